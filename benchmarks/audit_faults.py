"""Plants faults in hand-written tables of transformers, and counts those that the audit names.

    python -m benchmarks.audit_faults                 200 faults
    python -m benchmarks.audit_faults llama mixtral   all faults of some

Each fault changes the style of one rule to another that is wrong there: a cut along the other dim,
none at all, a missing or a second all-reduce, or a cut in the wrong place. Models are tiny. Exits
with 1 if a fault is not named, or if a table without a fault is not found right.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice, zip_longest

import click

from shardwright.planner.hand_written.audit import OPEN, RIGHT, audit
from shardwright.planner.prepare import prepare
from shardwright.planner.problem.tp_plan import table_of
from shardwright.planner.quiet import quiet
from shardwright.planner.search.restrictions import Restrictions, formulate
from shardwright.planner.search.task import Task
from tests import zoo

NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "granite", "olmo", "phi", "starcoder2",
    "mixtral", "qwen3_moe", "deepseek_v3", "phi3",
)  # fmt: skip
COUNT = 200

FAULTS: Mapping[str, tuple[str, ...]] = {
    "colwise": ("rowwise", "replicate", "colwise_gather_output", "all_reduce"),
    "rowwise": ("colwise", "replicate", "weight"),
    "colwise_gather_output": ("colwise", "all_reduce"),
    "rowwise_split_input": ("rowwise",),
    "packed_colwise": ("colwise", "replicate"),
    "embedding_rowwise": ("all_reduce", "weight"),
    "moe_tp_experts": ("replicate", "all_reduce"),
    "mla_kv_a_proj": ("replicate",),
    "replicated_with_grad_allreduce": ("replicate", "all_reduce"),
}
"""Style -> styles that are wrong in its place; "weight" cuts the weight and sums no output."""


def planted(table: Mapping[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield tables with one fault each, and the fault."""
    for key, style in table.items():
        for other in FAULTS.get(style, ()):
            if other != "weight":
                yield f"{key}: {style} -> {other}", {**table, key: other}
            else:
                rest = {k: v for k, v in table.items() if k != key}
                yield f"{key}: {style} without its sum", {**rest, f"{key}.weight": style}


def traced(name: str, tp: int) -> tuple[Task, dict[str, str]]:
    """Return the task of a tiny model, and its table."""
    with quiet():
        task = prepare(zoo.build(name, randomize=False)[1], tp)
    return task, table_of("auto", task.source.module)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, show_default=True, help="Ranks.")
def main(names: tuple[str, ...], tp: int) -> None:
    """Audit each table as it is and with each fault."""
    began, missed, count = time.monotonic(), 0, 0
    tasks = {name: traced(name, tp) for name in names or NAMES}
    posed = {n: formulate(task, Restrictions()) for n, (task, _) in tasks.items()}
    for name, (task, table) in tasks.items():
        found = audit(task, table, posed[name])
        if found.verdict != RIGHT:
            missed += 1
            print(f"FALSE ALARM {name}: {found.fault.text if found.fault else found.verdict}")
    rounds = zip_longest(*([(n, *f) for f in planted(t)] for n, (_, t) in tasks.items()))
    every = (fault for faults in rounds for fault in faults if fault)
    for name, what, broken in islice(every, None if names else COUNT):
        found, count = audit(tasks[name][0], broken, posed[name]), count + 1
        named = found.verdict not in (RIGHT, OPEN) and found.fault is not None
        missed += not named
        text = found.fault.text if found.fault else ""
        print(f"{'' if named else 'MISSED '}{name} {what}: {found.verdict}: {text}", flush=True)
    print(f"{count} faults in {time.monotonic() - began:.0f} s, {missed} missed or false")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
