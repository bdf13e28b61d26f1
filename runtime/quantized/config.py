"""Reads a config's `quantization_config`: formats, their parameters, and what is not quantized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shardwright.errors import CheckpointError
from shardwright.runtime.quantized.formats import FORMATS, Format, formats

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Scheme:
    """How some of the modules are quantized.

    Attributes:
        formats: what their weights may be stored as; the first one unless tensors say otherwise.
        parameters: for the formats.
        targets: names of modules, of classes, or "re:" and a pattern of names.
    """

    formats: tuple[Format, ...]
    parameters: Fields = field(default_factory=dict)
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True)
class Quantization:
    """What a config says of its checkpoint's weights.

    Attributes:
        left_out: modules that are not quantized, written as targets are; or the start, the end, or
            a pattern of their names.
        fields: the `quantization_config`.
    """

    method: str
    schemes: tuple[Scheme, ...]
    left_out: tuple[str, ...] = ()
    fields: Fields = field(default_factory=dict)

    def scheme(self, name: str, kind: str) -> Scheme | None:
        """Return the scheme of the module `name` of class `kind`; None if it is not quantized."""
        if any(_matches(target, name, kind) or _is_part(target, name) for target in self.left_out):
            return None
        for scheme in self.schemes:
            if any(_matches(target, name, kind) for target in scheme.targets):
                return scheme
        return None


def read_quantization(config: Any) -> Quantization | None:
    """Read `config.quantization_config`, of the config or of its text part; None if there is none.

    Raises:
        CheckpointError: the method is not known, or a parameter is not valid.
    """
    fields = _fields(config)
    if fields is None:
        return None
    method = str(fields.get("quant_method", "") or _implied(fields))
    known = formats(method)
    if not known:
        names = ", ".join(sorted({form.method for form in FORMATS}))
        raise CheckpointError(
            f"the checkpoint is quantized by '{method:.40}', which is not known here ({names}): "
            "use the checkpoint that it was made from, or a package that adds the format (an entry "
            "point in the group shardwright.quantization)"
        )
    try:
        schemes, left_out = READERS.get(method, _plain)(fields, known), tuple(_left_out(fields))
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the quantization_config cannot be read ({error}): fetch config.json again"
        ) from None
    for scheme in schemes:
        for key, value in scheme.parameters.items():
            if value is not None and (type(value) is not int or value < (key != "less")):
                raise CheckpointError(
                    f"the quantization_config gives {key} as {value!r:.40}, which is not a number "
                    "above 0: fetch config.json again"
                )
    return Quantization(method, tuple(schemes), left_out, fields)


def drop_quantization(config: Any) -> None:
    """Remove what a config says of quantization: its model is going to be dense."""
    for part in _parts(config):
        vars(part).pop("quantization_config", None)


def _parts(config: Any) -> list[Any]:
    """Return the config, and its text part if it has one."""
    text = getattr(config, "text_config", None)
    return [config] if text is None else [config, text]


def _fields(config: Any) -> Fields | None:
    for part in _parts(config):
        found: Any = getattr(part, "quantization_config", None)
        found = found.to_dict() if hasattr(found, "to_dict") else found
        if found and isinstance(found, Mapping):
            return {k: v.value if isinstance(v, Enum) else v for k, v in found.items()}
    return None


def _implied(fields: Fields) -> str:
    return "bitsandbytes" if fields.get("load_in_4bit") or fields.get("load_in_8bit") else ""


LEFT_OUT = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules", "ignored_layers")
"""Keys of lists of modules that are not quantized."""


def _left_out(fields: Fields) -> Iterable[str]:
    listed = [name for key in LEFT_OUT for name in _list(fields, key)]
    return map(str, listed or () if fields.get("lm_head") else [*listed, "lm_head"])


def _list(fields: Fields, key: str) -> list[Any]:
    found = fields.get(key) or []
    if not isinstance(found, list | tuple):
        raise TypeError(f"{key} is {found!r:.40}, not a list")
    return [*found]


def _plain(fields: Fields, known: list[Format]) -> list[Scheme]:
    """The parameters are the config's numbers, under its own names."""
    numbers = {k: v for k, v in fields.items() if type(v) is int}
    return [Scheme(tuple(known), numbers)]


def _told_by_shapes(fields: Fields, known: list[Format]) -> list[Scheme]:
    return [Scheme(tuple(known))]


