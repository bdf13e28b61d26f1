"""Says whether a model will run split: what is split, what stays whole, which calls it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from shardwright.errors import InfeasibleError
from shardwright.planner.contract.mesh import TP
from shardwright.planner.contract.names import dtype_name
from shardwright.planner.contract.plan_file import Plan, Replicated
from shardwright.planner.devices.device import ranks_on_a_host
from shardwright.planner.prepare import DEVICE, read
from shardwright.planner.report import tables
from shardwright.planner.report.fit import fits, memory_of
from shardwright.planner.report.report import replicated_table
from shardwright.planner.search.ladder import search
from shardwright.planner.search.solution import SolverOptions
from shardwright.planner.search.task import Task
from shardwright.planner.trace.runs.decoding import without_state
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.units import human_bytes, human_time

TESTED = {"torch": "2.13.0", "transformers": "5.23.0"}
"""Versions that all tests run with."""


@dataclass(frozen=True)
class OnRanks:
    """The plan for least memory on some ranks; `why` says why there is none.

    `whole` are the large parameters that every rank holds, with reasons.
    """

    tp: int
    parameter_bytes: int = 0
    share: float = 0.0
    total_bytes: int = 0
    fits: bool = False
    time_ns: int = 0
    why: str = ""
    whole: list[Replicated] = field(default_factory=list)


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a model before it is split.

    Attributes:
        architecture: Class of the model.
        parameters: Number of elements.
        dtype: Their dtype.
        inputs: Shapes with which it was traced; values of what is no tensor.
        ranks: A plan for each number of ranks.
        whole: Large parameters that every rank holds, on the first number of ranks that has a
            plan, with reasons.
        opaque: Modules whose code was not traced, so that they stay whole.
        proven: Calls that the plan holds for.
        refused: Calls that could not be traced; split models refuse them.
        versions: Packages that are installed -> their versions.
    """

    architecture: str
    parameters: int
    dtype: str
    inputs: dict[str, Any]
    ranks: list[OnRanks]
    whole: list[Replicated] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    proven: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def diagnose(
    model: Any, ranks: Sequence[int] = (2, 4, 8), device: str = DEVICE, **how: Any
) -> Diagnosis:
    """Trace a model once, and plan it for least memory on each number of ranks.

    Args:
        model: As for `shardwright.plan`.
        ranks: Numbers of tensor-parallel ranks.
        device: Name of the device profile, or its file.
        **how: Other arguments that say how a model is read.

    Raises:
        ModelError: the model cannot be read or traced.
    """
    found = read(model, 1, device=device, **how)
    given: dict[str, Any] = {
        **{str(i): value for i, value in enumerate(found.source.args)}, **found.source.kwargs
    }  # fmt: skip
    rows, task = list[OnRanks](), None
    for tp in ranks:
        task = found.on({TP: tp}, "ddp", ranks_on_a_host(device, tp, None))
        try:
            plan = search(task, SolverOptions(objective="memory")).plan
        except InfeasibleError as error:
            rows.append(OnRanks(tp, why=str(error)))
        else:
            rows.append(_on_ranks(tp, plan))
    source = found.source if task is None else task.source
    traced = {id(run) for run in source.further}
    lost = [wish[0] for wish in source.wishes if not any(id(run) in traced for run in wish)]
    made = made_runs(task) if task else source.runs
    if any(run.resumes for run in source.runs) and not any(run.resumes for run in made):
        lost = [run for run in lost if not run.resumes]  # no call of this model fills a cache
    return Diagnosis(
        source.architecture,
        sum(p.numel() for p in source.module.parameters()),
        dtype_name(source.dtype),
        {k: list(v.shape) if isinstance(v, Tensor) else v for k, v in given.items()},
        rows,
        whole=next((row.whole for row in rows if not row.why), []),
        opaque=sorted(task.graph.untraced) if task else [],
        proven=[*dict.fromkeys(_in_words(run) for run in made)],
        refused=[*dict.fromkeys(_in_words(run) for run in lost)],
        versions={name: version(name) for name in TESTED},
    )


