"""Train a split model with transformers' Trainer: log, evaluate, save, and go on from a checkpoint.

    torchrun --nproc-per-node 2 examples/trainer.py [DIRECTORY]

`shardwright.SplitTrainer` is that Trainer, told which ranks share the model. Here it trains half of
the steps, and a second one goes on from its checkpoint, which is one as any other.
Needs accelerate. No network, no GPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

import shardwright

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=160,
    eos_token_id=None,
    architectures=["LlamaForCausalLM"],
)
ROWS = torch.randint(CONFIG.vocab_size, (32, 16), generator=torch.Generator().manual_seed(1))
DATA: Any = [{"input_ids": row, "labels": row} for row in ROWS]


def prepare(directory: Path) -> None:
    """Write a checkpoint of random weights, and a plan that is priced for training."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(directory / "checkpoint")
    plan = shardwright.plan(
        directory / "checkpoint", tp=2, objective="memory", phase="train", batch=4, seq=16
    )
    plan.save(directory / "plan.json")


def trainer(directory: Path, steps: int) -> shardwright.SplitTrainer:
    """One of a model as the checkpoint has it; to be made on all ranks."""
    plan = directory / "plan.json"
    model = shardwright.load(directory / "checkpoint", plan, device="cpu")
    arguments = TrainingArguments(
        output_dir=str(directory / "runs"),
        per_device_train_batch_size=4,
        max_steps=steps,
        save_steps=steps,
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        adam_epsilon=1e-4,
        eval_strategy="steps",
        eval_steps=steps,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return shardwright.SplitTrainer(
        model, arguments, train_dataset=DATA[:24], eval_dataset=DATA[24:]
    )


def main(directory: Path) -> None:
    """What each rank does."""
    trainer(directory, 3).train()
    second = trainer(directory, 6)
    second.train(resume_from_checkpoint=str(directory / "runs" / "checkpoint-3"))
    found = second.evaluate()["eval_loss"]

    dist.barrier()
    saved: Any = AutoModelForCausalLM.from_pretrained(directory / "runs" / "checkpoint-6")
    wanted = saved(ROWS[24:], labels=ROWS[24:]).loss.item()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    if dist.get_rank() == 0:
        print(f"loss {found:.3f}: that of the checkpoint, as plain transformers reads it")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as temporary:
        place = [sys.argv[1] if len(sys.argv) > 1 else temporary]
        dist.broadcast_object_list(place)  # that of rank 0, for all
        if dist.get_rank() == 0:
            prepare(Path(place[0]))
        dist.barrier()
        main(Path(place[0]))
        dist.barrier()  # nobody leaves, and removes the files, while others read
    dist.destroy_process_group()
