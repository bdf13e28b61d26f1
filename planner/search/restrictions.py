"""The restrictions of an attempt, and the solver's problem of a task under them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """What is forbidden or allowed in addition to the rules of the ops.

    Attributes:
        pins: Placements of parameters that the user asked for.
        forbidden: Splits that failed their dry run.
        gathered: Stored tensors that may be all-gathered at each use.
        conventions: The `CONVENTIONS` to follow where possible. The search sets the first ones.
    """

    pins: tuple[Pin, ...] = ()
    forbidden: Splits = frozenset()
    gathered: frozenset[str] = frozenset()
    conventions: frozenset[str] = frozenset()

    @property
    def splits(self) -> tuple[Splits, frozenset[str]]:
        """The restrictions that `UnpinnedProblem` depends on."""
        return self.forbidden, self.gathered


@dataclass(frozen=True, eq=False)
class UnpinnedProblem:
    """Prices, and the problem without pins and conventions, for the restrictions `splits`."""

    task: Task
    costs: Costs
    splits: tuple[Splits, frozenset[str]]
    wider: CostFunctionNetwork | None = None
    """The problem under fewer restrictions, if it is known."""

    @cached_property
    def network(self) -> CostFunctionNetwork:
        """The problem."""
        costs, rigid = self.costs, self.task.rigid
        return build_network(self.task.graph, costs.states, costs, rigid, self.wider)

    @cached_property
    def small(self) -> Presolved | None:
        """The problem, presolved; None where it has no solution."""
        return presolve(self.network.problem)


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem to solve.

    Attributes:
        unpinned: The problem without pins and conventions.
        posed: Returns the problem with them.
        pinned: The pin of each pinned stored tensor.
        followed: The conventions that restrict some parameter.
    """

    unpinned: UnpinnedProblem
    posed: Callable[[], CostFunctionNetwork]
    pinned: Mapping[str, Pin]
    followed: frozenset[str] = frozenset()

    @cached_property
    def network(self) -> CostFunctionNetwork:
        """The problem with pins and conventions."""
        return self.posed()

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
    """Return the problem of a task without pins and conventions.

    It is taken from `earlier`, another formulation of the same task, if that has the same splits,
    and narrowed from it, if it forbids fewer.
    """
    if earlier is not None and earlier.unpinned.splits == restrictions.splits:
        return earlier.unpinned
    forbidden, gathered = restrictions.forbidden, restrictions.gathered
    wider = None
    if earlier is not None and earlier.unpinned.splits[1] == gathered:
        wider = earlier.unpinned.network if earlier.unpinned.splits[0] <= forbidden else None
    graph, axes, copies = task.graph, task.axes, task.kept_copies
    shares = task.workload.dp == "fsdp"
    states = States(graph, axes, task.tp, task.lookups, forbidden, task.sequence, task.sub, shares)
    costs = Costs(graph, axes, states, task.workload, task.caches, gathered, copies=copies)
    return UnpinnedProblem(task, costs, restrictions.splits, wider)


def formulate(
    task: Task, restrictions: Restrictions, earlier: Formulation | None = None
) -> Formulation:
    """Return the problem of a task under restrictions.

    Args:
        task: The task.
        restrictions: The restrictions.
        earlier: Another formulation of the same task, whose parts may be reused.

    Raises:
        UsageError: a pin names nothing, or two pins contradict each other.
        InfeasibleError: a pinned dim cannot be sharded.
    """
    stage("problem")
    found = unpinned_problem(task, restrictions, earlier)
    costs = found.costs
    pinned = resolve(restrictions.pins, task.graph, costs.states)
    preferred: dict[str, PreferredStates] = {
        name: find(task.graph, costs.states)
        for name, find in CONVENTIONS.items()
        if name in restrictions.conventions
    }
    followed = frozenset(name for name, named in preferred.items() if named.keys() - pinned.keys())

    def posed() -> CostFunctionNetwork:
        network = found.network.copy()
        restrict(network, pinned)
        every = {k: v for states in preferred.values() for k, v in states.items()}
        follow(network, every, pinned)
        return network

    return Formulation(found, posed, pinned, followed)
