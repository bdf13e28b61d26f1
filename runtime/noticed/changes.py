"""What changes of a split model are: which may be, when a value is another, and how it is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwright.errors import UsageError
from shardwright.planner.contract.plain_values import FREE

HARMLESS = frozenset(
    """
_adapters_disabled _commit_hash _disable_adapters _gradient_checkpointing_func _is_hf_initialized
_loss_function _name_or_path _output_attentions _output_capturing_hooks_installed architectures
dtype generation_config gradient_checkpointing id2label initializer_range label2id loss_function
merged_adapters name_or_path transformers_version
""".split()
)
"""Names of what may change, besides `FREE` flags, what torch keeps, and token ids.
Whether modules train is seen to elsewhere, and what a loss does with split scores. Adapters that
are off, or merged into their layers, are gone around: what is around takes a term less."""

OF_TORCH = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
"""What torch keeps in each module, and in recurrent layers: lists of their own weights."""


class MISSING:
    """Stands for what is not there."""


def may_change(name: str) -> bool:
    """Whether no code computes otherwise where what has this name is another."""
    known = name in HARMLESS or name in FREE or name in OF_TORCH
    return known or name.endswith(("token_id", "token_ids"))


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Entries of two tables that are not the same: their names, and what they were and are."""
    for name in {**before, **now}:
        was, is_now = before.get(name, MISSING), now.get(name, MISSING)
        if was is not is_now:
            yield name, was, is_now


def is_config(value: Any) -> bool:
    """Whether it is what transformers keeps what a model is made of in."""
    return hasattr(value, "to_dict") and hasattr(value, "__dict__")


def differ(before: Any, now: Any) -> bool:
    """Whether code may do something else with one than with the other."""
    if before is now:
        return False
    if type(before) is not type(now):
        return True
    if is_config(now):  # a copy is like it
        entries = differences(vars(before), vars(now))
        return any(differ(a, b) for name, a, b in entries if not may_change(name))
    try:
        return bool(before != now)
    except (TypeError, ValueError, RuntimeError):  # of arrays, say
        return True


def refused(name: str, before: Any, now: Any) -> UsageError:
    """What to say of a change."""
    was = "not there" if before is MISSING else repr(before)
    return UsageError(
        f"'{name}' is {now!r:.60}, and was {was:.60} when the model was split: its code may do "
        "what nobody has proven then: set it before the model is planned and split"
    )
