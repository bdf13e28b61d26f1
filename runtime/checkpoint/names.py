"""Finds the checkpoint tensor that each tensor of a model is loaded from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from shardwright.errors import CheckpointError
from shardwright.planner.contract.names import grouped
from shardwright.runtime.checkpoint.expressions import Expression

Rename = Callable[[str], tuple[str, str | None]]
"""Checkpoint key -> (the name that transformers gives it, a converter's pattern or None)."""


@dataclass(frozen=True)
class Source:
    """The source of a model's tensor: one checkpoint tensor, or an expression of several."""

    key: str
    """The checkpoint tensor; for several, what messages call them."""
    made: Expression | None = None


Convert = Callable[[str, Mapping[str, list[str]]], Mapping[str, Source]]
"""(the new name of keys that are converted together, pattern -> keys) -> parameter -> source."""


@dataclass(frozen=True)
class ModelNames:
    """A model's tensor names, and which missing or surplus checkpoint tensors it allows."""

    title: str
    groups: tuple[tuple[str, ...], ...]
    """All names of each distinct parameter or persistent buffer (several names if tied)."""
    transient: frozenset[str] = frozenset()
    """Non-persistent buffers, which a checkpoint need not hold."""
    prefix: str = ""
    """What a model with a head puts before the names in its base model."""
    may_lack: tuple[str, ...] = ()
    may_hold: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """The result of `match_names`: every tensor of model and checkpoint is accounted for."""

    sources: dict[str, Source]
    """First name of each group -> its source."""
    twins: dict[str, tuple[Source, ...]]
    """First name of a tied group -> further copies, if the checkpoint holds several."""
    computed: tuple[str, ...]
    """Parameters that the checkpoint lacks and that the model class allows to be missing."""
    unread: tuple[str, ...]
    """Checkpoint tensors that the model has no place for and that may be skipped."""


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, with all names of tied ones."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def model_names(model: nn.Module) -> ModelNames:
    """Collect the names of `model`'s tensors."""
    found: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    transient = set()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        if leaf in model.get_submodule(owner)._non_persistent_buffers_set:
            transient.add(name)
        else:
            found.append((name, buffer))
    groups = grouped((id(tensor), name) for name, tensor in found)
    return ModelNames(
        title=type(model).__name__,
        groups=tuple(map(tuple, groups.values())),
        transient=frozenset(transient),
        prefix=getattr(model, "base_model_prefix", "") or "",
        may_lack=tuple(sorted(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())),
        may_hold=tuple(sorted(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())),
    )


def match_names(
    names: ModelNames,
    keys: Iterable[str],
    where: str,
    rename: Rename,
    convert: Convert,
    allow_surplus: bool = False,
    adds_nothing: Callable[[str], bool] = lambda key: False,
) -> Match:
    """Find the checkpoint tensor that fills each tensor of the model.

    A key may match under its own name, as transformers renames it, or with the base model's prefix
    added or dropped. A base model skips the head in the checkpoint of a model with a head.

    Args:
        names: the model's tensor names.
        keys: the checkpoint's tensor names.
        where: what messages call the checkpoint.
        rename: the renaming that is tried first; called once for each key, in order.
        convert: converts the keys that one converter takes together.
        allow_surplus: skip tensors that the model has no place for.
        adds_nothing: whether a tensor that the model has no place for changes no result.

    Raises:
        CheckpointError: tensors are missing, surplus or ambiguous, or cannot be converted.
    """
    keys = list(keys)
    found, surplus = _assign(names, keys, where, rename, convert)
    sources: dict[str, Source] = {}
    twins: dict[str, tuple[Source, ...]] = {}
    missing: list[str] = []
    for group in names.groups:
        held = [found[name] for name in group if name in found]
        if not held:
            missing.append(group[0])
            continue
        sources[group[0]] = held[0]
        if held[1:]:
            twins[group[0]] = tuple(held[1:])
    computed = [name for name in missing if _any(names.may_lack, name)]
    missing = [name for name in missing if name not in computed]
    unread = [
        key for key in surplus if allow_surplus or _tolerated(names, keys, key) or adds_nothing(key)
    ]
    surplus = [key for key in surplus if key not in unread]
    _refuse(names, where, missing, surplus)
    return Match(sources, twins, tuple(computed), tuple(unread))


def _assign(
    names: ModelNames, keys: list[str], where: str, rename: Rename, convert: Convert
) -> tuple[dict[str, Source], list[str]]:
    """Return model name -> source, and the keys that are left over."""
    known = {name for group in names.groups for name in group}
    found: dict[str, Source] = {}
    surplus: list[str] = []
    together: dict[str, dict[str, list[str]]] = {}

    def fill(name: str, source: Source) -> None:
        if name in found:
            raise CheckpointError(
                f"{where} holds {name} twice, as {found[name].key} and as {source.key}: "
                "remove one of them"
            )
        found[name] = source

    for key in keys:
        renamed, pattern = rename(key)
        name = next((n for n in _variants(names.prefix, renamed) if n in known), None)
        if name is not None and pattern is not None:
            together.setdefault(name, {}).setdefault(pattern, []).append(key)
            continue
        # The renaming may not have been meant for this key: transformers then keeps the key.
        name = name or next((n for n in _variants(names.prefix, key) if n in known), None)
        if name is None:
            surplus.append(key)
        else:
            fill(name, Source(key))
    for first, group in together.items():
        for name, source in convert(first, group).items():
            if name in known:
                fill(name, source)
            else:
                surplus.append(f"{name} (made of {source.key})")
    return found, surplus


def _variants(prefix: str, name: str) -> Iterator[str]:
    """Yield `name`, `name` without the base model's prefix, and `name` with it."""
    yield name
    if prefix:
        if name.startswith(prefix + "."):
            yield name.removeprefix(prefix + ".")
        yield f"{prefix}.{name}"


def _tolerated(names: ModelNames, keys: list[str], key: str) -> bool:
    """Return whether the surplus `key` may be skipped."""
    if _any(names.may_hold, key):
        return True
    # Old checkpoints hold buffers that are now computed, sometimes in another module. Compare only
    # the owner's name and the leaf ("rotary_emb.inv_freq").
    tail = key.split(".")[-2:]
    if len(tail) == 2 and any(name.split(".")[-2:] == tail for name in names.transient):
        return True
    dot = names.prefix + "."
    is_base = not any(name.startswith(dot) for group in names.groups for name in group)
    has_head = any(k.startswith(dot) for k in keys)
    return bool(names.prefix) and is_base and has_head and not key.startswith(dot)


def _refuse(names: ModelNames, where: str, missing: list[str], surplus: list[str]) -> None:
    if not missing and not surplus:
        return
    texts = []
    if missing:
        texts.append(
            f"{where} lacks {len(missing)} of the {len(names.groups)} tensors of {names.title}: "
            f"{few(missing)}"
        )
    if surplus:
        texts.append(
            f"{'it' if missing else where} holds {len(surplus)} tensor{'s' * (len(surplus) > 1)} "
            f"that {names.title} has no place for: {few(surplus)}"
        )
    todo = "load it with the class and config that its config.json names"
    if not missing:
        todo += ", or pass allow_surplus=True to leave them unread"
    raise CheckpointError(f"{'; '.join(texts)}: {todo}")


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def few(names: Iterable[str]) -> str:
    """Return the first three of `names`, in one line, and how many more there are."""
    names = list(names)
    more = len(names) - 3
    first = ", ".join(name if name.isprintable() else repr(name) for name in names[:3])
    return first + (f" and {more} more" if more > 0 else "")
