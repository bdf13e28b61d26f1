"""A plan as tables of transformers' own styles: candidates, of which one may be right.

Its styles cut linear layers, embeddings and stacked experts, and set no integers. Where code counts
heads by a number of its own, or takes a fused weight apart, a layer is cut in memory, and what it
makes is gathered: `gathered` says for which modules. What a candidate computes is for
`on_ranks/stock.py` to find out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.planner.contract.names import is_within, pattern
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import ModulePlan, Plan
from shardwright.planner.contract.ranges import local_ranges
from shardwright.planner.problem.tp_plan import general, read, split_dim, style_of

Table = dict[str, str]
"""Name of a module or parameter, `*` for a layer number -> style."""

COLUMN, ROW = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
"""What a linear layer gives or takes in parts; the second of a pair gives and takes whole."""
EXPERTS, SUMMED, WHOLE = "moe_tp_experts", "replicated_with_grad_allreduce", "replicate"
BY_TORCH, SECOND = "embedding_rowwise", "embedding_colwise"
"""Of an embedding; it has any module compute with DTensors, and give out what is whole."""
MOST = 1.05
"""Of the bytes of our plan on a rank: what holds more replicates what should be split."""


def candidates(plan: Plan, model: nn.Module) -> Iterator[Table]:
    """Tables for `model`, on meta or not: those that leave most split while it computes first."""
    seen: list[Table] = []
    own = _with_integers(plan, model)
    groups = _groups(plan, model)
    for gathered in (own, *(own | {g} for g in sorted(groups)), own | groups):
        for by_torch, plain, routers in product((False, True), repeat=3):
            table = _table(plan, model, Choice(frozenset(gathered), plain, by_torch, routers))
            if table not in seen:
                seen.append(table)
                yield table


class Choice(NamedTuple):
    """What a candidate leaves whole."""

    gathered: frozenset[str]
    """Patterns of modules in which linear layers are split in memory only."""
    plain: bool
    """Whether embeddings that take several arguments are left whole: styles see the first."""
    by_torch: bool
    """Whether torch computes with what no style is made for, as DTensors split in memory only."""
    routers: bool
    """Whether the gradients of routers beside experts are summed over the ranks."""

    def whole(self, name: str) -> bool:
        """Whether a module's layers give and take whole tensors."""
        return any(pattern(around) in self.gathered for around in _around(name))


