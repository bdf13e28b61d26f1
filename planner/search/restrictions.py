"""What an attempt may choose from, and the problem that this makes of a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.planner.cost.cost import Costs
from shardwright.planner.dry_run.conflict import Splits
from shardwright.planner.problem.builder import CostFunctionNetwork, build_network
from shardwright.planner.problem.conventions import CONVENTIONS, Usual, follow
from shardwright.planner.problem.pins import Pin, resolve, restrict
from shardwright.planner.search.task import Task
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
class Formulation:
    """A problem that can be solved: prices, the network, and what was left out of it.

    `pinned` has the pin of each stored tensor, `followed` the conventions that took choices away.
    `unrestricted` is the network without both; what that depends on is in `splits`.
    """

    costs: Costs
    network: CostFunctionNetwork
    pinned: Mapping[str, Pin]
    followed: frozenset[str] = frozenset()
    unrestricted: CostFunctionNetwork | None = None
    splits: tuple[Splits, frozenset[str]] = (frozenset(), frozenset())


def bare(task: Task, restrictions: Restrictions) -> tuple[Costs, CostFunctionNetwork]:
    """Prices, and the problem without pins and conventions."""
    forbidden, gathered = restrictions.forbidden, restrictions.gathered
    given = task.graph, task.axes, task.tp, task.lookups, forbidden, task.sequence, task.sub
    states = States(*given)
    costs = Costs(task.graph, task.axes, states, task.workload, task.caches, gathered)
    return costs, build_network(task.graph, states, costs, task.rigid)


def formulate(
    task: Task, restrictions: Restrictions, earlier: Formulation | None = None
) -> Formulation:
    """The problem of a task under restrictions; `earlier` is another of the same task.

    Raises:
        UsageError: a pin names nothing, or two contradict each other.
        InfeasibleError: a dim that is pinned cannot be split.
    """
    stage("problem")
    if earlier and earlier.unrestricted and earlier.splits == restrictions.splits:
        costs, unrestricted = earlier.costs, earlier.unrestricted
    else:
        costs, unrestricted = bare(task, restrictions)
    network = unrestricted.copy()
    pinned = resolve(restrictions.pins, task.graph, costs.states)
    restrict(network, pinned)
    usual: dict[str, Usual] = {
        name: find(task.graph, costs.states)
        for name, find in CONVENTIONS.items()
        if name in restrictions.conventions
    }
    follow(network, {k: v for found in usual.values() for k, v in found.items()}, pinned)
    followed = frozenset(name for name, found in usual.items() if found.keys() - pinned.keys())
    return Formulation(costs, network, pinned, followed, unrestricted, restrictions.splits)
