"""Slots: finds and replaces single tensors in the arguments or the output of a forward.

A slot is a dotted name: "hidden_states", "position_embeddings.0", "*0" (first of *args), "logits".
"" is an output that is a single tensor. Containers are rebuilt, never changed in place: callers may
still hold them. What a callee then does to its copy, `give_back` does to the caller's container.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.planner.contract.names import taken_as

Keys = tuple[str, ...]
Kinds = type | tuple[type, ...]


def keys_of(slot: str) -> Keys:
    """The keys of a slot: "past.0" -> ("past", "0"), "" -> ()."""
    return tuple(slot.split(".")) if slot else ()


@lru_cache(maxsize=1 << 12)
def parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a method by name, including `self`."""
    return inspect.signature(forward).parameters


def positions(forward: Callable[..., Any]) -> tuple[dict[str, int], int]:
    """The index of each argument that may be given by position, and the index of *args."""
    names: dict[str, int] = {}
    parameters = list(parameters_of(forward).values())[1:]  # without self
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return names, index
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
            break
        names[parameter.name] = index
    return names, len(names)


def names_of(args: Sequence[Any], names: Iterable[str]) -> list[str]:
    """The names of arguments that are given by position; "*0" is the first that has none."""
    return [*names, *(f"*{i}" for i in range(len(args)))][: len(args)]


def index_of(root: str, names: dict[str, int], varargs: int) -> int | None:
    """The position of argument `root`; None if it can only be given by name."""
    if root.startswith("*"):
        return varargs + int(root[1:])
    return names.get(root)


