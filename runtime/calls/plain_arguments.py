"""Checks arguments that are not tensors: code may depend on them, so they must be as traced.

For each such argument, the plan has its kind in every proven call: a value; any number, if the
trace showed that code does not depend on it; or a tensor. An argument that was left out had its
default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from shardwright.errors import UsageError
from shardwright.planner.contract import plain_values
from shardwright.planner.contract.plain_values import FREE, PlainValue
from shardwright.planner.contract.plan_file import TracedCall


class AnyValue(Enum):
    """Stands for any value with tensors, or for any number."""

    TENSOR, NUMBER = "a tensor", "any number"


class PlainArguments:
    """The plain values that arguments of one model may have.

    Args:
        calls: The proven calls of the model itself.
        defaults: The default values of its arguments.
    """

    def __init__(self, calls: Sequence[TracedCall], defaults: Mapping[str, Any]) -> None:
        names = {n for call in calls for n in (*call.values, *call.numbers)} - FREE
        self.known = {n: [_had(call, n, defaults) for call in calls] for n in sorted(names)}
        self.defaults = defaults
        self.within = any("." in name for name in self.known)
        """Whether some of the values are in lists or dicts."""

    def unknown(self, name: str, value: Any) -> str | None:
        """The place of a plain value in a list or dict that no call had there; None if none."""
        return next(
            (at for at, _ in plain_values.plain_within(value, name) if at not in self.known), None
        )

    def check(self, model: str, given: Mapping[str, Any]) -> None:
        """Check that each argument, given or left out, had the same value in some call.

        Args:
            model: The class name of the model, for messages.
            given: The arguments by name.

        Raises:
            UsageError: one had not.
        """
        if self.within:
            more = (found for n, v in given.items() for found in plain_values.plain_within(v, n))
            given = {**given, **dict(more)}
        for name, had in self.known.items():
            value = given[name] if name in given else self.defaults.get(name)
            if not _among(value, had):
                now = repr(value) if plain_values.is_said(value) else f"a {type(value).__name__}"
                texts = (one.value if isinstance(one, AnyValue) else repr(one) for one in had)
                were = " or ".join(dict.fromkeys(texts))
                tensor = ", or a 0-d tensor in its place if code only computes with it"
                raise UsageError(
                    f"argument '{name}' of {model} is {now}{'' if name in given else ' (left out)'}"
                    f", and was {were} in the calls that the plan was made for: with another value "
                    "its code may take a path that was not traced: plan with example inputs "
                    f"(kwargs) that have it{tensor if plain_values.is_number(value) else ''}"
                )


def check_flags(
    module: str,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    had: Mapping[str, Sequence[PlainValue]],
    by_itself: bool,
) -> None:
    """Check the flags and numbers that a module is given in a call.

    None is allowed for an argument that was always a tensor: in a trace, models make masks that
    they omit otherwise.

    Args:
        module: The name of the module, for messages.
        given: The arguments by name.
        defaults: The default values of its arguments.
        had: The values of each argument in the calls of the plan.
        by_itself: Whether it is called directly; else the model calls it.

    Raises:
        UsageError: one has another value than in the plan.
    """
    for name in {**had, **given}:
        value = given[name] if name in given else defaults.get(name)
        among = had.get(name, ())
        off = value is None and not all(among)  # as if left out: a switch that is off
        if name in FREE or not plain_values.is_said(value) or off or _among(value, among):
            continue
        if name in had or (value and plain_values.is_flag(value)):
            were = " or ".join(map(repr, among)) or "none"
            direct = " (called directly)" if by_itself else ""
            raise UsageError(
                f"argument '{name}' of '{module}'{direct} is {value!r}"
                f"{'' if name in given else ' (left out)'}. Its values in the calls that the plan "
                f"was made for: {were}. With another value the code may take a path that was not "
                "traced: plan with example inputs (kwargs) for which the model passes this value"
            )


def _among(value: Any, had: Sequence[Any]) -> bool:
    """Whether code behaves with `value` as with one of the values that it had."""
    if not plain_values.is_said(value):
        return AnyValue.TENSOR in had
    if plain_values.is_number(value) and AnyValue.NUMBER in had:
        return True
    if not value and None in had:  # a switch that is off, as if left out
        return True
    said = plain_values.plain_value(value)
    return any(plain_values.same_value(said, one) for one in had)


def _had(call: TracedCall, name: str, defaults: Mapping[str, Any]) -> Any:
    """The value of an argument in a call, or what stands for it."""
    if name in call.values:
        return call.values[name]
    if name in call.numbers:
        return AnyValue.NUMBER
    if name in call.inputs:
        return AnyValue.TENSOR
    default = defaults.get(name)
    return plain_values.plain_value(default) if plain_values.is_said(default) else AnyValue.TENSOR
