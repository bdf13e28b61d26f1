"""Loops that run as often as the length of an input says, other than in the trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.planner.equal import features
from tests.planner.mlps import WIDTH
from tests.ranks import run_ranks

TRACED, SHORTER_AND_LONGER = (3, 19), (5, 7, 20, 21, 47)


class Loops(nn.Module):
    """A gradient that a later run leaves partial is summed where the first run took its input.

    `loop` goes through an input, with the module as `m`; `start` gives what the loop begins with.
    """

    def __init__(self, loop: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.loop, self.layers_run = loop, 1
        self.first, self.last = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)
        self.key, self.cell = nn.Linear(WIDTH, 36), nn.GRUCell(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 36), nn.ReLU(), nn.Linear(36, WIDTH)) for _ in range(4)
        )
        self.kept: Tensor | None = None

    def start(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())

    def step(self, y: Tensor) -> Tensor:
        return self.down(self.up(y).relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self, x)


def remainder(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for _ in range(x.shape[1] % 3):
        y = m.step(y)
    return y


def none_at_first(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for _ in range(x.shape[1] // 20):
        y = m.step(y)
    return y


def none_later(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for _ in range(x.shape[1] // 6):
        y = m.step(y)
    return y


def chunks(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for _ in range(0, x.shape[1], 20):
        y = m.step(y)
    return y


def backwards(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for i in range(x.shape[1], 0, -20):
        y = m.step(y + i)
    return y


def numbered(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for n, _ in enumerate(reversed(range(x.shape[1] // 10))):
        y = m.step(y) + n
    return y


def nested(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for _ in range(x.shape[1] // 10):
        for _ in range(x.shape[1] // 10):
            y = m.step(y)
        y = y.tanh()
    return y


def pair(m: Any, x: Tensor) -> Tensor:
    state = (m.start(x), m.last(m.first(x)))
    for _ in range(x.shape[1] // 10):
        h, c = state
        c = m.step(h) + c
        state = (c.tanh(), c)
    return state[0] + state[1]


def attribute(m: Any, x: Tensor) -> Tensor:
    m.kept = m.start(x)
    for _ in range(x.shape[1] // 10):
        m.kept = m.step(m.kept)
    y, m.kept = m.kept, None
    return y


def recurrent(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    for i in range(0, x.shape[1], 20):
        h = m.cell(m.step(x[:, i]), h)
    return h


def attention(m: Any, x: Tensor) -> Tensor:
    (b, t, _), outs = x.shape, []
    q, k, v = (f(x).view(b, t, 6, 6).transpose(1, 2) for f in (m.first, m.up, m.key))
    state = torch.zeros(b, 6, 6, 6, dtype=x.dtype)
    for i in range(-(-t // 20)):
        a = q[:, :, i * 20 : i * 20 + 20]
        c, d = k[:, :, i * 20 : i * 20 + 20], v[:, :, i * 20 : i * 20 + 20]
        outs.append(a @ state + (a @ c.mT).tril() @ d)
        state = state * 0.9 + c.mT @ d
    return m.down(torch.cat(outs, 2).transpose(1, 2).reshape(b, t, 36))


def layers(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for i in range(x.shape[1] // 10):
        y = m.layers[i](y)
    return y


SHOWN = (
    *(remainder, none_later, chunks, backwards, numbered, nested, pair, attribute, recurrent),
    *(attention, layers),
)
"""Their only run shows what others do."""


def nothing_at_first(m: Any, x: Tensor) -> Tensor:
    h = None
    for i in range(0, x.shape[1], 20):
        part = x[:, i : i + 20].mean(1)
        h = m.step(part) if h is None else m.step(part + h) * h.tanh()
    assert h is not None
    return h


def by_number(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for i in range(x.shape[1] // 10):
        y = m.step(y) if i else y * 2
    return y


def by_flag(m: Any, x: Tensor) -> Tensor:
    y, first = m.start(x), True
    for _ in range(x.shape[1] // 10):
        y = y + 1 if first else m.step(y)
        first = False
    return y


def left_early(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for i in range(0, x.shape[1], 20):
        y = m.step(y) + i
        if x.shape[1] < 20:
            break
    return y


def earlier_outputs(m: Any, x: Tensor) -> Tensor:
    outs = [m.start(x[:, :1])]
    for _ in range(0, x.shape[1], 20):
        outs.append(m.step(outs[-1]))
    return torch.cat(outs, 1).mean(1)


def list_of_parts(m: Any, x: Tensor) -> Tensor:
    y, parts = m.start(x[:, :1]), [x[:, i : i + 20] for i in range(0, x.shape[1], 20)]
    for part in parts:
        y = m.step(y) + part.mean(1, keepdim=True)
    return y


def appended_parts(m: Any, x: Tensor) -> Tensor:
    y, parts = m.start(x[:, :1]), []
    for i in range(0, x.shape[1], 20):
        parts.append(x[:, i : i + 20])
    for part in parts:
        y = m.step(y) + part.mean(1, keepdim=True)
    return y


def _parts(x: Tensor) -> Iterator[Tensor]:
    for i in range(0, x.shape[1], 20):
        yield x[:, i : i + 20]


def yielded_parts(m: Any, x: Tensor) -> Tensor:
    y = m.start(x[:, :1])
    for part in _parts(x):
        y = m.step(y) + part.mean(1, keepdim=True)
    return y


def list_of_numbers(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for _ in list(range(0, x.shape[1], 20)):
        y = m.step(y)
    return y


def split(m: Any, x: Tensor) -> Tensor:
    y = m.start(x[:, :1])
    for part in x.split(20, dim=1):
        y = m.step(y) + part.mean(1, keepdim=True)
    return y


def sections(m: Any, x: Tensor) -> Tensor:
    y = m.start(x[:, :1])
    for part in torch.tensor_split(x, x.shape[1] // 20 + 1, dim=1):
        y = m.step(y) + part.mean(1, keepdim=True)
    return y


def repeated(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for factor in [2] * (x.shape[1] // 10):
        y = m.step(y) * factor
    return y


TRACED_AGAIN = (
    *(none_at_first, nothing_at_first, by_number, by_flag, left_early, earlier_outputs),
    *(list_of_parts, appended_parts, yielded_parts, list_of_numbers, split, sections, repeated),
)
"""A call of another length is traced, too."""


def rows(m: Any, x: Tensor) -> Tensor:
    y = m.start(x[:, :1])
    for part in x[:, ::20].transpose(0, 1):
        y = m.step(y) + part[:, None]
    return y


def some_layers(m: Any, x: Tensor) -> Tensor:
    y = m.start(x)
    for layer in m.layers[: x.shape[1] // 10]:
        y = layer(y)
    return y


def own(m: Any, x: Tensor) -> Tensor:
    """Its number of runs is no length, and code may ask whether something is a range."""
    y, runs = m.start(x), range(m.layers_run)
    assert isinstance(runs, range)
    for _ in runs:
        y = m.step(y)
    return y


def planned(loop: Callable[[Any, Tensor], Tensor], tp: int) -> tuple[Loops, Plan]:
    torch.manual_seed(0)
    model = Loops(loop).double()
    args = features(WIDTH)(*TRACED)
    return model, planning.plan(copy.deepcopy(model), tp, args=args, phase="train")


def assert_equal(model: nn.Module, plan: Plan, tp: int, lengths: tuple[int, ...]) -> None:
    given = [features(WIDTH)(2, n)[0] for n in lengths]

    def use(local: nn.Module) -> list[dict[str, Tensor]]:
        found = []
        for x in given:
            x = x.clone().requires_grad_()
            local.zero_grad()
            y = local(x)
            (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
            assert x.grad is not None
            grads = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
            found.append({"": y, "x": x.grad, **full_tensors(local, grads)})
        return found

    want = use(copy.deepcopy(model))
    for found in run_ranks(tp, lambda mesh: use(apply(copy.deepcopy(model), plan, mesh))):
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-9)


ALL = (*SHOWN, *TRACED_AGAIN, rows, some_layers, own)
THREE = (none_at_first, none_later, attention, split)


@pytest.mark.parametrize(("loop", "tp"), [*((f, 2) for f in ALL), *((f, 3) for f in THREE)])
def test_other_numbers_of_runs(loop: Callable[[Any, Tensor], Tensor], tp: int) -> None:
    model, plan = planned(loop, tp)
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    assert not any(call.lengths for call in plan.calls)
    assert (len(plan.calls) > 1) == (loop in TRACED_AGAIN)
    assert_equal(model, plan, tp, SHORTER_AND_LONGER)


def far(m: Any, x: Tensor) -> Tensor:
    """No length that is traced gives another run."""
    y = m.start(x[:, :1])
    for part in x.split(100_000, dim=1):
        y = m.step(y) + part[:, :1]
    return y


def test_numbers_of_runs_that_cannot_be_traced_are_refused() -> None:
    model, plan = planned(far, 2)
    assert_equal(model, plan, 2, (5, 47))
    long = torch.randn(1, 1, WIDTH).double().expand(1, 100_001, WIDTH)
    with pytest.raises(UsageError, match=r"test_loop_lengths.py:\d+.* and x.shape\[1\] is 100001"):
        run_ranks(2, lambda mesh: apply(copy.deepcopy(model), plan, mesh)(long))
