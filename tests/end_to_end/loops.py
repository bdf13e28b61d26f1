"""What each rank of `test_loops` does, and what the test itself does without ranks, to compare."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import copy
import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import TrainingArguments

import shardwright
from tests import planning, six_heads

ROWS = torch.randint(0, 50, (22, 8), generator=torch.Generator().manual_seed(1)).tolist()


def data(rows: list[list[int]], padded: int = 1) -> Any:
    """Rows of which up to `padded` - 1 labels do not count.

    In training, so that the mean of the losses of copies is not that over all tokens; evaluation
    is the mean over batches to Trainer, too.
    """
    lengths = [i % padded for i in range(len(rows))]
    return [
        {"input_ids": row, "labels": [-100] * n + row[n:]}
        for row, n in zip(rows, lengths, strict=True)
    ]


def llama() -> Any:
    torch.manual_seed(0)
    return six_heads.llama().double()


def arguments(folder: Path, batch: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2,
        max_steps=4,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        max_grad_norm=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        include_num_input_tokens_seen="all",
        remove_unused_columns=False,
    )


def train(make: Any, model: Any, folder: Path, batch: int, resume: Path | None = None) -> Any:
    """The trainer when it is done, and what it logged of each step."""
    trainer = make(
        model,
        arguments(folder, batch),
        train_dataset=data(ROWS[:16], padded=5),
        eval_dataset=data(ROWS[16:]),
        compute_metrics=lambda found: {"size": float(abs(found.predictions).mean())},
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    keys = ("loss", "grad_norm", "eval_loss", "eval_size", "learning_rate", "num_input_tokens_seen")
    logged = [{k: float(v) for k, v in e.items() if k in keys} for e in trainer.state.log_history]
    return trainer, [entry for entry in logged if entry]


def close(got: Any, want: Any, name: str) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6, msg=lambda m: f"{name}: {m}")


def main(folder: Path, *resume: Path | None) -> None:
    """Train once for each checkpoint that is to be resumed from, then over cp, or none."""
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    copies = dist.get_world_size() // 2
    for checkpoint in resume:
        shared = {"tp": 2} if checkpoint is None else {"cp": 2, "tp": 1}
        _as_unsplit(folder, {"dp": copies, **shared}, checkpoint)
    dist.barrier()
    dist.destroy_process_group()


def _as_unsplit(folder: Path, sizes: dict[str, int], resume: Path | None) -> None:
    ranks, model = dist.get_world_size(), llama()
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    plan = planning.plan(copy.deepcopy(model), mesh=sizes, phase="train", batch=4, seq=8)
    split = shardwright.apply(model, plan, mesh)
    out = folder / ("split" if resume is None else "resumed")
    _, logged = train(shardwright.SplitTrainer, split, out, 8 // ranks, resume)
    want = json.loads((folder / "want.json").read_text())
    for got, entry in zip(logged, want, strict=True):
        assert got.keys() == entry.keys()
        for name, value in entry.items():
            close(got[name], value, name)
    after = shardwright.full_tensors(split, dict(split.named_parameters()))
    for name, value in torch.load(folder / "after.pt").items():
        close(after[name], value, name)
