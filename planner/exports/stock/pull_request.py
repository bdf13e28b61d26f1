"""A plan as a change to transformers, in words that a maintainer can check.

For architectures that have no table there, or one that leaves much whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.errors import PlanError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.proven import Model, proven
from shardwright.planner.exports.stock.table import WHOLE
from shardwright.planner.exports.stock.to_transformers import by_class
from shardwright.planner.on_ranks.stock import Table


def emit(plan: Plan, model: Any = None, **how: Any) -> str:
    """A text in Markdown: what to add where, what it was measured to do, how to run that again.

    Args:
        plan: The plan.
        model: What it was made for, as `shardwright.plan` takes it.
        **how: `trust_remote_code`, and where a hub id leads, as `plan` takes them.

    Raises:
        PlanError: there is no table that is right, or one that holds no more than the plan.
    """
    subject = Model.read(plan, model, **how)
    found = proven(plan, subject, Table)
    stock: Mapping[str, str] = getattr(subject.whole, "tp_plan", None) or {}
    if stock and set(stock) <= {k for k, s in found.table.items() if s != WHOLE}:
        raise PlanError(
            f"transformers has a table for {plan.model.architecture} that splits as much already"
        )
    base, head = by_class(found.table, subject.whole)
    config: Any = subject.whole.config
    lost, proof = found.lost(), found.proof()
    held = lost["bytes_a_rank"]
    gathered = lost["gathered"]
    inner = [name for name in gathered if "*" in name]
    return _TEXT.format(
        architecture=plan.model.architecture,
        config=type(config).__name__,
        base=_python(base, 8),
        head=_python(head, 8),
        share=held["table"] / held["unsplit"],
        tp=plan.mesh["tp"],
        forward=lost["collectives_forward"]["table"],
        gathered=(
            f"\nSplit in memory only, since their code counts heads or takes fused parts: "
            f"{', '.join(f'`{name}`' for name in inner)}.\n" if inner else ""
        ),
        ranks=proof["ranks"],
        logits=proof["logits"],
        gradients=proof["gradients"],
    )  # fmt: skip


def _python(table: Mapping[str, str], indent: int) -> str:
    lines = "".join(f'{" " * indent}"{key}": "{style}",\n' for key, style in table.items())
    return f"{{\n{lines}{' ' * (indent - 4)}}}"


_TEXT = """# Add a tensor parallel plan for {architecture}

`{architecture}` has no tensor parallel plan that splits all of its weights. This adds one; each
rank then holds {share:.0%} of the bytes at `tp_size={tp}`.

In `{config}`:

```python
    base_model_tp_plan = {base}
```

In `{architecture}`:

```python
    _tp_plan = {head}
```
{gathered}
A forward pass takes {forward} collectives. On {ranks} gloo ranks a small random model of the same
structure, saved and read with `from_pretrained(..., distributed_config=DistributedConfig(
tp_size={ranks}))`, has the logits of the unsplit one within {logits:.0e} and all gradients within
{gradients:.0e} of their largest entry, in float64.
"""
