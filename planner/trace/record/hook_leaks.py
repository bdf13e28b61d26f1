"""Tensors that code gets from hooks by way of a list, say: of these a hook sees full ones.

A hook on a layer may keep its output in a dict, from which the forward of an outer module reads
it. A split model gives hooks full tensors, with full gradients, so the layer must give these too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.model.argument_trees import tree_leaves, tree_map
from shardwright.planner.trace.record.op_tensors import tensors_in
from shardwright.planner.trace.record.record import Call
from shardwright.runtime.boundary.hooks import is_trusted


class HookLeaks:
    """Tensors that hooks saw or computed, and neither returned nor put into a parameter or buffer.

    Args:
        root: The model.
        calls: Returns the calls that were recorded so far.
    """

    def __init__(self, root: nn.Module, calls: Callable[[], Sequence[Call]]) -> None:
        self._root, self._calls = root, calls
        self._own: dict[int, Tensor] = {}
        self._within: set[int] = set()
        """The numbers of the calls that hooks made."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager in which forward hooks see aliases."""
        modules = self._root.modules()
        tables = [t for m in modules for t in (m._forward_hooks, m._forward_pre_hooks)]
        before: list[tuple[Any, dict[int, Any]]] = [(table, {**table}) for table in tables if table]
        for table, hooks in before:
            table.update({key: self._around(hook) for key, hook in hooks.items()})
        try:
            yield
        finally:
            for table, hooks in before:
                table.update({key: hook for key, hook in hooks.items() if key in table})

    def leaked(self) -> list[Tensor]:
        """Return those that code outside of hooks computes with."""
        found: dict[int, Tensor] = {}
        for number, call in enumerate(self._calls() if self._own else ()):
            if number not in self._within:
                given = tensors_in((call.args, call.kwargs))
                found |= {id(t): t for t in given if id(t) in self._own}
        return [*found.values()]

    def _around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        if is_trusted(hook):
            return hook

        @wraps(hook)
        def call(module: nn.Module, *given: Any) -> Any:
            shown = tree_map(_alias, given)
            first = len(self._calls())
            found = hook(module, *shown)
            made = [x for one in self._calls()[first:] for x in tensors_in(one.result)]
            self._within |= {*range(first, len(self._calls()))}
            modules = self._root.modules() if made else ()
            stores = (store for m in modules for store in (m._parameters, m._buffers))
            given_back = [*tree_leaves(found), *(x for store in stores for x in store.values())]
            made += [inner(x) for x in tree_leaves(shown) if isinstance(x, Tensor)]
            others = {id(inner(x)) for x in given_back if isinstance(x, Tensor)}
            self._own |= {id(x): x for x in made if id(x) not in others}
            return found

        return call


def _alias(value: Any) -> Any:
    """Return the same tensor as another one; the graph has one for both."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    with torch._C.DisableTorchFunction():
        return value.detach()
