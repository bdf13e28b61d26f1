"""`shardwright audit`."""

from __future__ import annotations

import click

from shardwright.planner.cli.console import Count, compact, say, working
from shardwright.planner.cli.shared import as_json, priced_on


@click.command(
    short_help="Check the hand-written plans of transformers.",
    epilog="""\b
Examples:
  shardwright audit transformers
  shardwright audit transformers --tp 8 --json > audit.json
""",
)
@click.argument("library", type=click.Choice(["transformers"]))
@click.argument("names", nargs=-1, metavar="[TYPE]...")
@click.option("--tp", type=Count(2), metavar="N", default=2, show_default=True,
              help="Ranks to split over.")  # fmt: skip
@priced_on
@as_json
@click.pass_context
def audit(
    ctx: click.Context, library: str, names: tuple[str, ...], tp: int, device: str, as_json: bool
) -> None:
    """Check each parallel table of LIBRARY, or those of some model TYPEs, against our rules.

    A small model of each default config is traced. No weights are read, and no ranks are started.
    The exit code is 1 if a table is wrong.
    """
    with working(f"listing the tables of {library}"):
        from shardwright.planner.hand_written import audit_report as report
        from shardwright.planner.hand_written.audit import OPEN, RIGHT
        from shardwright.planner.hand_written.subjects import subjects
        from shardwright.planner.report.tables import show

        found = subjects(names)
    rows = []
    for i, subject in enumerate(found):
        with working(f"{i + 1} of {len(found)}: auditing {subject.name}"):
            rows.extend(report.audited(subject, tp, device))
    if as_json:
        click.echo(compact(report.as_json(rows, tp)))
    else:
        show(report.audit_report(rows, tp))
    if wrong := sum(row.verdict not in (RIGHT, OPEN) for row in rows):
        say(f"{wrong} of {len(rows)} tables are wrong on {tp} ranks")
        ctx.exit(1)
