"""What a page says beside a plan, by where the search for it ended: alternatives, another table."""

from __future__ import annotations

from typing import Any

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.picture.view import Shown
from shardwright.planner.picture.weights import Weights
from shardwright.planner.problem.tp_plan import OWN, table_of
from shardwright.planner.report.explain import explained, made
from shardwright.planner.report.hand_written import HandWritten, price
from shardwright.planner.search.search_state import SearchState


def beside(plan: Plan, name: str, made: SearchState) -> Shown:
    """A plan with what its alternatives would cost, and with transformers' own table.

    Args:
        plan: The plan.
        name: What it is called on the page.
        made: Where the search for it ended.
    """
    large = [w.one for w in Weights(plan) if len(w.shape) > 1]
    return Shown(plan, name, _table(made), explained(plan, made, large))


def beside_model(plan: Plan, name: str, model: Any, **how: Any) -> Shown:
    """The same of a plan that was read.

    Args:
        plan: The plan.
        name: What it is called on the page.
        model: What it was made for, as `shardwright.plan` takes it; it is traced.
        how: Example inputs as it was made with, and whether to run code that comes with the model.

    Raises:
        PlanError: the plan is for another model.
        ModelError: the model cannot be read or traced.
    """
    return beside(plan, name, made(plan, model, **how))


def _table(made: SearchState) -> HandWritten | None:
    task = made.task
    try:
        return price(task, table_of(OWN, task.source.module), made.formulation)
    except UsageError as error:
        return HandWritten(0, [], str(error), None, {})
