"""Finds the table to export: the first candidate with which the runtime is right on ranks."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.errors import PlanError, ShardwrightError, UsageError
from shardwright.planner.contract.mesh import CP, EP
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.exports.stock.experts import DISPATCH, expert_ranks
from shardwright.planner.exports.stock.styles import BY_TORCH, COLUMN
from shardwright.planner.exports.stock.table import MAX_RATIO, Table, candidates, held
from shardwright.planner.on_ranks.small import small
from shardwright.planner.on_ranks.stock import Ran, Way, try_out
from shardwright.planner.problem.tp_plan import read
from shardwright.planner.quiet import quiet
from shardwright.runtime.model.build import building, empty_model
from shardwright.runtime.model.config import read_config
from shardwright.runtime.model.hub import Hub
from shardwright.runtime.model.identity import check_identity

BY_DTENSORS = "computed as DTensors"
"""The effect of an embedding's style on any other module."""
FORWARD = {
    "colwise_gather_output", "rowwise", "rowwise_split_input", "embedding_rowwise",
    "embedding_colwise", "moe_tp_experts", "all_reduce", BY_DTENSORS,
}  # fmt: skip
"""Styles with a collective in the forward pass."""
TRAVEL = {"forward": 3, "backward": 2}
"""Collectives of a module whose tokens travel: their counts, tokens and results, and gradients."""
BACKWARD = {
    "colwise": 1, "packed_colwise": 1, "moe_tp_experts": 2, "mla_kv_a_proj": 1,
    "replicated_with_grad_allreduce": 1, "rowwise_split_input": 1, "colwise_gather_output": 1,
    "embedding_colwise": 0, "embedding_rowwise": 0, BY_DTENSORS: 1,
}  # fmt: skip
"""Collectives of a style in the backward pass, if the module's input has a gradient."""


@dataclass(frozen=True)
class Model:
    """The model of a plan: unsharded on meta, and a small one of the same structure."""

    whole: nn.Module
    small: nn.Module
    inputs: dict[str, Any]

    @classmethod
    def read(cls, plan: Plan, model: Any, **how: Any) -> Model:
        """Read the model that `plan` was made for: a Hub id, directory, config or module.

        Raises:
            UsageError: no model is given, or it is not a transformers model.
            PlanError: the plan is for another model.
        """
        if model is None:
            raise UsageError(
                "an export is tried on ranks first: give the MODEL that the plan was made for"
            )
        if unknown := how.keys() - {*Hub._fields}:
            raise UsageError(f"this format does not take {', '.join(sorted(unknown))}")
        if isinstance(model, nn.Module) and hasattr(model, "config"):
            cls_name, model = type(model).__name__, copy.deepcopy(model.config)
            model.architectures = [cls_name]  # type: ignore[attr-defined]
        config, hub = model, Hub(**how)
        if not hasattr(model, "get_text_config"):
            if not isinstance(model, str):
                raise UsageError("only models of transformers can be exported to other runtimes")
            config = read_config(model, hub)
        with building(config, hub) as made:
            whole = empty_model(made._from_config, copy.deepcopy(config))
        check_identity(whole, plan)
        return cls(whole, *small(config, hub))

    def run(self, way: Way, ranks: int) -> Ran:
        """Split the small model with `way`, and compare it with the unsharded one."""
        from safetensors import SafetensorError

        with quiet(), tempfile.TemporaryDirectory() as directory:
            saved: Any = self.small
            try:
                saved.save_pretrained(directory)
            except SafetensorError as error:  # a full disk says nothing about the table
                raise OSError(f"{directory}: {error}") from None
            return try_out(way, type(self.small), directory, self.inputs, ranks)


@dataclass(frozen=True)
class Proven:
    """A table that was right on ranks, and its costs compared with the plan."""

    plan: Plan
    model: Model
    table: Table
    ran: Ran
    ranks: int
    experts: Table
    """Rules for experts that are spread."""

    def lost(self) -> dict[str, Any]:
        """Return costs of the plan and of the table: bytes, collectives, gathered modules."""
        whole = self.model.whole
        names = read(self.table, whole).modules if self.table else {}
        names |= {
            n: BY_DTENSORS
            for n, s in names.items()
            if s == BY_TORCH and not isinstance(whole.get_submodule(n), nn.Embedding)
        }
        styles = list(names.values())
        spread = read(self.experts, whole).modules.values() if self.experts else ()
        sent = {p: n * sum(s == DISPATCH for s in spread) for p, n in TRAVEL.items()}
        ours = {p: sum(c.count for c in self.plan.predicted.collectives if c.phase == p)
                for p in ("forward", "backward")}  # fmt: skip
        gathered = {pattern(n) for n, s in names.items() if s in (COLUMN[1], BY_DTENSORS)}
        return {
            "bytes_a_rank": {"plan": max(self.plan.predicted.parameter_bytes),
                             "table": self.bytes, "unsplit": self.plan.predicted.unsharded_bytes},
            "collectives_forward": {"plan": ours["forward"],
                                    "table": sum(s in FORWARD for s in styles) + sent["forward"]},
            "collectives_backward": {"plan": ours["backward"],
                                     "table": sum(BACKWARD.get(s, 0) for s in styles)
                                     + sent["backward"]},
            "gathered": sorted(gathered),
        }  # fmt: skip

    @property
    def bytes(self) -> int:
        """Return the bytes of parameters and buffers on the fullest rank."""
        return sum(_held(self.plan, self.model.whole, self.table, self.experts).values())

    def proof(self) -> dict[str, Any]:
        """Return the size of the run and its differences."""
        return {
            "ranks": self.ranks,
            "parameters": sum(p.numel() for p in self.model.small.parameters()),
            "logits": self.ran.logits,
            "gradients": self.ran.gradients,
            "tolerance": self.ran.tolerance,
        }


