"""Hide attributes of modules until code reads them, so that reads can be noted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwright.planner.trace.state.attribute_reads import Place
from shardwright.runtime.scopes import replaced

HIDDEN = "_shardwright_hidden"
"""The attribute that holds the hidden values."""


@contextmanager
def hidden_until_asked(
    modules: Mapping[str, nn.Module], places: Collection[Place], found: Callable[[Place, Any], Any]
) -> Iterator[None]:
    """Context manager that hides the attributes `places` of `modules` until code reads them.

    A read calls `found`, and its result becomes the attribute. Attributes that are never read are
    put back at the end.
    """
    if not places:
        yield
        return
    changed = [modules[path] for path in {place.path for place in places}]
    for place in places:
        module = modules[place.path]
        if place.name in vars(module):
            value = vars(module).pop(place.name)
            hides = vars(module).setdefault(HIDDEN, {})
            hides[place.name] = (value, lambda value, place=place: found(place, value))
            if hasattr(type(module), place.name):  # `__getattr__` would not be called
                _show(module, place.name)
    before = nn.Module.__getattr__

    def get(self: nn.Module, name: str) -> Any:
        hides = vars(self).get(HIDDEN)
        return _show(self, name) if hides and name in hides else before(self, name)

    try:
        with replaced(nn.Module, __getattr__=get):
            yield
    finally:
        for module in changed:
            for name, (value, _) in vars(module).pop(HIDDEN, {}).items():
                vars(module).setdefault(name, value)


def _show(module: nn.Module, name: str) -> Any:
    value, found = vars(module)[HIDDEN].pop(name)
    vars(module)[name] = value = found(value)
    return value
