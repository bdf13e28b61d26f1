"""Options and steps that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardwright.errors import PlanError, UsageError
from shardwright.planner.cli.console import Count, compact

if TYPE_CHECKING:
    from shardwright.planner.contract.plan_file import Plan
    from shardwright.planner.picture.view import Shown

F = TypeVar("F", bound=Callable[..., Any])

given = click.option("--inputs", metavar="MODULE:FUNCTION",
                     help="What gives inputs for MODEL, or a file of torch.save.")  # fmt: skip
COUNT = Count()
DTYPES = ("bfloat16", "float16", "float32", "float64")
trusting = click.option("--trust-remote-code", "trust", is_flag=True,
                        help="Run code that comes with the model.")  # fmt: skip
_OPTIONS = (
    click.option("--revision", metavar="NAME", help="Branch, tag or commit of a hub id."),
    click.option("--cache-dir", type=click.Path(file_okay=False), metavar="DIR",
                 help="Where downloads are kept."),
    click.option("--local-files-only", is_flag=True, help="Fetch nothing from the hub."),
)  # fmt: skip


def from_hub(command: F) -> F:
    """A command with options that say where a hub id leads: `hub` has those, as `plan` takes them.

    There is none for a token: others could read it off the command line.
    """

    @functools.wraps(command)
    def with_hub(*args: Any, **given: Any) -> Any:
        hub = {name: given.pop(name) for name in ("revision", "cache_dir", "local_files_only")}
        return command(*args, hub=hub, **given)

    return reduce(lambda made, option: option(made), reversed(_OPTIONS), with_hub)  # type: ignore[return-value]


as_json = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")


def example_inputs(name: str | None) -> dict[str, Any]:
    """What `plan` takes: example inputs, if they are given."""
    from shardwright.planner.trace.model.python_references import inputs

    args, kwargs = ((), None) if name is None else inputs(name)
    return {"args": args, "kwargs": kwargs}


def check_folder(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    folder = Path(os.path.realpath(path)).parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: {folder} is not a directory one can write to")


def save(result: Plan, path: Path) -> None:
    """Write the plan, all of it or nothing."""
    try:
        result.save(path)
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror or error}") from error


def save_page(shown: Sequence[Shown], path: Path) -> None:
    """Write plans as a page of HTML, all of it or nothing."""
    from shardwright.planner.contract.files import write_atomically
    from shardwright.planner.picture.page import page

    try:
        write_atomically(path, page(shown))
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror or error}") from error


def show_plan(result: Plan, as_json: bool) -> None:
    """Print a plan on stdout."""
    from shardwright.planner.report.report import print_report

    if as_json:
        click.echo(compact(result.model_dump()))
    else:
        print_report(result)
