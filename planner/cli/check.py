"""`shardwright check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.errors import PlanError
from shardwright.planner.cli.console import compact, working
from shardwright.planner.cli.shared import (
    COUNT,
    DTYPES,
    as_json,
    example_inputs,
    from_hub,
    given,
    save,
    trusting,
)

if TYPE_CHECKING:
    from shardwright.planner.contract.plan_file import Plan


@click.command(
    short_help="Prove that a plan is right for its model.",
    epilog="""\b
Examples:
  shardwright check plan.json ./my-model
  shardwright check plan.json ./my-model --numeric --layers 2 --dtype float64
  shardwright check --accept edited.json ./my-model
""",
)
@click.argument("file", metavar="PLAN.JSON", type=click.Path())
@click.argument("model")
@click.option("--numeric", is_flag=True, help="Start the ranks on CPU with random weights.")
@click.option("--layers", type=COUNT, metavar="N",
              help="For --numeric: cut the model to so many layers, planned anew.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES[2:]), default="float32", show_default=True,
              help="For --numeric: differences up to 1e-4 or 1e-9 pass.")  # fmt: skip
@click.option("--accept", is_flag=True,
              help="Write the digest of an edited or old plan, if it holds.")  # fmt: skip
@given
@trusting
@from_hub
@as_json
@click.pass_context
def check(
    ctx: click.Context,
    file: str,
    model: str,
    numeric: bool,
    layers: int | None,
    dtype: str,
    accept: bool,
    inputs: str | None,
    trust: bool,
    hub: dict[str, Any],
    as_json: bool,
) -> None:
    """Prove that the plan is right for MODEL: by the rules of its ops, and on meta."""
    given = ctx.get_parameter_source("dtype") is click.core.ParameterSource.COMMANDLINE
    if not numeric and (layers is not None or given):
        raise click.UsageError("--layers and --dtype need --numeric")
    from shardwright.planner.contract.plan_file import Plan

    loaded = Plan.load(file)
    if not accept:
        loaded.unedited(file)
    with working("proving the plan"):
        from shardwright.planner.prove.prover import Prover

        example = example_inputs(inputs)
        prover = Prover(model, trust_remote_code=trust, **example, **hub)
        found = prover.prove(loaded, figures=not accept)
    report: dict[str, Any] = {
        "ranks": found.ranks, "shapes": found.shapes, "ops": found.ops, "changes": found.changes,
    }  # fmt: skip
    if not as_json:
        ranks = " and ".join(map(str, found.ranks))
        click.echo(
            f"by the rules: {found.ops} ops and {found.changes} changes of placement, values and "
            f"gradients\non meta: {loaded.model.architecture}, rank{'s' * (len(found.ranks) > 1)} "
            f"{ranks} of {loaded.world_size}: {found.shapes} output shapes as planned"
        )
    if numeric:
        how = {"trust_remote_code": trust, **example, **hub}
        report["numeric"] = _numeric(found.plan, model, layers, dtype, as_json, how)
    ok = not numeric or report["numeric"]["ok"]
    if accept and ok:
        report["accepted"] = found.plan != loaded
        _accept(found.plan, loaded, file, as_json)
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


def _accept(proven: Plan, loaded: Plan, file: str, as_json: bool) -> None:
    """Write a plan with its digest, if that is not what the file has."""
    if proven != loaded:
        save(proven, Path(file))
    if not as_json:
        click.echo(f"{'accepted' if proven != loaded else 'as it was'}: {file}")


def _numeric(
    plan: Plan,
    model: str,
    layers: int | None,
    dtype: str,
    as_json: bool,
    how: dict[str, Any],
) -> dict[str, Any]:
    with working(f"running {plan.world_size} ranks on CPU"):
        import dataclasses

        import torch

        from shardwright.planner.on_ranks.numeric import compare

        found = compare(plan, model, layers, getattr(torch, dtype), **how)
    if not as_json:
        click.echo(
            f"numeric: {found.ranks} ranks{f', {found.layers} layers' if found.layers else ''}"
            f"{' (planned anew)' if layers else ''}, {found.dtype}, random weights\n"
            f"  logits     differ by {found.logits:.2e} at most\n"
            f"  gradients  differ by {found.gradients:.2e} of their largest entry at most, over "
            f"{found.parameters} parameters (worst: {found.worst})"
        )
    return {**dataclasses.asdict(found), "ok": found.ok}
