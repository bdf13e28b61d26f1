"""`shardwright doctor`."""

from __future__ import annotations

from typing import Any

import click

from shardwright.planner.cli.console import compact, working
from shardwright.planner.cli.shared import COUNT, as_json, priced_on, reads_model, with_inputs


@click.command(
    short_help="Say whether a model will run split, and what stays replicated.",
    epilog="""\b
Examples:
  shardwright doctor some-org/some-model
  shardwright doctor ./my-model --tp 2 --tp 16 --device l4-pcie
""",
)
@click.argument("model")
@click.option("--tp", "ranks", type=COUNT, multiple=True, metavar="N", default=(2, 4, 8),
              show_default="2, 4, 8", help="Ranks to plan for; repeatable.")  # fmt: skip
@priced_on
@reads_model()
@as_json
def doctor(
    model: str, ranks: tuple[int, ...], device: str, as_json: bool, how: dict[str, Any]
) -> None:
    """Say what of MODEL is split, what stays replicated and why, and which calls it takes.

    It is traced once, and planned for least memory on each number of ranks. No weights are read.
    """
    with working(f"examining {model}"):
        from dataclasses import asdict

        from shardwright.planner.report.doctor import diagnose, doctor_report

        found = diagnose(model, ranks, device, **with_inputs(how))
    if as_json:
        dumped = asdict(found)
        for part in (dumped, *dumped["ranks"]):
            part["whole"] = [one.model_dump() for one in part["whole"]]
        click.echo(compact(dumped))
    else:
        from shardwright.planner.report.tables import show

        show(doctor_report(found))
