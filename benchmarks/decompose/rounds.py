"""The solver: prices and messages bound, branching splits, parts of what is known get better.

Nodes of the tree, and chains of parts of the best assignment, are solved in rounds, a task a
worker; what they find is put together in the order of the tasks, so that a run is the same every
time, up to where the clock ends it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.decompose.branch import Node, Visited, dive
from benchmarks.decompose.contract import Contracted, contract
from benchmarks.decompose.model import EXACT, Model, model
from benchmarks.decompose.network import Score
from benchmarks.decompose.parallel import side_by_side
from benchmarks.decompose.prices import HALF
from benchmarks.decompose.search import Hints, Search, Searched
from shardwright.errors import SolverError
from shardwright.planner.solvers.problem import Problem, Result

ROOT, VISIT = 0.4, 0.1
"""Parts of the time for the first visit and for each other one, at most."""
SPLIT = 3
"""What a node's splitting takes at most, in times that it took to make the root small."""
PARTS, DIVE = 12, 4
"""What a worker does in a round: parts of the best assignment solved, or nodes visited."""
EFFORT = 8.0
"""For a part, at most."""
MUCH = 0.01
"""While a round makes the best assignment better by this part, all workers search on."""
SIZE = 6_000.0
"""Pairs of values in a part at first."""


@dataclass
class _State:
    """What is known: the best assignment of the root, and nodes that are open."""

    root: Node
    began: float
    seconds: float
    workers: int
    seed: int
    open: list[Node] = field(default_factory=list)
    best: tuple[Score, list[int]] | None = None
    hints: Hints | None = None
    """Of the first visit."""
    leads: list[list[int]] = field(default_factory=list)
    """Assignments that pass bounds, for workers to mend."""
    setup: float = 0.0
    """Seconds that it took to make the root small."""
    most: float = math.inf
    """No assignment costs more."""
    target: float = math.inf
    """Nodes are of solutions that cost less."""
    size: float = SIZE
    effort: float = 1.0
    """For a part: it doubles while nothing is gained."""
    fresh: bool = True
    """Whether the best assignment is not one of a search."""
    work: float = 0.0
    """What the last visits took."""
    rounds: int = 0

    @property
    def ceiling(self) -> float:
        """The least cost known."""
        known = self.best is not None and self.best[0].whole
        return self.best[0].cost if self.best is not None and known else self.most + 1

    @property
    def cost(self) -> float:
        """Cost of the best assignment; of one that is broken, a large number that falls."""
        assert self.best is not None
        broken, over, cost = self.best[0]
        return cost + self.most * (broken + over)

    def lower(self) -> float:
        """A bound on what may be in the nodes that are open, or costs what is aimed at or more."""
        rest = self.target if self.target < self.ceiling else math.inf
        return min([rest, *[node.bound for node in self.open]])

    def aim(self) -> None:
        """Look for what costs less than halfway from the bound to the best one known, first.

        So much more is cut. Where there is none, that is a bound, and the tree begins anew.
        """
        worth = min(self.ceiling, self.target) - 1 + HALF
        self.open = [node for node in self.open if node.bound <= worth]
        missed = not self.open and self.target < self.ceiling
        first = self.target == math.inf and self.ceiling <= self.most
        if self.hints is not None and (missed or first):
            bound = self.lower()
            close = self.ceiling - bound < MUCH * self.ceiling
            self.target = self.ceiling if close else math.ceil((bound + self.ceiling) / 2)
            self.open = [self.root._replace(bound=bound, prices=self.hints.prices)]

    def done(self) -> bool:
        """Whether the time is over, or nothing better can be."""
        late = time.monotonic() >= self.began + self.seconds
        return late or self.lower() > min(self.ceiling, EXACT) - 1 + HALF

    def until(self, part: float) -> float:
        """When a task that may take so much of the time must end."""
        end = self.began + self.seconds
        return min(end, time.monotonic() + part * self.seconds)

    def round(self, nodes: int) -> None:
        """Visit so many nodes, and let the other workers search."""
        known = self.best is not None
        count, deadline = (DIVE, self.until(VISIT)) if known else (1, self.until(ROOT))
        ceiling = min(self.ceiling, self.target)
        tasks: list[Callable[[], Visited | Searched]] = [
            lambda node=node: dive(node, count, ceiling, deadline) for node in self.chosen(nodes)
        ]
        if self.best is not None:
            parts, work = max(round(PARTS / self.effort), 2), 0.0
            if tasks or self.workers == 1:  # as long as a visit
                work = self.work
            for k in range(self.workers - len(tasks)):
                search = self.searching(k)
                tasks.append(lambda search=search: search.run(parts, work, deadline))
        self.rounds += 1
        before = self.best
        for found in side_by_side(tasks):
            if isinstance(found, Visited):
                self.visited(found)
            else:
                self.size = found.size
                self.offer(found.x)
                self.fresh = False
                if before is not None and self.best is not None:  # what another worker changed
                    both = zip(before[1], found.x, self.best[1], strict=True)
                    self.offer([new if new != old else now for old, new, now in both])

    def chosen(self, count: int) -> list[Node]:
        """Open nodes to visit, by turns the one of the least bound and the last one made."""
        late = max(VISIT * self.seconds / 2, SPLIT * self.setup)  # by which a visit may end
        if self.best is not None and self.until(VISIT) + late > self.began + self.seconds:
            return []
        out: list[Node] = []
        while self.open and len(out) < count:
            least = min(range(len(self.open)), key=lambda k: (self.open[k].bound, -k))
            out.append(self.open.pop(least if len(out) % 2 == 0 else -1))
        return out

    def searching(self, worker: int) -> Search:
        """A search from the best assignment, with a seed of its own."""
        assert self.best is not None and self.hints is not None
        seed = (self.seed * 1_000_003 + self.rounds) * 64 + worker
        x, fresh = (self.leads.pop(0), True) if self.leads else (list(self.best[1]), self.fresh)
        return Search(self.root.network, x, self.hints, seed, self.size, self.effort, fresh)

    def visited(self, seen: Visited) -> None:
        """Take over what a visit found."""
        self.leads, self.work = seen.leads, seen.work
        if seen.best is not None and self.offer(seen.best):
            self.fresh = True
        self.hints = self.hints or seen.hints
        self.open += seen.open

    def offer(self, x: list[int]) -> bool:
        """Take an assignment of the root if it is better; whether it is."""
        score = self.root.network.score(x)
        better = self.best is None or score < self.best[0]
        if better:
            self.best = score, x
        return better


