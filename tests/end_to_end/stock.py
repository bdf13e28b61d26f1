"""What each of 4 ranks of `test_stock` does: FSDP2 over dp, clipping, distributed checkpoints.

Every rank trains the unsplit model, too, and compares by itself.
"""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import copy
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from transformers import Qwen3Config, Qwen3ForCausalLM

import shardwright
from tests import planning

IDS = torch.randint(0, 48, (4, 7), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.randn(4, 7, 48, generator=torch.Generator().manual_seed(2)).double()
CLOSE = {"rtol": 0.0, "atol": 1e-6}  # norms compute in float32


def train(model: Any, rows: slice, steps: int) -> tuple[list[torch.Tensor], Any]:
    """Norms of the gradients, and the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        (model(IDS[rows]).logits * WEIGHTS[rows]).tanh().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norms.append(getattr(norm, "full_tensor", lambda n=norm: n)().detach())
        optimizer.step()
    return norms, optimizer


def sharded(dp: Any) -> Any:
    def around(model: Any) -> None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=dp)
        fully_shard(model, mesh=dp)

    return around


def replicated(dp: Any) -> Any:
    return lambda model: replicate(model, mesh=dp)


def named(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters())


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def compare(model: Any, after: Any) -> None:
    for name, tensor in shardwright.full_tensors(model, dict(model.named_parameters())).items():
        assert_close(tensor, after[name].detach(), **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def main(folder: Path) -> None:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    config = Qwen3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        intermediate_size=48,
        vocab_size=48,
        num_hidden_layers=2,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config).double()
    whole = copy.deepcopy(model)
    want, _ = train(whole, slice(None), 10)
    after = dict(whole.named_parameters())

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = 2 * mesh["dp"].get_local_rank()
    rows = slice(mine, mine + 2)
    options: Any = {"phase": "train", "batch": 4, "seq": 7, "sequence_parallel": True}
    plan = planning.plan(copy.deepcopy(model), mesh={"dp": 2, "tp": 2}, **options)
    for around in (lambda model: None, replicated(mesh["dp"]), sharded(mesh["dp"])):
        split: Any = shardwright.apply(copy.deepcopy(model), plan, mesh)
        around(split)
        norms, optimizer = train(split, rows, 10)
        compare(split, after)
        assert_close(norms, want, **CLOSE)

    plan = planning.plan(copy.deepcopy(model), tp=2, **options)
    split = shardwright.apply(copy.deepcopy(model), plan, mesh["tp"])
    sharded(mesh["dp"])(split)
    norms, optimizer = train(split, rows, 10)
    compare(split, after)
    assert_close(norms, want, **CLOSE)

    state = dict(zip("mo", get_state_dict(split, optimizer), strict=True))
    own = dist.new_group(backend="gloo")  # a thread saves over it, while ranks go on
    saving = dcp.async_save(state, checkpoint_id=folder / "state", process_group=own)
    shardwright.save(split, folder / "whole")
    saving.result()
    assert_close(read(folder / "whole"), shardwright.full_tensors(split, named(split)), **CLOSE)
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    again = shardwright.apply(model, planning.plan(copy.deepcopy(model), tp=4), four)
    other = torch.optim.AdamW(again.parameters(), lr=1e-2, eps=1e-3)
    state = dict(zip("mo", get_state_dict(again, other), strict=True))
    dcp.load(state, checkpoint_id=folder / "state")
    set_state_dict(again, other, model_state_dict=state["m"], optim_state_dict=state["o"])
    compare(again, after)
    dist.barrier()
    dist.destroy_process_group()
