"""Modules and parameters that come into a split model: what they compute is of whole tensors."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

import shardwright
from shardwright.errors import DistributedError, UsageError
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_dtensors import IDS, WEIGHTS, gpt2, llama, made, phi3, planned, whole


class Softer(nn.Module):
    """Computes over all features of what a layer gives: on a part it would be wrong, silently."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 5 * self.inner(x).softmax(-1)


class Adapted(nn.Module):
    """Has parameters of its own, and reads sizes and weights of the layer."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, (rows, columns) = inner, inner.weight.shape
        if isinstance(inner, nn.Linear):
            assert (inner.out_features, inner.in_features) == (rows, columns)
        values = torch.linspace(-1, 1, rows * columns).double()
        self.more = nn.Parameter(values.view(rows, columns) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = whole(self.inner.weight)
        delta = self.more + 0.1 * weight.detach()
        y = F.linear(x, delta) if isinstance(self.inner, nn.Linear) else x @ delta
        return self.inner(x) + y


def layers(model: Any, names: tuple[str, ...]) -> list[tuple[nn.Module, str]]:
    """The modules whose name ends so, by parent and name."""
    found = [path.rpartition(".") for path, _ in model.named_modules() if path.endswith(names)]
    return [(model.get_submodule(parent), name) for parent, _, name in found]


UP, ACT = ("up_proj", "c_fc", "qkv_proj"), ("act_fn", "act", "activation_fn")


def wrap(around: Callable[[Any], nn.Module], names: tuple[str, ...]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        assert (found := layers(model, names))
        for parent, name in found:
            setattr(parent, name, around(getattr(parent, name)))

    return change


def new_weight(model: Any) -> None:
    shape = model.lm_head.weight.shape
    values = torch.linspace(-1, 1, shape.numel()).double().view(shape)
    model.lm_head.weight = nn.Parameter(values)


def new_list(model: Any) -> None:
    """A list of blocks, whose members are wrapped."""
    stack = "layers" if hasattr(model, "model") else "h"
    base = model.base_model
    setattr(base, stack, nn.ModuleList([Through(block) for block in getattr(base, stack)]))


class Through(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a weight": new_weight,
    "a layer of another kind": wrap(lambda old: nn.Softmax(-1), ACT),
    "a wrapper that computes": wrap(Softer, UP),
    "an adapter": wrap(Adapted, UP),
    "an adapter of the head": wrap(Adapted, ("lm_head",)),
    "wrapped blocks": new_list,
}


@pytest.mark.parametrize("kind", [llama, gpt2, phi3])
def test_what_comes_in_computes_with_whole_tensors(kind: Any) -> None:
    """Values, all gradients, and tokens of a cached run are those of the unsplit model."""
    base, plan = made(kind), planned(kind)

    def numbers(model: Any) -> tuple[Any, Any]:
        model(IDS).logits.mul(WEIGHTS).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        with torch.no_grad():
            return grads, model.generate(IDS, max_new_tokens=2, do_sample=False)

    want = {}
    for name, change in CHANGES.items():
        change(unsplit := copy.deepcopy(base))
        want[name] = numbers(unsplit)

    def work(mesh: Mesh) -> None:
        for name, change in CHANGES.items():
            change(split := shardwright.apply(copy.deepcopy(base), plan, mesh))
            grads, tokens = numbers(split)
            assert torch.equal(tokens, want[name][1]), name
            assert grads.keys() == want[name][0].keys()
            for parameter, expected in want[name][0].items():
                at = f"{name}: {parameter}"
                torch.testing.assert_close(
                    whole(grads[parameter]), expected, rtol=0, atol=1e-9, msg=lambda m, a=at: a + m
                )

    run_ranks(2, work)


def test_what_comes_in_is_the_same_on_all_ranks_or_refused() -> None:
    base, plan = made(llama), planned(llama)

    def work(mesh: Mesh) -> None:
        def split() -> Any:
            return shardwright.apply(copy.deepcopy(base), plan, mesh)

        model = split()
        model.lm_head.weight = nn.Parameter(torch.full((50, 36), 1.0 + mesh["tp"].rank).double())
        with pytest.raises(DistributedError, match="was put into the model after it was split"):
            model(IDS)
        model = split()
        weight = nn.Parameter(torch.zeros(50, 36).double())
        model.lm_head.weight = weight
        weight.grad = torch.ones_like(weight)
        with pytest.raises(UsageError, match="assigned to a split model"):
            torch.optim.SGD([weight], lr=0.1).step()
        stored = model.lm_head.weight
        assert isinstance(stored, DTensor)
        assert stored.placements != (Replicate(),)
        with pytest.raises(UsageError, match="with other placements"):
            model.lm_head.weight = nn.Parameter(
                stored.detach().redistribute(placements=[Replicate()])
            )
        act = nn.SiLU()
        act.forward = act.forward
        with pytest.raises(UsageError, match="class of its own"):
            model.model.layers[0].mlp.act_fn = act
        model.model.layers[0].mlp.act_fn = act = nn.SiLU()
        with pytest.raises(UsageError, match="a copy of it"):
            model.model.layers[0].self_attn.o_proj = act

    run_ranks(2, work)


class Attention(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(12, 16) for _ in range(3))
        self.sparse = sparse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, 4, 4).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3)
        weights = scores.relu() if self.sparse else scores.softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, 16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Attention(sparse=True), nn.Linear(16, 12)

    def make_dense(self) -> None:
        dense, sparse = Attention(sparse=False), self.inner
        dense.query, dense.key, dense.value = sparse.query, sparse.key, sparse.value
        self.inner = dense

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.inner(x))


class Choosing(nn.Module):
    """Replaces modules by others of another setting in its first call, as BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([Block(), Block()])
        self.sparse = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sparse and x.shape[1] < 8:
            self.sparse = False
            for block in self.blocks:
                block.make_dense()
        for block in self.blocks:
            x = block(x)
        return x


def test_a_module_that_the_model_replaces_in_its_first_call_is_split() -> None:
    torch.manual_seed(0)
    base = Choosing().double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    plan = planning.plan(copy.deepcopy(base), 2, args=(x,))

    def numbers(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        (y := model(x)).mul(x).sum().backward()
        return y.detach(), {n: whole(p.grad).clone() for n, p in model.named_parameters()}

    want = numbers(copy.deepcopy(base))

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        assert all(
            parameter.to_local().numel() < parameter.numel()
            for name, parameter in split.named_parameters()
            if name.endswith("weight")
        )
        for _ in range(2):
            torch.testing.assert_close(numbers(split), want, rtol=0, atol=1e-9)

    run_ranks(2, work)
