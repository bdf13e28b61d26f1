"""Export formats: an emitter turns a plan into text or bytes. Other packages can add formats."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from shardwright import plugins
from shardwright.errors import PluginError, UsageError
from shardwright.planner.contract.plan_file import Plan

Emitter = Callable[..., str | bytes]
"""`emit(plan, **options)` -> text or bytes. Raises UsageError for options that it does not know."""

EMITTERS = {
    "csv": "shardwright.planner.exports.parameter_table:as_csv",
    "markdown": "shardwright.planner.exports.parameter_table:as_markdown",
    "pull-request": "shardwright.planner.exports.stock.pull_request:emit",
    "torch": "shardwright.planner.exports.stock.runtimes:to_torch",
    "transformers": "shardwright.planner.exports.stock.runtimes:to_transformers",
    "vllm": "shardwright.planner.exports.stock.runtimes:to_vllm",
}
"""The built-in formats."""


def names() -> list[str]:
    """Return the names of all installed formats."""
    return sorted({*EMITTERS, *plugins.names("emitters")})


def emitter(name: str) -> Emitter:
    """Return the emitter of a format.

    Raises:
        UsageError: the format is not installed.
        PluginError: the format does not load.
    """
    found = resolve_name(EMITTERS[name]) if name in EMITTERS else plugins.load("emitters", name)
    if found is None:
        raise UsageError(f"unknown format '{name}'; installed: {', '.join(names())}")
    return found


def export(plan: Plan | str | Path, to: str, **options: object) -> str | bytes:
    """Convert a plan to another format.

    Args:
        plan: The plan, or its file.
        to: "csv" and "markdown" are tables of all parameters. "transformers", "torch" and "vllm"
            are plans for these runtimes. "pull-request" is a text for transformers. Packages can
            add formats.
        **options: Options of the format. Tables have none. The others take `model`, the model that
            the plan was made for. They start ranks on this machine, and export only what gives the
            results of the unsharded model there. "transformers" takes `own_styles` (see
            `shardwright.tp_plan`).

    Raises:
        UsageError: there is no such format, or it does not take these options.
        PlanError: the file is not a plan, or the runtime cannot carry the plan out.
        PluginError: a format of another package does not load, or returns neither text nor bytes.
    """
    emit, read = emitter(to), Plan.load(plan)
    try:
        inspect.signature(emit).bind(read, **options)
    except TypeError:
        raise UsageError(f"format '{to}' does not take {', '.join(sorted(options))}") from None
    made = emit(read, **options)
    if not isinstance(made, str | bytes):
        raise PluginError(f"format '{to}' gives a {type(made).__name__}, not text or bytes")
    return made
