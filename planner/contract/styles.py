"""Layer styles: what a module becomes where ranks share its `weight`. One table for all readers.

The planner asks which style a module gets, a report for its word, the runtime for its class. A plan
names one of ours as it is, another's as "package:name", so that it says what must be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from shardwright import plugins
from shardwright.errors import PlanError, PluginError

LOCAL = "LocalModule"
"""A module without a style: its own code runs on local parameters."""


@dataclass(frozen=True)
class Style:
    """For which modules a style is, and what they become; classes as "importable.module:Class"."""

    word: str
    """For reports: "column" of `column 64@tp`."""

    module: str
    """Modules of this class, or one derived from it, get the style."""

    dim: int
    """Where this dim of their `weight` is split, as it is stored and as they see it."""

    layer: str
    """The class they become: `class Layer(LocalModule, Module)`, where Module is `module` or a
    class derived from it with a forward for local parameters. If the class has `set_up`, that is
    called once, when the parameters are in place."""


STYLES = {
    "ColumnParallelLinear": Style(
        word="column", module="torch.nn:Linear", dim=0,
        layer="shardwright.runtime.layers:ColumnParallelLinear",
    ),
    "RowParallelLinear": Style(
        word="row", module="torch.nn:Linear", dim=1,
        layer="shardwright.runtime.layers:RowParallelLinear",
    ),
    "VocabParallelEmbedding": Style(
        word="vocab", module="torch.nn:Embedding", dim=0,
        layer="shardwright.runtime.layers:VocabParallelEmbedding",
    ),
}  # fmt: skip
"""Our own; where two fit, the first counts."""


def styles() -> Iterator[tuple[str, Style]]:
    """Every style and its name in plans: those of other packages first, for they are more special.

    One that does not load is a line in the log: a model without such modules needs none.
    """
    for package, name, found in plugins.load_all("layers"):
        yield f"{package}:{name}", _checked(f"{package}:{name}", found)
    yield from STYLES.items()


def style(name: str) -> Style | None:
    """The style that a plan calls `name`; None where its package is not installed.

    Raises:
        PluginError: it does not load.
    """
    if name in STYLES:
        return STYLES[name]
    package, colon, short = name.partition(":")
    found = plugins.load("layers", short, package) if colon else None
    return None if found is None else _checked(name, found)


def needed(name: str) -> Style:
    """The same.

    Raises:
        PlanError: it is not installed; the message says what to install.
        PluginError: it does not load.
    """
    found = style(name)
    if found is None and ":" in name:
        package, _, short = name.partition(":")
        raise PlanError(f"layer style '{short}' is of package {package}: install it on each rank")
    if found is None:
        raise PlanError(
            f"there is no layer style '{name}'; known are {', '.join((*STYLES, LOCAL))}"
        )
    return found


def resolved(text: str) -> Any:
    """The class that a style names.

    Raises:
        PluginError: there is none.
    """
    try:
        return resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(f"a layer style names '{text}', which is not there: {error}") from None


def _checked(name: str, found: Any) -> Style:
    if not isinstance(found, Style):
        raise PluginError(f"'{name}' for shardwright.layers is no Style: {found!r:.80}")
    return found
