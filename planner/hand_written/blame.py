"""Says in words where a hand-written table goes wrong: the op, its module, file and line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.errors import InfeasibleError
from shardwright.planner.graph.axes import ATOM, Dim, find
from shardwright.planner.graph.graph import EQUAL, Graph, Op, SizeArgument
from shardwright.planner.graph.marks import KINDS
from shardwright.planner.hand_written.first_fault import Fact
from shardwright.planner.problem.infeasible_core import Contradiction
from shardwright.planner.problem.tp_moves import COPIED, GATHERED, SLICED, SUMMED, TERM
from shardwright.planner.problem.tp_plan import Rules, style_of
from shardwright.planner.problem.tp_table import Unsplittable
from shardwright.planner.search.task import Task
from shardwright.planner.strategies.obstacles import place
from shardwright.planner.strategies.state import State

NEEDS = {"colwise": "out_features", "rowwise": "in_features"}
"""First part of a style's name -> what transformers reads from the module; without, it raises."""

TAKEN_FOR = {
    COPIED: "replicated, with a whole gradient",
    SLICED: "replicated",
    GATHERED: "split along its last dim",
    SUMMED: "a partial sum",
    TERM: "replicated",
}
"""Move -> the state that a style takes for granted before it."""
OUTPUT = "output"
GIVES_OUT = "an output of the model must be replicated"
CAUTION = frozenset(
    {"carried", "handed", "again", "boundary", "use", "decided_unseen", "collected", "modes"}
)
"""Facts that our runtime, or what was not traced, needs. What breaks only these is not decided."""


@dataclass(frozen=True)
class Fault:
    """Where a table goes wrong.

    Attributes:
        text: In words.
        op: The op, if one is at fault.
        module: Its module.
        where: File and line of the model's code.
        open: Whether the rules do not decide it: then the table is not known to be wrong.
    """

    text: str
    op: str = ""
    module: str = ""
    where: str = ""
    open: bool = False


def of_style(task: Task, rules: Rules) -> Fault | None:
    """Return a style on a module that transformers cannot put it on; None if there is none."""
    for name, style in rules.modules.items():
        attribute = NEEDS.get(style.partition("_")[0])
        module = task.source.module.get_submodule(name)
        if attribute and not hasattr(module, attribute):
            kind = type(module).__name__
            return Fault(f"style '{style}' on '{name}': {kind} has no {attribute}", module=name)
    return None


def of_fact(task: Task, rules: Rules, fact: Fact) -> Fault:
    """Return the fault of the first fact that cannot hold."""
    if fact.kind == "op":
        op = next(op for op in task.graph.ops if op.name == fact.name)
        if task.axes.rules.get(op.name) is None:
            return _at(op, f"no rule is known for {place(op)}", unknown=True)
        return _at(op, f"{place(op)} cannot take what is {_given(op, fact)}")
    if fact.kind in ("styled", "kept"):
        return _of_boundary(task.graph, rules, fact)
    names = [n for n in fact.tensors if n in task.graph.tensors]
    op = next(filter(None, (_made(task.graph, n) for n in names)), None)
    have = ", ".join(dict.fromkeys(_in_words(fact.tensors[n]) for n in names))
    said = KINDS[fact.kind].reason.format(names[0]) if fact.kind in KINDS else fact.kind
    if fact.kind == OUTPUT:
        said = GIVES_OUT
    text = f"{said}, but it is {have}" + (f": {place(op)}" if op else "")
    return _at(op, text) if op else Fault(text)


def _of_boundary(graph: Graph, rules: Rules, fact: Fact) -> Fault:
    """Return the fault of a tensor that enters or leaves a module."""
    at = next(b for b in graph.boundaries if f"{b.module} {b.side} {b.slot}" == fact.name)
    near = _made(graph, at.source) if at.side == "out" else _read(graph, at.target)
    have, style = _in_words(fact.tensors.get(at.source, [])), rules.modules.get(at.module)
    way = "leaves" if at.side == "out" else "enters"
    if fact.kind == "styled" and style is not None:
        move = style_of(style).leaves if at.side == "out" else style_of(style).enters
        why = f"style '{style}' expects it to be {TAKEN_FOR.get(move, 'something else')}"
        if TAKEN_FOR.get(move) == have:
            why = f"after style '{style}' the style of a module around does not fit"
    else:
        why = "no style redistributes it there"
    text = f"a tensor that {way} '{at.module}' is {have}, and {why}"
    if not at.module:
        text = f"{GIVES_OUT}, but it is {have}"
    return _at(near, f"{text}: {place(near)}") if near else Fault(text, module=at.module)


