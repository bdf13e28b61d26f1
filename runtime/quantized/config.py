"""Reads a config's `quantization_config`: formats, their parameters, and what is not quantized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
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
        needs: roles of tensors that must be stored, though their format can do without.
        exponents: bytes may stand for scales.
    """

    formats: tuple[Format, ...]
    parameters: Fields = field(default_factory=dict)
    targets: tuple[str, ...] = ("Linear",)
    needs: tuple[str, ...] = ()
    exponents: bool = True


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
        """Return the scheme of the module `name` of class `kind`; None if it is not quantized.

        A target that is the name comes before a pattern, and that before a class.
        """
        for target in self.left_out:
            named = target in (name, kind) or _is_pattern_of(target, name)
            if named or _is_part(target, name):
                return None
        found = (s for s in self.schemes if name in s.targets)
        by_pattern = (s for s in self.schemes if any(_is_pattern_of(t, name) for t in s.targets))
        of_class = (s for s in self.schemes if kind in s.targets)
        return next(chain(found, by_pattern, of_class), None)


def read_quantization(config: Any) -> Quantization | None:
    """Read `config.quantization_config`, of the config or of its text part; None if there is none.

    Raises:
        CheckpointError: the method is not known, or a parameter is not valid.
    """
    fields = _fields(config)
    if fields is None:
        return None
    bits = fields.get("load_in_4bit") or fields.get("load_in_8bit")
    method = str(fields.get("quant_method", "") or ("bitsandbytes" if bits else ""))
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
        for target in (*left_out, *(target for scheme in schemes for target in scheme.targets)):
            if target.startswith(PATTERN):
                re.compile(target.removeprefix(PATTERN))
    except (TypeError, AttributeError, ValueError, KeyError, re.error) as error:
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


PATTERN = "re:"
"""How a target begins that is a pattern of names."""

NOT = "-:"
"""How a pattern of names begins, in GPTQ's config, whose modules are not quantized."""

LEFT_OUT = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules", "ignored_layers")
"""Keys of lists of modules that are not quantized."""


def _left_out(fields: Fields) -> Iterable[str]:
    listed = [name for key in LEFT_OUT for name in _list(fields, key)]
    dynamic = (name for name in fields.get("dynamic") or () if name.startswith(NOT))
    listed += [PATTERN + name.removeprefix(NOT) for name in dynamic]
    if fields.get("quant_method") == "modelopt":
        listed = [PATTERN + _with_all_inside(str(name)) for name in listed]
    return map(str, listed or () if fields.get("lm_head") else [*listed, "lm_head"])


def _with_all_inside(wildcard: str) -> str:
    module = wildcard.removesuffix("*").removesuffix(".")
    return ".*".join(map(re.escape, module.split("*"))) + r"(?:\..*)?$"


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


def _by_types(fields: Fields, known: list[Format]) -> list[Scheme]:
    """The class that torchao has for integers of any width always stores zero points."""
    kind = ((fields.get("quant_type") or {}).get("default") or {}).get("_type")
    return [Scheme(tuple(known), needs=("zero",) if "Intx" in str(kind) else ())]


def _blocks(fields: Fields, known: list[Format]) -> list[Scheme]:
    block = fields.get("weight_block_size")
    exponents = fields.get("scale_fmt") == "ue8m0"
    if block is None:  # the size of blocks cannot be told from the number of their scales
        sizes = [{"rows": rows, "cols": None} for rows in (None, 1)]
        return [Scheme(tuple(known), size, exponents=exponents) for size in sizes]
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise CheckpointError(
            f"the quantization_config gives weight_block_size as {block!r:.40}, which is not a "
            "pair of numbers: fetch config.json again"
        )
    size = {"rows": block[0], "cols": block[1]}
    return [Scheme(tuple(known), size, exponents=exponents)]


