"""Forward hooks on split modules see whole tensors, and give them, in value and gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.mesh import Mesh
from tests import planning
from tests.cli.conftest import tiny
from tests.ranks import run_ranks


class Mlp(nn.Module):
    """One split by rows, one by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def loss_with_hooks(model: Any, x: Tensor, hooked: Any) -> Tensor:
    """What hooks read is in the loss, and one gives something else."""
    seen = hooked(model)
    out = model(x)
    return out.pow(2).sum() + sum(t.pow(3).sum() for t in seen)


def put_hooks(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []

    def behind(_: Any, args: Any, out: Tensor) -> Tensor:
        seen.extend((args[0], out))
        return out * torch.arange(1.0, 25.0, dtype=out.dtype)

    def before(_: Any, args: Any) -> Any:
        return (args[0] - args[0].mean(-1, keepdim=True),)

    def named(_: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        seen.append(out)

    model.up.register_forward_hook(behind)
    model.down.register_forward_pre_hook(before)
    model.down.register_forward_hook(named, with_kwargs=True)
    return seen


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tp", [2, 3])
def test_hooks_see_and_give_whole_tensors(tp: int, early: bool) -> None:
    """Also those that were there before the model was split."""
    torch.manual_seed(0)
    model, x = Mlp().double(), torch.randn(3, 5, 8).double()
    plan = planning.plan(model, tp=tp, args=(x,))
    assert plan.predicted.collectives
    whole = copy.deepcopy(model)
    want = loss_with_hooks(whole, x, put_hooks)
    want.backward()

    def work(mesh: Mesh) -> None:
        local: Any = copy.deepcopy(model)
        seen = put_hooks(local) if early else None
        local = apply(local, plan, mesh)
        got = loss_with_hooks(local, x, lambda m: put_hooks(m) if seen is None else seen)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
        got.backward()
        for name, p in local.named_parameters():
            expected = whole.get_parameter(name).grad
            torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=0, atol=1e-9)

    run_ranks(tp, work)


def test_hooks_do_not_take_a_part_of_a_cache_for_the_whole() -> None:
    """What is in it is hidden while a hook runs, and there again for the model's code behind it."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(tiny()).double().eval()  # type: ignore[arg-type]
    ids = torch.arange(10).view(2, 5)
    plan = planning.plan(model, tp=2)
    want = model(ids, use_cache=True)
    step = model(ids[:, :1], past_key_values=want.past_key_values).logits

    def look(_: Any, args: Any, kwargs: Any, out: Any = None) -> None:
        cache = kwargs["past_key_values"]
        assert cache.get_seq_length() >= 0
        if cache.get_seq_length():
            with pytest.raises(UsageError, match="take keys, values and states from the unsplit"):
                cache.layers[0].keys.sum()
            seen.append(1)

    seen: list[int] = []

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        attention = local.model.layers[1].self_attn
        attention.register_forward_pre_hook(look, with_kwargs=True)
        attention.register_forward_hook(look, with_kwargs=True)
        got = local(ids, use_cache=True)
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-9)
        got = local(ids[:, :1], past_key_values=got.past_key_values)
        torch.testing.assert_close(got.logits, step, rtol=0, atol=1e-9)

    run_ranks(2, work)
    assert len(seen) == 2 * (2 + 2)
