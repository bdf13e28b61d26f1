"""`shardwright plan`."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.errors import InfeasibleError
from shardwright.planner.cli.console import ByRank, Count, Size, compact, say, working
from shardwright.planner.cli.shared import (
    COUNT,
    DTYPES,
    as_json,
    check_output,
    priced_on,
    reads_model,
    show_plan,
    with_inputs,
    write,
    write_page,
)

if TYPE_CHECKING:
    from torch import nn

    from shardwright.planner.contract.plan_file import Plan
    from shardwright.planner.hand_written.price import HandWritten
    from shardwright.planner.search.meshes import Cluster


@click.command(
    short_help="Plan a model; no weights are read.",
    epilog="""\b
Examples:
  shardwright plan some-org/some-model --tp 4 -o plan.json
  shardwright plan ./my-model --tp 8 --batch 16 --seq 2048 --dtype bfloat16
  shardwright plan ./my-model --tp 2 --memory 24GiB --solver backtracking
  shardwright plan ./my-model --tp 2 --pin 'model.layers.*.mlp=replicate'
  shardwright plan ./my-model --tp 4 -o plan.json --html plan.html
  shardwright plan ./my-pipeline --tp 2 --subfolder transformer
  shardwright plan timm/NAME --tp 2
  shardwright plan my_net.py:Net --tp 2 --inputs my_net.py:example
