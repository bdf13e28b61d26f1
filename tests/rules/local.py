"""One call of an op, and the same call on the parts that one rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 (registers its ops)

from shardwright.rules.call import make_rule, name_of, packet_named
from shardwright.rules.notation import Rule, expr_size, letters
from shardwright.rules.registry import TABLE
from shardwright.rules.testing.concrete import Concrete, Tensors, arguments_of
from shardwright.rules.testing.parts import Parts

from .draw import Example, T
from .strict import CONSTANT, NO_DERIVATIVE, VALUES_UNKNOWN

aten = torch.ops.aten


@dataclass(frozen=True)
class Own(Concrete):
    """A call of an op of our tables, which may be told sizes."""

    @cached_property
    def rule(self) -> Rule | None:
        """Not by `rule_for`, which takes a rule that does not fit for none."""
        return make_rule(TABLE[self.op], self.call)

    def local(self, rule: Rule, tensors: Tensors, parts: Parts) -> Tensors:
        """The op on what one rank holds, its integer arguments as they must be there."""
        if rule.lookup & parts.keys():
            return _masked_lookup(self, tensors, parts)
        sizes = {a: len(parts[a]) if a in parts else n for a, n in rule.sizes.items()}
        shapes = [[expr_size(e, sizes) for e in dims] for dims in (*rule.operands, *rule.results)]
        overload = OTHER_OVERLOAD.get(self.op, self.overload)
        changed = dict(self.arguments) | _localised(self, rule, sizes, shapes)
        return replace(self, overload=overload, arguments=changed).run(tensors)


def concrete(example: Example, seed: int) -> Own:
    """The call with values drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    name, _, overload = example.overload.partition(".")
    target = getattr(packet_named(name), overload or "default")
    arguments, drawn = arguments_of(target, example.args, example.kwargs, T)
    op = name_of(target)
    return Own(
        target,
        arguments,
        [t.make(generator) for t in drawn],
        has_gradient=str(target).removeprefix("aten.") not in NO_DERIVATIVE,
        values_matter=op not in VALUES_UNKNOWN,
        fixed=frozenset(arguments[name].index for name in CONSTANT.get(op, ())),
    )


OTHER_OVERLOAD = {"split": aten.split_with_sizes.default, "squeeze": aten.squeeze.dims}
"""`split` cannot be told unequal parts; `squeeze` must not take a dim that is 1 on a rank only."""


def _localised(
    call: Concrete, rule: Rule, sizes: Mapping[str, int], shapes: Sequence[list[int]]
) -> dict[str, Any]:
    """The integer arguments that are sizes, as axis sizes `sizes` make them."""
    arguments, result = call.arguments, shapes[len(call.tensors)]
    match call.op:
        case "arange":
            return {"end": result[0]}
        case "linspace":
            return {"steps": result[0]}
        case "eye":
            return {"n": result[0], "m": result[1]}
        case "split" | "split_with_sizes":
            made = shapes[len(call.tensors) :]
            return {"split_sizes": [s[call.call.dim()] for s in made]}
        case "squeeze":
            return {"dim": [d for d in call.call.dims() if call.call.operands[0][d] == 1]}
        case "slice" | "select" | "slice_scatter" | "select_scatter":
            return _bounds(call, rule, sizes, shapes[0])
        case "repeat":
            times = enumerate(arguments["repeats"])
            return {"repeats": [sizes.get(f"r{i}", n) for i, n in times]}
        case "group_norm":
            return {"num_groups": sizes["g"]}
        case "native_group_norm":
            n, c, *space = shapes[0]
            return {"N": n, "C": c, "HxW": torch.Size(space).numel(), "group": sizes["g"]}
        case "layer_norm" | "native_layer_norm" | "rms_norm":
            return {"normalized_shape": shapes[0][-len(arguments["normalized_shape"]) :]}
        case "convolution":
            return {"groups": sizes.get("g", 1)}
        case "topk":
            return {"k": sizes.get("t", 1)}
        case "bincount":
            return {"minlength": sizes["b"]}
        case "histc":
            return {"bins": sizes["n"]}
        case "one_hot":
            return {"num_classes": sizes["c"]}
        case "unfold":
            return {}
        case _:
            return {name: result for name in ("size", "shape") if name in arguments}


def _bounds(
    call: Concrete, rule: Rule, sizes: Mapping[str, int], shape: list[int]
) -> dict[str, Any]:
    dim = call.call.dim()
    parts = set(letters(rule.operands[0][dim]))
    before = sizes["p0"] if "p0" in parts else 0
    if "index" in call.arguments:
        return {"index": before}
    if "k" in parts:
        return {"start": before, "end": before + sizes["k"]}
    if "e" in sizes:  # nothing, or a stride that does not divide
        return {}
    return {"end": shape[dim]}


def _masked_lookup(call: Concrete, tensors: Tensors, parts: Parts) -> Tensors:
    """An embedding that knows its rows: the others give zeros."""
    weight, index = tensors
    (rows,) = parts.values()
    hit = index[..., None] == rows
    padding = (rows == call.arguments["padding_idx"]).nonzero().flatten().tolist()
    found = aten.embedding(weight, hit.int().argmax(-1), padding[0] if padding else -1)
    return [found * hit.any(-1)[..., None]]
