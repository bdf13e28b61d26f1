"""Names of modules and tensors, and tables whose keys may have `*` for a layer number."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from functools import lru_cache
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "layer_past")
"""Names that the argument or the output for a cache may have, the newest first.

transformers renames it: wrappers of forwards then rename old names, and outputs have the new one.
"""

DRAWN_LIKE = frozenset("bernoulli.p rand_like randn_like randint_like".split())
"""Ops, perhaps with an overload, that draw a new tensor of the shape of their first argument."""
DRAWN_INTO = frozenset(
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split()
)
"""Ops that draw random numbers into their first argument, if no other argument is a tensor."""


def is_drawn_like(name: str, overload: str) -> bool:
    """Return whether an op draws a new tensor of the shape of its first argument."""
    return name in DRAWN_LIKE or f"{name}.{overload}" in DRAWN_LIKE


PAGED = "cache"
"""The argument for a paged cache, in calls of transformers' continuous batching."""

PAGED_CACHES = ("PagedAttentionCache", "TracedPagedCache")
"""The classes of paged caches: that of transformers, and the one that stands for it in a trace."""

EAGER, PAGED_EAGER = "eager", "paged|eager"
"""Attention in a model's own ops, and what continuous batching sets in its place."""
PAGING = ((EAGER, PAGED_EAGER), (PAGED_EAGER, EAGER))
"""Changes of attention by which continuous batching begins and ends."""

MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
"""Padding masks -> the argument with the tokens that they mask."""


def cache_argument(takes: Container[str]) -> str:
    """Return the name of the argument for a cache among those that a forward takes; else ""."""
    return next((name for name in CACHE_NAMES if name in takes), "")


def taken_as(name: str, takes: Container[str]) -> str:
    """Return the argument that takes what an output, or another version, calls `name`.

    This is `name` unless that is a cache for which the forward has another name.
    """
    known = name in takes or name not in CACHE_NAMES
    return name if known else cache_argument(takes) or name


def old_names(takes: Container[str]) -> dict[str, str]:
    """Return old names for a cache -> the name that a forward has for it.

    Newer names than the forward has are no caches to its code.
    """
    now = cache_argument(takes)
    old = CACHE_NAMES[CACHE_NAMES.index(now) + 1 :] if now else ()
    return {name: now for name in old if name not in takes}


def renamed(given: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """Return arguments with the one that has an old name of `names` under the new name.

    If there are several, or the new name is taken, all stay as they are.
    """
    old = names.keys() & given.keys()
    names = names if len(old) == 1 and names[min(old)] not in given else {}
    return {names.get(name, name): value for name, value in given.items()}


def is_batched(state: Mapping[str, str]) -> bool:
    """Return whether a call with caches of these classes, by argument, batches continuously."""
    return any(kind in PAGED_CACHES for kind in state.values())


def dtype_name(dtype: object) -> str:
    """Return the name of a torch dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=1 << 16)
def pattern(name: str) -> str:
    """Replace each number that stands alone between dots by *."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def slot_pattern(slot: str) -> str:
    """Replace numbers by * except in the first part: tuple elements of a slot stay distinct."""
    first, dot, rest = slot.partition(".")
    return first + dot + pattern(rest) if dot else slot


def is_within(name: str, around: str) -> bool:
    """Return whether `name` is the module `around` or something in it."""
    return f"{name}.".startswith(f"{around}.")


def prefixes(module: str) -> list[str]:
    """Return the names of the modules around a module and its own: "", "a", "a.b" for a.b."""
    words = module.split(".") if module else []
    return [".".join(words[:n]) for n in range(len(words) + 1)]


def numbered(module: str) -> list[str]:
    """Return the numbered modules that `module` is in, itself included, the outermost first."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def block_number(name: str, path: str) -> int | None:
    """Return the number of the block that `name` is in, of the list of blocks `path`; else None."""
    rest = name.removeprefix(f"{path}.")
    return int(rest.partition(".")[0]) if rest != name else None


def first_block(name: str, firsts: Mapping[str, int]) -> str:
    """Return the block that `name` is in; "" if it is not among the first of a list of blocks.

    Args:
        name: A module or parameter.
        firsts: List of blocks -> how many of them count.
    """
    for path, count in firsts.items():
        number = block_number(name, path)
        if number is not None and number < count:
            return f"{path}.{number}"
    return ""


def lookup(table: Mapping[str, T], name: str) -> T | None:
    """Return the entry for `name`, or else for its pattern, or else None."""
    return table.get(name, table.get(pattern(name)))


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the second of each pair by the first, in order."""
    out: dict[K, list[T]] = {}
    for key, value in pairs:
        out.setdefault(key, []).append(value)
    return out


def made_once(table: MutableMapping[K, T], key: K, make: Callable[[], T]) -> T:
    """Return the entry of a table. An entry that is missing is made first."""
    if key not in table:
        table[key] = make()
    return table[key]


def fold(entries: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """Fold `entries` into one per pattern, if all of `names` that fit the pattern have equal ones.

    Args:
        entries: Values by name.
        names: All names, including names without an entry.
    """
    out: dict[str, T] = {}
    for key, members in grouped((pattern(name), name) for name in names).items():
        first = entries.get(members[0])
        found = [entries.get(m) for m in members]
        if first is not None and all(x is first or x == first for x in found):
            out[key] = first
        else:
            out |= {m: entries[m] for m in members if m in entries}
    return out
