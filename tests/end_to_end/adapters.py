"""What each rank of `test_loops.test_adapters` does: LoRA, before the model is split and after."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import shardwright
from shardwright.errors import DistributedError, ModelError, UsageError
from tests import planning
from tests.end_to_end.loops import close, llama

IDS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))
LORA = LoraConfig(target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], r=3)


def adapted(base: Any = None, dropout: float = 0.0, seed: int = 1) -> Any:
    base, config = base or llama(), copy.deepcopy(LORA)
    config.lora_dropout = dropout
    torch.manual_seed(seed)
    with shardwright.adding_adapters():
        model = get_peft_model(base, config, autocast_adapter_dtype=False).double()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    return model


def train(model: Any) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def late(mesh: Any, asked: Any) -> None:
    """Adapters around layers that are split already: they drop as those of the unsplit model do."""
    plan = planning.plan(llama(), **asked)
    model, whole = adapted(shardwright.apply(llama(), plan, mesh), 0.2), adapted(dropout=0.2)
    torch.manual_seed(2 + dist.get_rank())
    losses = train(model.train())
    torch.manual_seed(2)
    for got, want in zip(losses, train(whole.train()), strict=True):
        close(got, want, "loss with late adapters")
    other = adapted(shardwright.apply(llama(), plan, mesh), seed=dist.get_rank())
    with pytest.raises(DistributedError, match="was put into the model after it was split"):
        other(IDS)
    with pytest.raises(UsageError, match="adding_adapters"):
        get_peft_model(shardwright.apply(llama(), plan, mesh), copy.deepcopy(LORA))


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole, model = adapted(), adapted()
    base = model.get_base_model()
    asked: Any = {"tp": 2, "phase": "train", "batch": 2, "seq": 7}
    plan = planning.plan(adapted().get_base_model(), **asked)
    shardwright.apply(base, plan, mesh)
    for got, want in zip(train(model.train()), train(whole.train()), strict=True):
        close(got, want, "loss")

    with pytest.raises(UsageError, match=r"shardwright\.save"):
        model.save_pretrained(folder / "parts")
    shardwright.save(model, folder)
    again = PeftModel.from_pretrained(llama(), folder, autocast_adapter_dtype=False).double()
    with torch.no_grad():
        want = whole(IDS).logits
        close(again(IDS).logits, want, "adapters read by the unsplit model")
        close(model(IDS).logits, want, "logits")
        with model.disable_adapter(), whole.disable_adapter():
            close(model(IDS).logits, whole(IDS).logits, "without adapters")
        close(model(IDS).logits, want, "adapters again")
        model.merge_adapter()
        close(model(IDS).logits, want, "merged")
        model.unmerge_adapter()
        close(model(IDS).logits, want, "unmerged")
        merged = model.merge_and_unload()
        with pytest.raises(UsageError, match="taken out"):
            merged(IDS)
        shardwright.save(merged, folder / "merged")
        read = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float64)
        close(dict(read.named_parameters()), dict(whole.merge_and_unload().named_parameters()), "")
        close(read(IDS).logits, want, "merged and read")

    with pytest.raises(ModelError, match="get_base_model"):
        planning.plan(adapted(), tp=2)
    late(mesh, asked)
    dist.barrier()
    dist.destroy_process_group()
