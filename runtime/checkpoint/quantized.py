"""Shows a quantized checkpoint as one of dense weights, which are computed where they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from shardwright.errors import CheckpointError
from shardwright.planner.contract.names import dtype_name
from shardwright.runtime.checkpoint.header import Entry
from shardwright.runtime.quantized.config import Quantization, Scheme
from shardwright.runtime.quantized.formats import EXPONENTS, STATE, Format
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
    for key, candidates in _found(entries, quantization):
        weight, parts = _resolved(key, candidates, entries, quantization, read)
        codes_role = weight.format.parts[0].role
        codes = entries[parts[codes_role]]
        if key in weights or (key in entries and key not in parts.values()):
            raise CheckpointError(
                f"{codes.file}: {key} is stored twice, also as {parts[codes_role]}: fetch the "
                "checkpoint again"
            )
        used = {part.key for part in weight.parts.values()}
        unused = (_named(key, template) for template in weight.format.unused.split())
        beside = [*parts.values(), *(name for name in unused if name in out)]
        for stored in beside:
            out.pop(stored, None)
        out[key] = codes._replace(dtype=dtype, shape=weight.shape)
        weights[key] = replace(weight, beside=tuple(name for name in beside if name not in used))
    for name, entry in out.items():
        if name not in weights and entry.dtype.is_floating_point and entry.dtype.itemsize == 1:
            raise CheckpointError(
                f"{entry.file}: {name} is {dtype_name(entry.dtype)}, but has no scales as "
                f"{quantization.method} stores them: fetch the checkpoint and its config again"
            )
    if not weights:
        raise CheckpointError(
            f"{next(iter(entries.values())).file.parent}: the config says that weights are "
            f"quantized by {quantization.method}, but no tensor is stored so: use the config that "
            "belongs to this checkpoint"
        )
    return out, weights


UNFIT = (Mismatch, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What is raised where tensors are not what the config says."""

Candidates = list[tuple[Format, dict[str, str]]]
"""Formats that a weight may have, each with role -> the key of a stored tensor."""


def _found(
    entries: Mapping[str, Entry], quantization: Quantization
) -> Iterator[tuple[str, Candidates]]:
    """Yield each quantized weight's key, and the formats whose tensors are all stored."""
    known = {form.name: form for scheme in quantization.schemes for form in scheme.formats}
    for stored, entry in entries.items():
        found: dict[str, Candidates] = {}
        for form in known.values():
            key = _weight_of(stored, form)
            if key is None or dtype_name(entry.dtype) not in form.dtypes.split():
                continue
            held = {
                part.role: name
                for part in form.parts
                if (name := _key(key, part.keys, entries)) is not None
            }
            complete = all(part.role in held or part.optional for part in form.parts)
            if complete and len({*held.values()}) == len(held):
                found.setdefault(key, []).append((form, held))
        yield from found.items()


def _resolved(
    key: str,
    candidates: Candidates,
    entries: Mapping[str, Entry],
    quantization: Quantization,
    read: Read,
) -> tuple[QuantizedWeight, dict[str, str]]:
    """Return a weight, and its stored tensors by role.

    The first format and the first of the config's schemes that fit the shapes are taken.
    """
    module, first = key.rpartition(".")[0], ""
    named, likely = (quantization.scheme(module, kind) for kind in ("", "Linear"))
    order = (likely or quantization.schemes[0]).formats
    candidates = sorted(candidates, key=lambda found: order.index(found[0]))
    for form, parts in candidates:
        stored = {
            role: (name, entries[name].shape, entries[name].dtype.itemsize * 8)
            for role, name in parts.items()
        }
        schemes = [scheme for scheme in quantization.schemes if form in scheme.formats]
        if named is not None:  # the config may have names that are not the checkpoint's
            schemes = [scheme for scheme in schemes if scheme.targets == named.targets]
        for scheme in sorted(schemes, key=lambda scheme: scheme is not likely):
            try:
                _check(key, form, parts, entries, scheme)
                state = lambda: read(entries[parts[STATE]])  # noqa: E731, B023
                return resolve(key, form, scheme.parameters, stored, state), parts
            except UNFIT as error:
                first = first or f"{form.name}: {error}"
    codes = next(iter(candidates[0][1].values()))
    raise CheckpointError(
        f"{entries[codes].file}: {key} is not stored as the config says of {first}. Use the config "
        "that belongs to this checkpoint"
    )


def _check(
    key: str, form: Format, parts: Mapping[str, str], entries: Mapping[str, Entry], scheme: Scheme
) -> None:
    """Check that what the config asks for is there, and that no tensor has a senseless dtype."""
    for part in form.parts:
        if part.role not in parts:
            if part.role in scheme.needs:
                raise Mismatch(f"{_named(key, part.keys[0])} is missing")
            continue
        dtype = dtype_name(entries[parts[part.role]].dtype)
        exponents = dtype == "uint8" and part.dtypes == EXPONENTS and not scheme.exponents
        if part.dtypes and dtype not in part.dtypes or exponents:
            raise Mismatch(f"{parts[part.role]} is {dtype}")


def _weight_of(stored: str, form: Format) -> str | None:
    """Return the key of the weight whose elements are stored as `stored`; None if none could be."""
    before, after = form.parts[0].keys[0].split("{}")
    path, dot, leaf = stored.rpartition(".")
    if not (leaf.startswith(before) and leaf.endswith(after) and len(leaf) > len(before + after)):
        return None
    return path + dot + leaf[len(before) : len(leaf) - len(after)]


def _key(weight: str, templates: Sequence[str], entries: Mapping[str, Entry]) -> str | None:
    names = (_named(weight, template) for template in templates)
    return next((name for name in names if name in entries), None)


def _named(weight: str, template: str) -> str:
    path, dot, leaf = weight.rpartition(".")
    if template.startswith("../"):
        path, template = path.rpartition(".")[0], template.removeprefix("../")
    return path + dot + template.replace("{}", leaf)
