"""What people read and change inside of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.uses.subject import Subject, Unfit, blocks, tensors, use, weigh
from shardwright.runtime.code.model_objects import OF_TORCH


@use()
def hooks_on_blocks(s: Subject) -> Any:
    """What forward hooks read of blocks."""
    read: list[Any] = []
    found = blocks(s.model)
    if not found:
        raise Unfit
    hooks = [b.register_forward_hook(lambda _, __, out: read.append(out)) for _, b in found]
    s.call()
    for hook in hooks:
        hook.remove()
    return [tensors(out)[0] for out in read]


@use()
def hooks_on_blocks_with_gradients(s: Subject) -> Any:
    """A loss of what forward hooks read of blocks."""
    read: list[Any] = []
    found = blocks(s.model)
    if not found:
        raise Unfit
    for _, block in found:
        block.register_forward_hook(lambda _, __, out: read.append(tensors(out)[0]))
    s.call()
    weigh(read).backward()
    return read


@use()
def hooks_on_all_modules(s: Subject) -> Any:
    """A loss of what forward hooks read and are given, on whatever module: activations, norms.

    Copies: what code behind a hook does in place to what the hook keeps is not shown by a whole.
    """
    read: list[Any] = []

    def note(_: Any, args: Any, out: Any) -> None:
        read.extend(t.clone() for t in (*_floats(args), *_floats(out)) if t.requires_grad)

    for module in _called(s.model):
        module.register_forward_hook(note)
    s.call()
    weigh(read).backward()
    return read


@use()
def backward_hooks_on_all_modules(s: Subject) -> Any:
    """Gradients that hooks read of all modules."""
    read: list[Any] = []

    def note(_: Any, *grads: Any) -> None:
        read.extend(_floats(grads))

    for module in _called(s.model):
        module.register_full_backward_hook(note)
        module.register_full_backward_pre_hook(note)
    weigh(s.call()).backward()
    return read


@use(may_refuse=True)
def kept_gradients(s: Subject) -> Any:
    """`retain_grad` on what hooks read, as saliency maps are made.

    Refused where a module gives on what it was given: others have that, too.
    """
    read: list[Tensor] = []

    def note(_: Any, __: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.requires_grad and not out.is_leaf:
            out.retain_grad()
            read.append(out)

    for module in _called(s.model):
        module.register_forward_hook(note)
    weigh(s.call()).backward()
    return [t.grad for t in read if t.grad is not None]


def _called(model: nn.Module) -> list[nn.Module]:
    """The modules within that have code."""
    within = [m for m in model.modules() if m is not model]
    return [m for m in within if type(m).forward is not nn.Module.forward]


def _floats(value: Any) -> list[Tensor]:
    """Real tensors among arguments or outputs, not those in caches."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    parts = value if isinstance(value, (tuple, list)) else ()
    return [t for part in parts for t in _floats(part)]


@use(may_refuse=True)
def hooks_on_projections(s: Subject) -> Any:
    """What forward hooks read of linear layers, as it was then (see `hooks_on_all_modules`)."""
    read: list[Any] = []

    def note(_: Any, __: Any, out: Any) -> None:
        read.extend(t.clone() for t in tensors(out))

    for module in s.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    s.call()
    if not read:
        raise Unfit
    return read


@use()
def hooks_that_change_blocks(s: Subject) -> Any:
    """Steering: a hook adds to what a block gives."""
    found = blocks(s.model)
    if not found:
        raise Unfit

    def steer(_: Any, __: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return out + 0.1
        return (out[0] + 0.1, *out[1:]) if isinstance(out, tuple) else out

    found[0][1].register_forward_hook(steer)
    out = s.call()
    weigh(out).backward()
    return out


@use()
def full_backward_hooks(s: Subject) -> Any:
    """Gradients that hooks read of blocks."""
    read: list[Any] = []
    found = blocks(s.model)
    if not found:
        raise Unfit
    for _, block in found:
        block.register_full_backward_hook(lambda _, __, grads: read.append(tensors(grads)[0]))
    weigh(s.call()).backward()
    return read


@use(may_refuse=True)
def norms_of_weights(s: Subject) -> Any:
    """`weight.norm()`, as logs and regularizers take it."""
    return [p.norm() for p in s.model.parameters()]


@use(may_refuse=True)
def weight_decay_in_the_loss(s: Subject) -> Any:
    """A penalty on parameters."""
    loss = weigh(s.call()) + 0.1 * torch.stack([p.pow(2).sum() for p in s.model.parameters()]).sum()
    loss.backward()
    return loss


@use()
def weight_decay_of_whole_numbers(s: Subject) -> Any:
    """The same, where what is computed of parameters is made whole before it joins the loss."""
    penalty = torch.stack([p.pow(2).sum() for p in s.model.parameters()]).sum()
    if isinstance(penalty, DTensor):
        penalty = penalty.full_tensor()
    loss = weigh(s.call()) + 0.1 * penalty
    loss.backward()
    return loss


@use()
def numbers_of_modules(s: Subject) -> Any:
    """Numbers and flags that modules have in attributes behind a call, and those given out."""
    out = s.call()
    found = [
        getattr(module, name)
        for module in s.model.modules()
        for name in sorted(vars(module).keys() - OF_TORCH)
        if not name.startswith("_shardwright")
    ]
    return torch.tensor([float(x) for value in (*found, out) for x in _numbers(value)])


def _numbers(value: Any) -> Iterator[Any]:
    """The numbers in a value, and in lists and dicts."""
    if isinstance(value, (bool, int, float)):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _numbers(part)


@use(may_refuse=True)
def shapes_of_parameters(s: Subject) -> Any:
    """How many numbers the model has."""
    return torch.tensor([p.numel() for p in s.model.parameters()]).double()
