"""`shardwright export`."""

from __future__ import annotations

from typing import Any

import click

from shardwright.planner.cli.console import say, working
from shardwright.planner.cli.shared import check_output, reads_model, write


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
              help="csv, markdown: tables of all parameters. transformers, torch, vllm: plans for "
              "these, tried on ranks of this machine first. pull-request: the text of a pull "
              "request to transformers. Or a format of another package.")  # fmt: skip
@click.option("--own-styles", is_flag=True,
              help="For transformers: all of the plan, with a style of Shardwright.")  # fmt: skip
@reads_model(inputs=False)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), help="File to write.  [default: stdout]"
)
def export(
    file: str, model: str | None, to: str, own_styles: bool, output: str | None, how: dict[str, Any]
) -> None:
    """Write a plan in another format. Formats for other runtimes also need MODEL."""
    from shardwright.planner.exports import exports

    options: dict[str, Any] = {"own_styles": True} if own_styles else {}
    if model is not None:
        options |= {"model": model, **how}
    check_output(output, file, model)
    with working(f"exporting {file}"):
        made = exports.export(file, to, **options)
    if output is None:
        click.echo(made, nl=False)
    else:
        write(output, made)
        say(f"Wrote {output}")
