"""Integers that change from call to call: arguments, and numbers that a model counts itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import ModelError, UsageError
from shardwright.runtime.api import apply
from tests import planning
from tests.ranks import run_ranks

WIDTH, HEADS = 24, 6


class Attention(nn.Module):
    table: Tensor
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("table", torch.randn(64, 4))
        self.register_buffer("keys", torch.zeros(5, 64, HEADS, 4))
        self.register_buffer("values", torch.zeros(5, 64, HEADS, 4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [f(x).unflatten(-1, (HEADS, 4)) for f in (self.q, self.k, self.v)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Sliced(Attention):
    def forward(self, x: Tensor, start: int) -> Tensor:
        q, k, v = self.heads(x)
        rows = self.table[start : start + x.shape[1], None]
        return self.attend(q * rows, k * rows, v)


class Counted(Attention):
    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        q, k, v = self.heads(x)
        rows = self.table[torch.arange(start, start + x.shape[1])][:, None]
        return self.attend(q * rows, k * rows, v)


class Cached(Attention):
    """As the first Llama: a cache in buffers, and a mask of as many columns as were before."""

    def forward(self, x: Tensor, start: int) -> Tensor:
        (batch, length, _), (q, k, v) = x.shape, self.heads(x)
        self.keys[:batch, start : start + length] = k
        self.values[:batch, start : start + length] = v
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        mask = torch.hstack([torch.zeros((length, start), dtype=x.dtype), mask])
        ends = [cache[:batch, : start + length] for cache in (self.keys, self.values)]
        return self.attend(q, ends[0], ends[1], mask)


class Above(Cached):
    """What is masked lies above a diagonal that moves with the number."""

    def forward(self, x: Tensor, start: int) -> Tensor:
        length, (q, k, v) = x.shape[1], self.heads(x)
        self.keys[: x.shape[0], start : start + length] = k
        k = self.keys[: x.shape[0], : start + length]
        mask = torch.full((length, start + length), float("-inf"), dtype=x.dtype)
        return self.attend(q, k, k + v.mean(1, keepdim=True), mask.triu(start + 1))


class Llama(nn.Module):
    """It passes its number on to layers, and its table is a tensor that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cached() for _ in range(2))
        self.rows = torch.randn(64, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, start: int) -> Tensor:
        x = x * self.rows[start : start + x.shape[1]]
        for layer in self.layers:
            x = x + layer(x, start)
        return x


class KeepsTensor(Cached):
    """It writes to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.keys
        self.keys = torch.zeros(5, 64, HEADS, 4, dtype=torch.float64)


class Mlp(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.register_buffer("table", torch.randn(64, 48))
        self.pos = 0

    def reset_cache(self) -> None:
        self.pos = 0


class Row(Mlp):
    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.down(F.gelu(self.up(x) + self.table[step]))


class Filled(Mlp):
    def forward(self, x: Tensor, step: int) -> Tensor:
        time = torch.full((x.shape[0], 1, 1), step / 7, dtype=x.dtype) ** 2
        return self.down(F.gelu(self.up(x) + time + torch.tensor(step, dtype=x.dtype)))


class Decides(Mlp):
    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h.roll(1, -1) if step > 5 else h))


class DecidesByTensor(Mlp):
    """What it decides by is computed from its number by torch."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h.roll(1, -1) if (torch.ones(1) * step).item() > 5 else h))


class DecidesByPosition(Mlp):
    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h.roll(1, -1) if torch.arange(99)[step].item() > 5 else h))


class Loops(Mlp):
    def forward(self, x: Tensor, step: int) -> Tensor:
        for _ in range(step):
            x = x + self.down(F.gelu(self.up(x)))
        return x


