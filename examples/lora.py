"""Train LoRA adapters of a split model with peft, write them whole, and read them anywhere.

    torchrun --nproc-per-node 2 examples/lora.py [DIRECTORY]

peft puts the adapters in, then the base model is planned and split, adapters and all. The unsplit
model is trained beside it, to show that both come out alike. Needs peft. No network, no GPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=160,
    eos_token_id=None,
)
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
STEPS = 5


def base() -> LlamaForCausalLM:
    """The model that is adapted: random weights, the same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def adapted() -> Any:
    """It with adapters; all ranks draw the same."""
    torch.manual_seed(1)
    return get_peft_model(base(), LoraConfig(**LORA))


def train(model: Any) -> list[float]:
    """A few steps on made-up data, the same on all ranks; the losses."""
    ids = torch.randint(CONFIG.vocab_size, (4, 16), generator=torch.manual_seed(2))
    adapters = [p for p in model.train().parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2, eps=1e-4)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(directory: Path) -> None:
    """What each rank does."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = shardwright.plan(
        adapted().get_base_model(), tp=2, objective="memory", phase="train", batch=4, seq=16
    )
    model, whole = adapted(), adapted()
    shardwright.apply(model.get_base_model(), plan, mesh)
    losses, wanted = train(model), train(whole)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-4)

    shardwright.save(model, directory)  # the adapters; all ranks call it
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.3f}" for loss in losses))
        merged: Any = PeftModel.from_pretrained(base(), directory).merge_and_unload()
        ids = torch.arange(8)[None]
        found, wanted = merged(ids).logits, whole.eval()(ids).logits
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
        print("saved, and merged into the unsplit model: as trained unsplit")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as temporary:
        place = [sys.argv[1] if len(sys.argv) > 1 else temporary]
        dist.broadcast_object_list(place)  # that of rank 0, for all
        main(Path(place[0]))
        dist.barrier()  # nobody leaves, and removes the files, while others read
    dist.destroy_process_group()
