"""Training loops of others on split models, on real ranks: as the unsplit model in one process."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from benchmarks.forked import run_forked

from . import adapters, loops


def well(ranks: int, fn: Any, *args: Any) -> None:
    """Run `fn(*args)` on so many ranks; a failure is that of the test, with what ranks wrote."""
    for end in run_forked(ranks, fn, args, args[0], limit=300):
        assert end.how == "well", (end.text, end.log)


def test_adapters(tmp_path: Path) -> None:
    """LoRA put in before splitting: trained, written whole, read again, merged."""
    well(2, adapters.main, tmp_path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_trainer(ranks: int, tmp_path: Path) -> None:
    """Losses, norms, evaluation and counts; and a run that goes on from either's checkpoint."""
    trainer, logged = loops.train(Trainer, loops.llama(), tmp_path / "whole", 4)
    (tmp_path / "want.json").write_text(json.dumps(logged))
    after = {name: p.detach() for name, p in trainer.model.named_parameters()}
    torch.save(after, tmp_path / "after.pt")
    middle = [tmp_path / "whole" / "checkpoint-2"] if ranks == 2 else []
    well(ranks, loops.main, tmp_path, None, *middle)

    saved = LlamaForCausalLM.from_pretrained(tmp_path / "split" / "checkpoint-4")
    for name, parameter in saved.double().named_parameters():
        loops.close(parameter.detach(), after[name], name)
    if ranks == 2:  # it went on from what the unsplit Trainer wrote, now back
        model = loops.llama()
        middle = tmp_path / "split" / "checkpoint-2"
        again, _ = loops.train(Trainer, model, tmp_path / "again", 4, middle)
        for name, parameter in again.model.named_parameters():
            loops.close(parameter.detach(), after[name], name)
