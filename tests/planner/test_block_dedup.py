"""Blocks that are alike run once in a dry run, and code that tells them apart is not folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.blocks.stacks import find_stacks
from shardwright.planner.dry_run.dry_run import DryRun
from shardwright.planner.prepare import prepare
from shardwright.planner.trace.data_queries.stand_ins import WatchedNumber
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.runs.run import Run
from tests.planner.equal import assert_equal, features, planned

WIDTH, BLOCKS, SPECIAL = 8, 6, 3
Asks = Callable[[Any], Any]
"""Whether a block with that number is the special one."""


def never(number: int) -> bool:
    return False


class Block(nn.Module):
    def __init__(self, number: int, asks: Asks) -> None:
        super().__init__()
        self.number, self.asks = number, asks
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h.softmax(-1) if self.asks(self.number) else h.relu()
        return self.down(h)


class Tower(nn.Module):
    """Blocks of which one may do something else; or the code between two of them does."""

    def __init__(self, asks: Asks = never, between: Asks = never) -> None:
        super().__init__()
        self.between = between
        self.layers = nn.ModuleList(Block(n, asks) for n in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(x)
            x = x.cumsum(1) if self.between(n) else x.cos()
        return x


ASK: dict[str, Asks] = {
    "compares": lambda n: n == SPECIAL,
    "computes": lambda n: n % BLOCKS == SPECIAL,
    "looks up in a list": lambda n: [m == SPECIAL for m in range(BLOCKS)][n],
    "looks up in a table": lambda n: {SPECIAL: True}.get(n, False),
    "names it": lambda n: f"block {n}" == f"block {SPECIAL}",
    "tests it": lambda n: not n,
    "counts up to it": lambda n: len(range(n)) == SPECIAL,
}


@pytest.mark.parametrize("how", ASK)
def test_blocks_that_ask_for_their_number_are_not_folded(how: str) -> None:
    tower = Tower(asks=ASK[how])
    plan = planned(tower, features(WIDTH), 2)
    assert plan.modules
    assert_equal(tower, features(WIDTH), plan)


def test_blocks_that_compute_with_their_number_are_not_folded() -> None:
    """What stands for the number is none to torch: the run that looks for questions fails."""

    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.number

    tower = Tower(asks=ASK["compares"])
    tower.layers = nn.ModuleList(Scaled(n, ASK["compares"]) for n in range(BLOCKS))
    assert not prepare(tower, 2, args=features(WIDTH)(3, 19)).folding.stacks
    assert_equal(tower, features(WIDTH), planned(tower, features(WIDTH), 2))


def test_code_between_blocks_that_counts_them_is_not_folded() -> None:
    tower = Tower(between=lambda n: n == SPECIAL)
    assert not prepare(tower, 2, args=features(WIDTH)(3, 19)).folding.stacks
    assert_equal(tower, features(WIDTH), planned(tower, features(WIDTH), 2))


def test_block_dedup_run_once() -> None:
    task = prepare(Tower(), 2, args=features(WIDTH)(3, 19))
    (stack,) = task.folding.stacks
    full = task.dry.each[0]
    left_out = full.unsharded(every_block=False).left_out
    assert left_out == {(f"layers.{n}", 0) for n in range(BLOCKS)} - {
        (f"layers.{stack.traced.index(place)}", 0) for place in set(stack.traced)
    }
    every = full.unsharded(every_block=True)
    assert not every.left_out
    assert {f"layers.{n}" for n in range(BLOCKS)} <= (every.calls or {}).keys()


def test_block_dedup_are_copied_hollow_unless_code_looks_into_them() -> None:
    """Of those nothing is copied that they hold; who asks for it gets a real copy of all."""

    class Looks(Tower):
        def __init__(self, look: Callable[[nn.ModuleList], Any]) -> None:
            super().__init__()
            self.look = look

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.look(self.layers)
            except Exception:  # it is noted all the same
                return x
            return super().forward(x)

    def hollow(look: Callable[[nn.ModuleList], Any]) -> tuple[set[str], set[tuple[str, int]]]:
        root = Looks(look).to("meta")
        runs = [Run("", (torch.empty(3, 19, WIDTH, device="meta"),), {})]
        dry_run = DryRun(root, (), runs, Opaque(root), (), find_stacks(root))
        whole = dry_run.unsharded(every_block=False)
        assert whole.calls
        return {*whole.hollow}, {*whole.left_out}

    last = BLOCKS - 1
    left_out = {(f"layers.{n}", 0) for n in range(2, BLOCKS)}
    assert hollow(lambda layers: layers[last].number) == ({n for n, _ in left_out}, left_out)
    looks: list[Callable[[Any], Any]] = [
        lambda layers: layers[last].up.weight.shape,
        lambda layers: sum(p.numel() for p in layers.parameters()),
        lambda layers: [*layers.modules()],
        lambda layers: hasattr(layers[last], "gate"),
        lambda layers: bool(layers[last]._buffers),
    ]
    for look in looks:
        assert hollow(look) == (set(), left_out)


def test_blocks_that_keep_their_modules_elsewhere_too_are_not_copied_hollow() -> None:
    root = Tower().to("meta")
    for block in root.layers.children():
        vars(block)["parts"] = [block.up]
    runs = [Run("", (torch.empty(3, 19, WIDTH, device="meta"),), {})]
    whole = DryRun(root, (), runs, Opaque(root), (), find_stacks(root)).unsharded(every_block=False)
    assert whole.calls
    assert not whole.hollow


def test_what_is_given_otherwise_runs() -> None:
    """The second half gets longer sequences: none of its blocks is like one of the first half."""

    class Grows(Tower):
        def forward(self, x: Tensor) -> Tensor:
            for n, layer in enumerate(self.layers):
                x = layer(torch.cat((x, x), 1) if n == BLOCKS // 2 else x)
            return x

    root = Grows().to("meta")
    runs = [Run("", (torch.empty(3, 19, WIDTH, device="meta"),), {})]
    dry_run = DryRun(root, (), runs, Opaque(root), (), find_stacks(root))
    left_out = {name for name, _ in dry_run.unsharded(every_block=False).left_out}
    assert left_out == {"layers.2", *(f"layers.{n}" for n in range(BLOCKS // 2 + 1, BLOCKS))}
    assert not dry_run.unsharded(every_block=False).hollow


def test_a_number_is_an_integer_that_notes_questions() -> None:
    asked: list[None] = []
    number = WatchedNumber(3, lambda: asked.append(None))
    assert isinstance(number, int)
    assert not asked
    assert (number + 1, 1 + number, int(number), [*range(number)]) == (4, 4, 3, [0, 1, 2])
    assert number == 3
    assert number in {3}
    assert len(asked) >= 6
