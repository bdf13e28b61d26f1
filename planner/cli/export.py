"""`shardwright export`."""

from __future__ import annotations

from pathlib import Path

import click

from shardwright.errors import UsageError
from shardwright.planner.cli.console import say, working
from shardwright.planner.cli.shared import check_folder


@click.command(
    epilog="\b\nExamples:\n  shardwright export plan.json --to markdown\n"
    "  shardwright export plan.json --to csv -o plan.csv"
)
@click.argument("file", metavar="PLAN.JSON", type=click.Path())
@click.option("--to", metavar="FORMAT", required=True,
              help="csv or markdown: tables of all parameters; or a package's.")  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="File to write.  [default: stdout]"
)
def export(file: str, to: str, output: str | None) -> None:
    """Write a plan in another format."""
    from shardwright.planner.contract.files import write_atomically
    from shardwright.planner.exports import exports

    if output is not None:
        check_folder(Path(output))
    with working(f"exporting {file}"):
        made = exports.export(file, to)
    if output is None:
        click.echo(made, nl=False)
        return
    try:
        write_atomically(Path(output), made)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}") from error
    say(f"Wrote {output}")
