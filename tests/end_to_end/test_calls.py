"""Other calls than the plain one: their outputs, and gradients, are those of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import shardwright
from shardwright.errors import UsageError
from tests import planning, zoo
from tests.planner import modules
from tests.planner.test_unused import TOKENS, Text
from tests.ranks import run_ranks


@cache
def planned(name: str, kind: str, tp: int) -> tuple[Any, dict[str, Any], Any]:
    config, model = zoo.build(name, kind=kind)
    model = model.double()
    inputs = zoo.inputs(name, config, kind=kind, dtype=torch.float64)
    return model, inputs, planning.plan(model, tp=tp)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def named(name: str, text: str) -> str:
    return f"{name}: {text}"


def assert_alike(model: Any, plan: Any, use: Callable[[Any], Tensor], tp: int = 2) -> None:
    want = use(model)
    expected = gradients(model, want)

    def work(mesh: Any) -> None:
        mine = shardwright.apply(copy.deepcopy(model), plan, mesh)
        got = use(mine)
        assert_close(got, want, atol=1e-9, rtol=1e-9)
        found = shardwright.full_tensors(mine, gradients(mine, got))
        for name, gradient in expected.items():
            assert_close(found[name], gradient, atol=1e-9, rtol=1e-9, msg=partial(named, name))

    run_ranks(tp, work)


def test_each_block_alone() -> None:
    model, _, plan = planned("llama", "causal", 2)
    x = torch.sin(torch.arange(2 * 5 * model.config.hidden_size, dtype=torch.float64))
    x = x.view(2, 5, -1)

    def alone(m: Any) -> Tensor:
        places = m.model.rotary_emb(x, torch.arange(5)[None])
        y, total = x, torch.zeros((), dtype=torch.float64)
        for layer in m.model.layers:
            y = layer(y, position_embeddings=places)
            total = total + layer.mlp(y).pow(2).sum() + layer.self_attn.q_proj(y).pow(3).sum()
        return total + m.model.norm(y).pow(2).sum()

    assert_alike(model, plan, alone)


def test_checkpoints_of_a_module_alone_and_in_the_model() -> None:
    """What runs again for a backward pass runs as it did."""
    model, inputs, plan = planned("llama", "causal", 2)

    def whole(m: Any) -> Tensor:
        m.gradient_checkpointing_enable({"use_reentrant": False})
        m.train()
        try:
            return zoo.logits(m(**inputs)).pow(2).sum()
        finally:
            m.eval()

    def alone(m: Any) -> Tensor:
        x = torch.ones(2, 5, m.config.hidden_size, dtype=torch.float64, requires_grad=True)
        return checkpoint(m.model.layers[0].mlp.gate_proj, x, use_reentrant=False).pow(3).sum()

    assert_alike(model, plan, alone)
    assert_alike(copy.deepcopy(model), plan, whole)


class Again(modules.Attention):
    """Has code of its own computed again, which reads a number of which ranks have a part."""

    def cut(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], self.num_heads, -1)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[return-value]


def test_checkpoints_of_functions_that_read_numbers_are_refused() -> None:
    """Nothing says whether what a backward pass runs was in a planned call."""
    model, x = Again().double(), torch.randn(3, 19, modules.WIDTH).double().requires_grad_()
    plan = planning.plan(model, 2, args=(x.detach(),))
    assert plan.modules[""].attributes

    def rank(mesh: Any) -> None:
        out = shardwright.apply(copy.deepcopy(model), plan, mesh)(x)
        assert_close(out, model(x))
        with pytest.raises(UsageError, match="'num_heads' is read by code .* runs again"):
            out.sum().backward()

    run_ranks(2, rank)


def test_many_blocks_are_still_folded() -> None:
    """Planned from the blocks that are traced, hidden states of all are given."""
    _, model = zoo.build("llama", num_hidden_layers=6)
    model = model.double()
    ids = torch.randint(1, 90, (2, 5), generator=torch.Generator().manual_seed(1))
    plan = planning.plan(model, tp=2)
    assert "hidden_states.*" in {slot for call in plan.calls for slot in call.outputs}

    def hidden_states(m: Any) -> Tensor:
        states = m(ids, output_hidden_states=True).hidden_states
        return torch.stack([(n + 1) * x.pow(2).sum() for n, x in enumerate(states)]).sum()

    assert_alike(model, plan, hidden_states)


# --- what models of one's own give out


@dataclass(frozen=True)
class Given:
    scores: Tensor
    inner: dict[str, Tensor]


class Own:
    def __init__(self, scores: Tensor, inner: Tensor) -> None:
        self.scores, self.inner = scores, [inner]


class InDataclass(Text):
    more = False

    def __init__(self) -> None:
        super().__init__(None)

    def give(self, scores: Tensor, inner: Tensor) -> Any:
        return Given(scores, {"x": inner})

    def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
        h = self.mlp.up(self.embed(input_ids))
        scores = self.head(self.mlp.down(h))
        return self.give(scores, h.relu()) if not self.more else (scores, h)


class InOwnClass(InDataclass):
    def give(self, scores: Tensor, inner: Tensor) -> Any:
        return Own(scores, inner)


@pytest.mark.parametrize("make", [InDataclass, InOwnClass])
def test_outputs_in_classes_of_ones_own(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    model = make().double().eval()
    ids = torch.randint(0, TOKENS, (2, 5))
    plan = planning.plan(model, tp=2)

    def use(m: Any) -> Tensor:
        output = m(ids)
        inner = output.inner["x"] if isinstance(output, Given) else output.inner[0]
        return output.scores.pow(2).sum() + inner.pow(3).sum()

    assert_alike(model, plan, use)


def test_outputs_that_were_given_in_no_call_are_refused() -> None:
    model = InDataclass().eval()
    plan = planning.plan(model, tp=2)

    def work(mesh: Any) -> None:
        mine = shardwright.apply(copy.deepcopy(model), plan, mesh)
        vars(mine)["more"] = True
        with pytest.raises(UsageError, match="output '0' of InDataclass was returned in no call"):
            mine(torch.zeros(1, 4, dtype=torch.int64))

    run_ranks(2, work)
