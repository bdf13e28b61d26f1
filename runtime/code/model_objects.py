"""What modules and configs keep: names that may change at any time, and plain values."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from shardwright.planner.contract.plain_values import FREE

HARMLESS = frozenset(
    """
_adapters_disabled _commit_hash _disable_adapters _gradient_checkpointing_func
_is_fsdp_managed_module _is_hf_initialized _loss_function _name_or_path _output_attentions
_output_capturing_hooks_installed architectures dtype generation_config gradient_checkpointing
id2label initializer_range label2id loss_function merged_adapters name_or_path
transformers_version
""".split()
)
"""Names of what may change, besides `FREE` flags, what torch keeps, and token ids.
Whether modules train is seen to elsewhere, and what a loss does with split scores. Adapters that
are off, or merged into their layers, are gone around: what is around takes a term less."""

OF_TORCH = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""What torch keeps in each module, and in recurrent layers: lists of their own weights."""

CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, nn.Module, Tensor)

LARGEST = 1000
"""Values in a list that is compared at each call; vocabularies have more, and decide nothing."""

DEEPEST = 8
"""Lists within lists."""


def may_change(name: str) -> bool:
    """Whether no code computes otherwise where what has this name is another."""
    known = name in HARMLESS or name in FREE or name in OF_TORCH
    return known or name.endswith(("token_id", "token_ids"))


def is_config(value: Any) -> bool:
    """Whether it is what transformers keeps what a model is made of in."""
    kind = type(value)  # the object may raise whatever it likes for an attribute it has not
    return hasattr(kind, "to_dict") and kind.__dictoffset__ != 0
