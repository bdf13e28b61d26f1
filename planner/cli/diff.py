"""`shardwright diff`."""

from __future__ import annotations

import click

from shardwright.planner.cli.console import compact
from shardwright.planner.cli.shared import as_json


@click.command(
    short_help="Compare two plans: placements and costs.",
    epilog="""\b
Examples:
  shardwright diff before.json after.json
  shardwright diff before.json after.json --json
""",
)
@click.argument("first", metavar="A.JSON", type=click.Path())
@click.argument("second", metavar="B.JSON", type=click.Path())
@as_json
@click.pass_context
def diff(ctx: click.Context, first: str, second: str, as_json: bool) -> None:
    """Compare two plans: placements and costs.

    The exit code is 0 if they are equal, and 1 if they differ. Solvers and versions are not
    compared.
    """
    from shardwright.planner.contract.plan_file import Plan
    from shardwright.planner.report.diff import diff_report, differences

    found = differences(Plan.load(first), Plan.load(second))
    if as_json:
        click.echo(compact({"equal": not found, "differences": [d._asdict() for d in found]}))
    else:
        from shardwright.planner.report.tables import show

        show(diff_report(found, first, second))
    ctx.exit(1 if found else 0)
