"""What a rank copies at a change of placement, around a collective or where there is none.

It follows the runtime (`runtime/split.py`, `runtime/reshard.py`) op by op: an all-reduce is of a
copy, gathered parts are put together, a part that is taken is new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwright.planner.contract_tmp.crossings import Step
from shardwright.planner.graph.axes import Dim, factors_of
from shardwright.planner.strategies.states import Cut, cut_of


class Order(NamedTuple):
    """How the parts of several ranks make up a whole tensor.

    `pieces`: a part is several pieces of the dim that is split. `in_turn`: in memory, the whole is
    equal parts one after the other, so that nothing need be copied to make one of the other.
    """

    pieces: bool
    in_turn: bool


APART = Order(pieces=False, in_turn=False)


def order(dims: Sequence[Dim], step: Step, ranks: int, length: Callable[[Dim, Cut], int]) -> Order:
    """How the parts along a step make up the whole.

    Args:
        dims: Those of the tensor.
        step: What splits it, or puts it together.
        ranks: How many parts there are.
        length: Of a dim with some of its axes split.
    """
    kept, changed = step.before & step.after, step.before ^ step.after
    longer = 1
    for k, dim in enumerate(dims):
        for factor in factors_of(dim):
            size = length(factor, cut_of(kept, k))
            if changed == {(k, factor.id, step.mask)}:
                return Order(False, longer == 1 and size % ranks == 0)
            longer = max(longer, size)
    return Order(True, False)


def copied(does: str, part: int, whole: int, how: Order) -> int:
    """Bytes read and written by copies of whole tensors and parts of so many bytes."""
    match does:
        case "all_reduce":
            return 2 * whole
        case "all_gather":
            return 0 if how.in_turn else 2 * whole
        case "reduce_scatter":
            return 0 if how.in_turn else (4 if how.pieces else 2) * whole
        case "take":
            return 2 * part
        case "pad":  # zeros beside the part, and all of it put together
            return 3 * whole - part
        case "keep_first":
            return whole
    raise ValueError(does)
