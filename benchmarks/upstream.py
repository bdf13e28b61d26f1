"""Tries the changes of `shardwright export --to pull-request`, as transformers' own test would.

    python -m benchmarks.upstream --json F       causal architectures that have no table there
    python -m benchmarks.upstream gpt2 bloom     some

Each table is set where the change would put it, in the class of the config and of the model, so
that `from_pretrained` finds it there. Then it is held to what transformers asks of an architecture
with a table (`tests/test_tensor_parallel_mixin.py`), on two gloo ranks in float32, with the same
tolerance: logits, loss and all gradients in training mode, and the scores and tokens of 25 greedy
steps. The models and their inputs are ours (`tests/zoo.py`), with 48 tokens instead of 64. What the
unsharded model itself cannot do is left out: generate, or take labels, instead of which its logits
are summed up with weights. transformers needs accelerate.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers.distributed import DistributedConfig, mixin

from benchmarks.compare import of_all, weighing_loss
from benchmarks.exports import one_mesh
from benchmarks.zoo import Row, printed
from benchmarks.zoo_case import build
from benchmarks.zoo_ranks import sweep
from shardwright.errors import ShardwrightError
from shardwright.planner.exports.stock.runtimes import by_class
from shardwright.planner.exports.stock.table import MAX_RATIO, candidates, held
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.scopes import replaced
from tests import planning, zoo

TOLERANCE = 5e-3
TOKENS, STEPS = 48, 25
Results = dict[str, torch.Tensor]
ALL = frozenset({"labels", "generate"})


def changed(kind: str, name: str, rank: int, tp: int, mesh: Mesh) -> Row:
    """Return the row of one architecture; every rank returns the same row."""
    del mesh  # transformers makes its own
    mixin.initialize_distributed_mesh = one_mesh
    row: Row = {"kind": kind, "name": name}
    config, model = build(kind, name, torch.float32)
    if model.tp_plan:
        return row | {"verdict": "has a table"}
    box: list[Any] = [None]
    if rank == 0:
        try:
            plan = planning.proven(model, tp=tp, kwargs=zoo.example(name, config, kind))
            most = MAX_RATIO * max(plan.predicted.parameter_bytes)
            tables = [
                t for t in candidates(plan, model) if sum(held(t, model, tp).values()) <= most
            ]
            box = [(tables, most, tempfile.mkdtemp())]
            model.save_pretrained(box[0][-1])
        except ShardwrightError as error:
            box = [f"no plan: {error}"]
    dist.broadcast_object_list(box)
    if isinstance(box[0], str):
        return row | {"verdict": "no plan", "why": box[0]}
    tables, most, directory = box[0]
    cls = type(model)
    given = zoo.inputs(name, config, seq=TOKENS)
    whole = cls.from_pretrained(directory)
    asked = ALL - {what for what in ALL if not _can(what, whole, given)}
    want = results(whole, given, asked)
    row |= {"verdict": "refused", "why": "no table holds as little as the plan"}
    for table in tables:
        row["why"] = _failures(table, model, directory, given, asked, want, most)
        if not row["why"]:
            row |= {"verdict": "passes", "rules": len(table), "left_out": sorted(ALL - asked)}
            break
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
    return row


def _can(what: str, model: Any, given: Mapping[str, Any]) -> bool:
    """Return whether an unsharded model takes labels, or generates."""
    try:
        results(model, given, frozenset({what}))
    except (ValueError, TypeError, AttributeError, RuntimeError):
        return False
    return True


def _failures(
    table: Mapping[str, str],
    model: Any,
    directory: str,
    given: Mapping[str, Any],
    asked: frozenset[str],
    want: Results,
    most: float,
) -> str:
    """Return what differs on some rank with a table in the classes; "" if nothing does.

    Nor may a rank hold more than `most` bytes, as it would without the table.
    """
    tp = dist.get_world_size()
    _clear_sharding_prop_cache()  # torch's cache entries of other models are wrong for some
    try:
        with in_classes(table, model):
            split = type(model).from_pretrained(
                directory, distributed_config=DistributedConfig(tp_size=tp)
            )
        local = [getattr(t, "_local_tensor", t) for t in (*split.parameters(), *split.buffers())]
        holds = sum(t.nbytes for t in local)
        found = results(split, given, asked)
        wrong = want.keys() ^ found.keys() or {n for n in want if not _close(found[n], want[n])}
        mine = f"differ: {', '.join(sorted(wrong)[:3])}" if wrong else ""
        mine = mine or (f"holds {holds:,} bytes, not {most:,.0f}" if holds > most else "")
    except Exception as error:
        mine = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.150}"
    return max(of_all(mine, tp))


@contextmanager
def in_classes(table: Mapping[str, str], model: Any) -> Iterator[None]:
    """Put a table where transformers stores one: on the class of the config and of the model."""
    base, head = by_class(table, model)
    of_config = replaced(type(model.config), base_model_tp_plan=base)
    with of_config, replaced(type(model), _tp_plan=head):
        yield


def results(model: Any, given: Mapping[str, Any], asked: frozenset[str]) -> Results:
    """Return logits, loss, gradients, and what greedy steps give, as far as it is `asked`."""
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        out = {"logits": _full(zoo.logits(model(**given)))}
    model.train()
    labels = {"labels": given["input_ids"]} if "labels" in asked else {}
    done = model(**given, **labels)
    loss = done.loss if labels else weighing_loss((_whole(zoo.logits(done)),))
    loss.backward()
    out["loss"] = _full(loss)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            out[f"gradient of {name}"] = _full(parameter.grad)
    model.eval()
    if "generate" in asked:
        tokens = given["input_ids"]
        made = model.generate(
            tokens[: len(tokens) // 2, :10], max_new_tokens=STEPS, do_sample=False, num_beams=1,
            output_scores=True, return_dict_in_generate=True, use_cache=True,
        )  # fmt: skip
        out |= {"scores": torch.stack(made.scores), "sequences": made.sequences}
    return out


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _full(x: torch.Tensor) -> torch.Tensor:
    return _whole(x).detach()


def _close(found: torch.Tensor, want: torch.Tensor) -> bool:
    same = found.shape == want.shape
    return same and torch.allclose(found, want, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--part", default="1/1", metavar="K/N", help="Every N-th of them, from the K-th on.")
@click.option("--limit", default=240.0, show_default=True, help="Processor seconds for a model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(names: tuple[str, ...], part: str, limit: float, path: Path | None) -> None:
    """Try the changes that tables would be in transformers."""
    k, n = map(int, part.split("/"))
    jobs = [("causal", x) for x in zoo.names() if not names or x in names][k - 1 :: n]
    printed(sweep(jobs, 2, changed, 1, limit), "changing", len(jobs), path)


if __name__ == "__main__":
    main()
