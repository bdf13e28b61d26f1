"""Options and steps that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardwright.errors import UsageError
from shardwright.planner.cli.console import Count, compact, say

if TYPE_CHECKING:
    from shardwright.planner.contract.plan_file import Plan
    from shardwright.planner.picture.view import Shown

F = TypeVar("F", bound=Callable[..., Any])

COUNT = Count()
CONFIGS = (
    "config.json", "generation_config.json", "model_index.json", "model.safetensors.index.json",
)  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32", "float64")

as_json = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
priced_on = click.option(
    "--device", metavar="PROFILE", default="h100-nvlink", show_default=True,
    help="Device to price for: a known one, or a profile.json.",
)  # fmt: skip
_OF_HUB = (
    click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model."),
    click.option("--revision", metavar="NAME", help="Branch, tag or commit of a hub id."),
    click.option("--cache-dir", type=click.Path(file_okay=False), metavar="DIR",
                 help="Where downloads are kept."),
    click.option("--local-files-only", is_flag=True, help="Fetch nothing from the hub."),
)  # fmt: skip
_SUBFOLDER = click.option("--subfolder", metavar="NAME",
                          help="The model of a pipeline of diffusers, such as vae.  "
                          "[default: its denoiser]")  # fmt: skip
_INPUTS = click.option("--inputs", metavar="MODULE:FUNCTION",
                       help="Example inputs for MODEL: a function that returns them, as in "
                       "my_net.py:example, or a file of torch.save.")  # fmt: skip


def reads_model(inputs: bool = True, hub: bool = True) -> Callable[[F], F]:
    """Options that say how a model is read, passed on as `how`: keywords of `shardwright.plan`.

    There is none for a token, which others could read off the command line.

    Args:
        inputs: Whether example inputs may be given. Then it may also be the model of a pipeline.
        hub: Whether the model may be a hub id.
    """
    options = [*([_INPUTS] if inputs else []), *([_SUBFOLDER] if inputs and hub else [])]
    options += _OF_HUB[: None if hub else 1]

    def with_options(command: F) -> F:
        @functools.wraps(command)
        def called(*args: Any, **given: Any) -> Any:
            names = "inputs subfolder trust_remote_code revision cache_dir local_files_only".split()
            how = {name: given.pop(name) for name in names if name in given}
            return command(*args, how=how, **given)

        made: Any = called
        for option in reversed(options):
            made = option(made)
        return made

    return with_options


def with_inputs(how: dict[str, Any]) -> dict[str, Any]:
    """`how` with the example inputs that `--inputs` names, as `args` and `kwargs`."""
    from shardwright.planner.trace.model.python_references import inputs

    rest = {key: value for key, value in how.items() if key != "inputs"}
    args, kwargs = inputs(how["inputs"]) if how["inputs"] else ((), None)
    return {"args": args, "kwargs": kwargs, **rest}


def check_output(path: str | None, *others: str | None) -> None:
    """Refuse a file that cannot be written, before any work is done for it.

    Args:
        path: The file.
        *others: What else the command reads or writes: files, a model's directory, or Python code
            as FILE.py:NAME. Nothing of these is written over.
    """
    if path is None:
        return
    if not path:
        raise UsageError("the name of the file to write is empty")
    for other in others:
        if other and any(_is_of(path, name) for name in (other, other.rpartition(":")[0]) if name):
            raise UsageError(
                f"cannot write {path}: this command also reads or writes {other}: give another file"
            )
    folder = Path(os.path.realpath(path)).parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: {folder} is not a directory one can write to")


def _is_of(path: str, other: str) -> bool:
    """Return whether `path` is the file `other`, or a file that a model in that directory has."""
    file, given = Path(os.path.realpath(path)), Path(os.path.realpath(other))
    belongs = file.suffix == ".safetensors" or file.name in CONFIGS
    if not file.exists():
        return file == given
    return file.is_file() and (file == given or (file.parent == given and belongs))


def write(path: str, content: str | bytes) -> None:
    """Write a file, all of it or nothing."""
    from shardwright.planner.contract.files import write_atomically

    folder = Path(path).parent
    is_new = not folder.exists()
    try:
        write_atomically(Path(path), content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    if is_new:
        say(f"Made the folder {folder}")


def write_page(shown: Sequence[Shown], path: str) -> None:
    """Write plans as a page of HTML."""
    from shardwright.planner.picture.page import page

    write(path, page(shown))


def show_plan(plan: Plan, as_json: bool) -> None:
    """Print a plan on stdout."""
    if as_json:
        click.echo(compact(plan.model_dump()))
    else:
        from shardwright.planner.report.report import report
        from shardwright.planner.report.tables import show

        show(report(plan))