""",
)
@click.argument("model")
@click.option("--tp", type=COUNT, metavar="N", help="Ranks to split over.")
@click.option("--mesh", metavar="NAME=N,...",
              help="dp=2,tp=4: 2 copies share the batch, each split over 4 ranks.")  # fmt: skip
@click.option("--hosts", type=COUNT, metavar="N",
              help="Choose the mesh for N hosts.")  # fmt: skip
@click.option("--gpus-per-host", type=COUNT, metavar="N",
              help="GPUs of a host.  [default: the device's]")  # fmt: skip
@click.option("--ranks", type=COUNT, metavar="N",
              help="Choose the mesh for N GPUs of one host.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File for the plan.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE",
              help="Draw the plan as an HTML page, with costs of alternatives.")  # fmt: skip
@click.option("--objective", type=click.Choice(["time", "memory"]), default="time",
              show_default=True,
              help="Minimize the time of a pass, or the memory of a rank.")  # fmt: skip
@click.option("--memory", type=ByRank(Size()),
              help="Limit per rank, like 24GiB or 500MB; or one for each: 48GiB,24GiB.  "
              "[default: the device's]")  # fmt: skip
@click.option("--speeds", type=ByRank(click.FLOAT), metavar="X,X,...",
              help="Speed of each rank, relative to the device, if ranks differ.")  # fmt: skip
@click.option("--solver", metavar="NAME",
              help="cpsat, backtracking, …  [default: cpsat]")  # fmt: skip
@click.option(
    "--time-limit", type=click.FloatRange(min=0, min_open=True), default=60.0, metavar="SECONDS",
    show_default=True, help="Time limit for planning in total.",
)  # fmt: skip
@click.option("--batch", type=COUNT, metavar="N",
              help="Sequences that are priced.  [default: 1 per copy]")  # fmt: skip
@click.option("--seq", type=COUNT, metavar="N", default=512, show_default=True,
              help="Tokens in each sequence; for decode, in its KV cache.")  # fmt: skip
@click.option("--phase", metavar="NAME,...", default="prefill", show_default=True,
              help="prefill, decode, train, or several: prefill,decode:128.")  # fmt: skip
@click.option("--optimizer-bytes", type=Count(0), metavar="N", default=8,
              show_default=True, help="Optimizer state per element, if training.")  # fmt: skip
@click.option("--expert-imbalance", type=click.FloatRange(min=1), metavar="X", default=1.0,
              show_default=True, help="With ep: tokens of the busiest rank, as a multiple of "
              "the average.")  # fmt: skip
@click.option("--dp", type=click.Choice(["ddp", "fsdp"]), default="ddp", show_default=True,
              help="What copies do: average gradients, or share out parameters, gradients and "
              "optimizer state, as torch's fully_shard does.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), help="Parameter dtype.  [default: config's]")
@click.option("--dequantize", is_flag=True,
              help="Hold weights of a quantized checkpoint dense.")  # fmt: skip
@priced_on
@click.option("--pin", "pins", metavar="NAME=PLACEMENT", multiple=True,
              help="Keep parameters at replicate or shard:DIM; repeatable.")  # fmt: skip
@click.option("--pins", "pin_file", type=click.Path(dir_okay=False), metavar="FILE",
              help="Pins from a JSON object of names and placements.")  # fmt: skip
@click.option("--pins-from-tp-plan", "follow", is_flag=True,
              help="Pins from the tensor-parallel plan of transformers.")  # fmt: skip
@click.option("--compare-tp-plan", "compare", is_flag=True,
              help="Price the tensor-parallel plan of transformers, too.")  # fmt: skip
@click.option("--tp-plan", "table_file", type=click.Path(dir_okay=False), metavar="FILE",
              help="Read the tensor-parallel plan from a JSON object.  "
              "[default: the model's own]")  # fmt: skip
@click.option("--sequence-parallel/--no-sequence-parallel", default=None,
              help="Split hidden states between blocks along the sequence.  "
              "[default: only if nothing fits --memory without]")  # fmt: skip
@click.option("--recompute/--no-recompute", default=None,
              help="For training: drop the activations of blocks and compute them again in the "
              "backward pass.  [default: of as few blocks as fit --memory]")  # fmt: skip
@click.option("--continuous-batching", is_flag=True,
              help="Prove transformers' continuous batching, too (generate_batch).")  # fmt: skip
@click.option("--tune", is_flag=True,
              help="Time other plans, too, on ranks here, and keep the fastest.")  # fmt: skip
@click.option("--dump", type=click.Path(file_okay=False), metavar="DIR",
              help="Write what the planner saw and decided to DIR, as text.")  # fmt: skip
@click.option("--write-model", type=click.Path(dir_okay=False), metavar="FILE",
              help="Write the CP-SAT model in its text format: integers for the axes of "
              "each tensor (sub-axes that shard it) and for Partial.")  # fmt: skip
@reads_model()
@as_json
@click.option("-q", "--quiet", is_flag=True, help="Print only the paths of the files written.")
def plan(
    model: str,
    tp: int | None,
    mesh: str | None,
    hosts: int | None,
    gpus_per_host: int | None,
    ranks: int | None,
    output: str | None,
    html: str | None,
    speeds: float | tuple[float, ...] | None,
    dtype: str | None,
    device: str,
    pins: tuple[str, ...],
    pin_file: str | None,
    follow: bool,
    compare: bool,
    table_file: str | None,
    write_model: str | None,
    tune: bool,
    as_json: bool,
    quiet: bool,
    how: dict[str, Any],
    **options: Any,
) -> None:
    """Plan MODEL; no weights are read.

    It is a local directory of a model or pipeline, a hub id, timm/NAME, or MODULE:NAME or
    FILE.py:NAME of Python code that makes it.
    """
    began = time.monotonic()
    if as_json and quiet:
        raise click.UsageError("--json and --quiet exclude each other")
    if compare and quiet:
        raise click.UsageError("--compare-tp-plan and --quiet exclude each other")
    if quiet and output is None and html is None:
        raise click.UsageError("--quiet prints the paths of files alone: give --output or --html")
    if sum(given is not None for given in (tp, mesh, hosts, ranks)) != 1:
        raise click.UsageError(
            "give one of --tp, as in --tp 4; --mesh, as in --mesh dp=2,tp=4; or, to choose a mesh, "
            "--ranks 8, or --hosts 2 --gpus-per-host 8"
        )
    if ranks is not None and gpus_per_host is not None:
        raise click.UsageError("--ranks are all on one host: give --hosts with --gpus-per-host")
    if table_file is not None and not (compare or follow):
        raise click.UsageError("--tp-plan needs --compare-tp-plan or --pins-from-tp-plan")
    others = [model, device, pin_file, table_file, how["inputs"]]
    for path in (output, html, write_model):
        check_output(path, *others)
        others.append(path)
    with working(f"planning {model}"):
        import torch

        from shardwright.planner.api import search_plan
        from shardwright.planner.contract.mesh import parse_mesh
        from shardwright.planner.hand_written.price import price
        from shardwright.planner.problem.pins import gather, read_table
        from shardwright.planner.problem.tp_plan import OWN, table_of
        from shardwright.planner.trace.model.components import chosen_component

        cluster = cluster_of(hosts, gpus_per_host, ranks, device)
        if tune and cluster and cluster.hosts > 1:
            raise click.UsageError("--tune starts ranks on this machine: give --ranks")
        named = OWN if table_file is None else read_table(table_file)
        found = search_plan(
            model, tp, mesh=parse_mesh(mesh) if mesh else None, cluster=cluster, began=began,
            gpus_per_host=None if cluster else gpus_per_host, device=device,
            speeds=(speeds,) if isinstance(speeds, int | float) else speeds,
            dtype=getattr(torch, dtype) if dtype else None, pins=gather(pins, pin_file),
            tp_plan=named if follow else None, write_model=write_model,
            **options, **with_inputs(how),
        )  # fmt: skip
        ended, others = found.ended, found.other_meshes() if tune else []
        source = ended.task.source
        hand = price(ended.task, table_of(named, source.module)) if compare else None
    if tune:
        with working("timing plans on ranks"):
            from shardwright.planner.tune import tune_search

            ended = tune_search(ended, model, others, **with_inputs(how))
    result = ended.plan
    if output is not None:
        write(output, result.to_json())
    if how["subfolder"] is None and (chosen := chosen_component(model)):
        say(f"Note: {chosen}")
    warn(result, source.module)
    if html is not None:
        with working(f"pricing alternatives for {html}"):
            from shardwright.planner.picture.beside import beside

            shown = beside(result, Path(output or html).name, ended)
        write_page([shown], html)
    if quiet:
        for path in filter(None, (output, html)):
            click.echo(path)
    elif hand is None:
        show_plan(result, as_json)
    else:
        show_both(result, hand, as_json)
    if output is not None and not (as_json or quiet):
        say(f"Wrote {output}: load it under torchrun with shardwright.load(MODEL, plan=...)")
    if html is not None and not (as_json or quiet):
        say(f"Wrote {html}: open it in a browser")
    from shardwright.planner.report.fit import misfit

    if text := misfit(result):
        raise InfeasibleError(text)


def cluster_of(
    hosts: int | None, gpus_per_host: int | None, ranks: int | None, device: str
) -> Cluster | None:
    """Return the hosts and GPUs to choose a mesh for; None if the mesh is given.

    Raises:
        UsageError: the device is unknown, or does not say how many are in a host.
    """
    from shardwright.planner.devices.device import device as profile
    from shardwright.planner.search.meshes import Cluster

    known = profile(device).hosts
    if ranks is not None:
        return Cluster(1, ranks)
    if hosts is None:
        return None
    if gpus_per_host is None and known is None:
        raise click.UsageError(f"--hosts: give --gpus-per-host, as '{device}' does not say it")
    return Cluster(hosts, gpus_per_host or (known.devices if known else 1))


def show_both(result: Plan, hand: HandWritten, as_json: bool) -> None:
    """Print a plan and transformers' own plan beside it."""
    from shardwright.planner.hand_written.side_by_side import both_as_json, side_by_side
    from shardwright.planner.report.tables import show

    if as_json:
        click.echo(compact(both_as_json(result, hand)))
        return
    show_plan(result, False)
    click.echo()
    show(side_by_side(result, hand))


def warn(result: Plan, module: nn.Module) -> None:
    """Print on stderr what the user should know beside the plan."""
    ranks = result.mesh["tp"]
    if not result.modules and result.objective.name == "time" and ranks > 1:
        say(
            "Hint: for least time this model is best replicated on each rank; --objective memory "
            "shards it, for fewest bytes"
        )
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if isinstance(heads, int) and heads < ranks:
        say(
            f"Warning: {ranks} ranks, and the model has {heads} attention heads: attention cannot "
            f"be split by heads over all of them; up to --tp {heads} it can"
        )
    from shardwright.planner.trace.inputs.argument_options import OPTIONS

    given = {name for call in result.calls if not call.module for name in call.inputs}
    for name in OPTIONS.keys() & inspect.signature(module.forward).parameters.keys() - given:
        if name.startswith(("pixel", "input_")) and name != "input_ids":
            say(
                f"Note: the plan covers no calls with {name}: give inputs that have them with "
                "--inputs FILE.py:FUNCTION"
            )
    if result.solver.note:
        say(f"Note: {result.solver.note}")
    if result.opaque:
        ops = ", ".join(result.opaque)
        say(f"Warning: ops without a rule; the tensors at them stay replicated: {ops}")
