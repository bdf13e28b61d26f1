"""A plan as a `base_model_tp_plan` that vLLM's transformers backend understands.

vLLM does not run here: what is given is what transformers was right with, marked as unproven.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.proven import Model, proven
from shardwright.planner.exports.stock.table import WHOLE
from shardwright.planner.exports.stock.to_transformers import by_class
from shardwright.planner.on_ranks.stock import Table

LOCAL = {"colwise", "rowwise"}
"""What it knows of: it counts heads by the rank itself, so nothing in blocks may be gathered."""
OUTSIDE = {"embedding_rowwise", "embedding_colwise", "colwise_gather_output"}
"""Of the embedding and the head, which it splits by itself."""


def emit(plan: Plan, model: Any = None, **how: Any) -> str:
    """`base_model_tp_plan` in JSON, to put into the model's config.

    Args:
        plan: The plan.
        model: What it was made for, as `shardwright.plan` takes it.
        **how: `trust_remote_code`, and where a hub id leads, as `plan` takes them.

    Raises:
        PlanError: vLLM would replicate, or cut wrongly, what the plan splits.
    """
    subject = Model.read(plan, model, **how)
    found = proven(plan, subject, Table, _unsaid, "the styles that vLLM knows")
    base, _ = by_class(found.table, subject.whole)
    text = {
        "base_model_tp_plan": {k: s for k, s in base.items() if s in LOCAL},
        "proven": False,
        "note": "not run by vLLM; run by transformers with its embedding and head split",
        "lost": found.lost(),
        "proof": found.proof(),
    }
    return json.dumps(text, indent=2) + "\n"


def _unsaid(table: Mapping[str, str]) -> str | None:
    for key, style in table.items():
        inside = "*" in key
        if style not in (LOCAL if inside else LOCAL | OUTSIDE) | {WHOLE}:
            return f"vLLM has no '{style}', for {key}"
    return None
