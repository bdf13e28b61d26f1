"""Who is right on FP8 checkpoints: transformers' own tensor parallelism, and ours, in one run.

    python -m benchmarks.quantized_peer            numbers of blocks that ranks divide, and others
    python -m benchmarks.quantized_peer --tp 2     on 2 ranks

Each row is a tiny dense model whose MLP has so many blocks of rows. Both load the same checkpoint
on real gloo ranks, and logits are compared with one process that dequantizes. transformers needs
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
    load = WHO[kind]
    with tempfile.TemporaryDirectory() as mine:
        saved = of_all(mine, tp)[0]
        if rank == 0:
            _make(saved, blocks)
        dist.barrier()
        whole: Any = AutoModelForCausalLM.from_pretrained(f"{saved}/{DENSE}", dtype=torch.float32)
        expected = whole.eval()(IDS).logits.detach()
        logits = load(saved, tp, mesh)(IDS).logits.detach()
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        row["off"] = max(of_all(float((logits - expected).abs().max()), tp))
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
    plan = planning.proven(Path(directory), tp=tp)
    return shardwright.load(directory, plan, mesh=mesh.device_mesh, dtype=torch.float32)


WHO = {"transformers": _theirs, "shardwright": _ours}


@click.command()
@click.option("--tp", "ranks", multiple=True, type=int, default=(2, 3, 4), help="Ranks.")
@click.option("--limit", default=60.0, help="Seconds for a model.")
def main(ranks: tuple[int, ...], limit: float) -> None:
    """Compare both on FP8 checkpoints."""
    table = Table("blocks of rows", "ranks", "transformers", "shardwright")
    for tp in ranks:
        jobs = [(who, str(n)) for n in BLOCKS for who in WHO]
        found = {(row["kind"], row["name"]): row for row in sweep(jobs, tp, compared, 1, limit)}
        for n in map(str, BLOCKS):
            table.add_row(n, str(tp), *(_cell(found[who, n]) for who in WHO))
    Console().print(table)


def _cell(row: dict[str, Any]) -> str:
    if "off" not in row:
        return f"{row['error'].splitlines()[0]:.70}"
    return f"{'equal' if row['off'] <= NEAR else 'WRONG'} ({row['off']:.0e})"


if __name__ == "__main__":
    main()
