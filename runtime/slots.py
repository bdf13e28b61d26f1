"""Finding one tensor among the arguments or in the output of a forward, and replacing it.

A slot is a dotted name: "hidden_states", "position_embeddings.0", "*0" (first of *args), "logits";
"" is a sole output. Containers are rebuilt, never changed in place: callers may still hold them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shardwright.errors import PlanError

Keys = tuple[str, ...]


def keys_of(slot: str) -> Keys:
    """The steps of a slot: "past.0" -> ("past", "0"), "" -> ()."""
    return tuple(slot.split(".")) if slot else ()


def positions(forward: Callable[..., Any]) -> tuple[dict[str, int], int]:
    """Where arguments may stand when given by position: name -> index, and where *args begins."""
    names: dict[str, int] = {}
    parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return names, index
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            break
        names[parameter.name] = index
    return names, len(names)


def index_of(root: str, names: dict[str, int], varargs: int) -> int | None:
    """The position of argument `root`, None if it can only be given by name."""
    if root.startswith("*"):
        return varargs + int(root[1:])
    return names.get(root)


def replace(value: Any, keys: Keys, change: Callable[[Tensor], Any]) -> Any:
    """`value` with the tensor at `keys` changed; as it is where that is None or absent.

    Raises:
        PlanError: something else stands there, so that the plan does not speak of this value.
    """
    if value is None:
        return None
    if not keys:
        if isinstance(value, Tensor):
            return change(value)
        raise PlanError(f"expected a tensor, found {type(value).__name__}")
    key, rest = keys[0], keys[1:]
    if isinstance(value, (tuple, list)):
        fields: tuple[str, ...] = getattr(value, "_fields", ())  # of a named tuple
        if key in fields:
            key = str(fields.index(key))
        if not key.isdigit():
            raise PlanError(
                f"'{key}' cannot be found in a {type(value).__name__}: call with return_dict=True"
            )
        at = int(key)
        if at >= len(value):
            return value
        items = [replace(v, rest, change) if i == at else v for i, v in enumerate(value)]
        return type(value)(*items) if fields else type(value)(items)
    if isinstance(value, Mapping):
        if key.isdigit() and key not in value:
            names = list(value)
            key = names[int(key)] if int(key) < len(names) else key
        if key not in value:
            return value
        return type(value)(**{**value, key: replace(value[key], rest, change)})
    raise PlanError(f"'{key}' cannot be found in a {type(value).__name__}")
