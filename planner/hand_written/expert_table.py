"""Holds a hand-written table for expert parallelism against the mixtures that numbers prove.

In transformers (distributed/expert_parallel.py, 5.23) "grouped_gemm" gives each rank the rows of
some experts, and sets `num_experts` to how many these are. "ep_dispatch_experts" takes the tokens
there. That is right on a mixture whose tokens may travel, if all parameters with rows for experts
are sharded, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwright.errors import UsageError
from shardwright.planner.experts import probe
from shardwright.planner.experts.mixtures import find_mixtures
from shardwright.planner.experts.probe import Mixture
from shardwright.planner.hand_written.audit import RIGHT, WRONG, Audited, wrong
from shardwright.planner.hand_written.blame import Fault
from shardwright.planner.problem.tp_plan import Rules, read
from shardwright.planner.search.task import Task

DISPATCH, ROWS = "ep_dispatch_experts", "grouped_gemm"
COUNT = "num_experts"
"""The one attribute of a mixture that transformers changes."""


def audit_experts(task: Task, table: Mapping[str, str], ranks: int) -> Audited:
    """Hold a table for expert parallelism against the mixtures of a model.

    Args:
        task: The traced model.
        table: Patterns of modules and parameters -> names of styles.
        ranks: How many ranks share out the experts.
    """
    try:
        rules = read(table, task.source.module)
    except UsageError as error:
        return Audited(WRONG, Fault(str(error)))
    fault = min(_faults(task, rules, ranks), key=lambda each: each.open, default=None)
    found = Audited(RIGHT) if fault is None else wrong(fault)
    return replace(found, unused=tuple(rules.unused))


def _faults(task: Task, rules: Rules, ranks: int) -> Iterator[Fault]:
    """Yield what is wrong and what is not decided."""
    mixtures = find_mixtures(task.graph, task.source.module)
    dispatching = {name for name, style in rules.modules.items() if style == DISPATCH}
    sharded = {name for name, style in rules.parameters.items() if style == ROWS}
    for name in sorted(sharded):
        module = name.rpartition(".")[0]
        if module not in dispatching:
            text = f"{name} is sharded by expert, and no tokens are taken to them"
            yield Fault(text, module=module)
    for name in sorted(dispatching):
        traced = task.traced_names.get(name, name)
        mixture = mixtures.found.get(traced)
        if mixture is None:
            why = mixtures.refused.get(traced, "it is not called as one")
            yield Fault(f"'{name}' is not proven to be a mixture: {why}", module=name, open=True)
        elif (text := _of_mixture(task, name, mixture, sharded, ranks)) is not None:
            yield Fault(f"'{name}' {text}", module=name)
    for name, style in {**rules.modules, **rules.parameters}.items():
        if style not in (DISPATCH, ROWS):
            text = f"style '{style}' on {name}: only styles of experts are known here"
            yield Fault(text, module=name, open=True)


def _of_mixture(
    task: Task, name: str, mixture: Mixture, sharded: set[str], ranks: int
) -> str | None:
    """Return what is wrong with a mixture's tokens, rows or numbers; None if nothing is."""
    module = task.source.module.get_submodule(name)
    mine = {n for n, _ in module.named_parameters() if f"{name}.{n}" in sharded}
    if mixture.experts is None:
        return "is called without the numbers of each token's experts"
    if not hasattr(module, COUNT):
        return f"has no {COUNT}"
    if mixture.count % ranks:
        return f"has {mixture.count} experts, which {ranks} ranks cannot share equally"
    if mixture.first < mixture.count:
        return f"gets tokens of {mixture.count} experts, and only {mixture.first} have rows"
    if missing := sorted(mixture.parameters.keys() - mine):
        return f"keeps all rows of {missing[0]}, of which ranks use only those of their experts"
    if surplus := sorted(mine - mixture.parameters.keys()):
        return f"loses rows of {surplus[0]}, which has none for each expert"
    if {*mixture.attributes} - {COUNT}:
        alone = {n: v for n, v in mixture.attributes.items() if n == COUNT}
        if (why := probe.fault(module, replace(mixture, attributes=alone))) is not None:
            return f"is wrong if only {COUNT} is changed: {why}"
    return None