def _blocks(fields: Fields, known: list[Format]) -> list[Scheme]:
    block = fields.get("weight_block_size")
    if block is None:  # the size of blocks cannot be told from the number of their scales
        return [Scheme(tuple(known), {"rows": rows, "cols": None}) for rows in (None, 1)]
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise CheckpointError(
            f"the quantization_config gives weight_block_size as {block!r:.40}, which is not a "
            "pair of numbers: fetch config.json again"
        )
    return [Scheme(tuple(known), {"rows": block[0], "cols": block[1]})]


def _grouped(fields: Fields, known: list[Format]) -> list[Scheme]:
    keys = ("checkpoint_format", "version", "format")
    layout = str(next((fields[key] for key in keys if fields.get(key)), "gptq")).lower()
    if layout not in LESS:
        raise CheckpointError(
            f"the checkpoint is packed as '{layout:.40}', which is not known here "
            f"({', '.join(LESS)}): use the checkpoint that it was made from"
        )
    out = []
    # Modules with their own numbers; what begins with "-:" is not quantized.
    for pattern, own in [*(fields.get("dynamic") or {}).items(), (None, {})]:
        told = {"bits": 4, "group_size": 128, **fields, **(own or {})}
        size = None if told["group_size"] == -1 else told["group_size"]
        parameters = {"bits": told["bits"], "cols": size, "less": LESS[layout]}
        target = "Linear" if pattern is None else "re:" + pattern.removeprefix("+:")
        if pattern is None or not pattern.startswith("-:"):
            out.append(Scheme(tuple(known), parameters, (target,)))
    return out


LESS = {"gptq": 1, "gptq_v2": 0, "gemm": 0}
"""Layout of packed groups -> what was subtracted from zero points."""


def _as_saved(fields: Fields, known: list[Format]) -> list[Scheme]:
    width = "int8" if fields.get("load_in_8bit") else "4bit"
    return [Scheme(tuple(sorted(known, key=lambda form: not form.name.endswith(width))))]


STRATEGIES: Mapping[str, Callable[[Fields], Fields]] = {
    "tensor": lambda weights: {"rows": None, "cols": None},
    "channel": lambda weights: {"rows": 1, "cols": None},
    "group": lambda weights: {"rows": 1, "cols": weights.get("group_size")},
    "tensor_group": lambda weights: {"rows": 1, "cols": weights.get("group_size")},
    "block": lambda weights: dict(
        zip(("rows", "cols"), weights.get("block_structure") or (), strict=True)
    ),
}
"""What one scale stands for: strategy -> rows and columns; None stands for all."""

PACKED = {
    "pack-quantized": "compressed-tensors, packed",
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4, packed",
    "mxfp6-pack-quantized": "MXFP6, packed",
}
"""What `format` says -> the name of the format, if it is not the unpacked one."""


def _by_groups(fields: Fields, known: list[Format]) -> list[Scheme]:
    if (fields.get("transform_config") or {}).get("config_groups"):
        raise CheckpointError(
            "the quantization_config has a transform_config: activations are to be rotated, which "
            "is not known here: use the checkpoint that it was made from"
        )
    out = []
    for group in (fields.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        strategy = str(
            weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
        )
        if strategy not in STRATEGIES:
            raise CheckpointError(
                f"the quantization_config has the strategy '{strategy:.40}', which is not known "
                f"here ({', '.join(STRATEGIES)}): use the checkpoint that it was made from"
            )
        name = PACKED.get(str(group.get("format") or fields.get("format")), "compressed-tensors")
        first = sorted(known, key=lambda form: form.name != name)
        parameters = {"bits": weights.get("num_bits", 8), **STRATEGIES[strategy](weights)}
        out.append(Scheme(tuple(first), parameters, tuple(map(str, _list(group, "targets")))))
    return out


READERS: Mapping[str, Callable[[Fields, list[Format]], list[Scheme]]] = {
    "fp8": _blocks,
    "gptq": _grouped,
    "awq": _grouped,
    "bitsandbytes": _as_saved,
    "compressed-tensors": _by_groups,
    "fbgemm_fp8": _told_by_shapes,
    "mxfp4": _told_by_shapes,
    "torchao": _told_by_shapes,
}
"""`quant_method` -> how its config is read."""


def _matches(target: str, name: str, kind: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target in (name, kind)


def _is_part(target: str, name: str) -> bool:
    """Return whether `name` starts with the modules of `target`, or ends with it."""
    try:
        starts = re.match(rf"(?:{target})(?:(?<=\.)|(?=\.|$))", name) is not None
    except re.error:
        starts = False
    return starts or name.endswith(target)
