"""One call of an op, and the same call on the parts that one rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 (registers its ops)

from shardwright.rules.call import OpCall, Operand, make_rule, name_of, packet_named
from shardwright.rules.notation import Dims, Expr, Product, Rule, expr_size, letters
from shardwright.rules.registry import TABLE

from .draw import Example, T

aten = torch.ops.aten
Tensors = list[torch.Tensor]
Parts = Mapping[str, torch.Tensor]
"""Axis -> indices that a rank holds, for the axes that are split."""


@dataclass(frozen=True)
class Concrete:
    """A call with values; `arguments` are as `planner/trace/trace.py` gives them to a rule."""

    overload: Any
    arguments: Mapping[str, Any]
    tensors: Tensors

    @property
    def op(self) -> str:
        return name_of(self.overload)

    def run(self, tensors: Tensors | None = None) -> Tensors:
        """Results with other values in the place of `tensors`."""
        given = self.tensors if tensors is None else tensors
        args, kwargs = [], {}
        for parameter in self.overload._schema.arguments:
            value = _fill(self.arguments[parameter.name], given)
            if parameter.kwarg_only:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        results = self.overload(*args, **kwargs)
        return list(results) if isinstance(results, (list, tuple)) else [results]

    @cached_property
    def results(self) -> Tensors:
        return self.run([t.clone() for t in self.tensors])

    @cached_property
    def call(self) -> OpCall:
        return OpCall(
            op=self.op,
            arguments=self.arguments,
            operands=tuple(tuple(t.shape) for t in self.tensors),
            results=tuple(tuple(t.shape) for t in self.results),
            operand_dtypes=tuple(t.dtype for t in self.tensors),
            result_dtypes=tuple(t.dtype for t in self.results),
        )

    @cached_property
    def rule(self) -> Rule | None:
        """Not by `rule_for`, which takes a rule that does not fit for none."""
        return make_rule(TABLE[self.op], self.call)


def _fill(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, Operand):
        return tensors[value.index]
    return [_fill(v, tensors) for v in value] if isinstance(value, list) else value


def concrete(example: Example, seed: int) -> Concrete:
    """The call with values drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    name, _, overload = example.overload.partition(".")
    target = getattr(packet_named(name), overload or "default")
    tensors: Tensors = []

    def swap(value: Any) -> Any:
        if isinstance(value, T):
            tensors.append(value.make(generator))
            return Operand(len(tensors) - 1)
        return [swap(v) for v in value] if isinstance(value, (list, tuple)) else value

    arguments: dict[str, Any] = {}
    for i, parameter in enumerate(target._schema.arguments):
        if i < len(example.args):
            arguments[parameter.name] = swap(example.args[i])
        elif parameter.name in example.kwargs:
            arguments[parameter.name] = swap(example.kwargs[parameter.name])
        else:
            arguments[parameter.name] = parameter.default_value
    return Concrete(target, arguments, tensors)


def indices(expr: Expr, sizes: Mapping[str, int], parts: Parts) -> torch.Tensor:
    """Which elements of a dim a rank holds."""
    if isinstance(expr, str):
        return parts.get(expr, torch.arange(expr_size(expr, sizes)))
    held, before = torch.zeros(int(isinstance(expr, Product)), dtype=torch.long), 0
    for child in expr.factors if isinstance(expr, Product) else expr.terms:
        inner, n = indices(child, sizes, parts), expr_size(child, sizes)
        if isinstance(expr, Product):
            held = (held[:, None] * n + inner).flatten()
        else:
            held = torch.cat([held, before + inner])
            before += n
    return held


def take(tensor: torch.Tensor, dims: Dims, sizes: Mapping[str, int], parts: Parts) -> torch.Tensor:
    """The part of `tensor` that a rank holds."""
    for d, expr in enumerate(dims):
        if any(a in parts for a in letters(expr)):
            tensor = tensor.index_select(d, indices(expr, sizes, parts))
    return tensor


def add_at(
    total: torch.Tensor, part: torch.Tensor, dims: Dims, sizes: Mapping[str, int], parts: Parts
) -> None:
    """Add to `total` what a rank has for its part."""
    held = [indices(expr, sizes, parts) for expr in dims]
    if held:
        grid = torch.meshgrid(*held, indexing="ij")
        total.index_put_(grid, part, accumulate=True)
    else:
        total += part


def covered(expr: Expr, sizes: Mapping[str, int], split: Parts) -> torch.Tensor:
    """Which elements of a dim belong to some part of a split axis."""
    if isinstance(expr, str):
        return torch.full((expr_size(expr, sizes),), expr in split)
    if isinstance(expr, Product):
        out = torch.zeros(1, dtype=torch.bool)
        for child in expr.factors:
            out = (out[:, None] | covered(child, sizes, split)).flatten()
        return out
    return torch.cat([covered(t, sizes, split) for t in expr.terms])


def run_local(call: Concrete, rule: Rule, tensors: Tensors, parts: Parts) -> Tensors:
    """The op on what one rank holds, its integer arguments as they must be there."""
    if rule.lookup & parts.keys():
        return _masked_lookup(call, tensors, parts)
    sizes = {a: len(parts[a]) if a in parts else n for a, n in rule.sizes.items()}
    shapes = [[expr_size(e, sizes) for e in dims] for dims in (*rule.operands, *rule.results)]
    overload = OTHER_OVERLOAD.get(call.op, call.overload)
    changed = dict(call.arguments) | _localised(call, rule, sizes, shapes)
    return replace(call, overload=overload, arguments=changed).run(tensors)


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
