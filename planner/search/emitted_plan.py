"""Builds the plan of a model from a solution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce
from importlib.metadata import version
from inspect import signature
from operator import or_
from typing import Any, TypeVar

from shardwright.planner.contract.dims import dim_size
from shardwright.planner.contract.mesh import batch_dims
from shardwright.planner.contract.names import fold, is_batched, slot_pattern
from shardwright.planner.contract.plain_values import (
    FREE,
    SWITCHES,
    PlainValue,
    is_on,
    is_said,
    plain_value,
    plain_within,
)
from shardwright.planner.contract.plan_figures import SolverReport
from shardwright.planner.contract.plan_file import (
    Draws,
    ModelIdentity,
    ModulePlan,
    Plan,
    TracedCall,
)
from shardwright.planner.dry_run.conflict import Conflict
from shardwright.planner.emit.compared_lengths import compared_lengths
from shardwright.planner.emit.drawing import drawing
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.module_plans import folded, shapes
from shardwright.planner.emit.random_draws import draws_of
from shardwright.planner.emit.reasons import reason_of, replicated_parameters
from shardwright.planner.graph.axes import Axes
from shardwright.planner.graph.graph import Graph, Use
from shardwright.planner.graph.trace_sizes import has_rows
from shardwright.planner.problem.pins import as_table
from shardwright.planner.search.solution import Solution, predicted
from shardwright.planner.search.task import Task, of_copies
from shardwright.planner.search.unfolded import UnfoldedSolution
from shardwright.planner.trace.record.boundaries import argument_names
from shardwright.planner.trace.runs.decoding import tokens_of, without_state

NO_PADDING_MASK = (
    "calls with a mask for padding cannot be traced, and are refused: give one with example inputs"
)
"""The note of a plan if the model takes padding masks and the call with one was not traced."""

IN_EVAL_MODE = (
    "refused in training mode: its code does something else there that cannot be traced, draws "
    "random numbers with Python or NumPy (draw them with torch), or drops unequal parts on ranks "
    "(plan it without dropout, or on a number of ranks that divides them)"
)
"""The note of a plan for training if only eval mode is proven."""

AS_GIVEN = (
    "priced for the batch of its example inputs: to price others, give 2 samples or more, of a "
    "length that is not their number"
)
"""The note of a plan if the batch cannot be told from other lengths."""

BY_VALUE = "proven for what the code does with values like those that it was given"
"""The note of a plan that was traced with the values of inputs."""

T = TypeVar("T")


def make_plan(
    task: Task, solution: Solution, modules: Mapping[str, ModulePlan], earlier: Sequence[Conflict]
) -> Plan:
    """Return the plan of the model for the dry run; `finished` completes it afterwards.

    Args:
        task: The task.
        solution: Its solution.
        modules: Plans of the traced modules.
        earlier: Conflicts of earlier dry runs, which give reasons for replicated parameters.
    """
    layouts, there = solution.layouts, solution.unfolded
    failed = {name: conflict.text for conflict in earlier for name, _ in conflict.splits}
    used = {u.used: u for u in task.graph.uses}

    def unread(use: Use) -> str:
        like = used[task.unfolded.origin[use.used]]
        return reason_of(like, layouts, solution.possible)

    return Plan(
        **derived_keys(task, layouts, there, modules),
        mesh=dict(task.mesh),
        workload=task.workload,
        objective=solution.objective,
        drawing=drawing(there.layouts, there.bill, there.short),
        replicated=replicated_parameters(
            there.layouts,
            of_copies(solution.possible, task.unfolded),
            of_copies(solution.pinned, task.unfolded),
            of_copies(failed, task.unfolded),
            unread,
        ),
        solver=solution.unproven,
        pins=as_table(task.pins),
        versions=dict(_versions()),
    )


def derived_keys(
    task: Task, layouts: Layouts, there: UnfoldedSolution, modules: Mapping[str, ModulePlan]
) -> dict[str, Any]:
    """Return the keys of a plan that follow from the states of its tensors.

    Args:
        task: The task.
        layouts: Layouts of the folded graph.
        there: The same on the unfolded graph.
        modules: Plans of the traced modules.
    """
    source = task.source
    return {
        "model": ModelIdentity(
            architecture=source.architecture,
            config_hash=source.config_hash,
            parameters=shapes(source.module),
        ),
        "batch_dims": batch_dims(task.mesh),
        "sub_axes": layouts.states.sub.table(),
        "modules": of_all_blocks(task, modules),
        "fsdp": shared_parameters(there.layouts),
        "calls": traced_calls(task, layouts),
        "opaque": without_rule(task.graph, task.axes),
        "predicted": predicted(task, layouts, there),
    }


@cache
def _versions() -> dict[str, str]:
    """Return the versions of what traces depend on; to read them takes milliseconds."""
    return {package: version(package) for package in ("torch", "transformers")}


def finished(task: Task, plan: Plan, report: SolverReport) -> Plan:
    """Return a plan that passed its dry run with the solver's report and its notes, sealed."""
    plan = plan.model_copy(update={"solver": report})
    if "train" in task.workload.phases and not any(call.training for call in plan.calls):
        plan = plan.noted(IN_EVAL_MODE)
    lengths = task.graph.lengths.values()
    plan = plan.noted(BY_VALUE) if task.source.by_value else plan
    plan = plan.noted(AS_GIVEN) if task.graph.inputs and "batch" not in lengths else plan
    for module, why in task.graph.unspread.items():
        plan = plan.noted(f"each rank of ep holds all experts of '{module}': {why}")
    return plan.noted(NO_PADDING_MASK) if task.unmasked else plan.sealed()


