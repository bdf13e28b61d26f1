"""What transformers' styles do to a tensor: which states it may have before and after.

Modules hand each other plain tensors. A style takes for granted in which state a tensor comes, and
nothing looks: the moves below say what is taken for granted, and what the tensor is afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.planner.strategies.state import REPLICATED, State

SAME, COPIED, SLICED, GATHERED = "same", "copied", "sliced", "gathered"
SUMMED, SUMMED_BACK, TERM, ADDED_ONCE = "summed", "summed back", "term", "added once"


class Moves:
    """The moves of tensors of one domain.

    Args:
        domain: Every state that the tensor may have.
        full: The mask of all sub-axes: styles know one group of ranks only.
        last: The tensor's last dim.
    """

    def __init__(self, domain: Sequence[State], full: int, last: int) -> None:
        self.domain, self.full, self.last = domain, full, last
        partial = State(frozenset(), full)
        terms = State(frozenset(), 0, full)
        copied = terms if terms in domain else REPLICATED
        self._moves: dict[str, Callable[[State, State], bool]] = {
            SAME: State.__eq__,
            COPIED: lambda s, t: s == REPLICATED and t == copied,
            SLICED: lambda s, t: s == REPLICATED and self._is_cut(t),
            GATHERED: lambda s, t: self._is_cut(s) and t == REPLICATED,
            SUMMED: lambda s, t: s == partial and t == REPLICATED,
            SUMMED_BACK: lambda s, t: s in (t, t._replace(grad_partial=0)),
            TERM: lambda s, t: s in (REPLICATED, copied) and t == partial,
            ADDED_ONCE: lambda s, t: s == REPLICATED and t == partial,
        }

    def after(self, before: State, moves: Sequence[str]) -> set[State]:
        """Return the states that a tensor may have after `moves`, one after the other."""
        found = {before}
        for name in moves:
            allows = self._moves[name]
            found = {t for s in found for t in self.domain if allows(s, t)}
        return found

    def _is_cut(self, state: State) -> bool:
        """Whether the last dim is sharded over all ranks, and nothing else is pending."""
        cut = {(dim, mask) for dim, _, mask in state.shards}
        return cut == {(self.last, self.full)} and not (state.partial or state.grad_partial)
