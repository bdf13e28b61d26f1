"""`torch.cond` and loops of torch, compiled functions, ops that write, nested tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from shardwright.errors import ModelError, UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planning import plan
from tests.ranks import run_ranks


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Chosen(nn.Module):
    """Data says which module runs, and what is done with its output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.other(x) * 2, (x,))
        return torch.cond(y.abs().amax() > 1, lambda y: y / 2, lambda y: y + 1, (y,))


class Counted(nn.Module):
    """Three passes."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        body = lambda i, y: (i + 1, torch.tanh(y))  # noqa: E731
        return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), self.mlp(x)))[1]


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.mlp.compile()
        self.after: Callable[[Tensor], Tensor] = torch.compile(lambda y: torch.tanh(y) * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.mlp(x))


class Wrapped(nn.Module):
    """A module whose forward is that of another object, which nothing can replace."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: nn.Module = torch.compile(MLP(), backend="eager")  # type: ignore[assignment]
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.compiled(x))


class Repeated(nn.Module):
    """A split module in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        body = lambda i, y: (i + 1, y + self.mlp(y))  # noqa: E731
        return while_loop(lambda i, y: i < 2, body, (torch.tensor(0), x))[1]


@pytest.mark.parametrize("kind", [Chosen, Counted, Compiled, Wrapped, Repeated])
def test_planned(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().requires_grad_(False)
    found = plan(model, 2, args=(torch.randn(3, 19, 64),))
    assert found.predicted.parameter_bytes[0] < 0.52 * found.predicted.unsharded_bytes
    x = torch.randn(2, 11, 64).abs()
    for given in (x, -x):
        want = model(given)
        for got in run_ranks(2, lambda m, x=given: apply(copy.deepcopy(model), found, m)(x)):
            torch.testing.assert_close(got, want)


def test_gradients_through_a_condition() -> None:
    """Those of tensors are torch's. Split modules in branches are refused."""
    torch.manual_seed(0)
    model, x = Chosen().double(), torch.randn(3, 19, 64).double()
    found = plan(model, 2, args=(x,), phase="train")

    def work(mesh: Mesh) -> None:
        split = apply(copy.deepcopy(model), found, mesh)
        with pytest.raises(UsageError, match=r"call it under torch.no_grad\(\), or write an `if`"):
            split(x)
        with torch.no_grad():
            torch.testing.assert_close(split(x), model(x), rtol=0, atol=1e-9)

    run_ranks(2, work)


@torch.library.custom_op("shardwright_tests::add_to", mutates_args=("y",))
def add_to(x: Tensor, y: Tensor) -> None:
    y.add_(x)


@add_to.register_fake
def _(x: Tensor, y: Tensor) -> None:
    return None


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        add_to(x, y)
        return y * 2


class Jagged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([x[0, :3], x[1, :5]], layout=torch.jagged)
        return torch.tanh(rows).to_padded_tensor(0.0)


class Endless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return while_loop(lambda y: y.sum() < 9, lambda y: (y + y.abs() + 1,), (x,))[0]


class Scanned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        step = lambda carry, row: (carry + row, carry * 2)  # noqa: E731
        return scan(step, torch.zeros_like(x[:, 0]), x, dim=1)[0] + x.sum(1)


class Mapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return map_rows(torch.tanh, x)  # pyright: ignore[reportArgumentType]


REFUSED = {
    Scanned: "calls torch's scan, which runs code row by row",
    Mapped: "calls torch's map, which runs code row by row",
    Writes: "shardwright_tests::add_to writes to its arguments",
    Jagged: "nested .jagged. tensors: give padded tensors",
    Endless: "torch.while_loop makes as many passes as data says",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind: type[nn.Module]) -> None:
    with pytest.raises(ModelError, match=REFUSED[kind]):
        plan(kind(), 2, args=(torch.randn(3, 19, 64, device="meta"),))


def test_passes_of_other_data() -> None:
    """With data, as many passes are traced as that takes. Other data may take more, or fewer."""
    model = nn.Sequential(MLP(), Endless(), MLP()).requires_grad_(False).double()
    x = torch.rand(3, 19, 64).double()
    found = plan(model, 2, args=(x,))
    for given in (x, x - 1e3, x + 1e3):
        for got in run_ranks(2, lambda mesh, x=given: apply(copy.deepcopy(model), found, mesh)(x)):
            torch.testing.assert_close(got, model(given), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", REFUSED)
def test_whole_in_a_module_of_its_own(kind: type[nn.Module]) -> None:
    """What the messages advise."""
    model = nn.Sequential(MLP(), kind(), MLP()).requires_grad_(False)
    found = plan(model, 2, args=(torch.randn(3, 19, 64),))
    assert found.predicted.parameter_bytes[0] < 0.52 * found.predicted.unsharded_bytes
    x = torch.randn(2, 11, 64)
    with torch.compiler.set_stance("force_eager"):
        want = model(x)
        for got in run_ranks(2, lambda m: apply(copy.deepcopy(model), found, m)(x)):
            torch.testing.assert_close(got, want)


def test_nested_inputs_are_refused() -> None:
    given = torch.nested.nested_tensor([torch.randn(3, 64)], layout=torch.jagged)
    with pytest.raises(ModelError, match="give a padded tensor and a mask"):
        plan(MLP(), 2, args=(given,))
