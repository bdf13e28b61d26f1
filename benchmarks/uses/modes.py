"""Modes, dtypes, copies and compilers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare import weighing_loss
from benchmarks.uses.subject import Subject, use, weigh, without_dropout
from benchmarks.zoo_case import CASTS


@use()
def training_mode(s: Subject) -> Any:
    """`train()`, without dropout."""
    without_dropout(s.model)
    s.model.train()
    out = s.call()
    weigh(out).backward()
    return out


@use(tolerance=CASTS)
def training_mode_with_labels(s: Subject) -> Any:
    """The same with labels: what auxiliary losses hang on."""
    s.text()
    without_dropout(s.model)
    s.model.train()
    out = s.call(labels=s.ids)
    out.loss.backward()
    return out.loss


@use()
def train_then_eval(s: Subject) -> Any:
    """A step in one mode, a call in the other: what buffers remember."""
    without_dropout(s.model)
    s.model.train()
    weigh(s.call()).backward()
    s.model.eval()
    return s.call()


@use()
def gradient_checkpointing(s: Subject) -> Any:
    """As transformers turns it on."""
    model = s.known()
    without_dropout(model)
    model.gradient_checkpointing_enable()
    model.train()
    out = s.call()
    weighing_loss(out).backward()
    return out.logits


@use()
def accumulation(s: Subject) -> Any:
    """Gradients of two batches."""
    weigh(s.call()).backward()
    weigh(s.call()).backward()


@use()
def frozen_half(s: Subject) -> Any:
    """Every other parameter frozen."""
    for p in list(s.model.parameters())[::2]:
        p.requires_grad_(False)
    weigh(s.call()).backward()


@use(tolerance=1e-4)
def cast_to_float32(s: Subject) -> Any:
    """`model.float()`."""
    s.model.float()
    given = {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in s.inputs.items()
    }
    args = [a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in s.args]
    out = s.model(*args, **given)
    return out


@use()
def cast_to_float32_and_back(s: Subject) -> Any:
    """Rounded parameters, exact arithmetic."""
    s.model.float().double()
    return s.call()


@use()
def deep_copy(s: Subject) -> Any:
    """A copy computes the same, and the first is as it was."""
    twin = copy.deepcopy(s.model)
    with torch.no_grad():
        for p in s.model.parameters():
            p.mul_(0.5)
    out = replace(s, model=twin).call()
    weigh(out).backward()
    return [out, s.call()]


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    made = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    return made.to(next(model.parameters()).dtype).eval().get_base_model()


@use(before=_with_lora)
def lora_before_splitting(s: Subject) -> Any:
    """Adapters on all linear layers, and their gradients."""
    out = s.call()
    weigh(out).backward()
    return out


@use(own_process=True)
def compiled(s: Subject) -> Any:
    """`torch.compile`, traced through autograd, run as it is."""
    torch._dynamo.reset()
    model = torch.compile(s.model, backend="aot_eager")
    out = replace(s, model=model).call()
    weigh(out).backward()
    return out