def _grouped(fields: Fields, known: list[Format]) -> list[Scheme]:
    keys = ("checkpoint_format", "version", "format")
    layout = str(next((fields[key] for key in keys if fields.get(key)), "gptq")).lower()
    if layout not in LESS:
        raise CheckpointError(
            f"the checkpoint is packed as '{layout:.40}', which is not known here "
            f"({', '.join(LESS)}): use the checkpoint that it was made from"
        )
    out = []
    # Modules with their own numbers; those that are not quantized are left out.
    for pattern, own in [*(fields.get("dynamic") or {}).items(), (None, {})]:
        told = {"bits": 4, "group_size": 128, **fields, **(own or {})}
        size = None if told["group_size"] == -1 else told["group_size"]
        parameters = {"bits": told["bits"], "cols": size, "less": LESS[layout]}
        target = "Linear" if pattern is None else PATTERN + pattern.removeprefix("+:")
        needs = ("groups",) if told.get("desc_act") and size is not None else ()
        if told.get("zero_point", True):
            needs += ("zero",)
        if pattern is None or not pattern.startswith(NOT):
            out.append(Scheme(tuple(known), parameters, (target,), needs))
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
    "block": lambda weights: dict(zip(("rows", "cols"), _structure(weights), strict=True)),
}
"""What one scale stands for: strategy -> rows and columns; None stands for all."""


def _structure(weights: Fields) -> Sequence[Any]:
    """Return rows and columns of a block, which older configs have as "128x128"."""
    found = weights.get("block_structure") or ()
    return [*map(int, found.split("x"))] if isinstance(found, str) else found


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
        size = weights.get("group_size")
        implied = "channel" if size == -1 else "group" if size else "tensor"
        strategy = str(weights.get("strategy") or implied).lower()
        if strategy not in STRATEGIES:
            raise CheckpointError(
                f"the quantization_config has the strategy '{strategy:.40}', which is not known "
                f"here ({', '.join(STRATEGIES)}): use the checkpoint that it was made from"
            )
        layout = str(group.get("format") or fields.get("format"))
        name = PACKED.get(layout, "compressed-tensors")
        exponents = layout.startswith("mx") or "uint8" in str(weights.get("scale_dtype"))
        first = sorted(known, key=lambda form: form.name != name)
        parameters = {"bits": weights.get("num_bits", 8), **STRATEGIES[strategy](weights)}
        targets = tuple(map(str, _list(group, "targets")))
        needs = () if weights.get("symmetric", True) else ("zero",)
        if weights.get("actorder") in (True, "group", "dynamic"):
            needs += ("groups",)
        out.append(Scheme(tuple(first), parameters, targets, needs, exponents))
    return out


ALGORITHMS: Mapping[str, tuple[str, Fields]] = {
    "FP8": ("ModelOpt FP8", {"rows": None, "cols": None}),
    "FP8_PER_CHANNEL_PER_TOKEN": ("ModelOpt FP8", {"rows": 1, "cols": None}),
    "MXFP8": ("ModelOpt FP8", {"rows": 1, "cols": 32}),
    "NVFP4": ("ModelOpt NVFP4", {}),
    "W4A16_NVFP4": ("ModelOpt NVFP4", {}),
}
"""What ModelOpt's `quant_algo` says -> the name of the format, and what one scale stands for."""


def _by_algorithm(fields: Fields, known: list[Format]) -> list[Scheme]:
    algorithm = str(fields.get("quant_algo")).upper()
    if algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"the quantization_config has the quant_algo '{algorithm:.40}', which is not known "
            f"here ({', '.join(ALGORITHMS)}): use the checkpoint that it was made from"
        )
    name, size = ALGORITHMS[algorithm]
    first = sorted(known, key=lambda form: form.name != name)
    return [Scheme(tuple(first), size, exponents=algorithm == "MXFP8")]


READERS: Mapping[str, Callable[[Fields, list[Format]], list[Scheme]]] = {
    "fp8": _blocks,
    "gptq": _grouped,
    "awq": _grouped,
    "bitsandbytes": _as_saved,
    "compressed-tensors": _by_groups,
    "fbgemm_fp8": _told_by_shapes,
    "modelopt": _by_algorithm,
    "mxfp4": _told_by_shapes,
    "torchao": _by_types,
}
"""`quant_method` -> how its config is read."""


def _is_pattern_of(target: str, name: str) -> bool:
    pattern = target.removeprefix(PATTERN)
    return target.startswith(PATTERN) and re.match(pattern, name) is not None


def _is_part(target: str, name: str) -> bool:
    """Return whether `name` starts with the modules of `target`, or ends with it."""
    try:
        starts = re.match(rf"(?:{target})(?:(?<=\.)|(?=\.|$))", name) is not None
    except re.error:
        starts = False
    return starts or name.endswith(target)
