"""Styles of parallel layers: the class that a module gets if its weight is sharded.

The planner picks the first style that matches, reports use its word, and the runtime gives modules
its class. A plan names a style of another package "package:name", which says what to install. A
module that no style matches runs its own code on local parameters: `LOCAL`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

from shardwright import plugins
from shardwright.errors import PlanError, PluginError

LOCAL = "LocalModule"
UNCHANGED = "Unchanged"
"""A module that runs unchanged among sharded tensors; its hooks see unsharded ones."""


class LayerStyle(NamedTuple):
    """Which modules a style is for, and the class they get; classes as "package.module:Class".

    Attributes:
        module: Modules of this class, or of a derived one, get the style.
        dim: The dim of their `weight` that is sharded, as stored and as the module sees it.
        word: The word for the weight in reports.
        layer: The class they get: `class Layer(LocalModule, Module)`, where Module is `module` or a
            derived class with a forward for local parameters. If the class has `set_up`, it is
            called once, when the parameters are in place.
    """

    module: str
    dim: int
    word: str
    layer: str

    @property
    def replaced(self) -> type:
        """Return the class of modules that the layer replaces."""
        return _resolved(self.module)

    @property
    def becomes(self) -> type:
        """Return the class of the layer."""
        return _resolved(self.layer)


_OURS = "shardwright.runtime.modules.layers:"
STYLES = {
    "ColumnParallelLinear": LayerStyle(
        "torch.nn:Linear", 0, "column", _OURS + "ColumnParallelLinear"
    ),
    "RowParallelLinear": LayerStyle("torch.nn:Linear", 1, "row", _OURS + "RowParallelLinear"),
    "VocabParallelEmbedding": LayerStyle(
        "torch.nn:Embedding", 0, "vocab", _OURS + "VocabParallelEmbedding"
    ),
}
"""Name in a plan -> Shardwright's style; the first match counts."""


def styles() -> Iterator[tuple[str, LayerStyle]]:
    """Yield every style with its name in plans, those of other packages first.

    They are the more specific ones. One that does not load is only logged, since most models do
    not need it.
    """
    for package, name, found in plugins.load_all("layers"):
        yield f"{package}:{name}", _checked(f"{package}:{name}", found)
    yield from STYLES.items()


def style_of(name: str) -> LayerStyle | None:
    """Return the style that a plan calls `name`; None if its package is not installed.

    Raises:
        PluginError: the style does not load.
    """
    if name in STYLES:
        return STYLES[name]
    package, colon, short = name.partition(":")
    found = plugins.load("layers", short, package) if colon else None
    return None if found is None else _checked(name, found)


def needed(name: str) -> LayerStyle:
    """Return the style that a plan calls `name`.

    Raises:
        PlanError: it is not installed; the message says what to install.
        PluginError: it does not load.
    """
    found = style_of(name)
    if found is None and ":" in name:
        package, _, short = name.partition(":")
        raise PlanError(f"layer style '{short}' is of package {package}: install it on each rank")
    if found is None:
        raise PlanError(
            f"there is no layer style '{name}'; known are {', '.join((*STYLES, LOCAL, UNCHANGED))}"
        )
    return found


@cache
def _resolved(text: str) -> Any:
    """Return the class that a style names.

    Raises:
        PluginError: the class does not exist.
    """
    try:
        return resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(f"a layer style names '{text}', which is not there: {error}") from None


def _checked(name: str, found: Any) -> LayerStyle:
    if not isinstance(found, LayerStyle):
        raise PluginError(f"'{name}' for shardwright.layers is no LayerStyle: {found!r:.80}")
    return found
