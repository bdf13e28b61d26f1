"""Arguments that are no tensors: what code does may hang on them, so they are as they were traced.

Of each such argument it is known what it was in every proven call: a value, any number where the
trace showed that none decides anything, or a tensor. What was left out had its default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from shardwright.errors import UsageError
from shardwright.planner.contract.plain_values import (
    FREE,
    PlainValue,
    is_flag,
    is_said,
    plain_value,
    plain_within,
    same_value,
)
from shardwright.planner.contract.plan_file import TracedCall


class Of(Enum):
    """What stands for any tensor, or what has some in it, and for any number."""

    TENSOR, NUMBER = "a tensor", "any number"


class PlainArguments:
    """What plain values the arguments of one model may have.

    Args:
        calls: Of the model itself, that its plan is proven for.
        defaults: What its arguments are that are left out.
    """

    def __init__(self, calls: Sequence[TracedCall], defaults: Mapping[str, Any]) -> None:
        names = {n for call in calls for n in (*call.values, *call.numbers)} - FREE
        self.known = {n: [_had(call, n, defaults) for call in calls] for n in sorted(names)}
        self.defaults = defaults
        self.within = any("." in name for name in self.known)
        """Whether some are in lists and dicts."""

    def unknown(self, name: str, value: Any) -> str | None:
        """One in the lists and dicts of an argument that was there in no call; None without."""
        return next((at for at, _ in plain_within(value, name) if at not in self.known), None)

    def check(self, model: str, given: Mapping[str, Any]) -> None:
        """Look whether what is `given` to a `model`, and what is left out, was so in some call.

        Raises:
            UsageError: it was not.
        """
        if self.within:
            more = (found for n, v in given.items() for found in plain_within(v, n))
            given = {**given, **dict(more)}
        for name, had in self.known.items():
            value = given[name] if name in given else self.defaults.get(name)
            if not _among(value, had):
                now = repr(value) if is_said(value) else f"a {type(value).__name__}"
                were = " or ".join(
                    dict.fromkeys(one.value if isinstance(one, Of) else repr(one) for one in had)
                )
                raise UsageError(
                    f"argument '{name}' of {model} is {now}{'' if name in given else ' (left out)'}"
                    f", and was {were} in the calls that the plan was made for: with another value "
                    "its code may do what nobody has proven: plan with example inputs (kwargs) "
                    "that have it"
                )


def check_flags(
    module: str,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    had: Mapping[str, Sequence[PlainValue]],
) -> None:
    """Look whether the flags and numbers of a `module` called by itself are such as it `had`.

    None in the place of what was always a tensor is no flag: while they are traced, models make
    masks that they do without elsewhere.

    Raises:
        UsageError: one is not.
    """
    for name in {**had, **given}:
        value = given[name] if name in given else defaults.get(name)
        among = had.get(name, ())
        off = value is None and not all(among)  # as where it is left out, a switch that is off
        if name in FREE or not is_said(value) or off or _among(value, among):
            continue
        if name in had or (value and is_flag(value)):
            were = " or ".join(map(repr, among)) or "none"
            raise UsageError(
                f"argument '{name}' of '{module}', which is called by itself, is {value!r}"
                f"{'' if name in given else ' (left out)'}; such values in the calls that the plan "
                f"was made for: {were}. With another its code may do what nobody has proven: plan "
                "with example inputs with which the model gives it that"
            )


def _among(value: Any, had: Sequence[Any]) -> bool:
    """Whether code does with a value what it does with one of those that it had."""
    if not is_said(value):
        return Of.TENSOR in had
    if isinstance(value, (int, float)) and not isinstance(value, bool) and Of.NUMBER in had:
        return True
    if not value and None in had:  # a switch that is off, as where it is left out
        return True
    said = plain_value(value)
    return any(same_value(said, one) for one in had)


def _had(call: TracedCall, name: str, defaults: Mapping[str, Any]) -> Any:
    """What an argument was in a call."""
    if name in call.values:
        return call.values[name]
    if name in call.numbers:
        return Of.NUMBER
    if name in call.inputs:
        return Of.TENSOR
    default = defaults.get(name)
    return plain_value(default) if is_said(default) else Of.TENSOR
