"""`shardwright export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardwright.errors import UsageError
from shardwright.planner.cli.console import say, working
from shardwright.planner.cli.shared import check_folder, from_hub, trusting


@click.command(
    short_help="Write a plan for another runtime, or as a table.",
    epilog="\b\nExamples:\n  shardwright export plan.json --to markdown\n"
    "  shardwright export plan.json --to csv -o plan.csv\n"
    "  shardwright export plan.json ./my-model --to transformers -o tp_plan.json\n"
    "  shardwright export plan.json ./my-model --to torch -o parallelize.py",
)
@click.argument("file", metavar="PLAN.JSON", type=click.Path())
@click.argument("model", required=False)
@click.option("--to", metavar="FORMAT", required=True,
              help="csv or markdown: tables of all parameters. transformers, torch, vllm: what "
              "these split MODEL by, run on ranks here first; pull-request: a text for "
              "transformers. Or a package's.")  # fmt: skip
@click.option("--own-styles", is_flag=True,
              help="For transformers: all of the plan, by a style of ours.")  # fmt: skip
@trusting
@from_hub
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="File to write.  [default: stdout]"
)
def export(
    file: str,
    model: str | None,
    to: str,
    own_styles: bool,
    trust: bool,
    hub: dict[str, Any],
    output: str | None,
) -> None:
    """Write a plan in another format; for another runtime, that of MODEL."""
    from shardwright.planner.contract.files import write_atomically
    from shardwright.planner.exports import exports

    options: dict[str, Any] = {"own_styles": True} if own_styles else {}
    if model is not None:
        options |= {"model": model, "trust_remote_code": trust, **hub}
    if output is not None:
        check_folder(Path(output))
    with working(f"exporting {file}"):
        made = exports.export(file, to, **options)
    if output is None:
        click.echo(made, nl=False)
        return
    try:
        write_atomically(Path(output), made)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    say(f"Wrote {output}")
