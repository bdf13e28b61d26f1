"""Forwards that are put on modules after splitting: they see whole tensors, or are refused."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwright
from shardwright.errors import DistributedError, UsageError
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_dtensors import IDS, WEIGHTS, gpt2, made, phi3, whole

UP = ("up_proj", "c_fc", "gate_up_proj")


def of(model: Any, names: tuple[str, ...]) -> list[Any]:
    found = [m for path, m in model.named_modules() if path.rpartition(".")[2] in names]
    assert found
    return found


def handed_on(model: Any) -> None:
    """As accelerate has it, on each module: what was there runs, and nothing else."""
    for module in model.modules():
        if module is model or type(module).forward is torch.nn.Module.forward:
            continue
        module._old_forward = module.forward

        def new(owner: Any, *args: Any, **kwargs: Any) -> Any:
            return owner._old_forward(*args, **kwargs)

        around = functools.partial(new, module)
        module.forward = functools.update_wrapper(around, module._old_forward)


def over_features(model: Any) -> None:
    """Computes over what each rank has a part of, around what was there, twice."""
    for module in of(model, UP):
        for _ in range(2):

            def soft(*args: Any, old: Any = module.forward) -> Any:
                return 5 * old(*args).softmax(-1)

            module.forward = soft


def instead(model: Any) -> None:
    """Reads parameters, and calls nothing of the model."""
    for module in of(model, UP):

        def fused(self: Any, x: Any) -> Any:
            weight = self.weight.abs().cumsum(0)
            return F.linear(x, weight) if hasattr(self, "out_features") else x @ weight

        module.forward = MethodType(fused, module)


def blocks(model: Any) -> None:
    """A block that reads a weight of a module within, and runs that."""
    for module in of(model, ("mlp",)):

        def shaped(x: Any, self: Any = module, old: Any = module.forward) -> Any:
            first = next(m for m in self.modules() if hasattr(m, "weight"))
            return old(x) * first.weight.std() + 0.1 * first(x).sum(-1, keepdim=True)

        module.forward = shaped


CHANGES: list[Callable[[Any], None]] = [handed_on, over_features, instead, blocks]


@pytest.mark.parametrize("kind", [gpt2, phi3])
def test_they_compute_with_whole_tensors(kind: Any) -> None:
    """Values, all gradients, also with checkpointing, and tokens; then as if they never were."""
    base = made(kind)
    for module in base.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    plan = planning.plan(copy.deepcopy(base), tp=2)

    def numbers(model: Any) -> tuple[Any, ...]:
        grads = []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
            model.train(checkpointing).zero_grad()
            model(IDS, use_cache=False).logits.mul(WEIGHTS).sum().backward()
            grads.append({n: whole(p.grad) for n, p in model.named_parameters()})
        with torch.no_grad():
            return *grads, model.eval().generate(IDS, max_new_tokens=3, do_sample=False)

    want = {}
    for change in CHANGES:
        change(unsplit := copy.deepcopy(base))
        want[change] = numbers(unsplit)
    plain = base(IDS).logits

    def work(mesh: Mesh) -> None:
        for change in CHANGES:
            split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
            split(IDS)
            change(split)
            # A copy keeps functions, and so the modules that these hold: as of any model.
            models = [split, *([copy.deepcopy(split)] if change in (handed_on, instead) else [])]
            for model in models:
                *grads, tokens = numbers(model)
                assert torch.equal(tokens, want[change][-1]), change
                for got, expected in zip(grads, want[change], strict=False):
                    for name, grad in expected.items():
                        torch.testing.assert_close(got[name], grad, rtol=0, atol=1e-9)
            for model in models:
                for module in model.modules():
                    if "forward" in vars(module):
                        del module.forward
                torch.testing.assert_close(model(IDS).logits, plain, rtol=0, atol=1e-9)

    run_ranks(2, work)


def test_what_cannot_be_whole_is_refused() -> None:
    base = made(gpt2)
    plan = planning.plan(copy.deepcopy(base), tp=2)

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        attention = split.transformer.h[0].attn
        own, count = attention.forward, attention.split_size

        def helper(self: Any) -> int:
            return self.split_size

        for code in (
            lambda x, *_, **__: (x.unflatten(-1, (attention.split_size, -1)).flatten(-2), None),
            functools.partial(lambda self, x, **_: helper(self) * x, attention),
            MethodType(type(base.transformer.h[0].attn).forward, attention),
        ):
            with pytest.raises(
                UsageError, match=r"on 'transformer.h.0.attn' asks for 'split_size'"
            ):
                attention.forward = code
        attention.forward = own
        assert "forward" not in vars(attention)
        assert attention.split_size == count
        block = split.transformer.h[0]
        (block.ln_1 if mesh["tp"].rank else block.ln_2).forward = lambda x: x
        with pytest.raises(DistributedError, match="was put into the model after it was split"):
            split(IDS)

    run_ranks(2, work)
