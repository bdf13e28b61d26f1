"""Who is right on quantized checkpoints: transformers' own tensor parallelism, and ours, in one run.

    python -m benchmarks.quantized_peer            FP8 in blocks, of which some do not divide by the ranks

Each row is a tiny dense model whose MLP has so many blocks of rows. Both load the same checkpoint on
real gloo ranks, and logits are compared with one process that dequantizes. transformers needs
accelerate for this.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig

import shardwright
from benchmarks.compare import of_all
from benchmarks.quantize import DENSE, quantize
from benchmarks.zoo_ranks import sweep
from shardwright.runtime.communication.mesh import Mesh
from tests import planning

BLOCK = 16
BLOCKS = (2, 3, 4, 5, 7, 8)
IDS = torch.arange(1, 15).view(2, 7)
NEAR = 1e-5


def compared(kind: str, name: str, rank: int, tp: int, mesh: Mesh) -> dict[str, Any]:
    """Load one checkpoint both ways, and compare; every rank returns the same row."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp), "LOCAL_RANK": str(rank)}
    blocks = int(name)
    row: dict[str, Any] = {"kind": kind, "name": name}
    with tempfile.TemporaryDirectory() as mine:
        saved = of_all(mine, tp)[0]
        if rank == 0:
            _make(saved, blocks)
        dist.barrier()
        whole: Any = AutoModelForCausalLM.from_pretrained(f"{saved}/{DENSE}", dtype=torch.float32)
        expected = whole.eval()(IDS).logits.detach()
        for who, load in (("transformers", _theirs), ("shardwright", _ours)):
            try:
                logits = load(saved, tp, mesh)(IDS).logits.detach()
                logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
                found: Any = float((logits - expected).abs().max())
            except Exception as error:
                found = f"{type(error).__name__}: {str(error).splitlines()[0]:.60}"
            row[who] = max(of_all(found, tp), key=lambda x: (isinstance(x, str), x))
        dist.barrier()
    return row


def _make(directory: str, blocks: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=4 * BLOCK, intermediate_size=blocks * BLOCK, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=BLOCK, vocab_size=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # blocks whose scales differ
        if parameter.dim() == 2:
            grown = torch.linspace(0.5, 4, len(parameter))[:, None]
            parameter.data.mul_(grown)
    model.save_pretrained(directory)
    quantize(directory, "fp8", block=(BLOCK, BLOCK))


def _theirs(directory: str, tp: int, mesh: Mesh) -> Any:
    wanted = DistributedConfig(tp_size=tp, tp_plan="auto")
    how: Any = {"distributed_config": wanted, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(directory, **how).eval()


def _ours(directory: str, tp: int, mesh: Mesh) -> Any:
    plan = planning.plan(Path(directory), tp=tp)
    return shardwright.load(directory, plan, mesh=mesh.device_mesh, dtype=torch.float32)


@click.command()
@click.option("--tp", "ranks", multiple=True, type=int, default=(2, 3, 4), help="Ranks.")
@click.option("--limit", default=300.0, help="Seconds for a model.")
def main(ranks: tuple[int, ...], limit: float) -> None:
    """Compare both on FP8 checkpoints."""
    table = Table("blocks of rows", "ranks", "transformers", "shardwright")
    for tp in ranks:
        for row in sweep([("fp8", str(n)) for n in BLOCKS], tp, compared, 1, limit):
            cells = [
                _cell(row.get(who, row.get("error"))) for who in ("transformers", "shardwright")
            ]
            table.add_row(row["name"], str(tp), *cells)
    Console().print(table)


def _cell(found: Any) -> str:
    if isinstance(found, str):
        return found
    return f"{'equal' if found <= NEAR else 'WRONG'} ({found:.0e})"


if __name__ == "__main__":
    main()
