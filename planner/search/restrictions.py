"""What an attempt may choose from, and the problem that this makes of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.planner.cost.cost import Costs
from shardwright.planner.dry_run.conflict import Splits
from shardwright.planner.problem.builder import CostFunctionNetwork, build_network
from shardwright.planner.problem.conventions import CONVENTIONS, PreferredStates, follow
from shardwright.planner.problem.pins import Pin, resolve, restrict
from shardwright.planner.search.task import Task
from shardwright.planner.solvers.presolve import Presolved, narrowed, presolve
from shardwright.planner.stages import stage
from shardwright.planner.strategies.states import States


@dataclass(frozen=True)
class Restrictions:
    """What is forbidden or allowed besides what the model itself does.

    Attributes:
        pins: How these parameters must be stored.
        forbidden: Splits that failed their dry run.
        gathered: Stored tensors that may be gathered as they are read.
        conventions: Which of `CONVENTIONS` are followed, where they can be; a search sets those
            that it begins with.
    """

    pins: tuple[Pin, ...] = ()
    forbidden: Splits = frozenset()
    gathered: frozenset[str] = frozenset()
    conventions: frozenset[str] = frozenset()

    @property
    def splits(self) -> tuple[Splits, frozenset[str]]:
        """What prices and the problem without pins and conventions depend on."""
        return self.forbidden, self.gathered


@dataclass(frozen=True, eq=False)
class UnpinnedProblem:
    """Prices, and the problem without pins and conventions; `splits` is what it depends on."""

    costs: Costs
    network: CostFunctionNetwork
    splits: tuple[Splits, frozenset[str]]

    @cached_property
    def small(self) -> Presolved | None:
        """The problem, presolved; None where it has no solution."""
        return presolve(self.network.problem)


@dataclass(frozen=True, eq=False)
class Formulation:
    """A problem that can be solved: prices, the network, and what was left out of it.

    `pinned` has the pin of each stored tensor, `followed` the conventions that took choices away.
    `unpinned` is the problem without both.
    """

    unpinned: UnpinnedProblem
    network: CostFunctionNetwork
    pinned: Mapping[str, Pin]
    followed: frozenset[str] = frozenset()

    @property
    def costs(self) -> Costs:
        """Prices."""
        return self.unpinned.costs

    @cached_property
    def small(self) -> Presolved | None:
        """The problem, presolved; None where it has no solution."""
        whole, small = self.unpinned.network.problem, self.unpinned.small
        return small and narrowed(small, self.network.problem.factors[len(whole.factors) :])


def unpinned_problem(
    task: Task, restrictions: Restrictions, earlier: Formulation | None = None
) -> UnpinnedProblem:
    """The problem of a task without pins and conventions; `earlier` is another of the same task."""
    if earlier is not None and earlier.unpinned.splits == restrictions.splits:
        return earlier.unpinned
    forbidden, gathered = restrictions.forbidden, restrictions.gathered
    given = task.graph, task.axes, task.tp, task.lookups, forbidden, task.sequence, task.sub
    states = States(*given)
    costs = Costs(task.graph, task.axes, states, task.workload, task.caches, gathered)
    network = build_network(task.graph, states, costs, task.rigid)
    return UnpinnedProblem(costs, network, restrictions.splits)


def formulate(
    task: Task, restrictions: Restrictions, earlier: Formulation | None = None
) -> Formulation:
    """The problem of a task under restrictions; `earlier` is another of the same task.

    Raises:
        UsageError: a pin names nothing, or two contradict each other.
        InfeasibleError: a dim that is pinned cannot be split.
    """
    stage("problem")
    found = unpinned_problem(task, restrictions, earlier)
    costs, network = found.costs, found.network.copy()
    pinned = resolve(restrictions.pins, task.graph, costs.states)
    restrict(network, pinned)
    preferred: dict[str, PreferredStates] = {
        name: find(task.graph, costs.states)
        for name, find in CONVENTIONS.items()
        if name in restrictions.conventions
    }
    follow(network, {k: v for found in preferred.values() for k, v in found.items()}, pinned)
    followed = frozenset(name for name, found in preferred.items() if found.keys() - pinned.keys())
    return Formulation(found, network, pinned, followed)
