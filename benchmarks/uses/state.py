"""State that goes out of a model and into it."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import shardwright
from benchmarks.compare import weighing_loss
from benchmarks.uses.subject import MAKING, Subject, Unfit, tensors, use, weigh
from shardwright.runtime.state.gather import full_tensors


@use()
def state_dict_again(s: Subject) -> Any:
    """`load_state_dict` of its own `state_dict`."""
    state = {k: v.clone() for k, v in s.model.state_dict().items()}
    with torch.no_grad():
        for p in s.model.parameters():
            p.zero_()
    s.model.load_state_dict(state)
    return s.call()


@use(may_refuse=True)
def state_dict_of_the_whole(s: Subject) -> Any:
    """`load_state_dict` of the whole model's."""
    with torch.no_grad():
        for p in s.model.parameters():
            p.zero_()
    s.model.load_state_dict(s.whole.state_dict())
    return s.call()


@use(may_refuse=True)
def state_dict_values(s: Subject) -> Any:
    """What `state_dict` shows."""
    return [v for v in s.model.state_dict().values() if v.is_floating_point()]


@use()
def torch_save(s: Subject) -> Any:
    """`torch.save` of a state dict, each rank to a file of its own, read again."""
    file = io.BytesIO()
    torch.save(s.model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p in s.model.parameters():
            p.zero_()
    s.model.load_state_dict(torch.load(file, weights_only=False))
    return s.call()


@use(may_refuse=True)
def torch_save_for_the_whole(s: Subject) -> Any:
    """`torch.save` of a state dict, read again as the whole model's."""
    file = io.BytesIO()
    torch.save(s.model.state_dict(), file)
    file.seek(0)
    s.whole.load_state_dict(torch.load(file, weights_only=False))
    return replace(s, model=s.whole).call()


@use(may_refuse=True)
def pickled(s: Subject) -> Any:
    """`pickle` of the model, on each rank: its outputs, and its parameters' gradients."""
    model = pickle.loads(pickle.dumps(s.model))
    out = replace(s, model=model).call()
    weigh(out).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [tensors(out), full_tensors(model, grads)]


@use(may_refuse=True)
def save_pretrained(s: Subject) -> Any:
    """Saved as transformers does, read as a whole model."""
    model = s.known()
    model.save_pretrained(s.folder)
    with MAKING:
        again = type(s.whole).from_pretrained(s.folder, dtype=next(s.whole.parameters()).dtype)
    return replace(s, model=again.eval()).call()


@use(may_refuse=True)
def resized_embeddings(s: Subject) -> Any:
    """More tokens."""
    model = s.text()
    model.resize_token_embeddings(
        model.config.get_text_config().vocab_size + 5, mean_resizing=False
    )
    return s.call().logits[..., :20]


@use(may_refuse=True)
def lora_after_splitting(s: Subject) -> Any:
    """`get_peft_model`."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise Unfit from None
    s.known()
    torch.manual_seed(0)
    with shardwright.adding_adapters():
        model = get_peft_model(
            s.model, LoraConfig(target_modules="all-linear", init_lora_weights=False)
        )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora" in name:
                p.fill_(0.01)
    out = replace(s, model=model).call()
    weighing_loss(out).backward()
    return out.logits


@use(may_refuse=True)
def new_weight_in_place(s: Subject) -> Any:
    """A parameter replaced by a whole one of the user's."""
    name, owner = next((n, m) for n, m in s.model.named_modules() if isinstance(m, nn.Linear))
    weight = s.whole.get_submodule(name).weight
    owner.weight = nn.Parameter(weight.detach().clone() * 0.5)
    return s.call()


@use(may_refuse=True)
def new_module_in_place(s: Subject) -> Any:
    """A module replaced by a whole one of the user's."""
    name = next(n for n, m in s.model.named_modules() if isinstance(m, nn.Linear) and n)
    fresh = copy.deepcopy(s.whole.get_submodule(name))
    with torch.no_grad():
        fresh.weight.mul_(0.5)
    s.model.set_submodule(name, fresh)
    return s.call()
