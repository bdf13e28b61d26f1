"""Blocks whose activations are dropped after the forward pass and computed again for the backward.

A block keeps only its inputs, and so does the next one: what a block gives is kept, too. In the
backward pass it runs again, up to its last op that saves anything: `torch.utils.checkpoint` stops
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from weakref import proxy

from shardwright.planner.contract.names import first_block, made_once
from shardwright.planner.cost.saved_for_backward import SavedForBackward
from shardwright.planner.graph.graph import Boundary, Graph, Item, Op, made_by, taken_by


class Recomputation:
    """What autograd keeps of a graph, and what runs again in the backward pass.

    Args:
        graph: The traced model.
        blocks: Path of a list of blocks -> how many of its first blocks are computed again.
    """

    def __init__(self, graph: Graph, blocks: Mapping[str, int]) -> None:
        self.graph: Graph = proxy(graph)  # which keeps this
        self.blocks = blocks
        self._saved = SavedForBackward(graph.tensors)
        self._of: dict[str, str] = {}

    def block(self, module: str) -> str:
        """Return the path of the block that is computed again and has `module`; "" if none."""
        return made_once(self._of, module, lambda: first_block(module, self.blocks))

    def _around(self, item: Item) -> str:
        """Return the block that an item runs in; what enters or leaves a block is outside of it."""
        found = self.block(item.module)
        return "" if isinstance(item, Boundary) and item.module == found else found

    @cached_property
    def _items(self) -> list[Item]:
        return [item for item in self.graph.timeline() if self.graph.priced(item)]

    @cached_property
    def _made_in(self) -> dict[str, str]:
        """Tensor made in a block that is computed again -> that block."""
        found = ((item, self._around(item)) for item in self._items)
        return {name: block for item, block in found if block for name in made_by(item)}

    @cached_property
    def kept(self) -> list[str]:
        """The tensors that autograd keeps from the forward to the backward pass."""
        return list(dict.fromkeys(self._kept()))

    def _kept(self) -> Iterator[str]:
        for item in self._items:
            block = self._around(item)
            crossing = (n for n in taken_by(item) if self._made_in.get(n, "") != block)
            yield from crossing if self.blocks else ()
            if not block and isinstance(item, Op):
                yield from self._saved.of(item)

    @cached_property
    def inner(self) -> dict[str, list[str]]:
        """Block that is computed again -> the tensors made in it that it keeps meanwhile."""
        out: dict[str, list[str]] = {}
        for item in self._items:
            if isinstance(item, Op) and (block := self._around(item)):
                found = (n for n in self._saved.of(item) if self._made_in.get(n) == block)
                out.setdefault(block, []).extend(found)
        return out

    @cached_property
    def ends(self) -> dict[str, int]:
        """Block that is computed again -> the number of its last op."""
        return {self.block(op.module): i for i, op in enumerate(self.graph.ops)}

    @cached_property
    def again(self) -> frozenset[str]:
        """The tensors that are made once more in the backward pass, and parameters read for it."""
        runs: dict[tuple[str, int], list[Item]] = {}
        for item in self._items if self.blocks else ():
            if block := self._around(item):
                runs.setdefault((block, item.traced_call), []).append(item)
        return frozenset(n for items in runs.values() for n in self._until_last_saved(items))

    def _until_last_saved(self, items: list[Item]) -> Iterator[str]:
        saved = [{*self._saved.of(item)} if isinstance(item, Op) else set[str]() for item in items]
        last = max((i for i, names in enumerate(saved) if names), default=-1)
        used = {use.used for use in self.graph.uses}
        for i, item in enumerate(items[: last + 1]):
            yield from (n for n in taken_by(item) if n in used)
            if i < last or not saved[i].isdisjoint(made_by(item)):
                yield from made_by(item)


def recomputation(graph: Graph, blocks: Mapping[str, int]) -> Recomputation:
    """Return the recomputation of a graph; arguments as for the class."""
    at = Recomputation, *blocks.items()
    return made_once(graph.found, at, lambda: Recomputation(graph, blocks))