def find_argument(
    name: str, index: int | None, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """The key of an argument, or None if it is not given, and `args` or `kwargs`."""
    if name in kwargs:
        return name, kwargs
    given = index is not None and index < len(args)
    return (index if given else None), args


def replace(value: Any, keys: Keys, change: Callable[[Tensor], Any]) -> Any:
    """Return `value` with the tensor at `keys` changed; unchanged if that is None or absent.

    Raises:
        PlanError: something other than a tensor is there, so the plan is not for this value.
    """
    if value is None:
        return None
    if not keys:
        if isinstance(value, Tensor):
            return change(value)
        raise PlanError(f"expected a tensor, found {type(value).__name__}")
    key, rest = keys[0], keys[1:]
    parts = dict(value) if isinstance(value, Mapping) else _contents(value)
    if parts is None:
        raise PlanError(f"'{key}' cannot be found in a {type(value).__name__}")
    at: Any = key
    if key not in parts:
        if isinstance(value, (tuple, list)) and not key.isdigit():
            raise PlanError(
                f"'{key}' cannot be found in a {type(value).__name__}: call with return_dict=True"
            )
        if not key.isdigit() or int(key) >= len(parts):
            return value
        at = [*parts][int(key)]
    return _with_contents(value, {**parts, at: replace(parts[at], rest, change)})


def map_slots(
    value: Any, slot: str, change: Callable[[Any, str], Any], kinds: Kinds = Tensor
) -> Any:
    """Return `value` with `change(tensor, slot)` in place of each tensor in it.

    Args:
        value: A tensor, or a container.
        slot: The slot of `value`. Slots in it are joined by dots.
        change: Called with each tensor and its slot.
        kinds: The classes that are changed, instead of tensors.

    Containers other than tuples, lists, dicts and dataclasses (such as a KV cache) are left alone.
    """
    if isinstance(value, kinds):
        return change(value, slot)
    if (parts := _contents(value)) is None:
        return value
    new = {key: map_slots(x, joined(slot, key), change, kinds) for key, x in parts.items()}
    return _with_contents(value, new)


def tensors(value: Any) -> list[tuple[str, Tensor]]:
    """The slots and tensors that `map_slots` visits, in order."""
    found: list[tuple[str, Tensor]] = []
    map_slots(value, "", lambda x, slot: found.append((slot, x)))
    return found


class Rebuilt(NamedTuple):
    """A container of a caller, the copy that a callee gets, and what both hold before the call."""

    outer: Any
    inner: Any
    outside: dict[Any, Any]
    inside: dict[Any, Any]


def rebuilt(outer: Any, inner: Any) -> list[Rebuilt]:
    """The containers in `outer`, a value of a caller, of which `inner` has copies."""
    if outer is inner or (outside := _contents(outer, attributes=True)) is None:
        return []
    inside = _contents(inner, attributes=True) or {}
    own = [] if isinstance(outer, tuple) else [Rebuilt(outer, inner, outside, inside)]
    return own + [x for key, value in outside.items() for x in rebuilt(value, inside[key])]


def give_back(found: list[Rebuilt]) -> None:
    """Do to the containers of a caller what its callee did to the copies, of `rebuilt`."""
    outside = {id(x.inside[k]): value for x in found for k, value in x.outside.items()}
    outside |= {id(x.inner): x.outer for x in found}
    for outer, inner, _, inside in found:
        now = _contents(inner, attributes=True) or {}
        if list(now) == list(inside) and all(now[key] is value for key, value in inside.items()):
            continue
        new = {key: outside.get(id(value), value) for key, value in now.items()}
        if isinstance(outer, list):
            outer[:] = new.values()
        elif type(outer) is dict:
            outer.clear()
            outer.update(new)
        else:
            for name in inside.keys() - new.keys():
                object.__delattr__(outer, name)
            for name, value in new.items():
                setattr(outer, name, value)


def _contents(value: Any, attributes: bool = False) -> dict[Any, Any] | None:
    """What is in a container that is rebuilt (`map_slots`), by key; None if `value` is none.

    Of a dataclass, these are its fields, or all of its `attributes`.
    """
    if isinstance(value, (tuple, list)):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if type(value) is dict or _is_output(value):
        return dict(value)
    if not _is_record(value):
        return None
    names: Iterable[str] = [f.name for f in dataclasses.fields(value)]
    if attributes:
        names = getattr(value, "__dict__", None) or names
    return {n: getattr(value, n) for n in names if hasattr(value, n)}


def _with_contents(value: Any, contents: dict[Any, Any]) -> Any:
    """A container like `value` with other contents."""
    kind: Any = type(value)
    if isinstance(value, (tuple, list)):
        return kind(*contents.values()) if hasattr(value, "_fields") else kind(contents.values())
    if kind in (dict, OrderedDict):
        return kind(contents)
    if isinstance(value, OrderedDict) and dataclasses.is_dataclass(value):
        return _output(kind, contents)
    if isinstance(value, Mapping):
        return kind(**contents)
    out = copy.copy(value)
    for name, new in contents.items():
        object.__setattr__(out, name, new)  # frozen or not
    return out


def _output(kind: Any, contents: Mapping[str, Any]) -> Any:
    """An output of transformers with these contents, in their order: code may read it by number."""
    fields = {f.name for f in dataclasses.fields(kind)}
    out = kind(**{name: value for name, value in contents.items() if name in fields})
    if [*out] != [*contents]:  # code may have put more into it, in any order
        for name, value in contents.items():
            out[name] = value
            out.move_to_end(name)
    return out


def returned(output: Any, takes: Container[str]) -> list[tuple[str, Any]]:
    """The `leaves` of an output, without state (`but_state`)."""
    found: list[tuple[str, Any]] = []
    for slot, value in but_state(output, takes):
        if isinstance(value, Tensor):
            found.append((slot, value))
        else:
            found += leaves(value, slot)
    return found


def but_state(output: Any, takes: Container[str]) -> list[tuple[str, Any]]:
    """The values of an output by slot, without state such as a cache.

    State is an object of a custom class that the module also takes as an argument of the same name,
    or of another name for a cache.
    Each rank gets back from such a cache the local tensors that it put in.

    Args:
        output: What the module returned.
        takes: The names of its arguments.
    """
    if (by_name := named(output)) is None:
        return [("", output)]
    found = []
    for name, value in by_name.items():
        if taken_as(name, takes) not in takes or not is_own(value):
            found.append((str(name), value))
    return found


def state_of(output: Any, module: nn.Module) -> dict[str, Any]:
    """The values in `output` that the next call of `module` takes, by argument: caches."""
    takes = inspect.signature(module.forward).parameters
    found = sorted((named(output) or {}).items(), key=lambda one: one[0] in takes)
    state = ((taken_as(n, takes), v) for n, v in found if is_own(v) or isinstance(v, (tuple, list)))
    return {name: value for name, value in state if name in takes}


def named(output: Any) -> Mapping[str, Any] | None:
    """The values of an output by name; None if it has no names."""
    if isinstance(output, (dict, Mapping)):  # checking for dict first is fast
        return output
    return vars(output) if _is_record(output) else None


def leaves(value: Any, slot: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor in `value`, with its slot, and each object that cannot be searched.

    Objects of custom classes are searched by their attributes.
    """
    if isinstance(value, (Tensor, *HOLD_NO_TENSORS)) or value is None or id(value) in around:
        if isinstance(value, Tensor):
            yield slot, value
        return
    if (found := parts(value)) is None:
        yield slot, value
        return
    for key, part in found:
        yield from leaves(part, joined(slot, key), (*around, id(value)))


def parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The keys and values in `value`, not `HOLD_NO_TENSORS`; None if it cannot be searched."""
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
    """Base of objects that stand for a tensor and themselves prevent misuse as a full one."""


HOLD_NO_TENSORS = (
    *(bool, int, float, complex, str, bytes, range, slice, Enum, type, FunctionType),
    *(torch.dtype, torch.device, nn.Module, StandsForTensor),
)
"""Classes of objects without tensors of a forward."""


def joined(slot: str, key: object) -> str:
    """The slot of the entry `key` of a value at `slot`."""
    return f"{slot}.{key}" if slot else str(key)


def is_own(value: Any) -> bool:
    """Whether `value` is of a custom class: neither plain nor a container nor a dataclass."""
    known = (Tensor, tuple, list, set, frozenset, Mapping, *HOLD_NO_TENSORS)
    return not (value is None or isinstance(value, known) or dataclasses.is_dataclass(value))


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_record(value: Any) -> bool:
    """Whether `value` is a dataclass object, but not a mapping."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping))


def _is_output(value: Any) -> bool:
    """Whether `value` is an output of transformers: a dataclass that is a mapping."""
    return dataclasses.is_dataclass(value) and isinstance(value, Mapping)
