"""`shardwright show`."""

from __future__ import annotations

import click

from shardwright.planner.cli.shared import as_json, show_plan


@click.command(
    epilog="\b\nExamples:\n  shardwright show plan.json\n  shardwright show plan.json --json"
)
@click.argument("file", metavar="PLAN.JSON", type=click.Path())
@as_json
def show(file: str, as_json: bool) -> None:
    """Print a plan again from its file."""
    from shardwright.planner.contract.plan_file import Plan

    show_plan(Plan.load(file), as_json)
