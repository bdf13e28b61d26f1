"""Shows a quantized checkpoint as one of dense weights, which are computed where they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from shardwright.errors import CheckpointError
from shardwright.runtime.checkpoint.header import Entry
from shardwright.runtime.quantized.config import Quantization, Scheme
from shardwright.runtime.quantized.formats import STATE, Format
from shardwright.runtime.quantized.layout import Mismatch, QuantizedWeight, resolve

Read = Callable[[Entry], bytes]


def as_dense(
    entries: Mapping[str, Entry], quantization: Quantization, dtype: torch.dtype, read: Read
) -> tuple[dict[str, Entry], dict[str, QuantizedWeight]]:
    """Replace the stored tensors of quantized weights by the weights.

    Args:
        entries: the stored tensors.
        quantization: what the config says of them.
        dtype: of the weights.
        read: returns the bytes of a stored tensor.

    Returns:
        All tensors, and of those that are quantized what is stored of them. The entry of such a
        weight has the weight's shape and `dtype`, and lies where its elements are stored.

    Raises:
        CheckpointError: tensors are missing, or have another shape or dtype than the config says.
    """
    out, weights = dict(entries), {}
    for key, form, parts in _found(entries, quantization):
        weight = _resolved(key, form, parts, entries, quantization, read)
        codes = entries[parts[form.parts[0].role]]
        used = {part.key for part in weight.parts.values()}
        unused = (_beside(key, name) for name in form.unused.split())
        beside = [name for name in (*parts.values(), *unused) if name in entries]
        for stored in beside:
            out.pop(stored, None)
        out[key] = codes._replace(dtype=dtype, shape=weight.shape)
        weights[key] = replace(weight, beside=tuple(name for name in beside if name not in used))
    for name, entry in out.items():
        if name not in weights and entry.dtype.is_floating_point and entry.dtype.itemsize == 1:
            raise CheckpointError(
                f"{entry.file}: {name} is {_short(entry.dtype)}, but has no scales as "
                f"{quantization.method} stores them: fetch the checkpoint and its config again"
            )
    if not weights:
        raise CheckpointError(
            f"{next(iter(entries.values())).file.parent}: the config says that weights are "
            f"quantized by {quantization.method}, but no tensor is stored so: use the config that "
            "belongs to this checkpoint"
        )
    return out, weights


def _found(
    entries: Mapping[str, Entry], quantization: Quantization
) -> Iterator[tuple[str, Format, dict[str, str]]]:
    """Yield each quantized weight's key, its format, and role -> the key of a stored tensor."""
    known = {form.name: form for scheme in quantization.schemes for form in scheme.formats}
    for stored, entry in entries.items():
        for form in known.values():
            key = _weight_of(stored, form)
            if key is None or _short(entry.dtype) not in form.dtypes.split():
                continue
            parts = {part.role: _key(key, part.key) for part in form.parts}
            held = {role: name for role, name in parts.items() if name in entries}
            complete = all(part.role in held or part.optional for part in form.parts)
            if complete and len({*held.values()}) == len(held):
                yield key, form, held
                break


def _resolved(
    key: str,
    form: Format,
    parts: Mapping[str, str],
    entries: Mapping[str, Entry],
    quantization: Quantization,
    read: Read,
) -> QuantizedWeight:
    """Match a weight with the parameters of one of the config's schemes."""
    stored = {
        role: (name, entries[name].shape, entries[name].dtype.itemsize * 8)
        for role, name in parts.items()
    }
    first: Exception | None = None
    for scheme in _by_name(quantization, key, form):
        try:
            state = lambda: read(entries[parts[STATE]])  # noqa: E731
            return resolve(key, form, scheme.parameters, stored, state)
        except (Mismatch, ValueError, KeyError, TypeError, AttributeError) as error:
            first = first or error
    raise CheckpointError(
        f"{entries[parts[form.parts[0].role]].file}: {key} is not stored as the config says of "
        f"{form.name}: {first}. Use the config that belongs to this checkpoint"
    )


def _by_name(quantization: Quantization, key: str, form: Format) -> list[Scheme]:
    """Return the schemes with this format; the one that names the weight's module comes first."""
    schemes = [scheme for scheme in quantization.schemes if form in scheme.formats]
    named = quantization.scheme(key.rpartition(".")[0], "Linear")
    return sorted(schemes, key=lambda scheme: scheme is not named)


def _weight_of(stored: str, form: Format) -> str | None:
    """Return the key of the weight whose elements are stored as `stored`; None if none could be."""
    before, after = form.parts[0].key.split("{}")
    path, dot, leaf = stored.rpartition(".")
    if not (leaf.startswith(before) and leaf.endswith(after) and len(leaf) > len(before + after)):
        return None
    return path + dot + leaf[len(before) : len(leaf) - len(after)]


def _key(weight: str, template: str) -> str:
    leaf = weight.rpartition(".")[2]
    return _beside(weight, template.replace("{}", leaf))


def _beside(weight: str, name: str) -> str:
    path, dot, _ = weight.rpartition(".")
    return path + dot + name


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
