"""Turns a plan into candidate tables of transformers' own styles, one of which may be right.

The styles shard linear layers, embeddings and stacked experts, and change no integers. If code
counts heads by an attribute, or splits a fused weight, the layer is sharded in memory only and its
output is gathered: `gathered` says in which modules. `on_ranks/stock.py` tries a table on ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from torch import nn

from shardwright.planner.contract.names import grouped, is_within, pattern, prefixes
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.experts import ROWS, is_expert
from shardwright.planner.exports.stock.styles import (
    BY_TORCH,
    COLUMN,
    EXPERTS,
    ROW,
    Choice,
    Subject,
    Table,
    is_linear,
    split_dims,
)  # fmt: skip
from shardwright.planner.problem.tp_plan import general, read, split_dim, style_of

WHOLE = "replicate"
MAX_RATIO = 1.05
"""A table may hold at most this many times the plan's bytes per rank."""


def candidates(plan: Plan, model: nn.Module, experts: Table | None = None) -> Iterator[Table]:
    """Yield tables for `model`, on meta or not, those that gather least first.

    They have no rules for experts that `experts` spreads.
    """
    seen: list[Table] = []
    own = _with_integers(plan, model)
    groups = _groups(plan, model)
    every = own | groups
    for gathered in (own, *(own | {g} for g in sorted(groups)), every, every | _cut(plan, model)):
        for by_torch, plain, summed in product((False, True), repeat=3):
            choice = Choice(frozenset(gathered), plain, by_torch, summed)
            table = _table(plan, model, choice, experts or {})
            if table not in seen:
                seen.append(table)
                yield table


def held(
    table: Mapping[str, str],
    model: nn.Module,
    ranks: int,
    experts: Mapping[str, str] | None = None,
    spread: int = 1,
) -> dict[str, int]:
    """Return the bytes of each parameter and buffer on the fullest rank, tied ones once.

    Args:
        table: Rules for `ranks` ranks.
        model: The model.
        ranks: Ranks that shard a parameter.
        experts: Rules for experts, if any.
        spread: Ranks over which these are spread.
    """
    styles = read(table, model).parameters if table else {}
    out: dict[str, int] = {}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    every.sort(key=lambda item: item[0] not in styles)
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in reversed(every)}.values():
        shape = list(tensor.shape)
        dim = split_dim(style_of(styles[name]), name, len(shape)) if name in styles else None
        if dim is not None:
            shape[dim] = -(-shape[dim] // ranks)
        if experts and experts.get(general(name)) == ROWS:
            shape[0] = -(-shape[0] // spread)
        out[name] = prod(shape) * tensor.element_size()
    return out


def _with_integers(plan: Plan, model: nn.Module) -> set[str]:
    """Return patterns of modules whose code computes with integers that the plan makes local."""
    specs = {name: plan.module(name) for name, _ in model.named_modules()}
    return {pattern(n) for n, s in specs.items() if n and s and (s.attributes or s.sizes)}


def _groups(plan: Plan, model: nn.Module) -> set[str]:
    """Return patterns of modules that contain linear layers which the plan shards."""
    names = (n for n, m in model.named_modules() if is_linear(m) and _split(plan, n, "weight"))
    return {pattern(name.rpartition(".")[0] or name) for name in names}


def _cut(plan: Plan, model: nn.Module) -> set[str]:
    """Return patterns of all other modules with a sharded parameter."""
    specs = {n: plan.module(n) for n, m in model.named_modules() if n and not is_linear(m)}
    return {
        pattern(n) for n, s in specs.items() if s and any(_split(plan, n, p) for p in s.parameters)
    }


def _table(
    plan: Plan,
    model: nn.Module,
    choice: Choice,
    experts: Table,
    shared: frozenset[str] = frozenset(),
) -> Table:
    """Make the table of a choice; `shared` are keys of modules that no single style fits."""
    config: Any = model.config
    rotary = getattr(config.get_text_config(), "qk_rope_head_dim", None)
    found: dict[str, list[str | None]] = {}
    linear: dict[str, bool] = {}
    leaves: dict[str, bool] = {}
    for name, module in model.named_modules():
        if is_expert(name, experts):
            styles = {}
        elif general(name) in shared:
            styles = {name: BY_TORCH}
        else:
            spec = plan.module(name)
            whole = any(pattern(around) in choice.gathered for around in prefixes(name)[1:])
            at = Subject(plan, spec, module, whole, choice, rotary) if spec else None
            given = at.styles() if at and spec and spec.parameters else {}
            styles = {f"{name}.{key}".strip("."): style for key, style in given.items()}
        own = [f"{name}.{n}".lstrip(".") for n, _ in module.named_parameters(recurse=False)]
        for key in (name, *own):
            found.setdefault(general(key), []).append(styles.get(key))
        linear[general(name)] = linear.get(general(name), True) and is_linear(module)
        leaves[general(name)] = leaves.get(general(name), True) and not any(module.children())
    agreed = {key: _agreed(all_, linear.get(key, False)) for key, all_ in found.items() if key}
    if choice.by_torch and not shared:
        apart = {k for k, s in agreed.items() if s is None and any(found[k]) and leaves.get(k)}
        if apart:
            return _table(plan, model, choice, experts, frozenset(apart))
    table = {key: style for key, style in agreed.items() if style}
    stock: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    table |= _identities(table, model) | _aliases(table, model)
    return {**table, **{k: WHOLE for k in stock if k not in table}}


def _agreed(styles: list[str | None], linear: bool) -> str | None:
    """Return the one style for all modules that a key matches; None if there is none."""
    several = set(styles)
    if len(several) == 1:
        return styles[0]
    for pair in (COLUMN, ROW):
        if several <= set(pair):
            return pair[1]
    return COLUMN[1] if linear and several & {*COLUMN, *ROW} else None


def _identities(table: Table, model: nn.Module) -> Table:
    """Add rules for identity modules among experts: their output must become Partial too."""
    keys = {general(n) for n, m in model.named_modules() if isinstance(m, nn.Identity)}
    experts = [k for k, style in table.items() if style == EXPERTS]
    return {k: "moe_identity_expert" for k in keys if any(is_within(k, e) for e in experts)}


def _aliases(table: Table, model: nn.Module) -> Table:
    """Add rules for other names of tied parameters: parameters of styled modules are DTensors."""
    if not table:
        return {}
    styles = read(table, model).parameters
    parameters = [*model.named_parameters(remove_duplicate=False)]
    named = grouped((id(parameter), name) for name, parameter in parameters)
    shapes = {name: len(parameter.shape) for name, parameter in parameters}
    out: Table = {}
    for names in named.values():
        styled = [n for n in names if n in styles]
        for name in names if styled else ():
            dim = split_dim(style_of(styles[styled[0]]), styled[0], shapes[name])
            if name not in styles and dim is not None:
                out[general(name)] = COLUMN[0] if dim == shapes[name] - 2 or dim == 0 else ROW[0]
    return out


def _split(plan: Plan, name: str, parameter: str) -> list[int]:
    entry = plan.parameter(f"{name}.{parameter}")
    return split_dims(parse(entry.placement)) if entry else []
