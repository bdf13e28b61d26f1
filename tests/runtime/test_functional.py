"""`torch.func` on split models is refused: ranks exchange tensors on the way."""
# pyright: reportAttributeAccessIssue=false

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

import shardwright
from shardwright.errors import ModelError, UsageError
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks
from tests.runtime import test_dtensors
from tests.runtime.test_dtensors import IDS

EMBEDS = torch.randn(2, 7, 36, generator=torch.Generator().manual_seed(2)).double()

ONE = threading.Lock()
"""torch counts levels of forward mode for all threads of a process."""


@dataclass
class Pair:
    """What a module gives out."""

    up: Tensor
    down: Tensor


class Own(nn.Module):
    """Its output is a dataclass; it has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(36, 48), nn.Linear(48, 36)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Pair:
        """[..., 36] -> twice that."""
        down = self.fc2(self.fc1(x).relu()) * self.scale
        return Pair(x + down, down)


def llama() -> Any:
    """Heads that two ranks do not divide."""
    return _double(test_dtensors.llama())


def own() -> Any:
    """The module above."""
    return _double(Own())


def _double(model: nn.Module) -> Any:
    for i, p in enumerate(model.parameters()):
        nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(i))
    return model.double().eval()


def planned(model: Any, **how: Any) -> Any:
    """Its plan for two ranks."""
    given = {"args": (EMBEDS,)} if isinstance(model, Own) else {}
    return planning.plan(copy.deepcopy(model), **{"tp": 2, **given, **how})


def named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and float buffers, as torch.func takes them."""
    return {n: p.detach() for n, p in (*model.named_parameters(), *model.named_buffers())}


def wave(x: Tensor) -> Tensor:
    """A number that depends on each of `x`."""
    return (x * torch.sin(torch.arange(x.numel()).double()).view(x.shape)).sum()


def _loss(model: Any, **given: Any) -> Callable[[Any], Tensor]:
    return lambda p: wave(functional_call(model, p, (), {"input_ids": IDS, **given}).logits)


def _of_own(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: wave(model(x).down)


def _forward(model: Any) -> None:
    with ONE:
        jacfwd(lambda x: model(x).down)(EMBEDS)


def _of_a_norm(model: Any) -> None:
    norm = model.model.norm
    grad(lambda p: wave(functional_call(norm, p, (EMBEDS,))))(named(norm))


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (llama, lambda m: grad(_loss(m))(named(m))),
        (llama, _of_a_norm),
        (own, lambda m: grad(_of_own(m))(EMBEDS)),
        (own, lambda m: vjp(_of_own(m), EMBEDS)),
        (own, lambda m: vmap(grad(_of_own(m)))(EMBEDS)),
        (own, lambda m: grad(lambda x: wave(m.fc1(x)))(EMBEDS)),
        (own, lambda m: jacrev(lambda x: m(x).down)(EMBEDS)),
        (own, _forward),
    ],
)
def test_transforms_are_refused(make: Any, use: Any) -> None:
    base = make()
    plan = planned(base)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        with pytest.raises(UsageError, match=r"torch.func cannot transform.*backward\(\)"):
            use(split)

    run_ranks(2, work)


def test_forward_mode_is_refused() -> None:
    """Without torch.func; torch counts its levels for all threads, so it is around all ranks."""
    base = own()
    plan = planned(base)
    with forward_ad.dual_level():
        given = forward_ad.make_dual(EMBEDS, torch.ones_like(EMBEDS))

        def work(mesh: Mesh) -> None:
            split = shardwright.apply(copy.deepcopy(base), plan, mesh)
            for called in (split, split.get_submodule("fc1")):
                with torch.no_grad(), pytest.raises(UsageError, match="do not exchange tangents"):
                    called(given)

        run_ranks(2, work)


class Transforms(nn.Module):
    """It calls a module within a transform of its own."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.transform = nn.Sequential(nn.Linear(36, 48), nn.Linear(48, 36)), transform

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.transform(self.inner, x)


TRANSFORMS = (
    lambda inner, x: vmap(inner)(x),
    lambda inner, x: jvp(inner, (x,), (x.cos(),))[1],
    lambda inner, x: grad(lambda y: wave(inner(y)))(x),
)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_in_a_model_s_own_code_are_not_split(transform: Callable[..., Any]) -> None:
    """In place of numbers that are wrong; with gradients what is left whole is refused, too."""
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="within a transform of torch.func"):
        planning.plan(Transforms(transform).double(), tp=2, args=(EMBEDS,))
    base: Any = nn.Sequential(Transforms(transform), nn.Linear(36, 48), nn.Linear(48, 36)).double()
    plan = planning.plan(copy.deepcopy(base), tp=2, args=(EMBEDS,))
    assert {"1", "2"} <= plan.modules.keys() and "0.inner.0" not in plan.modules

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        for called in (split, split.get_submodule("0")):
            with ONE, pytest.raises(UsageError, match="torch.func cannot transform|tangents"):
                called(EMBEDS)

    run_ranks(2, work)
