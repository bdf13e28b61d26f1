"""`shardwright check`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from shardwright.errors import PlanError
from shardwright.planner.cli.console import compact, working
from shardwright.planner.cli.shared import COUNT, DTYPES, as_json, reads_model, with_inputs, write

if TYPE_CHECKING:
    from shardwright.planner.on_ranks.numeric import Difference


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
              help="For --numeric: cut the model to N layers, and plan it again.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES[2:]), default="float32", show_default=True,
              help="For --numeric: differences up to 1e-4 or 1e-9 pass.")  # fmt: skip
@click.option("--accept", is_flag=True,
              help="Write the digest of an edited or old plan, if it holds.")  # fmt: skip
@reads_model()
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
    as_json: bool,
    how: dict[str, Any],
) -> None:
    """Prove that the plan is right for MODEL: by the rules of its ops, and on meta."""
    chosen = ctx.get_parameter_source("dtype") is click.core.ParameterSource.COMMANDLINE
    if not numeric and (layers is not None or chosen):
        raise click.UsageError("--layers and --dtype need --numeric")
    from shardwright.planner.contract.plan_file import Plan

    loaded = Plan.load(file)
    if not accept:
        loaded.unedited(file)
    with working("proving the plan"):
        from shardwright.planner.prove.prover import Prover

        how = with_inputs(how)
        found = Prover(model, **how).prove(loaded, figures=not accept)
    report: dict[str, Any] = {
        "ranks": found.ranks, "shapes": found.shapes, "ops": found.ops, "changes": found.changes,
    }  # fmt: skip
    tell = (lambda text: None) if as_json else click.echo
    ranks = " and ".join(map(str, found.ranks))
    tell(
        f"by the rules: {found.ops} ops and {found.changes} redistributions, values and gradients\n"
        f"on meta: {loaded.model.architecture}, rank{'s' * (len(found.ranks) > 1)} {ranks} of "
        f"{loaded.world_size}: {found.shapes} output shapes as planned"
    )
    ok = True
    if numeric:
        with working(f"running {found.plan.world_size} ranks on CPU"):
            from shardwright.planner.on_ranks.numeric import compare

            compared = compare(found.plan, model, layers, dtype, **how)
        ok = compared.ok
        report["numeric"] = {**asdict(compared), "ok": ok}
        tell(_numeric_in_words(compared, layers is not None))
    if accept and ok:
        changed = found.plan != loaded
        report["accepted"] = changed
        if changed:
            write(file, found.plan.to_json())
        tell(f"{'accepted' if changed else 'unchanged'}: {file}")
    if as_json:
        click.echo(compact({"ok": ok, **report}))
    if not ok:
        doubt = "this may be rounding if the model computes in float32 internally"
        if dtype == "float32":
            doubt = "this may be rounding at a ReLU whose input is near 0: try --dtype float64"
        raise PlanError(
            "the split model differs from the unsplit one by more than "
            f"{report['numeric']['tolerance']:g} ({doubt})"
        )


def _numeric_in_words(found: Difference, anew: bool) -> str:
    return (
        f"numeric: {found.ranks} ranks{f', {found.layers} layers' if found.layers else ''}"
        f"{' (planned anew)' if anew else ''}, {found.dtype}, random weights\n"
        f"  logits     differ by {found.logits:.2e} at most\n"
        f"  gradients  differ by {found.gradients:.2e} of their largest entry at most, over "
        f"{found.parameters} parameters (worst: {found.worst})"
    )
