"""Reads a plan back into states of tensors for which `emit` would write the same plan.

A plan has the redistributions at boundaries of modules and between a parameter and its use, but not
the states in between. So the plan restricts the solver's problem, and the solver finds states for
the rest, or the problem is infeasible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from shardwright.errors import PlanError
from shardwright.planner.contract.names import made_once
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ParameterPlan, Plan, Redistribution
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.emit.module_plans import parameter_plan
from shardwright.planner.emit.redistributions import redistribution
from shardwright.planner.graph.graph import ATTENDS, KEEPS, Boundary, Graph, Use, crossed
from shardwright.planner.problem.builder import FREE, CostFunctionNetwork
from shardwright.planner.solvers.problem import Row
from shardwright.planner.strategies.state import State

Rows = list[tuple[int, ...]]


def gathered(graph: Graph, plan: Plan) -> frozenset[str]:
    """Return the stored tensors that the plan all-gathers at each use."""
    found = ((use.stored, plan.parameter(use.fqn)) for use in graph.uses)
    ends = ((n, parse(e.placement), parse(e.use)) for n, e in found if e and e.use)
    return frozenset(n for n, stored, used in ends if not stored.meshes <= used.meshes)


class ReadBack:
    """Reads plans of one traced model back into the solver's problem.

    Args:
        network: The problem, which a plan restricts.
        graph: The traced model.
    """

    def __init__(self, network: CostFunctionNetwork, graph: Graph) -> None:
        self.network, self.graph = network, graph
        self.layouts = Layouts(graph, network.states, {})
        self.outer = graph.outer()
        self._texts: dict[tuple[str, bool], list[str]] = {}
        self._rows: dict[object, Rows] = {}
        """What was found before: plans of one model have much in common."""

    def restricted(self, plan: Plan) -> CostFunctionNetwork:
        """Return the problem restricted to what the plan says.

        Raises:
            PlanError: the plan has a placement that no plan of this model can have.
        """
        network = self.network.copy()
        for label, names, rows in (*self._uses(plan), *self._boundaries(plan)):
            scope = [network.variables[n] for n in names]
            network.problem.factor(label, scope, [Row(values, FREE) for values in rows])
        return network

    def _uses(self, plan: Plan) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
        for use in self.graph.uses:
            entry = plan.parameter(use.fqn)
            said = use, entry, plan.is_shared(use.fqn)
            rows = made_once(self._rows, said, partial(self._use, *said))
            if not rows:
                at_rest = "no placement" if entry is None else f"placement '{entry.placement}'"
                raise PlanError(
                    f"the plan gives '{use.fqn}' {at_rest}"
                    + (f" and uses it as '{entry.use}'" if entry and entry.use else "")
                    + ", which no plan of this model can do"
                )
            yield f"said {use.fqn}", (use.stored, use.used), rows

    def _use(self, use: Use, entry: ParameterPlan | None, shared: bool) -> Rows:
        names = (use.stored, use.used)
        allowed = None
        if entry is not None:
            allowed = (entry.placement, entry.use or entry.placement)
        return [
            tuple(i for i, _ in ends)
            for ends in self._fitting(names, allowed, stored=True)
            if parameter_plan(self.layouts, use, *(s for _, s in ends)) == entry
            and ends[0][1].shared == shared
        ]

    def _boundaries(self, plan: Plan) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
        for boundary in self.graph.boundaries:
            ndim = len(self.graph.tensors[boundary.source].shape)
            said = _said(plan, boundary, ndim)
            at = boundary, said
            rows = made_once(self._rows, at, partial(self._boundary, *at))
            where = _where(boundary)
            if not rows:
                assert said is not None, "nothing may always be said"
                raise PlanError(
                    f"the plan redistributes the {where} from '{said.source}' to "
                    f"'{said.target}', which no plan of this model can do"
                )
            names = crossed(boundary, self.outer.get(boundary.target))
            yield f"said the {where}", names if said else names[-2:], rows

    def _boundary(self, boundary: Boundary, said: Redistribution | None) -> Rows:
        around = self.outer.get(boundary.target)
        names = crossed(boundary, around)
        if said is None:
            domain = self.network.states.domain
            index = {s: i for i, s in enumerate(domain(boundary.target))}
            pairs = ((i, index.get(s)) for i, s in enumerate(domain(boundary.source)))
            return [(i, j) for i, j in pairs if j is not None]
        wanted = (*([None] if around else []), said.source if not around else None, said.target)
        if boundary.side == ATTENDS:  # a plan has only the part over cp
            wanted = (None,) * len(names)
        return [
            tuple(i for i, _ in ends)
            for ends in self._fitting(names, wanted)
            if redistribution(self.layouts, boundary, around, [s for _, s in ends]) == said
        ]

    def _fitting(
        self, names: Sequence[str], texts: Sequence[str | None] | None, stored: bool = False
    ) -> Iterator[tuple[tuple[int, State], ...]]:
        """Yield numbered states of tensors that are written as `texts`; None allows any state."""
        options = []
        for name, text in zip(names, texts or [None] * len(names), strict=True):
            domain = self.network.states.domain(name)
            have = self._written(name, stored) if text is not None else []
            options.append([(i, s) for i, s in enumerate(domain) if not have or have[i] == text])
        return product(*options)

    def _written(self, name: str, stored: bool) -> list[str]:
        """Return how each state of a tensor is written."""
        if (name, stored) not in self._texts:
            domain = self.network.states.domain(name)
            made = [str(self.layouts.placement(name, s, stored)) for s in domain]
            self._texts[name, stored] = made
        return self._texts[name, stored]


def _where(boundary: Boundary) -> str:
    side = {"in": "input", "out": "output"}.get(boundary.side, boundary.side)
    slot = f" '{boundary.slot}'" if boundary.slot else ""
    return f"{side}{slot} of '{boundary.module}'"


def _said(plan: Plan, boundary: Boundary, ndim: int) -> Redistribution | None:
    """Return the plan's redistribution of a tensor at a boundary; None if there is none."""
    spec = plan.module(boundary.module)
    if spec is None:
        return None
    sides = {"in": spec.inputs, "out": spec.outputs, ATTENDS: spec.attention, KEEPS: spec.keeps}
    spoken = sides[boundary.side]
    found = [c for c in spoken if c.slot == boundary.slot and len(parse(c.source).dims) == ndim]
    return found[0] if found else None
