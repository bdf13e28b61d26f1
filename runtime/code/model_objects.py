"""Attributes of modules and configs: which may change at any time, and what a config is."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from shardwright.planner.contract.plain_values import FREE

HARMLESS = frozenset(
    """
_adapters_disabled _commit_hash _diffusers_hook _disable_adapters _gradient_checkpointing_func
_is_fsdp_managed_module _is_hf_initialized _loss_function _name_or_path _output_attentions
_output_capturing_hooks_installed architectures dtype generation_config gradient_checkpointing
id2label initializer_range label2id loss_function merged_adapters name_or_path
transformers_version
""".split()
)
"""Names of attributes that may change, besides `FREE` flags, torch's own ones, and token ids.
Training mode and losses of sharded logits are checked elsewhere. Code skips adapters that are off
or merged into their layers, so the layer around them adds one term less. diffusers' list of hooks
does nothing by itself: a hook in it also replaces a forward, which is refused."""

OF_TORCH = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""Attributes that torch sets in each module, and lists of weights in recurrent layers."""

CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, nn.Module, Tensor)

LARGEST = 1000
"""Most values in a container that is compared at each call. Vocabularies have more, and code does
not depend on them."""

DEEPEST = 8
"""Most levels of nested containers or objects that are compared."""


def has_forward(module: nn.Module) -> bool:
    """Whether the class of a module says what a call does: lists of modules do not."""
    return type(module).forward is not nn.Module.forward


def may_change(name: str) -> bool:
    """Whether no code computes anything else if an attribute of this name changes."""
    known = name in HARMLESS or name in FREE or name in OF_TORCH
    return known or name.endswith(("token_id", "token_ids"))


def is_config(value: Any) -> bool:
    """Whether `value` is a config as in transformers: it has `to_dict`, and attributes."""
    kind = type(value)  # the object itself may raise any error for a missing attribute
    return hasattr(kind, "to_dict") and kind.__dictoffset__ != 0
