"""`shardwright explain`."""

from __future__ import annotations

from typing import Any

import click

from shardwright.planner.cli.console import compact, say, working
from shardwright.planner.cli.shared import as_json, reads_model, with_inputs


@click.command(
    short_help="Say why a parameter is placed so, and what alternatives would cost.",
    epilog="""\b
Examples:
  shardwright explain plan.json lm_head.weight ./my-model
  shardwright explain plan.json 'model.layers.*.mlp' ./my-model
""",
)
@click.argument("file", metavar="PLAN.JSON", type=click.Path())
@click.argument("name")
@click.argument("model", required=False)
@reads_model()
@as_json
def explain(file: str, name: str, model: str | None, as_json: bool, how: dict[str, Any]) -> None:
    """Say why the parameter NAME, or those of a module, are placed as they are.

    With MODEL, also say what each other placement would cost, or which ops forbid it. MODEL is
    the model that the plan was made for. It is traced for this.
    """
    from dataclasses import asdict

    from shardwright.planner.contract.plan_file import Plan
    from shardwright.planner.report import explain as answer

    loaded = Plan.load(file)
    if model is None:
        found = answer.from_plan(loaded, name)
        say("Hint: give the model after the name to see what alternatives would cost")
    else:
        with working(f"planning {model} with alternatives"):
            found = answer.explain(loaded, name, model, **with_inputs(how))
    if as_json:
        click.echo(compact([asdict(one) for one in found]))
    else:
        from shardwright.planner.report.explain_report import explain_report
        from shardwright.planner.report.tables import show

        show(explain_report(found))
