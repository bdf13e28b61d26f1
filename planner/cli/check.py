"""`shardwright check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shardwright.errors import PlanError
from shardwright.planner.cli.console import compact, working
from shardwright.planner.cli.shared import COUNT, DTYPES, as_json

if TYPE_CHECKING:
    from shardwright.planner.contract.plan_file import Plan


@click.command(
    epilog="""\b
Examples:
  shardwright check plan.json ./my-model
  shardwright check plan.json ./my-model --numeric --layers 2 --dtype float64
"""
)
@click.argument("file", metavar="PLAN.JSON", type=click.Path())
@click.argument("model")
@click.option("--numeric", is_flag=True, help="Start the ranks on CPU with random weights.")
@click.option("--layers", type=COUNT, metavar="N",
              help="For --numeric: cut the model to so many layers, planned anew.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES[2:]), default="float32", show_default=True,
              help="For --numeric: differences up to 1e-4 or 1e-9 pass.")  # fmt: skip
@as_json
@click.pass_context
def check(
    ctx: click.Context,
    file: str,
    model: str,
    numeric: bool,
    layers: int | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Check that the plan is one for MODEL and holds: its forward on meta, shape by shape."""
    given = ctx.get_parameter_source("dtype") is click.core.ParameterSource.COMMANDLINE
    if not numeric and (layers is not None or given):
        raise click.UsageError("--layers and --dtype need --numeric")
    from shardwright.planner.contract.plan_file import Plan

    loaded = Plan.load(file)
    with working("running the ranks on meta"):
        from shardwright.planner.dry_run.written import dry_run_written

        ran = dry_run_written(loaded, model)
    ranks = " and ".join(map(str, ran.ranks))
    if not as_json:
        click.echo(
            f"on meta: {loaded.model.architecture}, rank{'s' * (len(ran.ranks) > 1)} {ranks} of "
            f"{loaded.world_size}: {ran.shapes} output shapes as planned"
        )
    report: dict[str, Any] = {"ranks": ran.ranks, "shapes": ran.shapes}
    if numeric:
        report["numeric"] = _numeric(loaded, model, layers, dtype, as_json)
    ok = not numeric or report["numeric"]["ok"]
    if as_json:
        click.echo(compact({"ok": ok, **report}))
    if not ok:
        doubt = "models that compute in float32 inside do"
        if dtype == "float32":
            doubt = "a ReLU whose input is 0 but for rounding may do that: --dtype float64 tells"
        raise PlanError(
            "the split model differs from the whole one by more than "
            f"{report['numeric']['tolerance']:g} ({doubt})"
        )


def _numeric(
    plan: Plan, model: str, layers: int | None, dtype: str, as_json: bool
) -> dict[str, Any]:
    with working(f"running {plan.world_size} ranks on CPU"):
        import dataclasses

        import torch

        from shardwright.planner.on_ranks.numeric import compare

        found = compare(plan, model, layers, getattr(torch, dtype))
    if not as_json:
        click.echo(
            f"numeric: {found.ranks} ranks, {found.layers} layers"
            f"{' (planned anew)' if layers else ''}, {found.dtype}, random weights\n"
            f"  logits     differ by {found.logits:.2e} at most\n"
            f"  gradients  differ by {found.gradients:.2e} of their largest entry at most, over "
            f"{found.parameters} parameters (worst: {found.worst})"
        )
    return {**dataclasses.asdict(found), "ok": found.ok}
