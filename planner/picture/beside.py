"""Computes what a page needs the model for: alternatives, transformers' plan, a baseline."""

from __future__ import annotations

from typing import Any

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.hand_written.price import HandWritten, price, unsharded
from shardwright.planner.picture.view import Shown
from shardwright.planner.picture.weights import Weights
from shardwright.planner.problem.tp_plan import OWN, table_of
from shardwright.planner.report.explain import explained, made
from shardwright.planner.search.search_state import SearchState


def beside(plan: Plan, name: str, made: SearchState) -> Shown:
    """Add to a plan the costs of alternatives, of transformers' own plan, and of no plan.

    Args:
        plan: The plan.
        name: Its name on the page.
        made: The end state of the search for it.
    """
    large = [w.one for w in Weights(plan) if len(w.shape) > 1]
    baseline = unsharded(made.task, made.formulation)
    return Shown(plan, name, _table(made), explained(plan, made, large), baseline)


def beside_model(plan: Plan, name: str, model: Any, **how: Any) -> Shown:
    """Do the same for a plan that was read from a file.

    Args:
        plan: The plan.
        name: Its name on the page.
        model: The model it was made for, as `shardwright.plan` takes it; it is traced.
        how: Example inputs as for the plan, and whether to run code shipped with the model.

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
