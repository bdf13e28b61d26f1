"""Exports a plan as the text of a pull request to transformers: what to set, and how it was tested.

It is for architectures that have no table there, or one that leaves much replicated.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.proven import Model, proven
from shardwright.planner.exports.stock.runtimes import FOLDER, by_class
from shardwright.planner.exports.stock.styles import BY_TORCH, COLUMN
from shardwright.planner.exports.stock.table import WHOLE
from shardwright.planner.on_ranks.stock import Table
from shardwright.planner.problem.tp_plan import general
from shardwright.planner.templates import rendered


def emit(plan: Plan, model: Any = None, **how: Any) -> str:
    """Return Markdown: what to set in which class, figures, and a script that tests it.

    Args:
        plan: The plan.
        model: The model it was made for, as `shardwright.plan` takes it.
        **how: `trust_remote_code` and options of a Hub id, as `plan` takes them.

    Raises:
        PlanError: no table gives right results in the plan's memory, or the model's code is not
            part of transformers.
    """
    subject = Model.read(plan, model, **how)
    whole: Any = subject.whole
    if not type(whole).__module__.startswith("transformers.models."):
        raise PlanError(f"the code of {plan.model.architecture} is not part of transformers")
    found = proven(plan, subject, Table)
    stock: Mapping[str, str] = getattr(whole, "tp_plan", None) or {}
    if stock and set(stock) <= {k for k, s in found.table.items() if s != WHOLE}:
        raise PlanError(
            f"transformers has a table for {plan.model.architecture} that splits as much already"
        )
    base, head = by_class(found.table, whole)
    if isinstance(getattr(whole.base_model, "embed_tokens", None), nn.Embedding):
        base = {k: s for k, s in base.items() if (k, s) != ("embed_tokens", BY_TORCH)}  # implied
    changes = [(type(whole.config), "base_model_tp_plan", base), (type(whole), "_tp_plan", head)]
    small: Any = subject.small
    experts: Any = getattr(whole, "get_experts_implementation", dict)()
    return rendered(
        FOLDER,
        "pull_request.md",
        plan=plan,
        stock=stock,
        lost=found.lost(),
        ran=found.ran,
        ranks=found.ranks,
        folder=type(whole.config).__module__.split(".")[2],
        changes=[(_file(cls), cls.__name__, key, t) for cls, key, t in changes if t],
        notes=_notes(plan, found.table, whole),
        cls=type(whole).__name__,
        config=type(small.config).__name__,
        settings=_settings(small.config),
        inputs={name: _value(value, small.config) for name, value in subject.inputs.items()},
        grouped="grouped_mm" in experts.values(),
    )


def _file(cls: type) -> str:
    """Return the path of a class's file in transformers' repository."""
    parts = Path(inspect.getfile(cls)).parts
    return "/".join(("src", *parts[len(parts) - 1 - parts[::-1].index("transformers") :]))


def _notes(plan: Plan, table: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """Explain which layers in blocks are sharded in memory only, by the key of their rule."""
    notes: dict[str, str] = {}
    prefix = f"{model.base_model_prefix}."
    for name, module in model.named_modules():
        key = general(name)
        style = table.get(key, "") if "*" in pattern(name) else ""
        if style == BY_TORCH and not isinstance(module, nn.Embedding):
            notes[key.removeprefix(prefix)] = f"gathered: a {type(module).__name__}"
        elif style == COLUMN[1]:
            counted = _counted(plan, name)
            reason = f"uses {counted}" if counted else "its output is split up"
            notes[key.removeprefix(prefix)] = f"gathered: {reason}"
    return notes


def _counted(plan: Plan, name: str) -> str:
    """List the integers that code around a layer computes with and the plan would make local."""
    while name := name.rpartition(".")[0]:
        spec = plan.module(name)
        if spec and spec.attributes:
            return ", ".join(sorted(spec.attributes))
    return ""


def _settings(config: Any) -> dict[str, str]:
    """Return a config's values as Python source."""
    drop = {"architectures", "transformers_version", "dtype", "model_type"}
    kept = {k: v for k, v in config.to_diff_dict().items() if k not in drop}
    return {k: json.dumps(v) if isinstance(v, str) else repr(v) for k, v in kept.items()}


def _value(value: Any, config: Any) -> str:
    """Return Python source for an input of the same kind."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_floating_point():
        return f"torch.randn({tuple(value.shape)}, dtype=torch.float64)"
    return f"torch.randint({config.get_text_config().vocab_size}, {tuple(value.shape)})"
