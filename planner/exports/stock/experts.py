"""Finds the rules by which transformers sends tokens to the experts of a plan with `ep`.

Its experts take hidden states, the numbers of each token's experts and their weights, in this
order. Each rank of its expert mesh, which covers all ranks that share the batch and those that
shard the rest of the model, holds as many experts as the others.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.mesh import EP
from shardwright.planner.contract.names import is_within, pattern
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.styles import Table
from shardwright.planner.problem.tp_plan import general

DISPATCH, ROWS = "ep_dispatch_experts", "grouped_gemm"
"""Styles of a module with experts, and of its parameters with a row for each."""


def expert_ranks(plan: Plan) -> int:
    """Return the size of transformers' expert mesh: experts are not sharded over tp there."""
    return plan.mesh.get(EP, 1) * plan.mesh["tp"]


def expert_rules(plan: Plan, model: nn.Module) -> Table:
    """Return the rules that spread a model's experts; there are none without `ep`.

    Raises:
        PlanError: transformers' styles cannot express how the plan spreads them.
    """
    rules: Table = {}
    for name, module in model.named_modules():
        spec = plan.module(name)
        if spec is None or spec.dispatch is None:
            continue
        told: Any = spec.dispatch
        taken = [*signature(type(module).forward).parameters][1:]
        if taken[:3] != [told.tokens, told.experts, told.weights]:
            raise PlanError(
                f"transformers sends tokens to modules that take hidden states, expert numbers "
                f"and weights, and '{pattern(name)}' takes {', '.join(taken)}: use shardwright.load"
            )
        if told.count % expert_ranks(plan):
            raise PlanError(
                f"transformers gives each rank as many experts, and '{pattern(name)}' has "
                f"{told.count} for {expert_ranks(plan)}: use shardwright.load"
            )
        rules[general(name)] = DISPATCH
        rows = (n for n, _ in module.named_parameters() if _is_spread(plan, f"{name}.{n}"))
        rules |= {general(f"{name}.{n}"): ROWS for n in rows}
    return rules


def _is_spread(plan: Plan, name: str) -> bool:
    entry = plan.parameter(name)
    return entry is not None and f"@{EP}" in entry.placement


def is_expert(name: str, rules: Table) -> bool:
    """Return whether a module or parameter belongs to experts that rules spread."""
    return any(style == DISPATCH and is_within(general(name), key) for key, style in rules.items())
