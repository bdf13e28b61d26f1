"""`shardwright show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shardwright.planner.cli.console import say, working
from shardwright.planner.cli.shared import (
    as_json,
    check_output,
    reads_model,
    show_plan,
    with_inputs,
    write_page,
)


@click.command(
    short_help="Print a plan again, or draw it as a page of HTML.",
    epilog="""\b
Examples:
  shardwright show plan.json
  shardwright show plan.json --json
  shardwright show plan.json --html plan.html
  shardwright show plan.json --html plan.html --model ./my-model
  shardwright show tp2.json tp4.json tp8.json --html plans.html
""",
)
@click.argument("files", metavar="PLAN.JSON...", type=click.Path(), nargs=-1, required=True)
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE",
              help="Draw the plans as one HTML page, which needs only a browser.")  # fmt: skip
@click.option("--model", metavar="MODEL",
              help="With --html: the model, to add what alternatives would cost.")  # fmt: skip
@reads_model(hub=False)
@as_json
def show(
    files: tuple[str, ...], html: str | None, model: str | None, as_json: bool, how: dict[str, Any]
) -> None:
    """Print a plan again from its file, or draw one or several on a page of HTML."""
    from shardwright.planner.contract.plan_file import Plan

    if html is None and (len(files) > 1 or model or any(how.values())):
        raise click.UsageError(
            "several plans, --model, --inputs and --trust-remote-code need --html FILE"
        )
    if html is not None and as_json:
        raise click.UsageError("--json and --html exclude each other")
    if how["inputs"] and model is None:
        raise click.UsageError("--inputs needs --model")
    if html is None:
        show_plan(Plan.load(next(iter(files))), as_json)
        return
    check_output(html, *files, model, how["inputs"])
    shown = []
    for file in files:
        plan, name = Plan.load(file), Path(file).name
        if model is None:
            from shardwright.planner.picture.view import Shown

            shown.append(Shown(plan, name))
            continue
        with working(f"pricing alternatives to {name}"):
            from shardwright.planner.picture.beside import beside_model

            shown.append(beside_model(plan, name, model, **with_inputs(how)))
    write_page(shown, html)
    say(f"Wrote {html}: open it in a browser")
