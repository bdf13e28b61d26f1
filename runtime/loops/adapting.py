"""Saves peft adapters of a split model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwright.runtime.checkpoint.write import on_first
from shardwright.runtime.state.gather import full_tensors


def is_adapted(model: Any) -> bool:
    """Whether `model` is peft's wrapper around a model, which saves only adapters."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_adapters(model: Any, directory: str | Path) -> None:
    """Write the same as peft's `save_pretrained` for the unsplit model; all ranks call this.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    prefix = getattr(model.base_model, "prefix", "")
    kept = model.state_dict()
    if prefix and not any(c.modules_to_save for c in model.peft_config.values()):
        kept = {name: tensor for name, tensor in kept.items() if prefix in name}
    whole = full_tensors(model, kept)
    on_first(lambda: model.save_pretrained(str(directory), state_dict=whole), directory)
