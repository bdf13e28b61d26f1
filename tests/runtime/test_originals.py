"""A tensor that a module takes as it was before a block around changed it: whoever else sees it.

In GPT-NeoX a block begins with two norms of what it is given, of which it makes a term of a sum.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.runtime.communication.mesh import Mesh
from tests import planning, zoo
from tests.ranks import run_ranks

IDS = torch.arange(12).view(2, 6)


def made() -> Any:
    torch.manual_seed(0)
    return zoo.build("gpt_neox", kind="causal")[1].double().eval()


MODEL = made()


planned = planning.Once(lambda: planning.plan(copy.deepcopy(MODEL), tp=2))


class Centred(nn.Module):
    """In the place of a norm: what it computes depends on all that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.pow(3).mean(-1, keepdim=True)


def norms(model: Any) -> list[tuple[Any, str]]:
    return [(block, "input_layernorm") for block in model.gpt_neox.layers]


def read(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    for block, name in norms(model):
        getattr(block, name).register_forward_hook(lambda _, args, out: seen.extend((*args, out)))
    return seen


def changed(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    for block, name in norms(model):
        getattr(block, name).register_forward_pre_hook(lambda _, args: (args[0].tanh(),))
        getattr(block, name).register_forward_hook(lambda _, args, out: seen.extend((*args, out)))
    return seen


def replaced(model: Any) -> list[Tensor]:
    for block, name in norms(model):
        setattr(block, name, Centred())
    return []


def replaced_and_read(model: Any) -> list[Tensor]:
    replaced(model)
    return read(model)


def replaced_in_a_copy(model: Any) -> list[Tensor]:
    replaced(model)
    return []


def numbers(model: Any, way: Any) -> dict[str, Tensor]:
    """Outputs, what hooks read, and gradients, those that backward hooks read among them."""
    seen, gradients = way(model), []
    if way is replaced_in_a_copy:
        model = copy.deepcopy(model)
    for block, name in norms(model):
        getattr(block, name).register_full_backward_hook(
            lambda _, given, out: gradients.extend((*given, *out))
        )
    logits = model(IDS).logits
    (logits.sin().sum() + sum(t.pow(2).sum() for t in seen)).backward()
    named = {n: p.grad for n, p in model.named_parameters()}
    found = shardwright.full_tensors(model, named)
    shown = {str(i): x for i, x in enumerate([logits, *seen, *gradients])}
    return {n: x.detach() for n, x in (found | shown).items()}


@pytest.mark.parametrize("way", [read, changed, replaced, replaced_and_read, replaced_in_a_copy])
def test_hooks_and_newcomers_are_given_it(way: Any) -> None:
    want = numbers(copy.deepcopy(MODEL), way)
    assert any(c.before for spec in planned().modules.values() for c in spec.inputs)

    def rank(mesh: Mesh) -> None:
        got = numbers(shardwright.apply(copy.deepcopy(MODEL), planned(), mesh), way)
        assert got.keys() == want.keys()
        for name, expected in want.items():
            torch.testing.assert_close(got[name], expected, rtol=1e-9, atol=1e-9)

    run_ranks(2, rank)
