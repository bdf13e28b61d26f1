"""`shardwright explain`."""

from __future__ import annotations

from typing import Any

import click

from shardwright.planner.cli.console import compact, say, working
from shardwright.planner.cli.shared import as_json, example_inputs, from_hub, given, trusting


@click.command(
    short_help="Say what holds a parameter in place, and what else would cost.",
    epilog="""\b
Examples:
  shardwright explain plan.json lm_head.weight ./my-model
  shardwright explain plan.json 'model.layers.*.mlp' ./my-model
""",
)
@click.argument("file", metavar="PLAN.JSON", type=click.Path())
@click.argument("name")
@click.argument("model", required=False)
@given
@trusting
@from_hub
@as_json
def explain(
    file: str,
    name: str,
    model: str | None,
    inputs: str | None,
    trust: bool,
    hub: dict[str, Any],
    as_json: bool,
) -> None:
    """Say what holds the parameter NAME, or those of a module, in place.

    What each other placement would cost, or the ops that forbid it: MODEL is traced for that, as
    the plan was made for it.
    """
    from dataclasses import asdict

    from shardwright.planner.contract.plan_file import Plan
    from shardwright.planner.report import explain as answer

    loaded = Plan.load(file)
    if model is None:
        found = answer.from_plan(loaded, name)
        say("Hint: give the model behind the name to be told what the alternatives would cost")
    else:
        with working(f"planning {model} with alternatives"):
            found = answer.explain(loaded, name, model, trust, **example_inputs(inputs), **hub)
    if as_json:
        click.echo(compact([asdict(one) for one in found]))
    else:
        from shardwright.planner.report.explain_report import explain_report
        from shardwright.planner.report.report import show

        show(explain_report(found))
