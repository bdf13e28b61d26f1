"""Finding one tensor among the arguments or in the output of a forward, and replacing it.

A slot is a dotted name: "hidden_states", "position_embeddings.0", "*0" (first of *args), "logits";
"" is a sole output. Containers are rebuilt, never changed in place: callers may still hold them.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError

Keys = tuple[str, ...]
Kinds = type | tuple[type, ...]


def keys_of(slot: str) -> Keys:
    """The steps of a slot: "past.0" -> ("past", "0"), "" -> ()."""
    return tuple(slot.split(".")) if slot else ()


@lru_cache(maxsize=1 << 12)
def parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a method by name, `self` among them."""
    return inspect.signature(forward).parameters


def positions(forward: Callable[..., Any]) -> tuple[dict[str, int], int]:
    """Where arguments may stand when given by position: name -> index, and where *args begins."""
    names: dict[str, int] = {}
    parameters = list(parameters_of(forward).values())[1:]  # without self
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
        items, found = list(value), value[at]
        plain = not rest and isinstance(found, Tensor)
        items[at] = change(found) if plain else replace(found, rest, change)
        return type(value)(*items) if fields else type(value)(items)
    if isinstance(value, Mapping):
        if key.isdigit() and key not in value:
            names = list(value)
            key = names[int(key)] if int(key) < len(names) else key
        if key not in value:
            return value
        return type(value)(**{**value, key: replace(value[key], rest, change)})
    if _is_record(value):
        return _with(value, {key: replace(getattr(value, key, None), rest, change)})
    raise PlanError(f"'{key}' cannot be found in a {type(value).__name__}")


def map_slots(
    value: Any,
    slot: str,
    change: Callable[[Any, str], Any],
    kinds: Kinds = Tensor,
) -> Any:
    """`value` with `change(tensor, slot)` for every tensor in it, or all that is of `kinds`.

    Slots of nested values are joined by dots; containers that are neither tuples, lists, dicts nor
    dataclasses (a key-value cache) are left alone.
    """
    if isinstance(value, kinds):
        return change(value, slot)

    def within(part: Any, key: object) -> Any:
        return map_slots(part, joined(slot, key), change, kinds)

    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named one
        return type(value)(*map(within, value, value._fields))  # type: ignore[attr-defined]
    if isinstance(value, (tuple, list)):
        return type(value)(within(v, i) for i, v in enumerate(value))
    if type(value) is dict or _is_output(value):
        new = {k: within(v, k) for k, v in value.items()}
        return type(value)(**new) if _is_output(value) else new
    if _is_record(value):
        names = (f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        return _with(value, {n: within(getattr(value, n), n) for n in names})
    return value


def tensors(value: Any) -> list[tuple[str, Tensor]]:
    """The slots and tensors that `map_slots` goes through, in order."""
    found: list[tuple[str, Tensor]] = []
    map_slots(value, "", lambda x, slot: found.append((slot, x)))
    return found


def returned(output: Any, takes: Container[str]) -> Iterator[tuple[str, Any]]:
    """The `leaves` of what a module gives out, which takes these arguments, but for state."""
    return (found for slot, value in but_state(output, takes) for found in leaves(value, slot))


def but_state(output: Any, takes: Container[str]) -> list[tuple[str, Any]]:
    """What a module gives out that takes arguments of these names, by its slots, but for state.

    That is an object of a class of its own that it also takes, by the name under which it gives it.
    What ranks put into such a cache is what they get back, each its part.
    """
    if (by_name := named(output)) is None:
        return [("", output)]
    return [(str(n), v) for n, v in by_name.items() if not (n in takes and is_own(v))]


def state_of(output: Any, module: nn.Module) -> dict[str, Any]:
    """What a call of `module` gave out that it takes in the next one, by the argument: a cache."""
    takes = inspect.signature(module.forward).parameters
    found = (named(output) or {}).items()
    return {n: v for n, v in found if n in takes and (is_own(v) or isinstance(v, (tuple, list)))}


def named(output: Any) -> Mapping[str, Any] | None:
    """The parts of an output by name; None where they have none."""
    if isinstance(output, (dict, Mapping)):  # a dict is known for one at once
        return output
    return vars(output) if _is_record(output) else None


def leaves(value: Any, slot: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor in `value`, with its slot, and what may have some in it but cannot be looked at.

    Objects of classes of one's own are looked at by their attributes.
    """
    if isinstance(value, (Tensor, *PLAIN)) or value is None or id(value) in around:
        if isinstance(value, Tensor):
            yield slot, value
        return
    if (found := parts(value)) is None:
        yield slot, value
        return
    for key, part in found:
        yield from leaves(part, joined(slot, key), (*around, id(value)))


def parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """What is in `value`, which is nothing plain, by where; None where nobody can look."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    if isinstance(value, Mapping):
        return value.items()
    if not hasattr(value, "__dict__"):
        return None
    slots = {s for c in type(value).__mro__ for s in _names(c.__dict__.get("__slots__", ()))}
    more = [(s, getattr(value, s)) for s in sorted(slots) if hasattr(value, s)]
    return [*vars(value).items(), *more]


class StandsForTensor:
    """What stands for a tensor, and sees to it by itself that it is not taken for a part."""


PLAIN = (
    *(bool, int, float, complex, str, bytes, range, slice, Enum, type, FunctionType),
    *(torch.dtype, torch.device, nn.Module, StandsForTensor),
)
"""What has no tensors of a forward in it."""


def joined(slot: str, key: object) -> str:
    """The slot of what stands under `key` in a value at `slot`."""
    return f"{slot}.{key}" if slot else str(key)


def is_own(value: Any) -> bool:
    """Whether `value` is an object of a class of one's own, and no record of tensors."""
    known = (Tensor, tuple, list, set, frozenset, Mapping, *PLAIN)
    return not (value is None or isinstance(value, known) or dataclasses.is_dataclass(value))


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_record(value: Any) -> bool:
    """Whether `value` is of a dataclass that is no mapping as well."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping))


def _is_output(value: Any) -> bool:
    """Whether `value` is an output as transformers has them: a dataclass that is a mapping."""
    return dataclasses.is_dataclass(value) and isinstance(value, Mapping)


def _with(value: Any, fields: Mapping[str, Any]) -> Any:
    """A copy of an object of a dataclass, frozen or not, with other values of some fields."""
    out = copy.copy(value)
    for name, new in fields.items():
        object.__setattr__(out, name, new)
    return out
