"""A plan as styles of torch's `parallelize_module`: Python source with a function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.proven import Model, proven
from shardwright.planner.exports.stock.table import WHOLE
from shardwright.planner.on_ranks.stock import Source

STYLES = {
    "colwise": "ColwiseParallel()",
    "colwise_gather_output": "ColwiseParallel(output_layouts=Replicate())",
    "rowwise": "RowwiseParallel()",
    "rowwise_split_input": "RowwiseParallel(input_layouts=Replicate())",
    "embedding_rowwise": "RowwiseParallel(input_layouts=Replicate())",
    "embedding_colwise": "ColwiseParallel(output_layouts=Replicate())",
}
"""A style of transformers -> what does the same in torch."""


def emit(plan: Plan, model: Any = None, **how: Any) -> str:
    """Python source with `parallelize(model, mesh)`, once that was run.

    Args:
        plan: The plan.
        model: What it was made for, as `shardwright.plan` takes it.
        **how: `trust_remote_code`, and where a hub id leads, as `plan` takes them.

    Raises:
        PlanError: it would not compute what the unsplit model does, or replicate what the plan
            splits.
    """
    subject = Model.read(plan, model, **how)
    found = proven(
        plan, subject, lambda table: Source(source(table, subject.small)), _unsaid, "torch's styles"
    )
    lost, proof = found.lost(), found.proof()
    held, ahead = lost["bytes_a_rank"], lost["collectives_forward"]
    title = f'''"""{plan.model.architecture} on {plan.mesh["tp"]} ranks, for torch.

A rank holds {held["table"]:,} bytes ({held["plan"]:,} by the plan, {held["unsplit"]:,} unsplit).
A forward pass takes {ahead["table"]} collectives ({ahead["plan"]} by the plan). A small model split
so on {proof["ranks"]} ranks differs from the unsplit one by {proof["logits"]:.1e} (logits) and
{proof["gradients"]:.1e} (gradients).
"""

'''
    return title + source(found.table, subject.whole)


def source(table: Mapping[str, str], model: nn.Module) -> str:
    """Code that does what `table` says, for `model` or one that differs in layer numbers only."""
    styles = {key: STYLES[style] for key, style in table.items() if style != WHOLE}
    lines = "".join(f'    "{key}": {style},\n' for key, style in styles.items())
    ties = "".join(f'    "{name}": "{other}",\n' for name, other in _ties(model).items())
    return _SOURCE.format(styles=lines, ties=ties)


def _ties(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another's, which torch's styles would part."""
    first: dict[int, str] = {}
    return {
        name: first[id(p)]
        for name, p in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(p), name) != name
    }


def _unsaid(table: Mapping[str, str]) -> str | None:
    """Why torch has no counterpart; None if it has."""
    missing = {k: s for k, s in table.items() if s != WHOLE and s not in STYLES}
    return next((f"it has no '{s}', for {pattern(k)}" for k, s in missing.items()), None)


_SOURCE = '''from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STYLES = {{
{styles}}}
TIED = {{
{ties}}}


def parallelize(model, mesh):
    """Split a whole model over the ranks of `mesh`, in place; every rank calls this."""
    parallelize_module(model, mesh, STYLES)
    for name, other in TIED.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(other))
    return model
'''
