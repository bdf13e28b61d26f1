"""Writes the plans of every tiny architecture and of the published models, and compares two sets.

    python -m benchmarks.plans DIR                     all of them, tp 2 (published: 2, 4, 8 and 16)
    python -m benchmarks.plans DIR llama gpt2          some
    python -m benchmarks.plans DIR --against BEFORE    and compare with those of another checkout

It tests changes that should change no plan. The plans are compared with those of the earlier code,
except for the names of the solvers that found and proved them. Plans of older format versions are
read in today's format. Exits with 1 if any differs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.progress import track

from shardwright.errors import PlanError, ShardwrightError
from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.plan_figures import ObjectiveName
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.contract.styles import LOCAL

RANKS = (2, 4, 8, 16)
"""Ranks for published models; tiny ones are planned for two."""
NEWS = ("digest", "objective", "calls", "takes", "gives", "drawing")
"""Keys that plans before version 3, and its first ones, do not have."""


def jobs(
    names: tuple[str, ...], objective: ObjectiveName
) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield file name and a function that makes the plan."""
    import torch

    import shardwright
    from benchmarks.planning_models import MODELS, Published
    from benchmarks.zoo_case import build
    from tests import zoo

    def tiny(kind: str, name: str) -> Plan:
        config, model = build(kind, name, torch.float64)
        example = zoo.example(name, config, kind, torch.float64)
        return shardwright.plan(model, tp=2, kwargs=example, objective=objective)

    def at(published: Published, tp: int) -> Plan:
        return shardwright.plan(published.config(), tp, objective=objective)

    for kind in zoo.KINDS:
        for name in zoo.names(kind):
            if not names or name in names:
                yield f"{kind}-{name}", lambda k=kind, n=name: tiny(k, n)
    for name, published in MODELS.items():
        for tp in RANKS if not names or name in names else ():
            yield f"{name}-tp{tp}", lambda p=published, n=tp: at(p, n)


def written(make: Callable[[], Plan]) -> str:
    """Return the plan as text, or the error that there is none."""
    try:
        return make().to_json()
    except ShardwrightError as error:
        return f"{type(error).__name__}: {error}\n"


def equal(text: str, before: str) -> bool:
    """Return whether a plan equals the earlier one, read in today's format.

    Keys that the earlier one lacks are not compared, nor the solvers: all that prove a plan find
    the same plan.
    """
    try:
        old, new = (_said(Plan.from_json(t)) for t in (before, text))
    except PlanError:
        return text == before
    said = json.loads(before)
    if said["version"] < Plan.model_fields["version"].default or "drawing" not in said:
        old, new = _without_news(old), _without_news(new)
    return old == new


def _said(plan: Plan) -> dict[str, Any]:
    """Return a plan's content without its solvers."""
    out = plan.model_dump()
    kept = {k: out["solver"][k] for k in ("status", "objective", "bound")}
    return out | {"solver": kept, "digest": ""}  # the digest covers the solvers too


def _without_news(said: dict[str, Any]) -> dict[str, Any]:
    """Drop new keys, and modules that have no others."""
    modules = {
        name: {k: v for k, v in spec.items() if k not in NEWS and v not in ([], {}, LOCAL)}
        for name, spec in said["modules"].items()
    }
    left = {k: v for k, v in said.items() if k not in NEWS}
    return left | {"modules": {name: spec for name, spec in modules.items() if spec}}


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.argument("names", nargs=-1)
@click.option("--against", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="A folder of plans that these should equal.")  # fmt: skip
@click.option("--objective", type=click.Choice(get_args(ObjectiveName)), default="memory",
              show_default=True, help="Least time leaves tiny models whole.")  # fmt: skip
@click.option("--part", default="1/1", metavar="K/N", help="Every N-th of them, from the K-th on.")
def main(
    directory: Path, names: tuple[str, ...], against: Path | None, objective: Any, part: str
) -> None:
    """Write plans into DIRECTORY."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    own, parts = (int(n) for n in part.split("/"))
    todo: list[Any] = list(jobs(names, objective))[own - 1 :: parts]
    if not todo:
        raise click.UsageError(f"no such models: {', '.join(names)}")
    console, differ, spent = Console(stderr=True), [], 0.0
    for name, make in track(todo, "planning", console=console, disable=not console.is_terminal):
        begun = time.process_time()
        text = written(make)
        spent += time.process_time() - begun
        write_atomically(directory / f"{name}.json", text)
        before = against / f"{name}.json" if against else None
        if before is not None and not (before.exists() and equal(text, before.read_text())):
            differ.append(name)
            print(f"differs: {name}", flush=True)
    compared = f", {len(todo) - len(differ)} equal those of {against}" if against else ""
    print(f"{len(todo)} written, {spent:.0f} s of processor time{compared}")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