class Features(Mlp):
    """A part of the features: these are split, and the number stays as it was planned."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.down(F.gelu(self.up(x))[..., :step].repeat(1, 1, 48 // step))


def inputs(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def planned(kind: type[nn.Module], *numbers: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = kind().double()
    return model, planning.plan(copy.deepcopy(model), tp=2, args=(inputs(3, 19), *numbers))


def assert_same(model: nn.Module, plan: Any, use: Callable[[Any], list[Tensor]]) -> None:
    want = use(copy.deepcopy(model))
    for found in run_ranks(2, lambda mesh: use(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(found, want, rtol=0, atol=1e-9)


ANY = [Sliced, Counted, Cached, Above, Llama, Row, Filled]
FIRST = [Cached, Above, Llama]
"""Planned with no token in the cache: what is joined there is empty."""


@pytest.mark.parametrize(("kind", "number"), [*((k, 2) for k in ANY), *((k, 0) for k in FIRST)])
def test_any_integer(kind: type[nn.Module], number: int) -> None:
    model, plan = planned(kind, number)
    assert len(plan.calls[0].numbers) == 1
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    first, second, third = inputs(2, 7), inputs(2, 1), inputs(2, 3)
    assert_same(model, plan, lambda local: [local(first, 0), local(second, 7), local(third, 8)])


def test_what_is_written_must_be_a_buffer() -> None:
    with pytest.raises(ModelError, match="neither a parameter nor a buffer.* register_buffer"):
        planned(KeepsTensor, 2)


@pytest.mark.parametrize("kind", [Decides, DecidesByTensor, DecidesByPosition, Loops, Features])
def test_an_integer_that_decides_stays(kind: type[nn.Module]) -> None:
    model, plan = planned(kind, 4)
    assert plan.calls[0].values == {"step": 4}
    x = inputs(2, 7)
    assert_same(model, plan, lambda local: [local(x, 4)])

    def other(mesh: Any) -> None:
        with pytest.raises(UsageError, match="was 4 in the calls .* or a 0-d tensor"):
            apply(copy.deepcopy(model), plan, mesh)(x, 6)

    run_ranks(2, other)


class Own(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.table[self.pos : self.pos + x.shape[1]]
        self.pos += x.shape[1]
        return self.down(F.gelu(self.up(x) + rows))


class OwnCache(Cached):
    def __init__(self) -> None:
        super().__init__()
        self.pos = 0

    def reset_cache(self) -> None:
        self.pos = 0
        self.keys.zero_()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        (batch, length, _), (q, k, v) = x.shape, self.heads(x)
        self.keys[:batch, self.pos : self.pos + length] = k
        self.values[:batch, self.pos : self.pos + length] = v
        self.pos += length
        ends = (cache[:batch, : self.pos] for cache in (self.keys, self.values))
        return self.attend(q, *ends)


@pytest.mark.parametrize("kind", [Own, OwnCache])
def test_a_counter_of_the_model_can_be_reset(kind: type[nn.Module]) -> None:
    model, plan = planned(kind)
    first, second = inputs(2, 7), inputs(2, 1)

    def use(local: Any) -> list[Tensor]:
        found = [local(first), local(second)]
        local.reset_cache()
        return [*found, local(first), local(second)]

    assert_same(model, plan, use)

    def other(mesh: Any) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        local(first)
        local.pos = 3
        with pytest.raises(UsageError, match="'pos' is 3, and was 7"):
            local(first)

    run_ranks(2, other)


class Stack(nn.Module):
    """Each layer counts, and is reset by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnCache() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_counters_of_layers_are_reset_together() -> None:
    model, plan = planned(Stack)
    first, second = inputs(2, 7), inputs(2, 1)

    def use(local: Any) -> list[Tensor]:
        found = [local(first), local(second)]
        for layer in local.layers:
            layer.reset_cache()
        return [*found, local(first)]

    assert_same(model, plan, use)

    def one_alone(mesh: Any) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        local(first)
        local.layers[0].reset_cache()
        with pytest.raises(UsageError, match=r"all counters or none, also layers\.1\.pos$"):
            local(second)

    run_ranks(2, one_alone)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 48), nn.BatchNorm1d(48, momentum=None)
        self.down = nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x).mT).mT))


def test_a_batch_norm_that_averages_all_batches() -> None:
    model, plan = planned(Norm)
    assert plan.modules["norm"].parameters["running_mean"].placement == "48@tp"
    batches = [inputs(2, 7) for _ in range(3)]

    def use(local: Any) -> list[Tensor]:
        found = [local.train()(x) for x in batches]
        return [*found, local.eval()(batches[0])]

    assert_same(model, plan, use)
