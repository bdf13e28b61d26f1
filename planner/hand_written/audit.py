"""Holds a hand-written tensor-parallel table against the rules: right, or wrong and where.

A table leaves no choice: it says how each parameter is sharded, and what happens to tensors at the
modules that it names. Every op of the traced model must then hold by its rule, and the code must
compute right sizes, as transformers changes no integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.errors import InfeasibleError, UsageError
from shardwright.planner.contract.plan_figures import Prediction
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.hand_written.blame import (
    CAUTION,
    Fault,
    contradicting,
    of_fact,
    of_facts,
    of_gradient,
    of_size,
    of_style,
)
from shardwright.planner.hand_written.first_fault import (
    Fact,
    first_fault,
    holds,
    of_values,
    without,
)
from shardwright.planner.hand_written.price import of_table
from shardwright.planner.problem.builder import CostFunctionNetwork
from shardwright.planner.problem.infeasible_core import in_words, reasons
from shardwright.planner.problem.tp_plan import Rules, read
from shardwright.planner.search.restrictions import Formulation
from shardwright.planner.search.solution import predicted
from shardwright.planner.search.task import Task
from shardwright.planner.search.try_plan import unmet_sizes
from shardwright.planner.search.unfolded import unfolded
from shardwright.planner.solvers.cores import core

RIGHT, WRONG, TRAINING, OPEN = "right", "wrong", "wrong in training", "not decided"


@dataclass(frozen=True)
class Audited:
    """What is known of a table: its verdict, its first fault or why it is open, and its price."""

    verdict: str
    fault: Fault | None = None
    predicted: Prediction | None = None
    unused: tuple[str, ...] = ()


def audit(task: Task, table: Mapping[str, str], earlier: Formulation | None = None) -> Audited:
    """Hold a table against the rules on the model and the ranks of `task`.

    Args:
        task: The traced model.
        table: Patterns of modules and parameters -> names of styles.
        earlier: A problem of the same task, parts of which are reused.
    """
    try:
        rules = read(table, task.source.module)
    except UsageError as error:
        return Audited(WRONG, Fault(str(error)))
    return replace(_judged(task, rules, earlier), unused=tuple(rules.unused))


def _judged(task: Task, rules: Rules, earlier: Formulation | None) -> Audited:
    for name, traced in task.traced_names.items():
        if rules.modules.get(name) != rules.modules.get(traced):
            return Audited(OPEN, Fault(f"'{name}' has another style than in blocks like its own"))
    if (fault := of_style(task, rules)) is not None:
        return Audited(WRONG, fault)
    try:
        formulation = of_table(task, rules, earlier)
    except UsageError as error:
        return Audited(OPEN, Fault(str(error)))
    except InfeasibleError as error:
        return wrong(of_facts(task, error))
    graph, certain = task.graph, without(formulation.network, CAUTION)
    found = first_fault(graph, of_values(certain))
    if isinstance(found, Fact):
        return wrong(of_fact(task, rules, found))
    found = first_fault(graph, certain)
    if isinstance(found, Fact):
        return wrong(of_gradient(task, rules, found), TRAINING)
    layouts = Layouts(graph, formulation.costs.states, found)
    if unmet := unmet_sizes(task, layouts):  # transformers changes no attributes of modules
        return wrong(of_size(graph, *unmet[0]))
    if not holds(certain, found):
        return _contradicted(task, certain)
    there = unfolded(task, layouts, formulation.costs)
    return Audited(RIGHT, predicted=predicted(task, layouts, there))


def wrong(fault: Fault, how: str = WRONG) -> Audited:
    """Return the verdict of a fault."""
    return Audited(OPEN if fault.open else how, fault)


def _contradicted(task: Task, network: CostFunctionNetwork) -> Audited:
    """Return what is wrong if no single fact is: values, or gradients alone."""
    for part, how in ((of_values(network), WRONG), (network, TRAINING)):
        if contradiction := core(part.problem):
            facts = in_words([f.name for f in contradiction], task.graph, {})
            return wrong(contradicting(reasons(facts)), how)
    return Audited(OPEN, Fault("no placements were found for all tensors"))
