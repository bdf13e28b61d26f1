"""Tensors of a model that no checkpoint has: those in attributes, and buffers that code makes.

`self.convs = [nn.Conv2d(...)]` keeps parameters where torch does not see them. Each rank that
builds the model draws its own. So it does with a buffer of `torch.randn(n)` that is not persistent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.errors import ModelError

OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes with which torch keeps its books of a module."""
HOLDERS = (Tensor, nn.Module, dict, list, tuple)
"""Types of values that are or hold tensors in an order. Sets have none."""
SAMPLES = 16
"""Numbers that are compared of each tensor."""


class Held(NamedTuple):
    """A tensor that an attribute holds."""

    module: str
    """The path of the module with the attribute."""
    attribute: str
    path: str
    """The path of the tensor: the attribute, and keys and names within it."""
    tensor: Tensor


def held_apart(model: nn.Module) -> Iterator[Held]:
    """Yield each tensor that an attribute holds and that torch has not registered, once."""
    modules = [*model.named_modules()]
    known = {id(module) for _, module in modules}
    known |= {id(t) for _, m in modules for t in (*m._parameters.values(), *m._buffers.values())}
    for path, module in modules:
        for name, value in list(vars(module).items()):
            if name not in OF_TORCH:
                for at, tensor in _within(value, name, known):
                    yield Held(path, name, f"{path}.{at}".lstrip("."), tensor)


def _within(value: Any, path: str, known: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value, with their paths."""
    if not isinstance(value, HOLDERS) or id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, nn.Module):
        inner = vars(value)
        named = [(n, v) for n, v in inner.items() if n not in OF_TORCH]
        for table in ("_parameters", "_buffers", "_modules"):
            named += inner.get(table, {}).items()
    elif isinstance(value, dict):  # a subclass may import what it lists
        named = [(str(key), one) for key, one in dict.items(value)]
    else:
        named = [(str(number), one) for number, one in enumerate(value)]
    for name, one in named:
        yield from _within(one, f"{path}.{name}", known)


def refuse_unregistered(model: nn.Module) -> None:
    """Check that no parameters are where no checkpoint can hold them.

    Raises:
        ModelError: an attribute holds parameters that torch has not registered.
    """
    for held in held_apart(model):
        if isinstance(held.tensor, nn.Parameter):
            owner = type(model.get_submodule(held.module)).__name__
            where = f" ('{held.module}')" if held.module else ""
            raise ModelError(
                f"a {owner}{where} keeps parameters in '{held.attribute}', where torch does not "
                f"see them, as in a plain list: no checkpoint has '{held.path}'. Make it an "
                "nn.ModuleList, nn.ModuleDict or nn.ParameterList; or build the model with all its "
                "weights on each rank, and give it to shardwright.plan and shardwright.apply"
            )


def numbers_made(model: nn.Module, persistent: bool) -> dict[str, list[float]]:
    """Return some numbers of each tensor that this rank has made; ranks compare them.

    Args:
        model: The model, before it is split.
        persistent: Whether to include the buffers that a checkpoint holds.
    """
    return {name: _some(tensor) for name, tensor in _made_here(model, persistent)}


def _made_here(model: nn.Module, persistent: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that this rank has made, by name; registered parameters are left out."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and (persistent or name in module._non_persistent_buffers_set):
                yield f"{path}.{name}".lstrip("."), buffer
    for held in held_apart(model):
        yield held.path, held.tensor


@torch.no_grad()
def _some(tensor: Tensor) -> list[float]:
    """Return some numbers of a tensor; none of one without values or of a special kind."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_meta or tensor.is_nested or not tensor.numel():
        return []
    some = tensor.reshape(-1)[:: -(-tensor.numel() // SAMPLES)]
    some = torch.view_as_real(some).reshape(-1) if some.is_complex() else some
    return some.double().tolist()
