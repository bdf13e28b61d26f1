"""Numbers that a plan makes local (`num_heads`): whole for code that runs in no call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

import shardwright
from shardwright.errors import UsageError
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.ranks import run_ranks

X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1)).double()


class Attention(nn.Module):
    """Its own code reads how many heads there are, of itself and of a config."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 6
        self.config: Any = PretrainedConfig.from_dict({"kv_heads": 3, "scale": 0.5})
        self.q, self.kv, self.o = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        def kv_heads() -> int:
            return self.config.kv_heads

        q = self.q(x).unflatten(-1, (self.heads, 4)).transpose(1, 2)
        kv = self.kv(x).unflatten(-1, (kv_heads(), 8)).transpose(1, 2)
        k, v = kv.repeat_interleave(2, dim=1).chunk(2, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, scale=self.config.scale)
        return self.o(out.transpose(1, 2).flatten(2))


torch.manual_seed(0)
BASE: Any = nn.Sequential(Attention(), Attention()).double()


planned = planning.Once(lambda: planning.plan(copy.deepcopy(BASE), tp=3, args=(X,)))


def of_code_outside(model: Any) -> Tensor:
    return Attention.forward(model[1], Attention.forward(model[0], X))


def of_hooks(model: Any) -> Tensor:
    seen: list[Any] = []

    def ablate(module: Any, args: Any) -> Any:
        by_head = args[0].unflatten(-1, (model[0].heads, 4)).clone()
        by_head[..., 1, :] = 0
        return (by_head.flatten(2),)

    def note(module: Any, args: Any, output: Any) -> None:
        assert isinstance(args, tuple)
        seen.append((module.heads, module.config.kv_heads))

    handles = [
        model[0].o.register_forward_pre_hook(ablate),
        model[1].register_forward_hook(note),
    ]
    out = model(X)
    for handle in handles:
        handle.remove()
    assert seen == [(6, 3)]
    return out


def of_a_copy_of_a_part(model: Any) -> Tensor:
    return copy.deepcopy(model[0])(X) + model(X)


def of_all(model: Any) -> Tensor:
    return model(X) + model[0](X)


@pytest.mark.parametrize("use", [of_code_outside, of_hooks, of_a_copy_of_a_part, of_all])
def test_code_in_no_call_reads_whole_numbers(use: Any) -> None:
    spec = planned().module("0")
    assert spec is not None and spec.attributes == {"heads": "3@tp*2", "config.kv_heads": "3@tp"}
    whole = copy.deepcopy(BASE)
    want = use(whole)
    want.pow(2).sum().backward()
    grads = {name: p.grad for name, p in whole.named_parameters()}

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(BASE), planned(), mesh)
        found = use(split)
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)
        found.pow(2).sum().backward()
        own = {name: p.grad for name, p in split.named_parameters()}
        for name, grad in full_tensors(split, own).items():
            torch.testing.assert_close(grad, grads[name], rtol=0, atol=1e-9)

    run_ranks(3, work)


def test_others_that_are_set_are_refused() -> None:
    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(BASE), planned(), mesh)
        split[0].heads = 3
        assert split[0].heads == 3
        with pytest.raises(UsageError, match="'0.heads' is 3"):
            split(X)
        split = shardwright.apply(copy.deepcopy(BASE), planned(), mesh)
        split[0].config.scale = 1.0
        with pytest.raises(UsageError, match="'0.config.scale' is 1.0"):
            split(X)

    run_ranks(3, work)