def of_gradient(task: Task, rules: Rules, fact: Fact) -> Fault:
    """Return the fault of the first fact that cannot hold, if only gradients are wrong."""
    op = next((op for op in task.graph.ops if (fact.kind, fact.name) == ("op", op.name)), None)
    if op is None:
        return replace(of_fact(task, rules, fact), open=False)
    given = _given(op, fact)
    text = f"{place(op)} has inputs that are {given}, and no style sums the partial gradient"
    return _at(op, text)


def of_facts(task: Task, error: InfeasibleError) -> Fault:
    """Return the fault of a parameter that cannot be split, or of facts that contradict."""
    if isinstance(error, Unsplittable) and error.stored:
        op = taken_apart(task, error.stored, error.dim)
        if op is not None:
            return _at(op, f"{error}: {place(op)}", error.on_an_edge)
        return Fault(str(error), module=error.fqn, open=error.on_an_edge)
    return contradicting(error.reasons) if isinstance(error, Contradiction) else Fault(str(error))


def contradicting(reasons: Sequence[str]) -> Fault:
    """Return the fault of facts that contradict each other."""
    return Fault("these contradict each other: " + "; ".join(reasons[:3]))


def of_size(graph: Graph, size: SizeArgument, gives: int, right: int) -> Fault:
    """Return the fault of code that computes a wrong size on a rank."""
    op = _made(graph, size.tensor)
    text = f"the code computes {gives} for dim {size.dim}, and a rank has {right}"
    if size.bound == EQUAL:
        text = f"code compares two integers that differ by {gives} on a rank"
    return _at(op, f"{place(op)}: {text}") if op else Fault(text)


def taken_apart(task: Task, stored: str, dim: int) -> Op | None:
    """Return the op that first splits a dim of a parameter up into several dims or parts."""
    dims, graph = task.axes.dims, task.graph
    parts = set(_parts(dims[stored][dim]))
    after = {u.used for u in graph.uses if u.stored == stored}
    for op in graph.ops:
        after |= {b.target for b in graph.boundaries if b.source in after}
        if after.isdisjoint(op.inputs):
            continue
        after |= {*op.outputs}
        if any(find(d).id in parts for n in op.outputs for d in dims[n]):
            return op
    return None


def _parts(dim: Dim) -> Sequence[int]:
    """Return the ids of everything that a dim consists of."""
    children = find(dim).children if find(dim).kind != ATOM else ()
    return [part for child in children for part in (find(child).id, *_parts(child))]


def _at(op: Op, text: str, unknown: bool = False) -> Fault:
    return Fault(text, op.call.op, op.module, op.source, unknown)


def _made(graph: Graph, name: str) -> Op | None:
    """Return the op that makes a tensor, looking back through boundaries."""
    sources = {b.target: b.source for b in graph.boundaries}
    producers = graph.producers()
    while name not in producers and name in sources:
        name = sources[name]
    return producers.get(name)


def _read(graph: Graph, name: str) -> Op | None:
    """Return the first op that reads a tensor, looking through boundaries."""
    reached = {name}
    for boundary in graph.boundaries:
        if boundary.source in reached:
            reached.add(boundary.target)
    return next((op for op in graph.ops if not reached.isdisjoint(op.inputs)), None)


def _given(op: Op, fact: Fact) -> str:
    return ", ".join(_in_words(fact.tensors.get(n, [])) for n in op.inputs)


def _in_words(states: Sequence[State]) -> str:
    """Return what a tensor may be, in words."""
    found = list(dict.fromkeys(map(_one, states)))
    return " or ".join(found[:2]) if found else "given"


def _one(state: State) -> str:
    if state.partial:
        return "a partial sum"
    if state.shards:
        dims = sorted({dim for dim, _, _ in state.shards})
        return "split along dim " + " and ".join(map(str, dims))
    return "replicated" + ", with a part of the gradient on each rank" * bool(state.grad_partial)
