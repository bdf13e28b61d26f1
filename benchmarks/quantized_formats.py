"""Compares split models of quantized checkpoints with one process, for each format and package.

    python -m benchmarks.quantized_formats                     all formats
    python -m benchmarks.quantized_formats NVFP4 AWQ           those whose names begin so
    python -m benchmarks.quantized_formats --json FILE         write the results, too

The packages that define the formats quantize small models (`quantized_packages.py`) and save them
through transformers where it can. Their own functions compute the weights of one unsplit dense
model. The split model reads the quantized checkpoint, once held as stored and once dequantized, on
2 and 3 ranks that are threads, with plans for least memory. All logits are compared in float32, and
must be equal within 1e-5. What is held as stored must be less than what is held dequantized. The
last column says whether transformers' one process, which reads the same quantized checkpoint on the
CPU, has these logits: with `dequantize=True` if the method has it. Exits with 1 if a cell is wrong.
Needs compressed-tensors, torchao and bitsandbytes; says which are not installed, and leaves out
their formats.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.quantized_packages import WAYS, Way, four_bit_numbers
from shardwright.planner.contract.files import write_atomically

EXACT = 1e-5
RANKS = (2, 3)
IDS = torch.arange(1, 15).view(2, 7)
COMMON = {
    "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    "tie_word_embeddings": False, "initializer_range": 0.05, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama"},
    "fused": {"model_type": "phi3"},
    "mixture": {"model_type": "qwen3_moe", **EXPERTS},
    "one kv head": {"model_type": "qwen2", "num_key_value_heads": 1},
    "tied": {"model_type": "qwen3", "tie_word_embeddings": True},
}
STACKED: dict[str, dict[str, Any]] = {
    "mixture": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
}
"""For formats of stacks of experts."""

WEIGHT = re.compile(r"(.*_proj)\.weight")
STACK = re.compile(r"(.*experts\.\w+_proj)")

Row = dict[str, Any]


def made(way: Way, values: dict[str, Any], directory: Path) -> Any:
    """Save a quantized model; return the dense model of the same numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**COMMON | values)
    base, dense = directory / "base", directory / "dense"
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(base)
    if way.quantizer is not None:
        return _saved(way, base, directory)
    _packed(way, base, directory, dense)
    return AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()


def _saved(way: Way, base: Path, directory: Path) -> Any:
    """Have transformers quantize and save the model `base`."""
    from transformers import AutoModelForCausalLM

    assert way.quantizer is not None
    load = AutoModelForCausalLM.from_pretrained
    model = load(base, dtype=torch.float32, quantization_config=way.quantizer())
    model.save_pretrained(directory)
    dense = load(base, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if (weight := numbers(getattr(module, "weight", None))) is not None:
            dense.get_submodule(name).weight.data = weight.float()
    return dense


def numbers(weight: Any) -> Tensor | None:
    """Return what the package computes of its own kind of weight; None if it is another one."""
    kind = type(weight).__name__
    if kind in ("Params4bit", "Int8Params"):
        functional = import_module("bitsandbytes.functional")
        if kind == "Params4bit":
            return four_bit_numbers(weight.data, weight.quant_state)
        return functional.int8_vectorwise_dequant(weight.data, weight.SCB)
    return weight.dequantize() if hasattr(weight, "tensor_data_names") else None


def _packed(way: Way, base: Path, directory: Path, dense: Path) -> None:
    """Quantize the weights of the checkpoint `base`, and save dense ones of the same numbers."""
    from safetensors.torch import load_file, save_file

    stored, computed = {}, {}
    for name, tensor in load_file(base / "model.safetensors").items():
        found = (STACK if way.experts else WEIGHT).fullmatch(name)
        computed[name] = stored[name] = tensor
        if found is None:
            continue
        parts, weight = way.pack(tensor)
        computed[name] = weight.to(tensor.dtype).contiguous()
        del stored[name]
        between = "" if way.experts else "."
        stored |= {f"{found[1]}{between}{key}": part for key, part in parts.items()}
    config = json.loads((base / "config.json").read_text())
    told = config | {"quantization_config": way.config()}
    for folder, tensors, values in ((directory, stored, told), (dense, computed, config)):
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(values))


def planned(directory: Path, model: str, ranks: int) -> Any:
    """Plan a checkpoint. Of each model but the first, one plan serves all formats."""
    import shardwright

    kind = json.loads((directory / "config.json").read_text())["model_type"]
    key = (kind, ranks, directory if model == next(iter(MODELS)) else None)
    if key not in _PLANS:
        _PLANS[key] = shardwright.plan(directory, tp=ranks, objective="memory")
    return _PLANS[key]


_PLANS: dict[Any, Any] = {}


