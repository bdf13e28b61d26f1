"""The command line: a group of commands, each in a file of its own."""

from __future__ import annotations

import sys

import click

from shardwright.planner.cli.audit import audit
from shardwright.planner.cli.calibrate import calibrate
from shardwright.planner.cli.check import check
from shardwright.planner.cli.console import Commands
from shardwright.planner.cli.diff import diff
from shardwright.planner.cli.doctor import doctor
from shardwright.planner.cli.explain import explain
from shardwright.planner.cli.export import export
from shardwright.planner.cli.plan import plan
from shardwright.planner.cli.schema import schema
from shardwright.planner.cli.serve import serve
from shardwright.planner.cli.show import show

EXAMPLES = """\b
Examples:
  shardwright plan some-org/some-model --tp 4 -o plan.json
  shardwright plan ./my-model --tp 2 --memory 24GiB --json
  shardwright show plan.json
  shardwright explain plan.json 'model.layers.*.mlp' ./my-model
  shardwright check plan.json ./my-model --numeric --layers 2
"""
COMMANDS = (doctor, plan, show, explain, diff, export, check, audit, serve, calibrate, schema)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXAMPLES,
)
@click.version_option(None, "-V", "--version", package_name="shardwright")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Derive the cheapest correct way to split a model over several ranks, and check it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for command in COMMANDS:
    main.add_command(command)

if __name__ == "__main__":
    sys.exit(main())
