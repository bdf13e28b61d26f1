"""What a page says beside a plan, for which its model is traced: alternatives, another table."""

from __future__ import annotations

from typing import Any

from shardwright.errors import UsageError
from shardwright.planner.api import as_planned, prepare
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.facts import Shown
from shardwright.planner.picture.weights import Weights
from shardwright.planner.problem.tp_plan import OWN, table_of
from shardwright.planner.report.explain import explained
from shardwright.planner.report.hand_written import HandWritten, price
from shardwright.planner.search.task import Task
from shardwright.runtime.identity import check_identity


def beside(plan: Plan, name: str, model: Any, **how: Any) -> Shown:
    """A plan with what its alternatives would cost, and with transformers' own table.

    Args:
        plan: The plan.
        name: What it is called on the page.
        model: What it was made for, as `shardwright.plan` takes it.
        how: Example inputs as it was made with, and whether to run code that comes with the model.

    Raises:
        PlanError: the plan is for another model.
        ModelError: the model cannot be read or traced.
    """
    task = prepare(model, **as_planned(plan), **how)
    check_identity(task.source.module, plan)
    large = [w.one for w in Weights(plan) if len(w.shape) > 1]
    return Shown(plan, name, _table(task), explained(plan, task, large))


def _table(task: Task) -> HandWritten | None:
    try:
        return price(task, table_of(OWN, task.source.module))
    except UsageError as error:
        return HandWritten(0, [], str(error), None, {})
