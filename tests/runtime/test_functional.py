"""`torch.func` on split models: gradients as of the unsplit one, and what is refused."""
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
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, grad_and_value, jacfwd, jacrev, jvp, vjp, vmap
from transformers import DynamicCache

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
    """Its output is a dataclass; it has a buffer, and may keep what it made."""

    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(36, 48), nn.Linear(48, 36)
        self.register_buffer("scale", torch.tensor(2.0))
        self.keeps = keeps

    def forward(self, x: Tensor) -> Pair:
        """[..., 36] -> twice that."""
        down = self.fc2(self.fc1(x).relu()) * self.scale
        if self.keeps:
            self.kept = down
        return Pair(x + down, down)


def llama() -> Any:
    """Heads that two ranks do not divide."""
    return _double(test_dtensors.llama())


def own(keeps: bool = False) -> Any:
    """The module above."""
    return _double(Own(keeps))


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


def with_labels(model: Any) -> Any:
    """Of a loss, scores that are split for it, and a penalty on a parameter."""

    def loss(params: Any) -> Tensor:
        out = functional_call(model, params, (), {"input_ids": IDS, "labels": IDS})
        scores = out.logits.whole() if hasattr(out.logits, "whole") else out.logits
        return out.loss * 0.1 + wave(scores)  # the loss is computed in float32

    return grad_and_value(loss)({n: p.detach() for n, p in model.named_parameters()})


def with_penalty(model: Any) -> Any:
    """Of a loss and a penalty, which is of all parameters."""

    def loss(params: Any) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in params.values())
        return (
            functional_call(model, params, (), {"input_ids": IDS, "labels": IDS}).loss * 0.1
            + penalty
        )

    return grad(loss)({n: p.detach() for n, p in model.named_parameters()})


def of_embeddings(model: Any) -> Any:
    """Of what is given alone."""
    return grad(lambda x: wave(model(inputs_embeds=x).logits))(EMBEDS)


def called_twice(model: Any) -> Any:
    """Two calls, the second with what the first gave; parameters, buffers and the input."""

    def loss(params: Any, x: Tensor) -> Tensor:
        first = functional_call(model, params, (x,))
        return wave(functional_call(model, params, (first.up,)).down) + wave(first.down)

    return grad(loss, (0, 1))(named(model), EMBEDS)


def products(model: Any) -> Any:
    """Two products with one Jacobian, and what was computed, which nobody differentiates."""
    found: Any = vjp(lambda p, x: functional_call(model, p, (x,)).up, named(model), EMBEDS)
    out, product = found
    return out, product(torch.ones_like(out)), product(out)


def beside_autograd(model: Any) -> Any:
    """What `vjp` gave is a function of parameters outside of it, too."""
    model.zero_grad()
    result: Any = vjp(lambda x: model(x).up, EMBEDS)
    out, product = result
    wave(out).backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    return product(out.detach()), found


def whole(tree: Any) -> Any:
    """`tree` with whole tensors."""
    return torch.utils._pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), tree)


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (llama, with_labels),
        (llama, with_penalty),
        (llama, of_embeddings),
        (own, called_twice),
        (own, products),
        (own, beside_autograd),
    ],
)
def test_gradients_are_those_of_the_unsplit_model(make: Any, use: Any) -> None:
    base = make()
    plan, want = planned(base), use(copy.deepcopy(base))

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        before = {n: id(p) for n, p in split.named_parameters()}
        torch.testing.assert_close(whole(use(split)), want, rtol=0, atol=1e-9)
        assert {n: id(p) for n, p in split.named_parameters()} == before

    run_ranks(2, work)


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


def _with_a_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda *_: None)
    grad(_loss(model))(named(model))


@pytest.mark.parametrize(
    ("make", "use", "why"),
    [
        (llama, lambda m: grad(_loss(m, past_key_values=DynamicCache()))(named(m)), "cache"),
        (llama, _with_a_hook, "hooks on modules within"),
        (lambda: own(keeps=True), lambda m: grad(_of_own(m))(EMBEDS), "in attributes"),
        (own, lambda m: vmap(grad(_of_own(m)))(EMBEDS), "for gradients of each sample"),
        (own, lambda m: grad(lambda x: wave(m.fc1(x)))(EMBEDS), "by itself"),
        (llama, _of_a_norm, "by itself"),
        (own, lambda m: jacrev(lambda x: m(x).down)(EMBEDS), "anything but grad and vjp"),
        (own, _forward, "anything but grad and vjp"),
        (own, lambda m: grad(lambda x: wave(grad(_of_own(m))(x)))(EMBEDS), "second derivatives"),
    ],
)
def test_what_would_lose_gradients_is_refused(make: Any, use: Any, why: str) -> None:
    base = make()
    plan = planned(base)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        with pytest.raises(UsageError, match=why):
            use(split)

    run_ranks(2, work)


def test_copies_that_average_gradients_refuse() -> None:
    base = own()
    sizes = {"dp": 2, "tp": 2}
    plan = planned(base, tp=None, mesh=sizes)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        with pytest.raises(UsageError, match="samples"):
            grad(_of_own(split))(EMBEDS)

    run_ranks(4, work, sizes)


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
    with torch.no_grad():
        want = base[0](EMBEDS)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        with ONE, pytest.raises(UsageError, match="reads within a transform"):
            split(EMBEDS)
        if transform is not TRANSFORMS[-1]:  # that asks for gradients by itself
            with ONE, torch.no_grad():
                found = split.get_submodule("0")(EMBEDS)
            torch.testing.assert_close(found, want, rtol=0, atol=1e-9)

    run_ranks(2, work)
