"""Prices a tensor-parallel plan of transformers by the same rules and costs as ours.

Its styles become restrictions of the same problem: parameters are sharded as the styles say, or
replicated, and tensors are redistributed only at the modules that the plan names. The remaining
choices cost nothing. If no solution remains, the plan is wrong by our rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import InfeasibleError, UsageError
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_figures import Prediction
from shardwright.planner.emit.prediction import whole_bytes
from shardwright.planner.problem.tp_plan import STYLES, Rules, read
from shardwright.planner.problem.tp_table import follow_table
from shardwright.planner.search.restrictions import Formulation, Restrictions, unpinned_problem
from shardwright.planner.search.solution import SolverOptions, predicted, solve
from shardwright.planner.search.task import Task

FREE = SolverOptions(objective="memory")
"""How the remaining choices are made: without a memory limit."""


@dataclass(frozen=True)
class HandWritten:
    """A hand-written plan with its prediction, or with the reason why it has none.

    `replicated` has the bytes of replicated parameters, with * for a layer number.
    """

    rules: int
    unused: list[str]
    problem: str | None
    predicted: Prediction | None
    replicated: dict[str, int]


def price(task: Task, table: Mapping[str, str], earlier: Formulation | None = None) -> HandWritten:
    """Price the plan `table` on the model, ranks and workload of `task`.

    Args:
        task: The task that the plan is for.
        table: Patterns of modules and parameters -> names of styles.
        earlier: A problem of the same task, parts of which are reused.

    Raises:
        UsageError: no rule of the plan matches anything.
    """
    rules = read(table, task.source.module)
    problem, found = None, None
    try:
        found = _predicted(task, rules, earlier)
    except (UsageError, InfeasibleError) as error:
        problem = str(error)
    return HandWritten(len(table), rules.unused, problem, found, _replicated(task, rules))


def unsharded(task: Task, earlier: Formulation | None = None) -> Prediction | None:
    """Price the model without a plan, with all computed on every rank; None if impossible."""
    try:
        return _predicted(task, Rules({}, {}, []), earlier)
    except InfeasibleError:  # for example, the ranks share a sequence
        return None


def _predicted(task: Task, rules: Rules, earlier: Formulation | None) -> Prediction:
    """Price the rules.

    Raises:
        UsageError: a style is unknown.
        InfeasibleError: no solution remains.
    """
    found = solve(task, of_table(task, rules, earlier), FREE).checked
    return predicted(task, found.layouts, found.unfolded)


def of_table(task: Task, rules: Rules, earlier: Formulation | None = None) -> Formulation:
    """Return the problem of a task that leaves only what the rules of a table do.

    Raises:
        UsageError: a style is unknown.
        InfeasibleError: a style is impossible, whatever the other styles are.
    """
    posed = unpinned_problem(task, Restrictions(), earlier)
    network = posed.network.copy()
    pinned = follow_table(task.graph, network, rules)
    return Formulation(posed, lambda: network, pinned)


def _replicated(task: Task, rules: Rules) -> dict[str, int]:
    """Return the bytes of the parameters that the plan replicates, the largest first."""
    found, graph = Counter[str](), task.graph
    split = {
        name
        for name, style in rules.parameters.items()
        if style not in STYLES or STYLES[style].dim is not None
    }
    stored = {u.stored for u in graph.uses if u.fqn in split}
    first = {u.stored: u.fqn for u in reversed(graph.uses) if not u.is_buffer}
    for name, fqn in first.items():
        if name not in stored:
            found[pattern(fqn)] += graph.times(name) * whole_bytes(graph, name)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
