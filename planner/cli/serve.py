"""`shardwright serve`."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from shardwright.errors import DistributedError, PlanError, UsageError
from shardwright.planner.cli.console import say, working
from shardwright.planner.cli.shared import COUNT, DTYPES, reads_model

if TYPE_CHECKING:
    from shardwright.planner.contract.plan_file import Plan

PACKAGES = ("fastapi", "prometheus_client", "uvicorn")
HOST = "127.0.0.1"


@click.command(
    short_help="Serve a split model on this machine, by OpenAI's API.",
    epilog="""\b
Examples:
  shardwright serve ./my-model --tp 2
  shardwright plan ./my-model --tp 4 --phase decode --continuous-batching -o plan.json
  SHARDWRIGHT_API_KEY=secret shardwright serve ./my-model --plan plan.json --host 0.0.0.0
""",
)
@click.argument("model")
@click.option("--tp", type=COUNT, metavar="N", help="Make a plan for N ranks first.")
@click.option("--plan", "file", type=click.Path(), metavar="FILE", help="Or serve by this plan.")
@click.option("--host", default=HOST, show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True,
              help="Port to listen on.")  # fmt: skip
@click.option("--name", help="The model's name for clients.  [default: MODEL]")
@click.option("--max-length", type=COUNT, metavar="N",
              help="Most tokens of a request, with its answer.  "
              "[default: what model and KV cache allow]")  # fmt: skip
@click.option("--cache-tokens", type=COUNT, metavar="N",
              help="Tokens in the KV cache, of all requests together.  "
              "[default: what a GPU has room for; 16384 on CPU]")  # fmt: skip
@click.option("--max-requests", type=COUNT, metavar="N", default=256, show_default=True,
              help="Most requests at a time; more get status 429.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              default=600.0, show_default=True, help="Longest time for a request.")  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the parameters.  [default: config's]")
@reads_model(inputs=False)
def serve(
    model: str,
    tp: int | None,
    file: str | None,
    host: str,
    port: int,
    name: str | None,
    max_length: int | None,
    cache_tokens: int | None,
    max_requests: int,
    timeout: float,
    dtype: str | None,
    how: dict[str, Any],
) -> None:
    """Serve MODEL split over ranks of this machine, by OpenAI's API.

    Requests are batched continuously. After SIGTERM or SIGINT the server answers the requests that
    it has accepted, and ends. With SHARDWRIGHT_API_KEY in the environment, clients must give that
    key.
    """
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise UsageError(f"serving needs {', '.join(missing)}: pip install 'shardwright[serve]'")
    if (tp is None) == (file is None):
        raise UsageError("give the number of ranks with --tp, or a plan with --plan")
    from shardwright.planner.on_ranks.launch import run_processes
    from shardwright.runtime.serving.rank import Serving, serve_on_rank, tokenizer_of

    tokenizer_of(model, how)  # before a plan is made and ranks start
    plan = _plan(model, tp, file, dtype, how)
    asked = Serving(
        model, plan.to_json(), name or model, host, port, max_length, cache_tokens, max_requests,
        timeout, {**how, "dtype": dtype},
    )  # fmt: skip
    on_gpus = _on_gpus(plan)
    if on_gpus:  # before NCCL starts: transformers captures graphs
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    say(f"Loading {model} on {plan.world_size} ranks")
    with _answers_first():
        run_processes(plan.world_size, serve_on_rank, asked, on_gpus=on_gpus)


def _plan(
    model: str, tp: int | None, file: str | None, dtype: str | None, how: dict[str, Any]
) -> Plan:
    """Return the plan in a file, or one for `tp` ranks that decode.

    Raises:
        PlanError: the plan is not proven for continuous batching, or needs more than tp.
    """
    import shardwright
    from shardwright.planner.contract.mesh import TP
    from shardwright.planner.contract.names import is_batched
    from shardwright.planner.contract.plan_file import Plan

    if file is None:
        with working(f"planning {model}"):
            return shardwright.plan(
                model, tp, phase="decode", batch=16, dtype=dtype, continuous_batching=True, **how
            )
    plan = Plan.load(file)
    if not any(is_batched(call.state) for call in plan.calls):
        raise PlanError(
            f"{file} is not proven for continuous batching: plan with --continuous-batching"
        )
    if {dim: size for dim, size in plan.mesh.items() if size > 1}.keys() - {TP}:
        raise PlanError(f"{file} has a mesh of {plan.mesh}: serve by a plan with tp alone")
    return plan


def _on_gpus(plan: Plan) -> bool:
    """Whether each rank has a GPU.

    Raises:
        UsageError: there are some, but too few.
    """
    import torch

    found = torch.cuda.device_count()
    if 0 < found < plan.world_size:
        raise UsageError(
            f"the plan needs {plan.world_size} GPUs, and this machine shows {found}: plan for "
            "fewer ranks, or set CUDA_VISIBLE_DEVICES= to serve on the CPU"
        )
    return found > 0


@contextmanager
def _answers_first() -> Iterator[None]:
    """Inside, the first SIGTERM or SIGINT ends the server after its requests; a second, at once.

    Before the server listens, rank 0 dies of it: then the command is aborted.
    """
    from shardwright.planner.on_ranks.launch import RANK

    ended: list[int] = []

    def end(number: int, _: Any) -> None:
        for each, handler in before.items():
            signal.signal(each, handler)
        first = [p for p in multiprocessing.active_children() if p.name == RANK.format(0)]
        for process in first:
            ended.append(number)
            os.kill(process.pid or 0, signal.SIGTERM)
        if not first:
            signal.raise_signal(number)

    taken = (signal.SIGTERM, signal.SIGINT)
    before = {each: signal.getsignal(each) for each in taken}
    for each in taken:
        signal.signal(each, end)
    try:
        yield
    except DistributedError as error:
        if ended:
            raise click.Abort from error
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
