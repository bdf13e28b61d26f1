"""A plan as a `tp_plan` of transformers, in JSON; or as Python that names our style."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.api import plan as make_plan
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.proven import Model, proven, ranks_to_run
from shardwright.planner.exports.stock.table import MOST, WHOLE
from shardwright.planner.on_ranks.stock import Table, WholePlan


def emit(plan: Plan, model: Any = None, own_styles: bool = False, **how: Any) -> str:
    """What `DistributedConfig(tp_size=..., tp_plan=...)` takes, once it was run.

    Args:
        plan: The plan.
        model: What it was made for, as `shardwright.plan` takes it.
        own_styles: Whether to use our style, which gives the whole plan and needs Shardwright on
            each rank; else a table of transformers' own styles.
        **how: `trust_remote_code`, and where a hub id leads, as `plan` takes them.

    Raises:
        PlanError: it would not compute what the unsplit model does, or replicate what the plan
            splits.
    """
    subject = Model.read(plan, model, **how)
    if own_styles:
        return _with_own_style(plan, subject)
    found = proven(plan, subject, Table)
    base, head = by_class(found.table, subject.whole)
    text = {
        "tp_size": plan.mesh["tp"],
        "tp_plan": found.table,
        "base_model_tp_plan": base,
        "_tp_plan": head,
        "lost": found.lost(),
        "proof": found.proof(),
    }
    return json.dumps(text, indent=2) + "\n"


def by_class(table: Mapping[str, str], model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """A table as transformers keeps it: of the config's base model, and of the class around it."""
    kept = {key: style for key, style in table.items() if style != WHOLE}
    if getattr(model, "base_model", None) is model:
        return kept, {}
    prefix: Any = f"{getattr(model, 'base_model_prefix', '')}."
    base = {k.removeprefix(prefix): s for k, s in kept.items() if k.startswith(prefix)}
    return base, {k: s for k, s in kept.items() if not k.startswith(prefix)}


def _with_own_style(plan: Plan, model: Model) -> str:
    ranks = ranks_to_run(plan)
    along = plan.workload.sequence_parallel
    again = make_plan(model.small, tp=ranks, objective="memory", sequence_parallel=along)
    ran = model.run(WholePlan(again), ranks)
    predicted = max(again.predicted.parameter_bytes) / again.predicted.unsharded_bytes
    if not (ran.ok and ran.share <= MOST * predicted):
        raise PlanError(
            f"our style in transformers differs from the unsplit model: logits by {ran.logits:.1e}"
            f", gradients by {ran.gradients:.1e} ({ran.worst}), or holds {ran.share:.0%} of all "
            "bytes: use shardwright.load"
        )
    ours, whole = max(plan.predicted.parameter_bytes), plan.predicted.unsharded_bytes
    return _SOURCE.format(
        name=plan.model.architecture,
        tp=plan.mesh["tp"],
        ours=ours,
        whole=whole,
        ranks=ranks,
        logits=ran.logits,
        gradients=ran.gradients,
        plan=json.dumps(plan.model_dump(), sort_keys=True),
    )


_SOURCE = '''"""A plan of {name} on {tp} ranks, for transformers: on each rank

    config = DistributedConfig(tp_size={tp}, tp_plan=tp_plan)
    model = AutoModelForCausalLM.from_pretrained(..., distributed_config=config)

A rank holds {ours:,} of {whole:,} bytes. Nothing of the plan is lost. A small model of the same
structure, planned alike for {ranks} ranks and split so by transformers, differs from the unsplit
one by {logits:.1e} (logits) and {gradients:.1e} (gradients).
"""

import shardwright

tp_plan = shardwright.tp_plan(shardwright.Plan.from_json(r"""{plan}"""))
'''