def held(table: Mapping[str, str], model: nn.Module, ranks: int) -> dict[str, int]:
    """Bytes that the fullest rank holds of each parameter and buffer, those that are tied once."""
    styles = read(table, model).parameters if table else {}
    out: dict[str, int] = {}
    seen: set[int] = set()
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, tensor in sorted(every, key=lambda item: item[0] not in styles):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        shape = list(tensor.shape)
        dim = split_dim(style_of(styles[name]), name, len(shape)) if name in styles else None
        if dim is not None:
            shape[dim] = -(-shape[dim] // ranks)
        out[name] = prod(shape) * tensor.element_size()
    return out


def _with_integers(plan: Plan, model: nn.Module) -> set[str]:
    """Patterns of the modules whose code computes with integers that the plan makes local."""
    specs = {name: plan.module(name) for name, _ in model.named_modules()}
    return {pattern(n) for n, s in specs.items() if n and s and (s.attributes or s.sizes)}


def _groups(plan: Plan, model: nn.Module) -> set[str]:
    """Patterns of the modules that linear layers lie in which the plan splits by rows."""
    names = (n for n, m in model.named_modules() if _is_linear(m) and _split(plan, n, "weight"))
    return {pattern(name.rpartition(".")[0]) for name in names if "." in name}


def _table(
    plan: Plan, model: nn.Module, choice: Choice, shared: frozenset[str] = frozenset()
) -> Table:
    """The table of a choice; `shared` are keys of modules that no one style fits."""
    found: dict[str, list[str | None]] = {}
    linear: dict[str, bool] = {}
    leaves: dict[str, bool] = {}
    for name, module in model.named_modules():
        if general(name) in shared:
            own = [n for n, _ in module.named_parameters(recurse=False)]
            styles = dict.fromkeys((name, *(f"{name}.{n}" for n in own)), BY_TORCH)
        else:
            styles = _styles(plan, name, module, choice)
        own = [f"{name}.{n}".lstrip(".") for n, _ in module.named_parameters(recurse=False)]
        for key in (name, *own):
            found.setdefault(general(key), []).append(styles.get(key))
        linear[general(name)] = linear.get(general(name), True) and _is_linear(module)
        leaves[general(name)] = leaves.get(general(name), True) and not any(module.children())
    agreed = {key: _agreed(all_, linear.get(key, False)) for key, all_ in found.items() if key}
    if choice.by_torch and not shared:
        apart = {k for k, s in agreed.items() if s is None and any(found[k]) and leaves.get(k)}
        if apart:
            return _table(plan, model, choice, frozenset(apart))
    table = {key: style for key, style in agreed.items() if style}
    table = table if choice.routers else _without_routers(table)
    stock: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    return {**table, **_aliases(table, model), **{k: WHOLE for k in stock if k not in table}}


def _agreed(styles: list[str | None], linear: bool) -> str | None:
    """The style of all modules that a key stands for; none where they cannot have the same."""
    several = set(styles)
    if len(several) == 1:
        return styles[0]
    for pair in (COLUMN, ROW):
        if several <= set(pair):
            return pair[1]
    return COLUMN[1] if linear and several & {*COLUMN, *ROW} else None


def _without_routers(table: Table) -> Table:
    """Experts' own style sums the gradient of what a router beside them gives."""
    beside = {k.rpartition(".")[0] for k, style in table.items() if style == EXPERTS}
    return {
        k: s for k, s in table.items() if s != SUMMED or not any(is_within(k, b) for b in beside)
    }


def _aliases(table: Table, model: nn.Module) -> Table:
    """Rules for other names of tied parameters: those of a module with a style are DTensors."""
    if not table:
        return {}
    styles = read(table, model).parameters
    named: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    shapes = {n: len(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    out: Table = {}
    for names in named.values():
        styled = [n for n in names if n in styles]
        for name in names if styled else ():
            dim = split_dim(style_of(styles[styled[0]]), styled[0], shapes[name])
            if name not in styles and dim is not None:
                out[general(name)] = COLUMN[0] if dim == shapes[name] - 2 or dim == 0 else ROW[0]
    return out


def _styles(plan: Plan, name: str, module: nn.Module, choice: Choice) -> Table:
    """The styles of a module and of its own parameters."""
    spec = plan.module(name)
    if spec is None or not spec.parameters:
        return {}
    if choice.plain and isinstance(module, nn.Embedding) and not _is_plain(module):
        return {}
    kinds = (_linear, _embedding, _experts, _stacked, _others)
    for kind in (*kinds, _by_torch) if choice.by_torch else kinds:
        styles = kind(plan, module, spec, choice.whole(name))
        if styles is not None:
            return {f"{name}.{key}".strip("."): style for key, style in styles.items()}
    return {}


def _linear(plan: Plan, module: nn.Module, spec: ModulePlan, whole: bool) -> Table | None:
    if not _is_linear(module) or "weight" not in spec.parameters:
        return None
    weight = parse(spec.parameters["weight"].placement)
    dims = _split_dims(weight)
    if dims == [0]:
        if whole or _gives_whole(spec):
            return {"": COLUMN[1]}
        if _contiguous(plan, weight, 0):
            return {"": COLUMN[0]}
        packed = getattr(module, "bias", None) is None and _contiguous(plan, weight, 0, parts=2)
        return {"": "packed_colwise" if packed else COLUMN[1]}
    if dims == [1]:
        cut = whole or bool(spec.inputs) or not _contiguous(plan, weight, 1)
        return {"": ROW[1] if cut else ROW[0]}
    summed = any(parse(c.target).grad_partial for c in spec.outputs)
    return {"": "mla_kv_a_proj"} if summed and not whole else None


def _embedding(plan: Plan, module: nn.Module, spec: ModulePlan, whole: bool) -> Table | None:
    if not isinstance(module, nn.Embedding):
        return None
    dims = _split_dims(parse(spec.parameters["weight"].placement))
    return {"": "embedding_rowwise" if dims == [0] else "embedding_colwise"} if dims else {}


def _experts(plan: Plan, module: nn.Module, spec: ModulePlan, whole: bool) -> Table | None:
    """Stacked experts, both products in one tensor each: cut within each of them, as is its way."""
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters(recurse=False)}
    up, down = shapes.get("gate_up_proj"), shapes.get("down_proj")
    if len(shapes) != 2 or up is None or down is None or len(up) != 3:
        return None
    if up == (down[0], 2 * down[2], down[1]):
        cut = {"gate_up_proj": "packed_colwise", "down_proj": ROW[0], "": EXPERTS}
    elif up == (down[0], down[2], 2 * down[1]):
        cut = {"gate_up_proj": "packed_rowwise", "down_proj": COLUMN[0], "": EXPERTS}
    else:
        return None
    return cut if _split_dims(parse(spec.parameters["down_proj"].placement)) else {}


def _stacked(plan: Plan, module: nn.Module, spec: ModulePlan, whole: bool) -> Table | None:
    """Experts of any other form, as the plan cuts them: each rank has a part of every expert."""
    placed = {n: parse(p.placement) for n, p in spec.parameters.items()}
    cut: Table = {}
    for name, at in placed.items():
        dims, ndim = _split_dims(at), len(at.dims)
        if not dims:
            continue
        pair = {ndim - 2: ("colwise", "packed_colwise"), ndim - 1: ("rowwise", "packed_rowwise")}
        found = [
            style
            for parts, style in enumerate(pair.get(dims[0], ()), 1)
            if len(dims) == 1 and _contiguous(plan, at, dims[0], parts)
        ]
        if not found:
            return None
        cut[name] = found[0]
    stacks = [n for n in cut if len(placed[n].dims) == 3]
    return {**cut, "": EXPERTS} if len(stacks) > 1 else None


def _by_torch(plan: Plan, module: nn.Module, spec: ModulePlan, whole: bool) -> Table | None:
    """A module that has matrices and is none of the others, with all that it has as DTensors."""
    own = dict(module.named_parameters(recurse=False))
    dims = {n: _split_dims(parse(p.placement)) for n, p in spec.parameters.items()}
    cut = [n for n in own if dims.get(n) and own[n].dim() > 1]
    if not cut or any(p.dim() == 0 for p in own.values()):
        return None
    ways = {name: _along(p.dim(), (dims.get(name) or [0])[0]) for name, p in own.items()}
    return {**ways, "": BY_TORCH}


def _along(ndim: int, dim: int) -> str:
    """A style that splits a parameter of so many dims along one of them."""
    styles = {ndim - 1: ROW[0], ndim - 2: COLUMN[0], 1: SECOND, 0: BY_TORCH}
    return styles.get(dim, BY_TORCH)


def _others(plan: Plan, module: nn.Module, spec: ModulePlan, whole: bool) -> Table | None:
    """Bare parameters with a part on each rank, and whole ones whose gradients are sums."""
    if whole:
        return None
    placed = {n: parse(p.placement) for n, p in spec.parameters.items() if _is_vector(module, n)}
    cut = {n: COLUMN[0] for n, p in placed.items() if _split_dims(p) and _contiguous(plan, p, 0)}
    if cut:
        return {**cut, "": "local_params"}
    uses = (parse(p.use) for p in spec.parameters.values() if p.use is not None)
    return {"": SUMMED} if any(u.grad_partial for u in uses) else None


def _is_plain(module: nn.Embedding) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _is_vector(module: nn.Module, name: str) -> bool:
    found = module._parameters.get(name)
    return isinstance(found, Tensor) and found.dim() == 1


def _is_linear(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    sizes = [getattr(module, n, None) for n in ("out_features", "in_features")]
    return isinstance(weight, Tensor) and list(weight.shape) == sizes


def _split(plan: Plan, name: str, parameter: str) -> list[int]:
    spec = plan.module(name)
    entry = spec.parameters.get(parameter) if spec else None
    return _split_dims(parse(entry.placement)) if entry else []


def _split_dims(placement: Placement) -> list[int]:
    replicated = placement.replicated().dims
    return [d for d, dim in enumerate(placement.dims) if dim != replicated[d]]


def _gives_whole(spec: ModulePlan) -> bool:
    """Whether what the plan has a layer give out is whole again."""
    return any(not _split_dims(parse(change.target)) for change in spec.outputs)


def _contiguous(plan: Plan, placed: Placement, dim: int, parts: int = 1) -> bool:
    """Whether each rank holds of a dim, or of its equal `parts`, what torch would give it."""
    size, ranks = placed.shape[dim] or 0, plan.mesh["tp"]
    if size % parts:
        return False
    share = -(-size // parts // ranks)
    for rank in range(plan.world_size):
        at = plan.coords(rank)["tp"][0]
        want = [
            (start + min(at * share, size // parts), start + min((at + 1) * share, size // parts))
            for start in range(0, size, size // parts)
        ]
        if _joined(want) != local_ranges(placed.dims[dim], plan.coords(rank)):
            return False
    return True


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def _around(name: str) -> Iterator[str]:
    """A module and those around it, without the root."""
    while name:
        yield name
        name = name.rpartition(".")[0]
