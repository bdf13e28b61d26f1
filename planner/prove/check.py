"""`check` proves that a plan is right for a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.prove.prover import Prover


def check(
    plan: Plan | str | Path,
    model: Any,
    *,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    accept: bool = False,
    trust_remote_code: bool = False,
    **hub: Any,
) -> Plan:
    """Prove that a plan is right for a model: values, gradients, shapes and predicted costs.

    The model is traced as for `plan`; no weights are read, and no ranks are started.

    Args:
        plan: The plan, or its file.
        model: The model, as for `plan`.
        args: Example inputs, as for the plan.
        kwargs: Example inputs by name.
        accept: Whether to accept a plan that was edited or that an older release wrote. Its figures
            are computed again.
        trust_remote_code: Whether to run code that comes with the model; by default it is refused.
        **hub: `revision`, `cache_dir`, `local_files_only`, `token`, as for `plan`.

    Returns:
        The plan. With `accept` its figures and digest are updated, ready to be saved.

    Raises:
        PlanError: the plan was edited, is for another model, or does not hold.
        ModelError: the model cannot be read or traced.
    """
    where = "the plan" if isinstance(plan, Plan) else plan
    read = Plan.load(plan)
    if not accept:
        read.unedited(where)
    how = {"kwargs": kwargs, "trust_remote_code": trust_remote_code, **hub}
    return Prover(model, args, **how).prove(read, figures=not accept).plan
