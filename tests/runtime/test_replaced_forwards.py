"""Forwards that are put on modules after splitting: on the root they run, else are refused."""
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import pytest
import torch

import shardwright
from shardwright.errors import UsageError
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_dtensors import IDS, gpt2, made


def test_a_forward_that_is_put_on_a_module_within_is_refused() -> None:
    base = made(gpt2)
    plan = planning.plan(copy.deepcopy(base), tp=2)
    want = base(IDS).logits

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        for module in (split.transformer.h[0].attn, split.transformer.h[0], split.transformer.ln_f):
            own = module.forward
            for forward in (
                lambda *args, **kwargs: None,
                functools.partial(own),
                MethodType(lambda self, *args: args, module),
            ):
                with pytest.raises(UsageError, match="a forward is put on 'transformer"):
                    module.forward = forward
            module.forward = own
            assert "forward" not in vars(module)
        torch.testing.assert_close(split(IDS).logits, want, rtol=0, atol=1e-9)

    run_ranks(2, work)


def test_a_forward_on_the_root_calls_what_was_there() -> None:
    """As accelerate's `prepare` has it."""
    base = made(gpt2)
    plan = planning.plan(copy.deepcopy(base), tp=2)
    want = base(IDS).logits

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        own = split.forward
        split.forward = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
        for _ in range(2):
            torch.testing.assert_close(split(IDS).logits, want, rtol=0, atol=1e-9)
        del split.forward
        torch.testing.assert_close(split(IDS).logits, want, rtol=0, atol=1e-9)

    run_ranks(2, work)
