"""Audits the tables of transformers: one row for each, as a table and as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import islice
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.errors import ModelError, ShardwrightError
from shardwright.planner.hand_written.audit import OPEN, RIGHT, TRAINING, WRONG, audit
from shardwright.planner.hand_written.blame import Fault
from shardwright.planner.hand_written.block_cuts import BLOCK, cuts_in_blocks
from shardwright.planner.hand_written.expert_table import audit_experts
from shardwright.planner.hand_written.subjects import Subject, with_few_experts
from shardwright.planner.on_ranks.small import smaller_configs
from shardwright.planner.prepare import prepare
from shardwright.planner.problem.tp_plan import OWN, read, table_of
from shardwright.planner.report import tables
from shardwright.planner.search.ladder import SOLVING, climb
from shardwright.planner.search.search_state import start
from shardwright.planner.search.solution import SolverOptions, predicted
from shardwright.planner.search.task import Task
from shardwright.planner.trace.model.source import from_config

TRIES = 5
"""How many small models are tried, if the code of the first cannot run."""
SECONDS = 60.0
"""How long a small model may be traced; twice as long at most."""
TENSORS, EXPERTS = "tp", "ep"
STYLES = {RIGHT: "green", WRONG: "red", TRAINING: "red", OPEN: "yellow"}


@dataclass(frozen=True)
class Row:
    """What is known of one table of a config class.

    Attributes:
        name: The model type.
        architecture: The class of the model that was traced.
        table: "tp", or "ep" for that of experts.
        rules: Rules of the table.
        verdict: "right", "wrong", "wrong in training" or "not decided".
        fault: The first fault, or why nothing is decided.
        unused: Rules that match nothing in this model.
        time: Predicted time of the table, as a multiple of our plan's.
        bytes: Bytes of parameters on a rank, as a multiple of our plan's.
        cuts: Weights that are cut inside a block of FP8 -> the cut.
    """

    name: str
    architecture: str = ""
    table: str = TENSORS
    rules: int = 0
    verdict: str = OPEN
    fault: Fault | None = None
    unused: tuple[str, ...] = ()
    time: float | None = None
    bytes: float | None = None
    cuts: dict[str, str] | None = None


def audited(subject: Subject, tp: int, device: str) -> list[Row]:
    """Trace a small model of a subject, and hold its tables against the rules: a row for each."""
    rows = [Row(subject.name, subject.config_class.__name__)]
    try:
        config = subject.config()
        rows = [replace(rows[0], architecture=config.architectures[0])]
        whole: Any = from_config(config)
        both = {TENSORS: whole.tp_plan, EXPERTS: whole.ep_plan}
        tables = {k: t for k, t in both.items() if t} or {TENSORS: table_of(OWN, whole)}
        rows = [replace(rows[0], table=k, rules=len(t)) for k, t in tables.items()]
        if TENSORS in tables:  # the default config need not be traced
            rules = read(tables[TENSORS], whole)
            rows[0] = replace(rows[0], cuts=cuts_in_blocks(whole, rules, tp))
        task = _traced(with_few_experts(config, tp), tp, device)
    except ShardwrightError as error:
        return [replace(row, fault=Fault(str(error), open=True)) for row in rows]
    return [_of_table(row, tables[row.table], task, tp) for row in rows]


def _of_table(row: Row, table: Mapping[str, str], task: Task, tp: int) -> Row:
    """Return the row with the verdict on its table."""
    try:
        if row.table == EXPERTS:
            found = audit_experts(task, table, tp)
        else:
            ours = climb(start(task, SolverOptions(objective="memory")), SOLVING)
            found = audit(task, table, ours.formulation)
            if found.predicted is not None:
                theirs, best = found.predicted, ours.solution
                own = predicted(task, best.layouts, best.unfolded)
                size = max(theirs.parameter_bytes) / max(*own.parameter_bytes, 1)
                row = replace(row, time=theirs.time_ns / max(own.time_ns, 1), bytes=size)
        return replace(row, verdict=found.verdict, fault=found.fault, unused=found.unused)
    except ShardwrightError as error:
        return replace(row, fault=Fault(str(error), open=True))


def _traced(config: Any, tp: int, device: str) -> Task:
    """Return the task of the smallest model of a config whose code can be traced.

    Raises:
        ModelError: none can be.
    """
    failed = ModelError(f"no small {config.architectures[0]} can be made of its default config")
    for smaller in islice(smaller_configs(config), TRIES):
        try:
            until = time.monotonic() + SECONDS
            return prepare(smaller, tp, device=device, dtype="bfloat16", until=until)
        except ModelError as error:
            failed = error
    raise failed


def as_json(rows: Sequence[Row], tp: int) -> dict[str, Any]:
    """Return all rows for scripts."""
    return {
        "transformers": version("transformers"), "tp": tp, "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def audit_report(rows: Sequence[Row], tp: int) -> RenderableType:
    """Return the rows, for rich to print, and how many have which verdict."""
    table = tables.table(
        tables.name("TYPE"), tables.name("TABLE"), tables.number("RULES"), tables.name("VERDICT"),
        tables.number("TIME"), tables.number("BYTES"), tables.number("FP8_CUTS"),
        tables.words("FIRST_FAULT"),
    )  # fmt: skip
    for row in rows:
        cuts = "" if row.cuts is None else str(len(row.cuts))
        table.add_row(
            row.name, row.table, str(row.rules), Text(row.verdict, style=STYLES[row.verdict]),
            _multiple(row.time), _multiple(row.bytes), cuts, row.fault.text if row.fault else "",
        )  # fmt: skip
    counts = Counter(row.verdict for row in rows)
    said = ", ".join(f"{counts[v]} {v}" for v in STYLES if counts[v])
    about = (
        f"transformers {version('transformers')}, tp={tp}: {said}. TIME and BYTES are multiples "
        f"of our plan's. FP8_CUTS counts weights that are cut inside a block of {BLOCK} x {BLOCK}."
    )
    return Group(table, Text(""), Text(about))


def _multiple(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
