"""What a fresh graph still needs: fewer boundaries, facts on tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import networkx as nx
from torch import nn

from shardwright.planner.graph.as_networkx import sources
from shardwright.planner.graph.graph import ATTENDS, KEEPS, Boundary, Graph, Op, SizeArgument, Slot
from shardwright.planner.graph.views import is_view
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.sizes.expressions import evaluate
from shardwright.rules.call import OpCall


def carried(graph: Graph, root: nn.Module) -> set[str]:
    """Tensors between blocks of a `ModuleList` where each takes what the one before gives first.

    What blocks hand on beside it (a position bias, say) no user sees.
    """
    leaves, enters, places = {}, [], dict[str, list[str]]()
    for boundary in graph.boundaries:
        stack, _, number = boundary.module.rpartition(".")
        if not number.isdigit() or not isinstance(root.get_submodule(stack), nn.ModuleList):
            continue
        if not any(True for _ in root.get_submodule(boundary.module).children()):
            continue
        blocks = places.setdefault(stack, list(root.get_submodule(stack)._modules))
        place = blocks.index(number)
        if boundary.side == "out":
            if boundary.slot in ("", "0"):
                leaves[boundary.target] = (stack, place)
        elif graph.tensors[boundary.source].differentiable:
            enters.append((boundary, stack, place))
    out: set[str] = set()
    chains = set()
    for boundary, stack, number in enters:
        if leaves.get(boundary.source) == (stack, number - 1):
            out.add(boundary.source)
            chains.add((stack, boundary.slot))
    # The first block's input and the last block's output are of the same kind.
    out |= {b.source for b, stack, number in enters if number == 0 and (stack, b.slot) in chains}
    stacks = {stack for stack, _ in chains}
    last = {stack: max(n for s, n in leaves.values() if s == stack) for stack in stacks}
    slots = {b.slot for b in graph.boundaries if b.target in out}
    out |= {
        b.target
        for b in graph.boundaries
        if b.target in leaves
        and b.slot in slots
        and leaves[b.target][0] in stacks
        and leaves[b.target][1] == last[leaves[b.target][0]]
    }
    return out


Key = tuple[str, str, str]


def _key(boundary: Boundary) -> Key:
    return boundary.module, boundary.side, boundary.slot


def prune_boundaries(graph: Graph) -> None:
    """Of boundaries in a row with nothing between them keep the first: one reshard there is enough.

    But keep a module's entrance where its own ops and modules within both take the tensor: a
    residual may become Partial there while the modules within take it as it was.
    """
    readers = Counter(name for op in graph.ops for name in {*op.inputs})
    readers.update(source for source, _ in {(b.source, b.target) for b in graph.boundaries})
    readers.update(stored for stored, _ in {(u.stored, u.used) for u in graph.uses})
    read_by_ops = {name for op in graph.ops for name in op.inputs}
    enters_again = {b.source for b in graph.boundaries if b.side == "in"}
    forks = {b.target for b in graph.boundaries if b.side == "in"} & read_by_ops & enters_again
    demanded = {*graph.outputs, *(n for *_, names in graph.marks.demands() for n in names)}
    # The root's own inputs are given whole: a module within it takes them from there.
    makers = {b.target: _key(b) for b in graph.boundaries if b.module or b.side == "out"}
    before: dict[Key, set[Key | None]] = {}
    for boundary in graph.boundaries:
        single = readers[boundary.source] == 1 and boundary.source not in demanded
        maker = makers.get(boundary.source) if single and boundary.target not in forks else None
        before.setdefault(_key(boundary), set()).add(maker)
    # A module does the same in each of its calls, so all of them must come behind the same
    # boundary.
    needless = {k for k, found in before.items() if len(found) == 1 and not found & {None, k}}
    needless = {k for k in needless if k[1] != ATTENDS}  # all that attention takes is known there
    shown = handed_out(graph)
    needless |= shown | _kept_for_later(graph)
    rename: dict[str, str] = {}
    kept = []
    for boundary in graph.boundaries:
        source = rename.get(boundary.source, boundary.source)
        if _key(boundary) in needless:
            rename[boundary.target] = source
            del graph.tensors[boundary.target]
        else:
            kept.append(boundary._replace(source=source))
    graph.crossed = [
        b._replace(source=rename.get(b.source, b.source), target=rename.get(b.target, b.target))
        for b in graph.boundaries
    ]
    graph.passed = [
        (at, p._replace(made_of=frozenset(rename.get(n, n) for n in p.made_of)))
        for at, p in graph.passed
    ]
    graph.watched = [
        (b.module, b.slot, b.target)
        for b in graph.crossed
        if b.side == "out" and _key(b) not in shown
    ]
    graph.boundaries = kept
    graph.ops = [op._replace(inputs=tuple(rename.get(n, n) for n in op.inputs)) for op in graph.ops]
    graph.outputs = [rename.get(n, n) for n in graph.outputs]
    graph.marks = graph.marks.renamed(rename)
    graph.sizes = [replace(s, tensor=rename.get(s.tensor, s.tensor)) for s in graph.sizes]
    graph.equal = [replace(s, tensor=rename.get(s.tensor, s.tensor)) for s in graph.equal]
    graph.reads = {n: rename.get(t, t) for n, t in graph.reads.items()}


def _kept_for_later(graph: Graph) -> set[Key]:
    """What modules set as their attributes for a later call, not for users: no boundary."""
    kept = [b for b in graph.boundaries if b.side == KEEPS]
    return {_key(b) for b in kept} - {_key(b) for b in kept if b.target in graph.outputs}


def handed_out(graph: Graph) -> set[Key]:
    """Where hidden states leave modules for users alone: whole as they are, they do not change."""
    read = {name for op in graph.ops for name in op.inputs}
    inside: dict[str, list[Boundary]] = {}
    for boundary in graph.boundaries:
        inside.setdefault(boundary.source, []).append(boundary)
    shown: dict[str, bool] = {}
    for b in reversed(graph.boundaries):
        later = inside.get(b.target, [])
        alone = b.target not in read and all(shown[each.target] for each in later)
        shown[b.target] = b.side == "out" and alone
    whole, found = set(graph.marks.carried), dict[Key, bool]()
    for b in graph.boundaries:
        hidden = shown[b.target] and b.source in whole
        found[_key(b)] = found.get(_key(b), True) and hidden
        whole |= {b.target} if hidden else set()
    return {key for key, hidden in found.items() if hidden}


def overwritten(graph: Graph) -> set[str]:
    """The tensors in whose memory those lie that code changes in place, they included."""

    def viewed(op: Op, _: str) -> str | None:
        return op.inputs[0] if is_view(op.call) else None

    return _behind(graph, graph.marks.overwritten, viewed)


def joined(graph: Graph, root: nn.Module) -> set[str]:
    """What runs from embeddings to blocks, and from block to block.

    What a part of the model gives (an image, a sound) is joined to it on the way, by code that is
    not traced: both must be replicated, and so must their gradients.
    """
    return graph.marks.carried | {
        b.target
        for b in graph.boundaries
        if b.side == "out" and isinstance(root.get_submodule(b.module), nn.Embedding)
    }


def gone_on(graph: Graph) -> set[str]:
    """What modules make, read themselves, and give out, if it is an output of the model, too.

    A change of placement where it leaves would make another tensor of it, which only code outside
    of the module goes on with. Scores of a loss, and hidden states, are seen to elsewhere.
    """
    leaves = {b.target: b for b in graph.boundaries if b.side == "out"}
    readers = Counter(name for op in graph.ops for name in {*op.inputs})
    readers.update(b.source for b in graph.boundaries)
    found = set()
    for name in graph.outputs:
        while (boundary := leaves.get(name)) is not None:
            name = boundary.source
            if readers[name] > 1 and graph.tensors[name].differentiable:
                found.add(name)
    return found - graph.marks.logits - graph.marks.carried


def logits(graph: Graph) -> set[str]:
    """The root's outputs, and what ops that keep the shape make of one real operand on the way.

    But not scores of fewer classes than there are features that they are made of: a loss that
    leaves such a table split saves less memory than the hidden states before it take anyway.
    """

    def reshaped(op: Op, name: str) -> str | None:
        sources = [n for n in op.inputs if graph.tensors[n].differentiable]
        alike = len(sources) == 1 and graph.tensors[sources[0]].shape == graph.tensors[name].shape
        return sources[0] if alike else None

    few = {op.outputs[0] for op in graph.ops if op.call.op == "linear" and _narrows(op.call)}
    before = sources(graph, reshaped)
    chains = ({n, *nx.descendants(before, n)} for n in graph.marks.logits)
    return {n for chain in chains if few.isdisjoint(chain) for n in chain}


def _narrows(call: OpCall) -> bool:
    """Whether a product makes fewer features than it takes."""
    return call.results[0][-1:] < call.operands[0][-1:]


def _behind(
    graph: Graph, names: Iterable[str], operand: Callable[[Op, str], str | None]
) -> set[str]:
    """`names`, and what they come from."""
    before = sources(graph, operand)
    return {n for name in names for n in (name, *nx.descendants(before, name))}


def modes(graph: Graph, runs: Sequence[Run]) -> set[tuple[str, str]]:
    """What each module takes and gives in eval mode, and what in the same call in training mode.

    Those `runs` that train are the others again, in their order.
    """
    twins = [i for i, run in enumerate(runs) if not run.training]
    again = dict(zip((i for i, run in enumerate(runs) if run.training), twins, strict=False))
    calls: dict[int, dict[Slot, list[Boundary]]] = {}
    for b in graph.crossed if again else ():
        found = calls.setdefault(b.traced_call, {})
        found.setdefault(graph.slot(b), []).append(b)
    first = {run: n for n, (run, _) in reversed([*enumerate(graph.branch_paths)])}
    out = set[tuple[str, str]]()
    for number, slots in calls.items():
        run = graph.branch_paths[number][0]
        twin = calls.get(first[again[run]], {}) if run in again else {}
        for slot, crossings in slots.items():
            for one, other in zip(twin.get(slot, ()), crossings, strict=False):
                out |= {(one.source, other.source), (one.target, other.target)}
    return {(one, other) for one, other in out if one != other}


def name_literals(graph: Graph) -> None:
    """Find slice bounds that come neither from an attribute nor from a size of a tensor."""
    producers = graph.producers()
    known: set[tuple[str, str]] = set()
    for size in graph.sizes:
        op = slice_of(producers, size)
        if op is not None:
            known.add((op.name, size.bound))
    for i, op in enumerate(graph.ops):
        if op.call.op in ("slice", "select"):
            bounds = ("index",) if op.call.op == "select" else ("start", "stop")
            graph.ops[i] = op._replace(
                literals=frozenset(b for b in bounds if (op.name, b) not in known)
            )


def fixed(graph: Graph, reads_as_numbers: Iterable[tuple[int, int]]) -> set[tuple[str, int]]:
    """Dims of tensors whose length must be the same on every rank."""
    stated = {(s.tensor, s.dim) for s in graph.sizes if s.expression[0] == "constant"}
    read = {(graph.reads[n], dim) for n, dim in reads_as_numbers if n in graph.reads}
    return read | {(name, dim) for name, dim in stated if dim >= 0}


def slice_of(producers: Mapping[str, Op], size: SizeArgument) -> Op | None:
    """The slice or select that `size` is a bound of; one index expression makes several."""
    if not size.bound:
        return None
    value = evaluate(size.expression, {})
    key = {"start": "start", "stop": "end", "index": "index"}[size.bound]
    op = producers.get(size.tensor)
    while op is not None and op.call.op in ("slice", "select", "unsqueeze"):
        if (
            op.call.op != "unsqueeze"
            and key in op.call.arguments
            and op.call.arguments[key] == value
        ):
            return op
        op = producers.get(op.inputs[0])
    return None
