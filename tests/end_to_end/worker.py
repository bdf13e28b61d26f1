"""What each rank of `test_torchrun` does: the split model beside the unsplit one, step by step.

Every rank loads both, since they are small, and compares by itself; a failure ends the process.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import shardwright
from benchmarks.demo_compute import embed
from shardwright.runtime.boundary.module_boundary import mesh_of, placements
from shardwright.runtime.checkpoint.write import save
from shardwright.runtime.communication.audit import count_collectives
from shardwright.runtime.logits.split_logits import SplitLogits

CLOSE = {"rtol": 0.0, "atol": 1e-5}


def decoder(checkpoint: Path, plan: Path, out: Path) -> None:
    whole: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    model: Any = shardwright.load(checkpoint, plan)
    assert not model.training
    held = sum(p.to_local().nbytes for p in model.parameters())
    assert held < 0.6 * sum(p.nbytes for p in whole.parameters())
    assert model.shardwright_report.held == model.shardwright_report.read >= held
    ids = torch.randint(1, whole.config.vocab_size, (2, 9), generator=torch.manual_seed(1))
    generates(model, whole, ids)
    trains(model, whole, ids)
    save(model, out / "saved", placements(model), mesh_of(model), max_shard_size="100KB")
    if dist.get_rank() == 0:
        save_file({n: p.detach() for n, p in whole.named_parameters()}, out / "want.safetensors")


def generates(model: Any, whole: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        assert_close(model(ids).logits, whole(ids).logits, **CLOSE)
    for options in ({}, {"cache_implementation": "static"}):
        options |= {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        want = whole.generate(ids, attention_mask=torch.ones_like(ids), **options)
        got = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert want.shape == (2, 17)
        assert torch.equal(got, want), options


def trains(model: Any, whole: Any, ids: torch.Tensor) -> None:
    labels = torch.where(torch.arange(ids.shape[1]) < 3, -100, ids)
    mine, other = model.train()(ids, labels=labels), whole.train()(ids, labels=labels)
    assert isinstance(mine.logits, SplitLogits)
    assert_close(mine.logits.whole(), other.logits, **CLOSE)
    with count_collectives() as calls:
        model(ids, labels=labels).loss.backward()
    gathered = max((call.bytes for call in calls if call.kind == "all_gather"), default=0)
    assert gathered < other.logits.nbytes / dist.get_world_size(), "the logits were gathered"
    model.zero_grad()
    mine.loss.backward()
    other.loss.backward()
    assert_close(mine.loss, other.loss, **CLOSE)
    grads = shardwright.full_tensors(model, {n: p.grad for n, p in model.named_parameters()})
    assert grads.keys() == dict(whole.named_parameters()).keys()
    for name, p in whole.named_parameters():
        assert_close(grads[name], p.grad, **CLOSE, msg=lambda m, n=name: f"gradient of {n}: {m}")
    for m in (model, whole):
        # A large epsilon: AdamW's first step is the sign of the gradient, also of one that is zero
        # but for rounding.
        torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3).step()
    after = shardwright.full_tensors(model, dict(model.named_parameters()))
    for name, p in whole.named_parameters():
        assert_close(after[name], p.detach(), rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def encoder(checkpoint: Path, plan: Path, out: Path) -> None:
    model = shardwright.load(checkpoint, plan)
    got = embed(model, load_file(out / "inputs.safetensors"))
    assert_close(got, load_file(out / "want.safetensors")["embeddings"], **CLOSE)


if __name__ == "__main__":
    {"decoder": decoder, "encoder": encoder}[sys.argv[1]](*map(Path, sys.argv[2:]))
    dist.barrier()  # a rank that leaves at once would cut off others
    dist.destroy_process_group()