def split(directory: Path, model_name: str, expected: Tensor, ranks: int) -> dict[str, Any]:
    """Return the greatest difference of the split model's logits, for both ways to hold weights."""
    import shardwright
    from tests.ranks import run_ranks

    def logits(mesh: Any) -> dict[str, Any]:
        options: Any = {"mesh": mesh.device_mesh, "dtype": torch.float32}
        out: dict[str, Any] = {}
        for how in (False, True):
            model: Any = shardwright.load(directory, plan, dequantize=how, **options)
            with torch.no_grad():
                got = model(IDS).logits
            name = "dequantized" if how else "as stored"
            out[name] = (got - expected).abs().max().item()
            out[f"held {name}"] = model.shardwright_report.held
        return out

    plan = planned(directory, model_name, ranks)
    found = run_ranks(ranks, logits)
    return {key: max(one[key] for one in found) for key in found[0]}


def one_process(directory: Path, expected: Tensor) -> str:
    """Say whether transformers' one process has the same logits."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    options: dict[str, Any] = {}
    if config["quant_method"] == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if config["quant_method"] == "fp8":
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    try:
        load = AutoModelForCausalLM.from_pretrained
        model = load(directory, dtype=torch.float32, **options).eval()
        off = (model(IDS).logits - expected).abs().max().item()
    except Exception as error:  # whatever a package raises
        return f"refuses ({type(error).__name__})"
    return "equal" if off <= EXACT else f"off by {off:.0e}"


def compared(name: str, model: str, console: Console) -> Row:
    """Compare one format on one model."""
    way, models = WAYS[name], STACKED if WAYS[name].experts else MODELS
    row: Row = {"format": name, "model": model}
    if model not in models:
        return row
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        try:
            dense = made(way, models[model], directory)
            with torch.no_grad():
                expected = dense(IDS).logits
            row["one process"] = one_process(directory, expected)
            for ranks in RANKS:
                row[str(ranks)] = split(directory, model, expected, ranks)
        except Exception as error:  # a row for each, whatever is raised
            row["error"] = f"{type(error).__name__}: {error}"
            console.print(f"{name}, {model}: {row['error']}", markup=False)
    return row


def right(row: Row) -> bool:
    """Return whether a cell has nothing wrong."""
    found = [row[str(ranks)] for ranks in RANKS if str(ranks) in row]
    smaller = all(one["held as stored"] < one["held dequantized"] for one in found)
    return "error" not in row and smaller and all(d <= EXACT for d in _off(row))


def _off(row: Row) -> list[float]:
    return [
        row[str(n)][how] for n in RANKS if str(n) in row for how in ("as stored", "dequantized")
    ]


def cell(row: Row) -> str:
    """Return what the table shows."""
    if "error" in row:
        return "error"
    off = _off(row)
    return "" if not off else "right" if right(row) else f"{max(off):.0e}"


def table(rows: list[Row]) -> Table:
    """Return the table: a row for each format, a column for each model."""
    title = "Logits on 2 and 3 ranks, held as stored and dequantized, against one dense process"
    out = Table("format", *MODELS, "transformers", title=title)
    for name in dict.fromkeys(row["format"] for row in rows):
        found = [row for row in rows if row["format"] == name]
        said = dict.fromkeys(row["one process"] for row in found if "one process" in row)
        out.add_row(name, *map(cell, found), ", ".join(said))
    return out


@click.command()
@click.argument("names", nargs=-1)
@click.option("--model", "chosen", multiple=True, type=click.Choice([*MODELS]), help="Only these.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(names: tuple[str, ...], chosen: tuple[str, ...], path: Path | None) -> None:
    """Compare split models of quantized checkpoints with one process."""
    from shardwright.planner.quiet import quiet

    begins: Callable[[str], bool] = lambda way: not names or way.startswith(names)  # noqa: E731
    known = [name for name in WAYS if begins(name)]
    there = [n for n in known if not WAYS[n].package or importlib.util.find_spec(WAYS[n].package)]
    console = Console(stderr=True)
    for name in sorted(set(known) - set(there)):
        console.print(f"{name}: {WAYS[name].package} is not installed", markup=False)
    rows = []
    jobs = [(name, model) for name in there for model in chosen or MODELS]
    for job in track(jobs, "comparing", console=console, disable=not console.is_terminal):
        with quiet():
            rows.append(compared(*job, console))
        if path:
            write_atomically(path, json.dumps(rows, indent=1) + "\n")
    packages = {WAYS[name].package for name in there} - {""} | {"torch", "transformers"}
    versions = ", ".join(f"{p} {version(p)}" for p in sorted(packages))
    shown = Console(width=150)
    shown.print(table(rows))
    shown.print(versions)
    sys.exit(0 if all(map(right, rows)) else 1)


if __name__ == "__main__":
    main()
