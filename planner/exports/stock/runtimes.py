"""Exports plans for transformers, torch and vLLM, from one table that was tried on ranks.

Each format is a function of a plan and of the model that it was made for, as `shardwright.plan`
takes it, with `trust_remote_code` and the options of a Hub id. It raises PlanError if the runtime
would not compute what the unsharded model does, or would replicate what the plan shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.api import plan as make_plan
from shardwright.planner.contract.mesh import EP
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.experts import expert_ranks, expert_rules
from shardwright.planner.exports.stock.proven import Model, proven, ranks_to_run
from shardwright.planner.exports.stock.table import MAX_RATIO, WHOLE
from shardwright.planner.on_ranks.stock import Source, Table
from shardwright.planner.templates import rendered

FOLDER = Path(__file__).parent
"""The folder of the templates."""

IN_TORCH = {
    "colwise": "ColwiseParallel()",
    "colwise_gather_output": "ColwiseParallel(output_layouts=Replicate())",
    "rowwise": "RowwiseParallel()",
    "rowwise_split_input": "RowwiseParallel(input_layouts=Replicate())",
    "embedding_rowwise": "RowwiseParallel(input_layouts=Replicate())",
    "embedding_colwise": "ColwiseParallel(output_layouts=Replicate())",
}
"""A transformers style -> the torch style that does the same."""
IN_VLLM = {"colwise", "rowwise"}
"""Styles that work within blocks: vLLM computes attention with a rank's heads, without gathers."""
BY_VLLM = {"embedding_rowwise", "embedding_colwise", "colwise_gather_output"}
"""Styles of the embedding and the head, which vLLM shards by itself."""


def to_transformers(plan: Plan, model: Any = None, own_styles: bool = False, **how: Any) -> str:
    """Return JSON for `DistributedConfig(tp_size=..., tp_plan=...)`.

    Of a plan with `ep` it also has `ep_size`, `ep_plan` and, for its copies, `fsdp_size`. With
    `own_styles`, return Python that uses our style, which carries out the full plan and needs
    Shardwright.
    """
    subject = Model.read(plan, model, **how)
    if own_styles:
        return _with_own_style(plan, subject)
    experts = expert_rules(plan, subject.whole)
    found = proven(plan, subject, partial(Table, experts=experts), experts=experts)
    base, head = by_class(found.table, subject.whole)
    of_experts = {
        "fsdp_size": plan.mesh.get(EP), "ep_size": expert_ranks(plan), "ep_plan": experts,
        "base_model_ep_plan": by_class(experts, subject.whole)[0],
    }  # fmt: skip
    return _json(
        tp_size=plan.mesh["tp"], tp_plan=found.table, base_model_tp_plan=base, _tp_plan=head,
        **(of_experts if experts else {}), lost=found.lost(), proof=found.proof(),
    )  # fmt: skip


def to_vllm(plan: Plan, model: Any = None, **how: Any) -> str:
    """Return JSON with `base_model_tp_plan` of the config, for vLLM's transformers backend.

    The table gave right results on ranks in transformers. vLLM is not run, and the file says so.
    """
    subject = Model.read(plan, model, **how)
    found = proven(plan, subject, Table, _not_in_vllm, "the styles that are exported for vLLM")
    base, _ = by_class(found.table, subject.whole)
    return _json(
        base_model_tp_plan={k: s for k, s in base.items() if s in IN_VLLM},
        proven=False,
        note="not run by vLLM; run by transformers with its embedding and head split",
        lost=found.lost(),
        proof=found.proof(),
    )


def to_torch(plan: Plan, model: Any = None, **how: Any) -> str:
    """Return Python source with `parallelize(model, mesh)`, by torch's `parallelize_module`."""
    subject = Model.read(plan, model, **how)
    small = subject.small
    found = proven(
        plan, subject, lambda table: Source(source(table, small)), _not_in_torch, "torch's styles"
    )
    lost, proof = found.lost(), found.proof()
    held, ahead = lost["bytes_a_rank"], lost["collectives_forward"]
    figures = {"plan": plan, "held": held, "ahead": ahead, "proof": proof}
    return source(found.table, subject.whole, **figures)


def by_class(table: Mapping[str, str], model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Split a table as transformers stores it: on the base config, and on the outer class."""
    kept = {key: style for key, style in table.items() if style != WHOLE}
    if getattr(model, "base_model", None) is model:
        return kept, {}
    prefix: Any = f"{getattr(model, 'base_model_prefix', '')}."
    base = {k.removeprefix(prefix): s for k, s in kept.items() if k.startswith(prefix)}
    return base, {k: s for k, s in kept.items() if not k.startswith(prefix)}


def source(table: Mapping[str, str], model: nn.Module, **figures: Any) -> str:
    """Return torch code that carries out `table`, for `model` with any layer numbers.

    With `figures`, it begins with them.
    """
    styles = {key: IN_TORCH[style] for key, style in table.items() if style != WHOLE}
    first: dict[int, str] = {}
    ties = {  # torch's styles would untie tied parameters
        name: first[id(p)]
        for name, p in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(p), name) != name
    }
    return rendered(FOLDER, "parallelize.py", styles=styles, ties=ties, **{"held": None, **figures})


def _not_in_torch(table: Mapping[str, str]) -> str | None:
    missing = {k: s for k, s in table.items() if s != WHOLE and s not in IN_TORCH}
    return next((f"torch has no '{s}', for {pattern(k)}" for k, s in missing.items()), None)


def _not_in_vllm(table: Mapping[str, str]) -> str | None:
    for key, style in table.items():
        if style not in (IN_VLLM if "*" in key else IN_VLLM | BY_VLLM) | {WHOLE}:
            return (
                f"'{style}', for {key}, is not exported for vLLM, which gives attention a rank's "
                "heads: let vLLM take the plan itself (SHARDWRIGHT_PLAN)"
            )
    return None


def _json(**keys: Any) -> str:
    return json.dumps(keys, indent=2) + "\n"


def _with_own_style(plan: Plan, model: Model) -> str:
    ranks = ranks_to_run(plan)
    along = plan.workload.sequence_parallel
    again = make_plan(model.small, tp=ranks, objective="memory", sequence_parallel=along)
    ran = model.run(Table(again), ranks)
    predicted = max(again.predicted.parameter_bytes) / again.predicted.unsharded_bytes
    if not (ran.ok and ran.share <= MAX_RATIO * predicted):
        raise PlanError(
            f"our style in transformers differs from the unsplit model: logits by {ran.logits:.1e}"
            f", gradients by {ran.gradients:.1e} ({ran.worst}), or holds {ran.share:.0%} of all "
            "bytes: use shardwright.load"
        )
    text = json.dumps(plan.model_dump(), sort_keys=True)
    return rendered(FOLDER, "own_style.py", plan=plan, ranks=ranks, ran=ran, text=text)
