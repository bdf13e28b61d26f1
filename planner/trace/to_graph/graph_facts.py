"""Passes over a fresh graph: prune boundaries, and find facts about tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import networkx as nx
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.planner.contract.names import grouped
from shardwright.planner.graph.as_networkx import sources
from shardwright.planner.graph.graph import ATTENDS, KEEPS, Boundary, Graph, Op, SizeArgument, Slot
from shardwright.planner.graph.views import is_view
from shardwright.planner.trace.runs.decoding import EMBEDDED
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.sizes.expressions import evaluate

TOKENS = tuple(name for embeds, ids in EMBEDDED.items() for name in (ids, embeds))
"""Arguments of tokens, or of their embeddings."""


def carried(graph: Graph, root: nn.Module) -> set[str]:
    """Find the tensors between blocks of a `ModuleList`: first outputs that the next block takes.

    Other tensors that blocks pass on (a position bias, for example) are not seen by users.
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
    # The first block's input and the last block's output are carried too.
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
    """Remove boundaries that directly follow another boundary: one reshard there is enough.

    A module's input boundary is kept if its own ops and its submodules both read the tensor: a
    residual may become Partial there, while the submodules take the tensor without that change.
    """
    readers = Counter(name for op in graph.ops for name in {*op.inputs})
    readers.update(source for source, _ in {(b.source, b.target) for b in graph.boundaries})
    readers.update(stored for stored, _ in {(u.stored, u.used) for u in graph.uses})
    read_by_ops = {name for op in graph.ops for name in op.inputs}
    enters_again = {b.source for b in graph.boundaries if b.side == "in"}
    forks = {b.target for b in graph.boundaries if b.side == "in"} & read_by_ops & enters_again
    demanded = {*graph.outputs, *(n for *_, names in graph.marks.demands() for n in names)}
    # Inputs of the root are full tensors: its submodules reshard them from there.
    makers = {b.target: _key(b) for b in graph.boundaries if b.module or b.side == "out"}
    before: dict[Key, set[Key | None]] = {}
    for boundary in graph.boundaries:
        single = readers[boundary.source] == 1 and boundary.source not in demanded
        maker = makers.get(boundary.source) if single and boundary.target not in forks else None
        before.setdefault(_key(boundary), set()).add(maker)
    # A module reshards in the same way in each call, so a boundary is needless only if it follows
    # the same boundary in all of them.
    needless = {k for k, found in before.items() if len(found) == 1 and not found & {None, k}}
    needless = {k for k in needless if k[1] != ATTENDS}  # the runtime needs all operands there
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
    """Return the keys of attributes that modules set for a later call only, not for users."""
    kept = [b for b in graph.boundaries if b.side == KEEPS]
    return {_key(b) for b in kept} - {_key(b) for b in kept if b.target in graph.outputs}


def handed_out(graph: Graph) -> set[Key]:
    """Return the output boundaries where hidden states leave modules only for users.

    Hidden states are replicated already, so no reshard is needed there.
    """
    read = {name for op in graph.ops for name in op.inputs}
    inside = grouped((b.source, b) for b in graph.boundaries)
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
    """Return the tensors that code changes in place, and the tensors that they are views of."""

    def viewed(op: Op, _: str) -> str | None:
        return op.inputs[0] if is_view(op.call) else None

    before = sources(graph, viewed)
    return {n for name in graph.marks.overwritten for n in (name, *nx.descendants(before, name))}


def joined(graph: Graph, root: nn.Module) -> set[str]:
    """Return the outputs of embeddings and the tensors carried from block to block.

    Untraced code may join them with the output of a part of the model (of an image or a sound).
    Both must then be replicated, and so must their gradients.
    """
    return graph.marks.carried | {
        b.target
        for b in graph.boundaries
        if b.side == "out" and isinstance(root.get_submodule(b.module), nn.Embedding)
    }


def gone_on(graph: Graph) -> set[str]:
    """Return the model outputs that a module inside it both returns and reads itself.

    A reshard at the module's output would make another tensor, which only code outside of the
    module would read. Scores of a loss and hidden states are handled by other marks.
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
    """Return the scores in `graph.marks.logits`, and the tensors of equal shape they come from.

    The tensors are followed back through ops with one differentiable operand of the same shape.
    Scores with fewer classes than the features that they are computed from are left out: keeping
    them sharded in the loss saves less memory than the hidden states before them take.
    """

    def reshaped(op: Op, name: str) -> str | None:
        sources = [n for n in op.inputs if graph.tensors[n].differentiable]
        alike = len(sources) == 1 and graph.tensors[sources[0]].shape == graph.tensors[name].shape
        return sources[0] if alike else None

    linear = (op for op in graph.ops if op.call.op == "linear")
    few = {op.outputs[0] for op in linear if op.call.results[0][-1:] < op.call.operands[0][-1:]}
    before = sources(graph, reshaped)
    chains = ({n, *nx.descendants(before, n)} for n in graph.marks.logits)
    return {n for chain in chains if few.isdisjoint(chain) for n in chain}


def modes(graph: Graph, runs: Sequence[Run]) -> set[tuple[str, str]]:
    """Pair the tensors at each module boundary in eval mode with those in training mode.

    The training `runs` are the eval runs repeated, in the same order.
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


def lengths(run: Run) -> dict[int, str]:
    """Return which lengths of the inputs of a call are its batch and its sequence.

    They are read off its token ids or embeddings, or else its first tensor. A length of 1 is not
    told from others, nor a batch of as many sequences as each has tokens.
    """
    named = [x for name in TOKENS if isinstance(x := run.kwargs.get(name), Tensor)]
    every = (x for x in tree_leaves((run.args, dict(run.kwargs))) if isinstance(x, Tensor))
    given = [x for x in named or islice(every, 1) if x.dim()]
    if not given:
        return {}
    tokens = [x for x in given if x.dim() == 2 + x.is_floating_point()]
    batch, seq = given[0].shape[0], {x.shape[1] for x in tokens}
    found = {batch: "batch", **dict.fromkeys(seq, "seq")} if batch not in seq else {}
    return {length: word for length, word in found.items() if length > 1}


def name_literals(graph: Graph) -> None:
    """Set `literals` of ops: slice bounds that come from no attribute and no tensor size."""
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
    """Return the dims of tensors whose length must be the same on every rank."""
    stated = {(s.tensor, s.dim) for s in graph.sizes if s.expression[0] == "constant"}
    read = {(graph.reads[n], dim) for n, dim in reads_as_numbers if n in graph.reads}
    return read | {(name, dim) for name, dim in stated if dim >= 0}


def slice_of(producers: Mapping[str, Op], size: SizeArgument) -> Op | None:
    """Return the slice or select op that `size` is a bound of, or None.

    One index expression makes several such ops; they are searched from the last to the first.
    """
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
