"""The logits of hidden states: what a model computes behind its base model, by its own code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError


class Given(nn.Module):
    """In place of a base model: gives the output that it is given.

    Args:
        module: The base model, whose other attributes are read.
    """

    output: Any

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        vars(self)["of"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["of"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return `output`."""
        return self.output


class Around(nn.Module):
    """Calls a module that is not in it, so that what moves or copies this leaves that alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.call = module.__call__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.call(*args, **kwargs)


class Head:
    """Computes logits of hidden states with the code of an unsplit model and a split model's parts.

    Args:
        unsplit: The same model, unsplit and without weights. Its parts are replaced.
        split: The split model. Its parts take and give full tensors.
        base: The path of the module that gives the hidden states.

    Raises:
        UsageError: the model has tensors of its own around that module.
    """

    def __init__(self, unsplit: nn.Module, split: nn.Module, base: str) -> None:
        self.model, self.base = unsplit, Given(split.get_submodule(base))
        path, around = base.split("."), unsplit
        for depth, name in enumerate(path):
            tensors = (*around._parameters, *around._buffers)
            if tensors:
                raise UsageError(
                    f"{type(around).__name__} has '{tensors[0]}' outside of its base model, and "
                    "vLLM calls only the base model"
                )
            split_parts = dict(split.get_submodule(".".join(path[:depth])).named_children())
            for part in dict(around.named_children()):
                if part != name:
                    setattr(around, part, Around(split_parts[part]))
            if depth + 1 < len(path):
                around = around.get_submodule(name)
            else:
                setattr(around, name, self.base)

    def logits(self, hidden: Tensor, output: Any) -> Tensor:
        """Return logits [rows, words] of hidden states [rows, width].

        Args:
            hidden: The hidden states.
            output: An output of the base model, to be given with other hidden states.
        """
        self.base.output = copy.copy(output)
        self.base.output["last_hidden_state"] = hidden[None]
        return self.model(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.int64)).logits[0]
