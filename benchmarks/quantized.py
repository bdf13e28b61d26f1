"""Every causal architecture from quantized checkpoints, split and whole, on ranks that are threads.

    python -m benchmarks.quantized                       all, FP8 and int4, on 2, 3 and 4 ranks
    python -m benchmarks.quantized --how fp8 --tp 3 gpt2
    python -m benchmarks.quantized --mesh ep=2,tp=2      mixtures, their experts spread over ranks

Each tiny model is quantized in blocks that neither its dims nor the cuts fall on. Logits, a decode
step and generated tokens of the split model, which holds its weights as they are stored, are
compared with those of one process that dequantizes. Prints what is not equal, and a count of each
verdict; `--json FILE` writes all rows. "refused when dense" is what the split model refuses with
dense weights as well, such as a kind of cache. What writes to weights that are held as stored is
refused with the advice to dequantize them: the row then says whether that is equal. Exits with 1 if
anything is wrong, fails or is refused for being quantized.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

import shardwright
from benchmarks.compare import decode_step
from benchmarks.experts import mixtures
from benchmarks.quantize import HOW, counts_for, quantize
from benchmarks.zoo import write
from benchmarks.zoo_case import build, experts_of
from shardwright.errors import ShardwrightError
from shardwright.planner.contract.mesh import EP, parse_mesh
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.config import read_config
from tests import planning, zoo
from tests.ranks import run_ranks

NEAR = 1e-5
NEW_TOKENS = 4

DENSE_TOO = "refused when dense"
DEQUANTIZED = "equal when dequantized"

Row = dict[str, Any]
Dims = dict[str, int]
"""Mesh dim -> ranks."""


@click.command()
@click.argument("names", nargs=-1)
@click.option("--how", "hows", multiple=True, type=click.Choice([*HOW]), help="Only these formats.")
@click.option("--tp", "ranks", multiple=True, type=int, help="Only on so many ranks.")
@click.option("--mesh", "text", help="Only on this mesh, in place of --tp.")
@click.option("--part", default="1/1", help="K/N: the Kth of N parts of the architectures.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(
    names: tuple[str, ...],
    hows: tuple[str, ...],
    ranks: tuple[int, ...],
    text: str | None,
    part: str,
    path: Path | None,
) -> None:
    """Compare split models of quantized checkpoints with whole ones."""
    torch.set_num_threads(1)
    k, n = map(int, part.split("/"))
    meshes = [parse_mesh(text)] if text else [{"tp": tp} for tp in ranks or (2, 3, 4)]
    every = mixtures() if any(EP in mesh for mesh in meshes) else zoo.names("causal")
    chosen = (names or tuple(every))[k - 1 :: n]
    console, rows = Console(stderr=True), []
    for name in track(chosen, "comparing", console=console, disable=not console.is_terminal):
        for row in compared(name, hows or tuple(HOW), meshes):
            rows.append(row)
            if row["verdict"] != "equal":
                print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        if path:
            write(path, {"rows": rows})
    counts = Counter(row["verdict"] for row in rows)
    print(json.dumps(counts))
    sys.exit(0 if {*counts} <= {"equal", DENSE_TOO, DEQUANTIZED} else 1)


def compared(name: str, hows: tuple[str, ...], meshes: list[Dims]) -> Iterator[Row]:
    """Yield a row for each format and mesh; in float32 if the model mixes dtypes."""
    for how in hows:
        try:
            yield from _of_format(name, how, meshes, torch.float64)
        except RuntimeError:
            yield from _of_format(name, how, meshes, torch.float32)


def _of_format(name: str, how: str, meshes: list[Dims], dtype: torch.dtype) -> Iterator[Row]:
    """Yield a row for each mesh. All copies of a model take the same sequences.

    Raises:
        RuntimeError: the whole model cannot run in `dtype`.
    """
    config, model = build("causal", name, dtype)
    inputs = zoo.inputs(name, config, dtype=dtype)
    example = zoo.example(name, config, "causal", dtype)
    experts = experts_of(model)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        dense = quantize(directory, how, counts_for(name))
        read: Row = {"config": read_config(dense), "dtype": dtype, **experts}
        whole: Any = type(model).from_pretrained(dense, **read)
        expected = _outcome(whole.eval(), inputs)
        said = json.loads((Path(directory) / "config.json").read_text())
        whole.config.quantization_config = said["quantization_config"]
        for mesh in meshes:
            row = {"name": name, "how": how, **mesh}
            case = whole, directory, example, inputs, mesh, expected
            verdict = _verdict(*case, experts)
            if verdict["verdict"] == "refused" and "dequantize=True" in verdict["why"]:
                again = _verdict(*case, experts | {"dequantize": True})
                equal = again["verdict"] == "equal"
                verdict = again | {"verdict": DEQUANTIZED} if equal else verdict
            yield row | verdict


def _verdict(
    whole: Any,
    directory: str,
    example: Any,
    inputs: Row,
    dims: Dims,
    expected: Row,
    options: Row,
) -> Row:
    try:
        plan = planning.proven(whole, mesh=dims, kwargs=example)

        def run(mesh: Mesh) -> Row:
            how: Any = options
            model: Any = shardwright.load(directory, plan, mesh=mesh.device_mesh, **how)
            held = model.shardwright_report.held
            return _outcome(model, inputs) | {"held": held}

        found = run_ranks(prod(dims.values()), run, dims)
    except ShardwrightError as error:
        verdict = DENSE_TOO if _refuses_dense(whole, example, inputs, dims) else "refused"
        return {"verdict": verdict, "why": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return {"verdict": "failed", "why": repr(error), "where": traceback.format_exc()}
    worst = {key: max(_apart(row[key], want) for row in found) for key, want in expected.items()}
    quantized = plan.workload.quantized is not None
    good = quantized and all(value <= NEAR for value in worst.values())
    return {"verdict": "equal" if good else "wrong", "quantized": quantized, **worst}


def _refuses_dense(whole: Any, example: Any, inputs: Row, dims: Dims) -> bool:
    """Return whether the model is refused with dense weights, too."""
    dense = copy.deepcopy(whole)
    del dense.config.quantization_config
    try:
        plan = planning.proven(dense, mesh=dims, kwargs=example)

        def run(mesh: Mesh) -> Row:
            return _outcome(shardwright.apply(copy.deepcopy(dense), plan, mesh), inputs)

        run_ranks(prod(dims.values()), run, dims)
    except ShardwrightError:
        return True
    return False


def _outcome(model: Any, inputs: Row) -> Row:
    """Return what is compared, of what the model can do."""
    with torch.no_grad():
        torch.manual_seed(0)
        out: Row = {"logits": zoo.logits(model(**inputs))}
        for key, work in (("decode", decode_step), ("tokens", _tokens)):
            try:
                torch.manual_seed(0)
                made = work(model, inputs)
            except ShardwrightError:
                raise
            except Exception:  # the model itself cannot
                made = None
            out[key] = made
    return out


def _tokens(model: Any, inputs: Row) -> Any:
    if "input_ids" not in inputs or not model.can_generate():
        return None
    ids = inputs["input_ids"]
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False).double()


def _apart(found: Any, expected: Any) -> float:
    if expected is None:
        return 0.0
    if found is None or found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max())


if __name__ == "__main__":
    main()
