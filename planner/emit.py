"""From states of tensors to the plan file: layouts, layers, crossings, reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from torch import nn

from shardwright.planner.contract import dims as layout
from shardwright.planner.contract.dims import simplify
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.names import fold
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import (
    Collective,
    Crossing,
    ModulePlan,
    ParameterPlan,
    Replicated,
)
from shardwright.planner.contract.styles import LOCAL, resolved, styles
from shardwright.planner.cost.cost import Collective as Call
from shardwright.planner.graph.axes import ATOM, PRODUCT, Dim, find, leaves_of
from shardwright.planner.graph.graph import Graph, Use
from shardwright.planner.strategies.states import (
    REPLICATED,
    Cut,
    State,
    States,
    cut_of,
    made_pending,
)
from shardwright.planner.verify.check import Assignment
from shardwright.planner.verify.recost import Bill

LARGE = 0.01
"""A parameter is worth a reason if it holds this share of all bytes."""

UNUSED = "the traced forward does not use it"

FLAG_BYTES = 4
"""What says whether a copy of the model has a gradient of a parameter."""


class Layouts:
    """Layouts of the tensors of a graph under an assignment."""

    def __init__(self, graph: Graph, states: States, assignment: Assignment) -> None:
        self.graph, self.states, self.assignment = graph, states, assignment
        dims = [find(d) for name in graph.inputs for d in states.axes.dims[name]]
        self.run_time = {d.id for d in dims} | {a.id for d in dims for a in leaves_of(d)}
        self.known = {
            a.id for u in graph.uses for d in states.axes.dims[u.stored] for a in leaves_of(d)
        }
        self._dims: dict[tuple[int, Cut, bool], layout.Dim] = {}

    def traced(self, name: str, state: State | None = None) -> tuple[layout.Dim, ...]:
        """Dims of a tensor with the sizes of the trace."""
        state = self.assignment[name] if state is None else state
        return tuple(
            self._dim(d, cut_of(state.shards, k), False)
            for k, d in enumerate(self.states.axes.dims[name])
        )

    def placement(self, name: str, state: State | None = None, stored: bool = False) -> Placement:
        """Placement of a tensor; sizes that vary at run time are open unless it is a stored one."""
        state = self.assignment[name] if state is None else state
        dims = []
        for k, dim in enumerate(self.states.axes.dims[name]):
            cut = cut_of(state.shards, k)
            known = stored or bool(cut) or all(a.id in self.known for a in leaves_of(dim))
            dims.append(simplify(self._dim(dim, cut, not stored)) if known else layout.Atom(None))
        return Placement(
            tuple(dims),
            self.states.sub.texts(state.partial),
            self.states.sub.texts(state.copied),
        )

    def length(self, *states: State) -> str | None:
        """The name of the run-time axis that one of `states` splits; None if none does."""
        opened = self.states.sequence.axes if self.states.sequence else {}
        names = {opened[a] for state in states for _, a, _ in state.shards if a in opened}
        return min(names, default=None)

    def _dim(self, dim: Dim, cut: Cut, open_sizes: bool) -> layout.Dim:
        dim = find(dim)
        at = (dim.id, cut, open_sizes)  # tensors share their dims
        if at not in self._dims:
            self._dims[at] = self._made(dim, cut, open_sizes)
        return self._dims[at]

    def _made(self, dim: Dim, cut: Cut, open_sizes: bool) -> layout.Dim:
        if open_sizes and dim.id in self.run_time:
            return layout.Atom(None, self._mesh(dim, cut))
        if dim.kind == ATOM:
            return layout.Atom(dim.size, self._mesh(dim, cut))
        children = tuple(self._dim(c, cut, open_sizes) for c in dim.children)
        return layout.Product(children) if dim.kind == PRODUCT else layout.Concat(children)

    def _mesh(self, dim: Dim, cut: Cut) -> str | None:
        """The mesh dim that splits an axis."""
        return next((self.states.sub.text(m) for a, m in cut if a == dim.id), None)


class Differs(Exception):
    """A module would take a tensor in one call as it is, in another as it was around it."""

    def __init__(self, module: str, slot: str) -> None:
        super().__init__(f"'{slot}' is taken otherwise in another call")
        self.module = module


def module_plans(
    root: nn.Module, layouts: Layouts, attributes: Mapping[tuple[str, str], layout.Dim]
) -> dict[str, ModulePlan]:
    """The plan of every module that changes, by its full name.

    Raises:
        Differs: there is no such plan.
    """
    graph, assignment = layouts.graph, layouts.assignment
    parameters: dict[str, dict[str, ParameterPlan]] = {}
    for use in graph.uses:
        stored, used = assignment[use.stored], assignment[use.used]
        if stored == used == REPLICATED:
            continue
        at_rest, seen = (
            layouts.placement(use.stored, stored, True),
            layouts.placement(use.used, used, True),
        )
        owner, _, name = use.fqn.rpartition(".")
        parameters.setdefault(owner, {})[name] = ParameterPlan(
            placement=str(at_rest), use=None if str(seen) == str(at_rest) else str(seen)
        )
    sides: dict[str, dict[str, dict[tuple[str, int], Crossing]]] = {}
    outer = graph.outer()
    changed = {
        graph.slot(b)[:3] for b in graph.boundaries if assignment[b.source] != assignment[b.target]
    }
    for boundary in graph.boundaries:
        source, target = assignment[boundary.source], assignment[boundary.target]
        slot = graph.slot(boundary)
        if slot[:3] in changed:
            slots = sides.setdefault(boundary.module, {}).setdefault(boundary.side, {})
            around, before = outer.get(boundary.target), None
            if around and made_pending(assignment[around.source], source):
                levels = boundary.module.removeprefix(around.module).count(".") + (
                    not around.module
                )
                before = "." * levels + around.slot
                source = assignment[around.source]
            if slot[2:] in slots and slots[slot[2:]].before != before:
                raise Differs(boundary.module, boundary.slot)
            slots[slot[2:]] = Crossing(
                slot=boundary.slot,
                source=str(layouts.placement(boundary.source, source)),
                target=str(layouts.placement(boundary.target, target)),
                length=layouts.length(source, target),
                deferred=boundary.target in graph.logits
                and bool(source.shards)
                and layouts.length(source) is None,
                before=before,
            )
    local: dict[str, dict[str, str]] = {}
    for (module, name), dim in attributes.items():
        local.setdefault(module, {})[name] = str(simplify(dim))
    names = {n for n, _ in root.named_modules()} & (parameters.keys() | sides.keys() | local.keys())
    return {
        name: ModulePlan(
            layer=_layer(root.get_submodule(name), parameters.get(name, {})),
            parameters=parameters.get(name, {}),
            inputs=[c for _, c in sorted(sides.get(name, {}).get("in", {}).items())],
            outputs=[c for _, c in sorted(sides.get(name, {}).get("out", {}).items())],
            attributes=local.get(name, {}),
        )
        for name in sorted(names)
    }


def _layer(module: nn.Module, parameters: Mapping[str, ParameterPlan]) -> str:
    if "weight" in parameters:
        entry = parameters["weight"]
        split = [
            any(a.mesh for a in layout.atoms(held)) and any(a.mesh for a in layout.atoms(seen))
            for held, seen in zip(
                parse(entry.placement).dims,
                parse(entry.use or entry.placement).dims,
                strict=True,
            )
        ]
        for name, style in styles():
            here = style.dim < len(split) and split[style.dim]
            if here and isinstance(module, resolved(style.module)):
                return name
    return LOCAL


def folded(root: nn.Module, plans: Mapping[str, ModulePlan]) -> dict[str, ModulePlan]:
    """The plans with one entry for modules that differ only in layer numbers."""
    return fold(plans, (n for n, _ in root.named_modules()))


def shapes(root: nn.Module) -> dict[str, list[int]]:
    """Unsharded shape of each parameter, one entry for those that differ only in layer numbers."""
    found = {n: list(p.shape) for n, p in root.named_parameters(remove_duplicate=False)}
    return fold(found, found)


def rank_bytes(layouts: Layouts, coords: Coords | None) -> int:
    """Bytes of parameters and buffers on the rank at `coords`; of the whole model without."""
    total = 0
    for stored in dict.fromkeys(u.stored for u in layouts.graph.uses):
        n = layouts.graph.tensors[stored].dtype.itemsize
        for dim in layouts.traced(stored):
            n *= layout.dim_size(dim, coords) or 0
        total += n * layouts.graph.times(stored)
    return total


def count(bill: Bill) -> list[Collective]:
    """Collectives by phase and kind: of the first pass, its backward, and a step of decoding.

    Before copies of the model average gradients they say which they have, which is not priced.
    """
    out = []
    ahead, back = bill.collectives()
    costs, stored = bill.costs, bill.costs.holdings.stored
    trained = sum(costs.gradient(n, bill.assignment[n]) is not None for n in stored)
    if trained:
        back[Call("all_reduce", FLAG_BYTES * trained, costs.workload.replicas)] += 1
    found = {"forward": ahead, "backward": back}
    for run in bill.costs.passes[1:]:
        if run.phase == "decode":
            found["decode"] = bill.collectives(run)[0]
    for phase, calls in found.items():
        for kind in sorted({c.kind for c in calls}):
            n = sum(times for c, times in calls.items() if c.kind == kind)
            size = sum(times * c.bytes for c, times in calls.items() if c.kind == kind)
            out.append(Collective(phase=phase, kind=kind, count=n, bytes=size))  # type: ignore[arg-type]
    return out


def replicated_parameters(
    layouts: Layouts,
    possible: Mapping[str, bool],
    pinned: Collection[str] = (),
    failed: Mapping[str, str] = MappingProxyType({}),
    unread: Callable[[Use], str] = lambda use: UNUSED,
) -> list[Replicated]:
    """Large parameters that every rank holds, each with the reason.

    Args:
        layouts: The plan's layouts.
        possible: Per stored tensor, whether any plan at all could split it.
        pinned: Stored tensors that the user wants as they are.
        failed: Tensors of which a split did not pass the trial -> what went wrong.
        unread: The reason for one that no op of the graph reads.
    """
    graph = layouts.graph
    read = {n for op in graph.ops for n in op.inputs}
    idle = {u.stored for u in graph.uses} - {u.stored for u in graph.uses if u.used in read}
    sizes = {u.stored: rank_bytes_of(graph, u.stored) for u in graph.uses}
    total = sum(sizes.values())
    found: dict[str, Replicated] = {}
    for use in graph.uses:
        if (
            layouts.assignment[use.stored].shards
            or sizes[use.stored] < LARGE * total
            or use.stored in found
        ):
            continue
        if use.stored in pinned:
            reason = "a pin asks for it"
        elif use.used in failed and not possible.get(use.stored):
            reason = f"split, the model's own code fails: {failed[use.used]}"
        elif use.stored in idle and not possible.get(use.stored):
            reason = unread(use)
        else:
            reason = reason_of(use, layouts, possible)
        found[use.stored] = Replicated(parameter=use.fqn, bytes=sizes[use.stored], reason=reason)
    return sorted(found.values(), key=lambda w: (-w.bytes, w.parameter))


def rank_bytes_of(graph: Graph, name: str) -> int:
    """Bytes of one whole tensor."""
    n = graph.tensors[name].dtype.itemsize
    for s in graph.tensors[name].shape:
        n *= s
    return n


def reason_of(use: Use, layouts: Layouts, possible: Mapping[str, bool]) -> str:
    """Why a parameter stays whole; `possible` is as for `replicated_parameters`."""
    states, graph = layouts.states, layouts.graph
    if possible.get(use.stored):
        return "splitting it would cost more time in collectives than its bytes are worth"
    used = {u.used for u in graph.uses if u.stored == use.stored}
    if not any(used & set(op.inputs) for op in graph.ops):
        return UNUSED
    for op in graph.ops:
        if used & set(op.inputs):
            where = f"{op.call.op} in '{op.module}' ({op.source})"
            if states.axes.rules.get(op.name) is None:
                return f"{where} has no rule"
            for conflict, text in states.axes.conflicts:
                if conflict is op:
                    return f"{where}: {text}"
    if not states.splits(use.stored):
        return f"it has no axis that {states.ranks} ranks could share"
    ops = [op for op in graph.ops if used & set(op.inputs)]
    where = f"{ops[0].call.op} in '{ops[0].module}' ({ops[0].source})" if ops else "no op"
    return f"used by {where}; no split of it leads to whole outputs by way of module boundaries"
