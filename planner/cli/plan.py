"""`shardwright plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.planner.cli.console import Count, Size, compact, say, working
from shardwright.planner.cli.shared import (
    COUNT,
    DTYPES,
    as_json,
    check_folder,
    example_inputs,
    from_hub,
    given,
    save,
    save_page,
    show_plan,
    trusting,
)

if TYPE_CHECKING:
    from shardwright.planner.contract.plan_figures import DataParallel, ObjectiveName
    from shardwright.planner.contract.plan_file import Plan
    from shardwright.planner.report.hand_written import HandWritten


@click.command(
    short_help="Plan a model; no weights are read.",
    epilog="""\b
Examples:
  shardwright plan some-org/some-model --tp 4 -o plan.json
  shardwright plan ./my-model --tp 8 --batch 16 --seq 2048 --dtype bfloat16
  shardwright plan ./my-model --tp 2 --memory 24GiB --solver backtracking
  shardwright plan ./my-model --tp 2 --pin 'model.layers.*.mlp=replicate'
  shardwright plan ./my-model --tp 4 -o plan.json --html plan.html
  shardwright plan my_net.py:Net --tp 2 --inputs my_net.py:example
""",
)
@click.argument("model")
@click.option("--tp", type=COUNT, metavar="N", help="Ranks to split over.")
@click.option("--mesh", metavar="NAME=N,...",
              help="dp=2,tp=4: 2 copies share the batch, each split over 4 ranks.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File for the plan.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE",
              help="Draw the plan on a page there, with what alternatives would cost.")  # fmt: skip
@click.option("--objective", type=click.Choice(["time", "memory"]), default="time",
              show_default=True, help="What is to be least, in a pass or on a rank.")  # fmt: skip
@click.option("--memory", type=Size(),
              help="What a rank may hold: 24GiB, 24GB, 500MB or bytes.  "
              "[default: what the device has]")  # fmt: skip
@click.option("--solver", metavar="NAME",
              help="cpsat, backtracking, …  [default: cpsat]")  # fmt: skip
@click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True), default=60.0, metavar="SECONDS",
    show_default=True, help="For the solver.",
)  # fmt: skip
@click.option("--batch", type=COUNT, metavar="N",
              help="Sequences that are priced.  [default: 1 a copy]")  # fmt: skip
@click.option("--seq", type=COUNT, metavar="N", default=512, show_default=True,
              help="Tokens of each; when decoding, in its KV cache.")  # fmt: skip
@click.option("--phase", metavar="NAME,...", default="prefill", show_default=True,
              help="prefill, decode, train, or several: prefill,decode:128.")  # fmt: skip
@click.option("--optimizer-bytes", type=Count(0), metavar="N", default=8,
              show_default=True, help="State an element of a parameter, if training.")  # fmt: skip
@click.option("--dp", type=click.Choice(["ddp", "fsdp"]), default="ddp", show_default=True,
              help="What copies do: average gradients, or share out parameters, gradients and "
              "optimizer state, as torch's fully_shard does.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the parameters.  [default: config's]")
@click.option("--device", metavar="PROFILE", default="h100-nvlink", show_default=True,
              help="Device that is priced: a known one, or a profile.json.")  # fmt: skip
@click.option("--pin", "pins", metavar="NAME=PLACEMENT", multiple=True,
              help="Keep parameters at replicate or shard:DIM; repeatable.")  # fmt: skip
@click.option("--pins", "pin_file", type=click.Path(dir_okay=False), metavar="FILE",
              help="The same from a JSON object.")  # fmt: skip
@click.option("--pins-from-tp-plan", "follow", is_flag=True,
              help="The same from the tensor-parallel plan of transformers.")  # fmt: skip
@click.option("--compare-tp-plan", "compare", is_flag=True,
              help="Price the tensor-parallel plan of transformers beside.")  # fmt: skip
@click.option("--tp-plan", "table_file", type=click.Path(dir_okay=False), metavar="FILE",
              help="Take it from a JSON object.  [default: the model's own]")  # fmt: skip
@click.option("--sequence-parallel/--no-sequence-parallel", default=None,
              help="Split hidden states between blocks along the sequence.  "
              "[default: where nothing fits --memory without]")  # fmt: skip
@click.option("--dump", type=click.Path(file_okay=False), metavar="DIR",
              help="Write there what the planner saw and decided, as text.")  # fmt: skip
@given
@click.option("--write-model", type=click.Path(dir_okay=False), metavar="FILE",
              help="Write there the CP-SAT model, in its text format: an integer for each axis of "
              "a tensor (over which sub-axes it is split) and for what is Partial.")  # fmt: skip
@trusting
@from_hub
@as_json
@click.option("-q", "--quiet", is_flag=True, help="Print only the path that was written.")
def plan(
    model: str,
    tp: int | None,
    mesh: str | None,
    output: str | None,
    html: str | None,
    objective: ObjectiveName,
    memory: int | None,
    solver: str | None,
    time_limit: float,
    batch: int | None,
    seq: int,
    phase: str,
    optimizer_bytes: int,
    dp: DataParallel,
    dtype: str | None,
    device: str,
    pins: tuple[str, ...],
    pin_file: str | None,
    follow: bool,
    compare: bool,
    table_file: str | None,
    sequence_parallel: bool | None,
    dump: str | None,
    inputs: str | None,
    write_model: str | None,
    trust: bool,
    hub: dict[str, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """Plan MODEL; no weights are read.

    It is a local directory, a hub id, or MODULE:NAME or FILE.py:NAME of Python code that makes it.
    """
    if as_json and quiet:
        raise click.UsageError("--json and --quiet exclude each other")
    if compare and quiet:
        raise click.UsageError("--compare-tp-plan and --quiet exclude each other")
    if (tp is None) == (mesh is None):
        raise click.UsageError("give either --tp, as in --tp 4, or --mesh, as in --mesh dp=2,tp=4")
    if table_file is not None and not (compare or follow):
        raise click.UsageError("--tp-plan needs --compare-tp-plan or --pins-from-tp-plan")
    for path in (output, html, write_model):
        if path is not None:
            check_folder(Path(path))
    with working(f"planning {model}"):
        import torch

        from shardwright.planner import solvers
        from shardwright.planner.api import prepare
        from shardwright.planner.contract.mesh import parse_mesh, read_mesh
        from shardwright.planner.cost.phases import parse_phases
        from shardwright.planner.devices.device import device as profile
        from shardwright.planner.dump.write import dumping
        from shardwright.planner.problem.pins import gather, read_table
        from shardwright.planner.problem.tp_plan import OWN, table_of
        from shardwright.planner.report.hand_written import price
        from shardwright.planner.search.ladder import search
        from shardwright.planner.search.solution import Asked

        dims = read_mesh(tp, None) if mesh is None else parse_mesh(mesh)
        profile(device)  # what can be refused at once should not wait for the trace
        parse_phases(phase)
        if solver is not None:
            solvers.load(solver)
        named = OWN if table_file is None else read_table(table_file)
        task = prepare(
            model, mesh=dims, batch=batch, seq=seq, dtype=getattr(torch, dtype) if dtype else None,
            device=device, phase=phase, optimizer_bytes=optimizer_bytes, dp=dp,
            pins=gather(pins, pin_file),
            tp_plan=named if follow else None, sequence_parallel=sequence_parallel,
            trust_remote_code=trust, **example_inputs(inputs), **hub,
        )  # fmt: skip
        table = table_of(named, task.source.module) if compare else {}
        with dumping(dump, task, write_model) as tell:
            ended = search(task, Asked(solver, time_limit, memory, objective), tell)
            result = ended.plan
        hand = price(task, table) if compare else None
    if output is not None:
        save(result, Path(output))
    warn(result)
    if html is not None:
        name = Path(output or html).name
        with working(f"pricing alternatives for {html}"):
            from shardwright.planner.picture.beside import beside

            shown = beside(result, name, ended)
        save_page([shown], Path(html))
    if quiet:
        for path in filter(None, (output, html)):
            click.echo(path)
    else:
        if hand is None:
            show_plan(result, as_json)
        else:
            show_both(result, hand, as_json)
        if output is not None and not as_json:
            say(f"Wrote {output}: load it under torchrun with shardwright.load(MODEL, plan=...)")
        if html is not None and not as_json:
            say(f"Wrote {html}: open it in a browser")


def show_both(result: Plan, hand: HandWritten, as_json: bool) -> None:
    """Print a plan and what the hand-written one comes to."""
    from shardwright.planner.report import side_by_side
    from shardwright.planner.report.report import show

    if as_json:
        click.echo(compact(side_by_side.as_json(result, hand)))
        return
    show_plan(result, False)
    click.echo()
    show(side_by_side.side_by_side(result, hand))


def warn(result: Plan) -> None:
    """Say on stderr what the user should know beside the plan."""
    if not result.modules and result.objective.name == "time" and result.mesh["tp"] > 1:
        say(
            "Hint: for least time this model is best whole on each rank; --objective memory "
            "shards it, for fewest bytes"
        )
    if result.solver.note:
        say(f"Note: {result.solver.note}")
    if result.opaque:
        ops = ", ".join(result.opaque)
        say(f"Warning: ops without a rule; the tensors at them stay replicated: {ops}")
