"""Output formats: an emitter makes text or bytes of a plan; packages of anyone's can add one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from shardwright import plugins
from shardwright.errors import PluginError, UsageError
from shardwright.planner.contract.plan_file import Plan

Emitter = Callable[..., str | bytes]
"""`emit(plan, **options)`: text or bytes. Raises UsageError for options that it does not know."""

EMITTERS = {
    "csv": "shardwright.planner.exports.parameters:as_csv",
    "markdown": "shardwright.planner.exports.parameters:as_markdown",
}
"""Our own."""


def names() -> list[str]:
    """Formats that are installed."""
    return sorted({*EMITTERS, *plugins.names("emitters")})


def emitter(name: str) -> Emitter:
    """The emitter of that format.

    Raises:
        UsageError: there is none.
        PluginError: it does not load.
    """
    found = resolve_name(EMITTERS[name]) if name in EMITTERS else plugins.load("emitters", name)
    if found is None:
        raise UsageError(f"unknown format '{name}'; installed: {', '.join(names())}")
    return found


def export(plan: Plan | str | Path, to: str, **options: object) -> str | bytes:
    """A plan in another format.

    Args:
        plan: The plan, or its file.
        to: "csv" and "markdown" are tables of all parameters; packages can add formats.
        **options: What the format takes; ours take none.

    Raises:
        UsageError: there is no such format, or it does not take such options.
        PlanError: the file is no plan.
        PluginError: another package's format does not load, or gives neither text nor bytes.
    """
    emit = emitter(to)
    made = emit(plan if isinstance(plan, Plan) else Plan.load(plan), **options)
    if not isinstance(made, str | bytes):
        raise PluginError(f"format '{to}' gives a {type(made).__name__}, not text or bytes")
    return made
