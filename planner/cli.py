"""The command line. Heavy imports stand inside the commands: `--help` takes no time."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.errors import PlanError, UsageError
from shardwright.planner.console import Commands, Size, compact, say, working

if TYPE_CHECKING:
    from shardwright.planner.plan_file import Plan

EXAMPLES = """\b
Examples:
  shardwright plan some-org/some-model --tp 4 -o plan.json
  shardwright plan ./my-model --tp 2 --memory 24GiB --json
  shardwright show plan.json
  shardwright check plan.json ./my-model --numeric --layers 2
"""
COUNT = click.IntRange(min=1)
DTYPES = ("bfloat16", "float16", "float32", "float64")


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXAMPLES,
)
@click.version_option(None, "-V", "--version", package_name="shardwright")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Derive the cheapest correct way to split a model over several ranks, and check it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


as_json = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")


@main.command(
    epilog="""\b
Examples:
  shardwright plan some-org/some-model --tp 4 -o plan.json
  shardwright plan ./my-model --tp 8 --batch 16 --seq 2048 --dtype bfloat16
  shardwright plan ./my-model --tp 2 --memory 24GiB --solver backtracking
"""
)
@click.argument("model")
@click.option("--tp", type=COUNT, metavar="N", required=True, help="Ranks to split over.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File for the plan.")
@click.option("--memory", type=Size(), help="What a rank may hold: 24GiB, 24GB, 500MB or bytes.")
@click.option("--solver", metavar="NAME", help="cpsat, backtracking or another installed one.")
@click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True), default=60.0, metavar="SECONDS",
    show_default=True, help="For the solver.",
)  # fmt: skip
@click.option("--batch", type=COUNT, metavar="N", default=1, show_default=True,
              help="Batch size that is priced.")  # fmt: skip
@click.option("--seq", type=COUNT, metavar="N", default=512, show_default=True,
              help="Sequence length that is priced.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the parameters.  [default: config's]")
@click.option("--device", metavar="PROFILE", default="h100-nvlink", show_default=True,
              help="Device that is priced.")  # fmt: skip
@as_json
@click.option("-q", "--quiet", is_flag=True, help="Print only the path that was written.")
def plan(
    model: str,
    tp: int,
    output: str | None,
    memory: int | None,
    solver: str | None,
    time_limit: float,
    batch: int,
    seq: int,
    dtype: str | None,
    device: str,
    as_json: bool,
    quiet: bool,
) -> None:
    """Plan MODEL, a local directory or hub id; no weights are read."""
    if as_json and quiet:
        raise click.UsageError("--json and --quiet exclude each other")
    if output is not None:
        check_folder(Path(output))
    with working(f"planning {model}"):
        import torch

        from shardwright.planner import solvers
        from shardwright.planner.api import plan as make
        from shardwright.planner.cost import device as profile

        profile(device)  # what can be refused at once should not wait for the trace
        if solver is not None:
            solvers.load(solver)
        result = make(
            model, tp, memory=memory, solver=solver, time_limit=time_limit, batch=batch, seq=seq,
            dtype=getattr(torch, dtype) if dtype else None, device=device,
        )  # fmt: skip
    if output is not None:
        save(result, Path(output))
    warn(result)
    if quiet:
        if output is not None:
            click.echo(output)
    else:
        show_plan(result, as_json)
        if output is not None and not as_json:
            say(f"Wrote {output}: load it under torchrun with shardwright.load(MODEL, plan=...)")


def check_folder(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {path}: {folder} is not a directory one can write to")


def save(result: Plan, path: Path) -> None:
    """Write the plan, all of it or nothing."""
    try:
        result.save(path)
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror or error}") from error


def warn(result: Plan) -> None:
    """Say on stderr what the user should know beside the plan."""
    if result.solver.note:
        say(f"Note: {result.solver.note}")
    if result.opaque:
        ops = ", ".join(result.opaque)
        say(f"Warning: ops without a rule; the tensors at them stay whole: {ops}")


def show_plan(result: Plan, as_json: bool) -> None:
    """Print a plan on stdout."""
    from shardwright.planner.report import print_report

    if as_json:
        click.echo(compact(result.model_dump()))
    else:
        print_report(result)


@main.command(
    epilog="\b\nExamples:\n  shardwright show plan.json\n  shardwright show plan.json --json"
)
@click.argument("file", metavar="PLAN.JSON", type=click.Path())
@as_json
def show(file: str, as_json: bool) -> None:
    """Print a plan again from its file."""
    from shardwright.planner.plan_file import Plan

    show_plan(Plan.load(file), as_json)


@main.command(
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
    from shardwright.planner.plan_file import Plan

    loaded = Plan.load(file)
    with working("running the ranks on meta"):
        from shardwright.planner.trial import try_on_meta

        trial = try_on_meta(loaded, model)
    ranks = " and ".join(map(str, trial.ranks))
    if not as_json:
        click.echo(
            f"on meta: {loaded.model.architecture}, rank{'s' * (len(trial.ranks) > 1)} {ranks} of "
            f"{loaded.world_size}: {trial.shapes} output shapes as planned"
        )
    report: dict[str, Any] = {"ranks": trial.ranks, "shapes": trial.shapes}
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

        from shardwright.planner.numeric import compare

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


@main.command()
def schema() -> None:
    """Print the JSON Schema of a plan."""
    from shardwright.planner.plan_file import Plan

    text = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Plan.model_json_schema()}
    click.echo(json.dumps(text, indent=2, sort_keys=True))


if __name__ == "__main__":
    sys.exit(main())
