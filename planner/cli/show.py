"""`shardwright show`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.planner.cli.console import say, working
from shardwright.planner.cli.shared import (
    as_json,
    check_folder,
    example_inputs,
    given,
    save_page,
    show_plan,
    trusting,
)

if TYPE_CHECKING:
    from shardwright.planner.contract.plan_file import Plan
    from shardwright.planner.picture.view import Shown


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
              help="Draw the plans on a page there; it needs nothing but a browser.")  # fmt: skip
@click.option("--model", metavar="MODEL",
              help="With --html: the model, to say what alternatives would cost, too.")  # fmt: skip
@given
@trusting
@as_json
def show(
    files: tuple[str, ...], html: str | None, model: str | None, inputs: str | None, trust: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Print a plan again from its file, or draw one or several on a page of HTML."""
    from shardwright.planner.contract.plan_file import Plan

    if html is None and (len(files) > 1 or model or inputs or trust):
        raise click.UsageError("several plans, --model and what goes with it need --html FILE")
    if html is not None and as_json:
        raise click.UsageError("--json and --html exclude each other")
    if inputs and model is None:
        raise click.UsageError("--inputs needs --model")
    if html is None:
        show_plan(Plan.load(next(iter(files))), as_json)
        return
    check_folder(Path(html))
    shown = [_shown(Plan.load(file), Path(file).name, model, inputs, trust) for file in files]
    save_page(shown, Path(html))
    say(f"Wrote {html}: open it in a browser")


def _shown(plan: Plan, name: str, model: str | None, inputs: str | None, trust: bool) -> Shown:
    """A plan for the page, with what its model tells beside."""
    from shardwright.planner.picture.view import Shown

    if model is None:
        return Shown(plan, name)
    with working(f"pricing alternatives to {name}"):
        from shardwright.planner.picture.beside import beside_model

        return beside_model(plan, name, model, trust_remote_code=trust, **example_inputs(inputs))
