"""Prices a tensor-parallel plan of transformers by the same rules and costs as ours.

Its styles become restrictions of the same problem: parameters are sharded as the styles say, or
replicated, and tensors are redistributed only at the modules that the plan names. The remaining
choices cost nothing. If no solution remains, the plan is wrong by our rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.errors import InfeasibleError, UsageError
from shardwright.planner.contract.names import pattern
from shardwright.planner.contract.plan_figures import Prediction
from shardwright.planner.emit.prediction import whole_bytes
from shardwright.planner.graph.axes import ATOM, PRODUCT, Dim, find
from shardwright.planner.graph.graph import Boundary
from shardwright.planner.problem.builder import CostFunctionNetwork
from shardwright.planner.problem.pins import Pin
from shardwright.planner.problem.tp_plan import STYLES, Rules, Style, read, split_dim, style_of
from shardwright.planner.search.restrictions import Formulation, Restrictions, unpinned_problem
from shardwright.planner.search.solution import SolverOptions, predicted, solve
from shardwright.planner.search.task import Task
from shardwright.planner.strategies.obstacles import obstacle
from shardwright.planner.strategies.state import State

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
    styles = {name: style_of(s) for name, s in (rules.modules | rules.parameters).items()}
    posed = unpinned_problem(task, Restrictions(), earlier)
    network = posed.network.copy()
    wanted = _Styles(task, network, rules, styles).add()
    return predicted(task, solve(task, Formulation(posed, network, wanted), FREE))


def _replicated(task: Task, rules: Rules) -> dict[str, int]:
    """Return the bytes of the parameters that the plan replicates, the largest first."""
    found: dict[str, int] = {}
    tied: set[str] = set()
    split = {
        name
        for name, style in rules.parameters.items()
        if style not in STYLES or STYLES[style].dim is not None
    }
    stored = {u.stored for u in task.graph.uses if u.fqn in split}
    for use in task.graph.uses:
        if use.is_buffer or use.stored in stored or use.stored in tied:
            continue
        tied.add(use.stored)
        key = pattern(use.fqn)
        size = task.graph.times(use.stored) * whole_bytes(task.graph, use.stored)
        found[key] = found.get(key, 0) + size
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class _Styles:
    """The restrictions that a plan's styles put on a network."""

    task: Task
    network: CostFunctionNetwork
    rules: Rules
    styles: Mapping[str, Style]

    def add(self) -> dict[str, Pin]:
        """Add all restrictions, and return the pin of each stored tensor.

        Raises:
            InfeasibleError: a style is impossible, whatever the other styles are.
        """
        wanted = self._stored()
        summed = self._summed()
        for use in self.task.graph.uses:
            if use.fqn not in summed:
                self._same(f"unsummed {use.fqn}", use.stored, use.used)
        for boundary in self.task.graph.boundaries:
            left, entered = self._passed(boundary)
            label = f"{boundary.module} {boundary.side} {boundary.slot}"
            if any(style.whole for style in left):
                self.network.allow(f"gathered {label}", boundary.target, _is_replicated)
            elif any(style.back for style in left):
                self.network.allow_pairs(
                    f"summed back {label}", boundary.source, boundary.target, _term_of
                )
            elif not any(style.into for style in entered):
                self._same(f"kept {label}", boundary.source, boundary.target)
        return wanted

    def _summed(self) -> set[str]:
        """Return the parameters whose gradients are summed over the ranks.

        A style says so, or a parameter has no style and a sibling module's style sums the gradient
        of its output.
        """
        beside = {_parent(m) for m in self.rules.modules if self.styles[m].back}
        found = set()
        for name in (use.fqn for use in self.task.graph.uses):
            module = _parent(name)
            styles = [self.styles[n] for n in (name, module) if n in self.styles]
            if any(s.sums for s in styles) or (not styles and _parent(module) in beside):
                found.add(name)
        return found

    def _passed(self, boundary: Boundary) -> tuple[list[Style], list[Style]]:
        """Return the styles of the modules that a tensor leaves and enters at a boundary.

        The graph has one boundary for several in a row; the others follow from its readers.
        """
        inside = self._readers.get(boundary.target, [""])
        shared = set.intersection(*(set(_around(m)) for m in inside))
        here = set(_around(boundary.module))
        entered = shared - here
        left = here - shared if boundary.side == "out" else set()
        if boundary.side == "in":
            entered.add(boundary.module)
        return (
            [self.styles[m] for m in sorted(left) if m in self.styles],
            [self.styles[m] for m in sorted(entered) if m in self.styles],
        )

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        """Map each tensor to the modules that read it, in ops or at boundaries."""
        out: dict[str, list[str]] = {}
        for op in self.task.graph.ops:
            for name in op.inputs:
                out.setdefault(name, []).append(op.module)
        for boundary in self.task.graph.boundaries:
            inner = boundary.module if boundary.side == "out" else _parent(boundary.module)
            out.setdefault(boundary.source, []).append(inner)
        return out

    def _stored(self) -> dict[str, Pin]:
        graph, states = self.task.graph, self.network.states
        wanted: dict[str, Pin] = {}
        for use in sorted(graph.uses, key=lambda u: u.fqn not in self.styles):
            style, shape = self.styles.get(use.fqn), graph.tensors[use.stored].shape
            dim = None if style is None else split_dim(style, use.fqn, len(shape))
            pin = wanted.setdefault(use.stored, Pin(use.fqn, dim))
            if style is None or use.fqn == pin.name:
                continue
            if pin.dim != dim:
                raise InfeasibleError(f"{pin.name} and {use.fqn} are tied, but not sharded alike")
        for stored, pin in wanted.items():
            allows = self._allows(stored, pin)
            if not any(allows(s) for s in states.domain(stored)):
                why = obstacle(graph, states, stored, pin.dim or 0)
                if any(pin.allows(s) for s in states.domain(stored)):
                    why = "its shards would not be those that the code splits up"
                style = self.rules.parameters[pin.name]
                raise InfeasibleError(f"{pin.name} cannot be split by style '{style}': {why}")
            self.network.allow(f"pin {stored}", stored, allows)
        return wanted

    def _same(self, label: str, one: str, other: str) -> None:
        self.network.allow_pairs(label, one, other, State.__eq__)

    def _allows(self, stored: str, pin: Pin) -> Callable[[State], bool]:
        """Return a test for states that are a plain Shard: equal, consecutive rows per rank.

        If the output is gathered at once, any sharding of the rows gives the same result.
        """
        style = self.styles.get(pin.name)
        owner = self.styles.get(_parent(pin.name))
        if style is None or pin.dim is None or (owner is not None and owner.whole and owner.into):
            return pin.allows
        dim = self.network.states.axes.dims[stored][pin.dim]
        ranks = self.network.states.sub.full
        atoms = {(atom, ranks) for atom in _leading(dim, style.parts)}
        return lambda s: pin.allows(s) and {shard[1:] for shard in s.shards} == atoms


def _around(module: str) -> list[str]:
    """Return a module's name and its parents' names, without the root."""
    parts = module.split(".") if module else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _term_of(before: State, after: State) -> bool:
    """Return whether only the gradient becomes Partial."""
    return before in (after, after._replace(grad_partial=0))


def _is_replicated(state: State) -> bool:
    return not state.shards and not state.partial


def _leading(dim: Dim, parts: int) -> set[int]:
    """Return the major axis of a dim, or of each of its equal parts; empty if there is none.

    A shard of consecutive rows splits this axis.
    """
    dim = find(dim)
    while dim.kind == PRODUCT:
        dim = find(next(c for c in dim.children if find(c).size > 1))
    if dim.kind == ATOM:
        return {dim.id} if parts == 1 else set()
    terms = [t for t in dim.children if find(t).size > 1]
    if parts != len(terms) or len({find(t).size for t in terms}) > 1:
        return set()
    return set().union(*(_leading(t, 1) for t in terms))