def of_all_blocks(task: Task, modules: Mapping[str, ModulePlan]) -> dict[str, ModulePlan]:
    """Return plans of all modules of the model, with one entry for equal modules."""
    every = {n: modules[t] for n, t in task.traced_names.items() if t in modules}
    return folded(task.source.module, every)


def shared_parameters(layouts: Layouts) -> list[str]:
    """Return the parameters that copies of the model share out, with one entry for equal ones."""
    uses = layouts.graph.uses
    shared = {u.fqn: True for u in uses if layouts.assignment[u.stored].shared}
    return sorted(fold(shared, dict.fromkeys(u.fqn for u in uses)))


def traced_calls(task: Task, layouts: Layouts) -> list[TracedCall]:
    """Return the traced calls, without duplicates."""
    runs, graph = task.source.runs, task.graph
    numbers = [run for run, _ in graph.branch_paths] or range(len(graph.returned_slots))
    found: list[TracedCall] = []
    drawn: Draws = "training" if graph.marks.drawn else ""
    draws: Draws = "always" if graph.draws else ""
    kept = zip(graph.cache_arguments, graph.cache_classes, strict=True)
    for number, given, (taken, state) in zip(numbers, graph.returned_slots, kept, strict=True):
        run = runs[number]
        if run.again:
            continue
        inputs = run.kwargs if taken or not run.resumes else without_state(run.kwargs)
        if inputs is None:
            continue
        forward = task.source.module.get_submodule(run.module).forward
        names = [*argument_names(forward), *(f"*{i}" for i in range(len(run.args)))]
        positions = names[: len(run.args)]
        plain = plain_values(forward, {**dict(zip(positions, run.args, strict=True)), **inputs})
        call = TracedCall(
            module=run.module,
            inputs=sorted({*positions, *taken, *(k for k, v in inputs.items() if v is not None)}),
            values={n: v for n, v in plain.items() if n not in graph.numbers},
            numbers=[n for n in plain if n in graph.numbers],
            outputs=sorted({slot_pattern(slot) for slot in given}),
            state=state,
            several=bool(state) and not is_batched(state) and tokens_of(inputs) > 1,
            draws=draws,
            asks_autocast=graph.asks_autocast,
        )
        alike = call.model_copy(update={"training": True, "draws": draws or drawn})
        if (run.training or graph.holds_in_training) and draws_alike(task, layouts):
            found = [*(c for c in found if c != call), alike]
        found += [] if call in found or alike in found else [call]
    # With shards of sequences, no call with a cache is tried.
    switches = () if task.source.by_rows else SWITCHES
    off = {name: False for name in switches if _never_on(task, numbers, name)}
    lengths = compared_lengths(graph, task.axes)
    return [
        call
        if call.module
        else call.model_copy(update={"values": call.values | off, "lengths": lengths})
        for call in found
    ]


def _never_on(task: Task, numbers: Iterable[int], name: str) -> bool:
    """Whether callers can set the flag `name` of the model, and no traced call of it had it on."""
    module = task.source.module
    parameters = signature(module.forward).parameters
    if name not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        return False
    config, names = getattr(module, "config", None), [*parameters]
    default = parameters[name].default if name in parameters else None
    calls = [run for n in numbers if not (run := task.source.runs[n]).module]
    given = ({**dict(zip(names, run.args, strict=False)), **run.kwargs} for run in calls)
    return bool(calls) and not any(is_on(name, each, default, config) for each in given)


def plain_values(forward: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, PlainValue]:
    """Return the arguments of a call that are not tensors and may change what the code does."""
    parameters = signature(forward).parameters
    defaults = {n: p.default for n, p in parameters.items()}
    left_out = {n for n, v in given.items() if v is None and defaults.get(n) is None}
    plain = {n: v for n, v in given.items() if is_said(v) and n not in FREE | left_out}
    plain |= {at: v for n, more in given.items() for at, v in plain_within(more, n)}
    return {name: plain_value(plain[name]) for name in sorted(plain)}


def draws_alike(task: Task, layouts: Layouts) -> bool:
    """Whether all ranks draw the same count of random numbers, so that their generators agree.

    They do if each draws for the full tensor and keeps its part (`draws_of`). The count of rows
    that data selects is the same on all ranks if no mask that selects them is sharded.
    """
    marks, tensors = layouts.graph.marks, layouts.graph.tensors
    by_data = any(layouts.assignment[n].shards for n in marks.loop_masks)
    every = task.ranks(layouts.states)
    of_wholes = draws_of(layouts)
    for name, draw in marks.drawn:
        if by_data and has_rows(tensors[name].shape):
            return False
        if draw.module in of_wholes:
            continue
        dims = layouts.traced(name)
        if len({tuple(dim_size(d, at) for d in dims) for at in every}) > 1:
            return False
    return True


def without_rule(graph: Graph, axes: Axes) -> dict[str, int]:
    """Return the ops without a rule, each with its largest count in any run."""
    runs: dict[int, Counter[str]] = {}
    for op in graph.ops:
        if axes.rules.get(op.name) is None:
            runs.setdefault(op.traced_call, Counter())[op.call.op] += graph.times(op.name)
    most = reduce(or_, runs.values(), Counter[str]())
    return dict(sorted(most.items()))