def ranks_to_run(plan: Plan, spread: bool = False) -> int:
    """Return how many processes try an export; `spread` says that the format may spread experts."""
    if {*plan.batch_dims} - ({EP} if spread else set()) or CP in plan.mesh:
        raise UsageError(
            "the plan has copies of the model: plan with tp alone, and ask the other runtime "
            "for copies"
        )
    if plan.workload.shares:
        raise UsageError(
            "the plan gives ranks parts of different sizes, and other runtimes share out evenly: "
            "plan without speeds and with one memory for all ranks, or use shardwright.load"
        )
    return plan.mesh["tp"] if plan.mesh["tp"] <= 4 and EP not in plan.mesh else 2


def proven(
    plan: Plan,
    model: Model,
    way: Callable[[Table], Way],
    expressed: Callable[[Table], str | None] = lambda table: None,
    what: str = "transformers' styles",
    experts: Table | None = None,
) -> Proven:
    """Return the first table that gives the unsharded model's results in the plan's memory.

    Args:
        plan: The plan.
        model: The plan's model.
        way: Turns a table into what is run.
        expressed: Returns why the format cannot express a table; None if it can.
        what: The styles of the format, for messages.
        experts: Rules for experts that are spread; None if the format has none.

    Raises:
        PlanError: no table qualifies; the message says why the first one failed.
    """
    ranks, why = ranks_to_run(plan, spread=experts is not None), ""
    experts = experts or {}
    for table in candidates(plan, model.whole, experts):
        reason = expressed(table) or _heavier(plan, model.whole, table, experts)
        if reason is not None:
            why = why or f"{what} cannot express this plan: {reason}"
            continue
        try:
            ran = model.run(way(table), ranks)
        except ShardwrightError as error:
            why = why or f"{what} do not run: {error}"
            continue
        if ran.ok and ran.share <= MAX_RATIO * _share(table, experts, model.small, ranks):
            return Proven(plan, model, table, ran, ranks, experts)
        why = why or (
            f"{what} differ from the unsplit model: logits by {ran.logits:.1e}, gradients by "
            f"{ran.gradients:.1e} ({ran.worst}), or hold more: {ran.share:.0%} of all bytes"
        )
    ours = "shardwright.load" if experts else "shardwright.load, or --to transformers --own-styles"
    raise PlanError(f"{why}: use {ours}")


def _share(table: Table, experts: Table, model: nn.Module, ranks: int) -> float:
    """Return the fullest rank's share of all bytes."""
    ours = held(table, model, ranks, experts, ranks)
    return sum(ours.values()) / sum(held({}, model, 1).values())


def _held(plan: Plan, model: nn.Module, table: Table, experts: Table) -> dict[str, int]:
    return held(table, model, plan.mesh["tp"], experts, expert_ranks(plan))


def _heavier(plan: Plan, model: nn.Module, table: Table, experts: Table) -> str | None:
    """Describe what a table replicates that the plan shards; None if that is little."""
    sizes, ours = _held(plan, model, table, experts), max(plan.predicted.parameter_bytes)
    if sum(sizes.values()) <= MAX_RATIO * ours:
        return None
    whole = _whole(plan, model, sizes)
    more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
    return (
        f"a rank would hold {sum(sizes.values()) / ours:.2f} of its bytes, with "
        f"{', '.join(whole[:3])}{more} replicated"
    )


def _whole(plan: Plan, model: nn.Module, sizes: Mapping[str, int]) -> list[str]:
    """List what the plan shards and a table replicates, the largest first."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        entry = plan.parameter(name)
        nbytes = parameter.numel() * parameter.element_size()
        if entry is not None and "@" in entry.placement and sizes.get(name) == nbytes:
            found[pattern(name)] = found.get(pattern(name), 0) + nbytes
    return sorted(found, key=lambda name: (-found[name], name))
