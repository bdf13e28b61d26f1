"""Data, context and tensor parallel training: FSDP2, activation checkpointing, AdamW, resuming.

    DP_SIZE=2 TP_SIZE=2 torchrun --nproc-per-node 4 examples/train_3d.py DIRECTORY [--resume]

All that comes after `shardwright.load` is torch's own. CP_SIZE ranks share each sequence: all of
them are given it whole. EP_SIZE copies share out the experts of a mixture in DIRECTORY/start: then
the model averages the gradients itself, without FSDP2. With --resume it goes on from the last
checkpoint in DIRECTORY, which may be one of other sizes. STEPS is the step to train to. No network,
no GPU.
"""

from __future__ import annotations

import os
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import shardwright

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=160,
    eos_token_id=None,
    architectures=["LlamaForCausalLM"],
)
BATCH, SEQ, EVERY = 4, 16, 2
DIMS = ("dp", "ep", "cp", "tp")


def sizes() -> dict[str, int]:
    """DP_SIZE, EP_SIZE, CP_SIZE and TP_SIZE, which share out all ranks."""
    mesh = {dim: int(os.environ.get(f"{dim.upper()}_SIZE", "1")) for dim in DIMS}
    if prod(mesh.values()) != dist.get_world_size():
        text = " x ".join(f"{dim.upper()}_SIZE={size}" for dim, size in mesh.items())
        sys.exit(
            f"{text} is not the {dist.get_world_size()} ranks that torchrun started: change "
            "--nproc-per-node or the sizes"
        )
    return mesh


def batch(step: int) -> torch.Tensor:
    """The token ids of one step, for all copies."""
    return torch.randint(CONFIG.vocab_size, (BATCH, SEQ), generator=torch.manual_seed(step))


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """A stock one."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def one_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> tuple[Any, Any]:
    """The loss of these rows, and the norm of the gradients of the whole batch."""
    loss = model(ids, labels=ids).loss
    loss.backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), getattr(norm, "full_tensor", lambda: norm)()  # a DTensor if split


def planned_dims(mesh: dict[str, int]) -> tuple[str, ...]:
    """The dims that the plan is for. FSDP2 has dp, but if ep shares out experts."""
    return ("dp", "ep", "tp") if mesh["ep"] > 1 else ("cp", "tp")


def plan_file(directory: Path, mesh: dict[str, int]) -> Path:
    """The plan for these sizes."""
    sizes = (f"{dim}{mesh[dim]}" for dim in planned_dims(mesh))
    return directory / f"plan-{'-'.join(sizes)}.json"


def prepare(directory: Path, mesh: dict[str, int]) -> None:
    """Write a checkpoint of random weights, unless it is there, and a plan for so many ranks."""
    if not (directory / "start").exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(directory / "start")
    how: Any = {"objective": "memory", "phase": "train", "batch": BATCH, "seq": SEQ}
    how["mesh"] = {dim: mesh[dim] for dim in planned_dims(mesh)}
    # All blocks keep only their inputs. Without `recompute`: as few as fit the memory.
    plan = shardwright.plan(directory / "start", recompute=True, **how)
    plan.save(plan_file(directory, mesh))


def last(directory: Path) -> int | None:
    """The step of the newest checkpoint that is complete."""
    found = directory.glob("step-*/.metadata")
    return max((int(p.parent.name.removeprefix("step-")) for p in found), default=None)


def main(directory: Path, resume: bool) -> None:
    """What each rank does."""
    ranks = sizes()
    mesh = init_device_mesh("cpu", tuple(ranks.values()), mesh_dim_names=DIMS)
    if dist.get_rank() == 0:
        prepare(directory, ranks)
    dist.barrier()
    plan, dims = plan_file(directory, ranks), mesh[planned_dims(ranks)]
    model: Any = shardwright.load(directory / "start", plan, device="cpu", mesh=dims).train()
    if "dp" not in planned_dims(ranks):
        for block in model.model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = optimizer_of(model)

    begun = last(directory) if resume else None
    if begun is not None:
        weights, kept = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": kept}, checkpoint_id=directory / f"step-{begun}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=kept)

    copies = ranks["dp"] * ranks["ep"]
    copy = mesh["dp"].get_local_rank() * ranks["ep"] + mesh["ep"].get_local_rank()
    rows = BATCH // copies
    for step in range(begun or 0, int(os.environ.get("STEPS", "6"))):
        loss, norm = one_step(model, optimizer, batch(step)[copy * rows :][:rows])
        for dim in ("dp", "ep"):
            dist.all_reduce(loss, group=mesh.get_group(dim))
        if dist.get_rank() == 0:
            mean = loss.item() / copies
            print(f"step {step} loss {mean:.10f} norm {norm.item():.10f}", flush=True)
        if (step + 1) % EVERY == 0:
            weights, kept = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": kept}
            dcp.save(state, checkpoint_id=directory / f"step-{step + 1}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]), "--resume" in sys.argv[2:])
    dist.barrier()
    dist.destroy_process_group()