def _on_ranks(tp: int, plan: Plan) -> OnRanks:
    held, whole = max(plan.predicted.parameter_bytes), max(plan.predicted.unsharded_bytes, 1)
    total, time = memory_of(plan).total, plan.predicted.time_ns
    return OnRanks(tp, held, held / whole, total, fits(plan), time, whole=plan.replicated)


def made_runs(task: Task) -> list[Run]:
    """Return the traced calls as they were made: without a cache, if no call before left one."""
    runs, graph = task.source.runs, task.graph
    numbers = [number for number, _ in graph.branch_paths] or range(len(graph.cache_arguments))
    found = list[Run]()
    for number, taken in zip(numbers, graph.cache_arguments, strict=True):
        run = runs[number]
        inputs = run.kwargs if taken or not run.resumes else without_state(run.kwargs)
        if inputs is not None:
            found.append(run._replace(kwargs=inputs, resumes=bool(run.resumes and taken)))
    return found


def _in_words(run: Run) -> str:
    """Return what a call gives, and what it continues."""
    given = [str(i) for i in range(len(run.args))]
    given += [
        f"{name}={value}" if isinstance(value, bool) else name for name, value in run.kwargs.items()
    ]
    of = f"{run.module}: " if run.module else ""
    after = ", after a call that filled the cache" if run.resumes else ""
    return of + ", ".join(given) + after + (", in training mode" if run.training else "")


def doctor_report(found: Diagnosis) -> RenderableType:
    """Return a diagnosis, for rich to print."""
    title = Text.assemble(
        (found.architecture, "bold"), f": {found.parameters:,} parameters, {found.dtype}"
    )
    grid = tables.facts()
    inputs = ", ".join(f"{name} {value}" for name, value in found.inputs.items())
    grid.add_row("traced with", inputs)
    for name, installed in found.versions.items():
        same = installed.partition("+")[0] == TESTED[name]
        grid.add_row(name, installed + ("" if same else f" (tested with {TESTED[name]})"))
    if found.opaque:
        grid.add_row("not traced", f"{', '.join(found.opaque)}: stay replicated")
    table = tables.table(
        tables.number("RANKS"), tables.number("PARAMETERS_PER_RANK"), tables.number("SHARE"),
        tables.number("MEMORY_PER_RANK"), tables.number("TIME"), tables.words("VERDICT"),
    )  # fmt: skip
    for row in found.ranks:
        if row.why:
            table.add_row(str(row.tp), "", "", "", "", row.why)
            continue
        table.add_row(
            str(row.tp), human_bytes(row.parameter_bytes), f"{row.share:.1%}",
            human_bytes(row.total_bytes), human_time(row.time_ns),
            "fits" if row.fits else "does not fit the device",
        )  # fmt: skip
    calls = tables.table(tables.words("CALL"), tables.name("SPLIT_MODEL"))
    for call in found.proven:
        calls.add_row(call, "proven")
    for call in found.refused:
        calls.add_row(call, Text("refused", style="yellow"))
    parts = [Group(title, grid), table, *_whole_tables(found.ranks), calls]
    return Group(*(p for part in parts for p in (part, Text(""))))


def _whole_tables(rows: Sequence[OnRanks]) -> list[RenderableType]:
    """Show what stays whole, once for all numbers of ranks on which it is the same."""
    ranks: dict[tuple[Replicated, ...], list[str]] = {}
    for row in rows:
        if not row.why:
            ranks.setdefault((*row.whole,), []).append(str(row.tp))
    found = {" and ".join(names): replicated_table(whole) for whole, names in ranks.items()}
    if len(found) < 2:
        return [*found.values()]
    return [Group(Text(f"On {names} ranks:", style="dim"), part) for names, part in found.items()]