def solve(
    problem: Problem,
    component: int,
    caps: Mapping[int, int],
    hint: Sequence[int] | None,
    seconds: float,
    workers: int | None = None,
    seed: int = 0,
) -> Result:
    """Minimise one component of `problem` under `caps` and the problem's limits.

    Args:
        problem: What to solve; its tables may be grids.
        component: What to minimise.
        caps: The most of other components.
        hint: An assignment to begin with; not needed here.
        seconds: The most time to take.
        workers: Processes; None: as many as there are cores for this one.
        seed: Of the search; the same seed finds the same, up to where the clock ends it.

    Raises:
        SolverError: the least cost is 2^52 or more (above what every table costs at least), limits
            are, or what was found breaks the problem.
    """
    began = time.monotonic()
    made = model(problem, component, caps)
    whole = contract(made.network)
    if whole is None:
        return Result("infeasible", None, 0)
    root = Node(-math.inf, whole.network, 0.0, (), None)
    cores = workers or len(os.sched_getaffinity(0))
    state = _State(root, began, seconds, cores, seed, [root])
    state.setup = time.monotonic() - began
    state.most = root.network.most()
    state.round(1)
    searching = True
    while not state.done():
        before = state.cost
        if not searching:
            state.aim()
        state.round(0 if searching else max(cores // 2, 1))
        gained = state.cost < (1 - MUCH) * before
        state.effort = 1.0 if gained else min(2 * state.effort, EFFORT)
        searching = gained or (cores == 1 and not searching)
    return _result(state, made, whole, caps, component)


def _result(
    state: _State, made: Model, whole: Contracted, caps: Mapping[int, int], component: int
) -> Result:
    """What is known, in terms of the problem."""
    lower = state.lower()
    known = state.best is not None and state.best[0].whole
    if (known or lower < math.inf) and min(lower, state.ceiling) + whole.constant >= EXACT:
        raise SolverError(
            "what is to be minimised is 2^52 or more, and decompose counts in floats: "
            "divide all costs by one number, or use cpsat"
        )
    if state.best is None or not known:
        if lower == math.inf:
            return Result("infeasible", None, 0)
        return Result("unknown", None, made.constant + math.ceil(whole.constant + lower))
    found = made.assignment(whole.way.expand(state.best[1]))
    cost = made.problem.accept(found, caps)[component]
    if lower > state.ceiling - 1 + HALF:
        claimed = made.constant + round(whole.constant + state.ceiling)
        if cost != claimed:
            raise SolverError(f"decompose claims {claimed}, its answer costs {cost}")
        return Result("optimal", found, cost)
    return Result("feasible", found, min(made.constant + math.ceil(whole.constant + lower), cost))
