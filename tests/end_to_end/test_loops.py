"""Training loops of others on split models, on real ranks: as the unsplit model in one process."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from benchmarks.demo_launch import torchrun

from . import loops


def test_adapters(tmp_path: Path) -> None:
    """LoRA put in before splitting: trained, written whole, read again, merged."""
    torchrun("tests.end_to_end.adapters", [tmp_path])


@pytest.mark.parametrize("ranks", [2, 4])
def test_trainer(ranks: int, tmp_path: Path) -> None:
    """Losses, norms, evaluation and counts; and a run that goes on from either's checkpoint."""
    trainer, logged = loops.train(Trainer, loops.llama(), tmp_path / "whole", 4)
    (tmp_path / "want.json").write_text(json.dumps(logged))
    after = {name: p.detach() for name, p in trainer.model.named_parameters()}
    torch.save(after, tmp_path / "after.pt")
    torchrun("tests.end_to_end.loops", [tmp_path], ranks=ranks)

    saved = LlamaForCausalLM.from_pretrained(tmp_path / "split" / "checkpoint-4")
    for name, parameter in saved.double().named_parameters():
        loops.close(parameter.detach(), after[name], name)
    if ranks == 2:  # from what the unsplit Trainer wrote, and back
        torchrun("tests.end_to_end.loops", [tmp_path, tmp_path / "whole" / "checkpoint-2"])
        model = loops.llama()
        middle = tmp_path / "split" / "checkpoint-2"
        again, _ = loops.train(Trainer, model, tmp_path / "again", 4, middle)
        for name, parameter in again.model.named_parameters():
            loops.close(parameter.detach(), after[name], name)
