"""Finds local values for the module attributes that model code computes sizes from.

The trace has the attributes that a size was computed from; the plan has the local length of that
dim. So each size is an equation. Attributes get values that satisfy all of their equations on all
given ranks. If no values do, as in `y.view(B, T, C)` with `C` read off an unsharded tensor, the
call is given the local size instead of the one that it computes, and the attributes keep their
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

import networkx as nx
from torch import nn

from shardwright.planner.contract import dims as layout
from shardwright.planner.contract.dims import Atom, Dim, simplify
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.graph.graph import EQUAL, Graph, Op, SizeArgument
from shardwright.planner.trace.sizes.expressions import Expression, attributes_of, evaluate
from shardwright.planner.trace.to_graph.graph_facts import slice_of
from shardwright.runtime.code.attributes import SIZES
from shardwright.runtime.code.call_sites import name_of

Key = tuple[str, str]
CallSizes = dict[tuple[str, str], str]
"""(module, name of a call) -> the sizes to give to the call; `?` keeps the call's own size."""

Reads = Mapping[tuple[int, int], int]
"""(number of a read, dim) -> the local size that code reads from a tensor."""


class Unsolvable(Exception):
    """No local attributes give this size.

    `size` is the size whose tensor must not be sharded, `others` the sizes that need the same
    attributes, `more` the other failures.
    """

    def __init__(self, size: SizeArgument, others: Iterable[SizeArgument] = ()) -> None:
        super().__init__(f"no attributes give dim {size.dim} of '{size.tensor}' its local size")
        self.size, self.others = size, tuple(others)
        self.more: tuple[Unsolvable, ...] = ()


def local_sizes(
    graph: Graph,
    dims: Mapping[str, tuple[Dim, ...]],
    coords: Sequence[Coords],
    dim_of: Callable[[str, int], Dim],
    sized: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[dict[Key, Dim], CallSizes]:
    """Find the local values of attributes, and the sizes to give to calls.

    Args:
        graph: The traced model.
        dims: Layout of every tensor under the plan.
        coords: The ranks whose equations must hold.
        dim_of: Returns a dim of a tensor as a plan has it, with run-time sizes left open.
        sized: Module -> its attributes that have the local sizes of its weight, whatever is asked.

    Returns:
        (module, attribute) -> local value as a dim, of each attribute that must change; and the
        sizes to give to calls where no attribute values work.

    Raises:
        Unsolvable: some sizes follow from no attribute values and cannot be given to a call.
    """
    producers = graph.producers()
    out: dict[Key, Dim] = {}
    failed: list[Unsolvable] = []
    given: list[SizeArgument] = []
    reads = [_sizes_read(graph, dims, at) for at in coords]
    layers = _of_layers(graph, dims, sized or {})
    for group in _groups([*graph.equal, *graph.sizes]):
        found = [(size, _target(size, dims, producers)) for size in group]
        targets = [(size, target) for size, target in found if target is not None]
        try:
            out |= _solve(targets, graph.pinned, coords, reads, layers)
        except Unsolvable as failure:
            wrong = [(s, t) for s, t in targets if not _holds(s, t, {}, coords, reads)]
            if all(_can_be_given(size, target, reads) for size, target in wrong):
                given += [size for size, _ in wrong]
            else:
                failed.append(failure)
    calls, unlike = _given(graph, given, dim_of)
    failed += [Unsolvable(size) for size in unlike]
    if failed:
        failed[0].more = tuple(failed[1:])
        raise failed[0]
    return out, calls


def unmet(
    graph: Graph, dims: Mapping[str, tuple[Dim, ...]], coords: Sequence[Coords]
) -> list[tuple[SizeArgument, int, int]]:
    """Return the sizes that are wrong if no attribute changes: what the code gives, what is right.

    Args:
        graph: The traced model.
        dims: Layout of every tensor.
        coords: The ranks.
    """
    producers = graph.producers()
    out = []
    for at in coords:
        read = _sizes_read(graph, dims, at)
        for size in (*graph.equal, *graph.sizes):
            target = _target(size, dims, producers)
            if target is None or _holds(size, target, {}, [at], [read]):
                continue
            gives = evaluate(size.expression, {}, read)
            if gives != -1 or size.bound:  # torch finds out what -1 is
                out.append((size, gives, layout.dim_size(target, at) or 0))
    return out


def _sizes_read(graph: Graph, dims: Mapping[str, tuple[Dim, ...]], at: Coords) -> Reads:
    """Return the local sizes that code reads from tensors, by number of the read and dim."""
    found = (
        (n, i, layout.dim_size(dim, at))
        for n, t in graph.reads.items()
        for i, dim in enumerate(dims[t])
    )
    return {(n, i): size for n, i, size in found if size is not None}


def _groups(sizes: Sequence[SizeArgument]) -> Iterator[list[SizeArgument]]:
    """Yield groups of equations that share attributes; first each one without attributes alone."""
    shared = nx.Graph()
    for size in sizes:
        nx.add_path(shared, sorted(attributes_of(size.expression)))
    number = {key: i for i, keys in enumerate(nx.connected_components(shared)) for key in keys}
    found: dict[int, list[SizeArgument]] = {}
    for size in sizes:
        if attributes := attributes_of(size.expression):
            found.setdefault(number[min(attributes)], []).append(size)
        else:
            yield [size]
    yield from found.values()


def _target(
    size: SizeArgument, dims: Mapping[str, tuple[Dim, ...]], producers: Mapping[str, Op]
) -> Dim | None:
    """Return the dim whose local length the expression must give; None for an irrelevant bound."""
    if not size.bound:
        return dims[size.tensor][size.dim]
    if size.bound == EQUAL:
        return Atom(0)
    op = slice_of(producers, size)
    if op is None or op.call.op == "select":
        return None
    source = dims[op.inputs[0]][op.call.dim()]
    value = evaluate(size.expression, {})
    whole = layout.dim_size(source)
    if whole is None or not any(a.mesh for a in layout.atoms(source)):
        return Atom(value)
    if value < 0:
        return None
    return _prefix(source, min(value, whole))


def _prefix(dim: Dim, length: int) -> Dim | None:
    """Return the first `length` elements of `dim` as a dim; None if that cuts through a part."""
    if length == layout.dim_size(dim):
        return dim
    if length == 0:
        return Atom(0)
    if isinstance(dim, layout.Concat):
        taken, have = [], 0
        for term in dim.terms:
            n = layout.dim_size(term) or 0
            if have + n > length:
                rest = _prefix(term, length - have)
                return None if rest is None else layout.Concat((*taken, rest)) if taken else rest
            taken.append(term)
            have += n
            if have == length:
                return taken[0] if len(taken) == 1 else layout.Concat(tuple(taken))
    if isinstance(dim, layout.Product):
        inner = 1
        for factor in dim.factors[1:]:
            inner *= layout.dim_size(factor) or 1
        if length % inner == 0:
            first = _prefix(dim.factors[0], length // inner)
            return None if first is None else layout.Product((first, *dim.factors[1:]))
    return Atom(length) if not any(a.mesh for a in layout.atoms(dim)) else None


def _solve(
    targets: list[tuple[SizeArgument, Dim]],
    pinned: set[Key],
    coords: Sequence[Coords],
    reads: Sequence[Reads],
    layers: Mapping[Key, Dim],
) -> dict[Key, Dim]:
    keys: dict[Key, int] = {}
    for size, _ in targets:
        keys |= _values(size.expression)
    options: dict[Key, list[Dim]] = {}
    for key, value in keys.items():
        split = [] if key in pinned else _candidates(value, [t for _, t in targets])
        options[key] = [layers[key]] if key in layers else [Atom(value), *split]
    names = [_values(size.expression).keys() for size, _ in targets]
    attempt: dict[Key, Dim] = {}
    deepest = 0

    def solved(i: int) -> bool:
        """Whether the sizes from number `i` on can be satisfied with the current attempt."""
        nonlocal deepest
        while i < len(targets) and names[i] <= attempt.keys():
            deepest = max(deepest, i)
            if not _holds(*targets[i], attempt, coords, reads):
                return False
            i += 1
        if i == len(targets):
            return True
        deepest = max(deepest, i)
        chosen = [key for key in names[i] if key not in attempt]
        for combination in product(*(options[key] for key in chosen)):
            attempt.update(zip(chosen, combination, strict=True))
            if solved(i):
                return True
        for key in chosen:
            del attempt[key]
        return False

    if not solved(0):
        raise Unsolvable(targets[deepest][0], [s for s, _ in targets])
    changed = {k: d for k, d in attempt.items() if any(a.mesh for a in layout.atoms(d))}
    return {k: d for k, d in changed.items() if k not in layers}


def sizes_of_layers(root: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the attributes that the runtime sets to the local sizes of a weight, by module."""
    every = root.named_modules()
    return {path: names for path, m in every for kind, names in SIZES if isinstance(m, kind)}


def _of_layers(
    graph: Graph, dims: Mapping[str, tuple[Dim, ...]], sized: Mapping[str, tuple[str, ...]]
) -> dict[Key, Dim]:
    """Return the sizes of layers, which are local where their weights are sharded."""
    weights = {use.fqn.removesuffix(".weight"): dims[use.used] for use in graph.uses}
    return {
        (module, name): dim
        for module, names in sized.items()
        for name, dim in zip(names, weights.get(module, ()), strict=False)
        if any(a.mesh for a in layout.atoms(dim))
    }


def _values(expression: Expression) -> dict[Key, int]:
    if expression[0] == "attribute":
        return {(expression[1], expression[2]): expression[3]}
    if expression[0] in ("constant", "read"):
        return {}
    return {k: v for e in expression[1:] for k, v in _values(e).items()}


def _candidates(value: int, targets: list[Dim]) -> list[Dim]:
    """Return the sharded parts of the targets whose full length is `value`."""
    out: dict[str, Dim] = {}
    for target in targets:
        for part in _parts(target):
            if layout.dim_size(part) == value and any(a.mesh for a in layout.atoms(part)):
                out.setdefault(str(part), part)
    return list(out.values())


def _parts(dim: Dim) -> Iterator[Dim]:
    yield dim
    if isinstance(dim, Atom):
        return
    children = dim.factors if isinstance(dim, layout.Product) else dim.terms
    make = layout.Product if isinstance(dim, layout.Product) else layout.Concat
    for i in range(len(children)):
        yield from _parts(children[i])
        for j in range(i + 2, len(children) + 1):
            if (i, j) != (0, len(children)):
                yield make(children[i:j])


def _holds(
    size: SizeArgument,
    target: Dim,
    attempt: Mapping[Key, Dim],
    coords: Sequence[Coords],
    reads: Sequence[Reads],
) -> bool:
    for at, read in zip(coords, reads, strict=True):
        values = {k: layout.dim_size(d, at) or 0 for k, d in attempt.items()}
        if evaluate(size.expression, values, read) != layout.dim_size(target, at):
            return False
    return True


def _can_be_given(size: SizeArgument, target: Dim, reads: Sequence[Reads]) -> bool:
    """Whether a call can be given `target` for a size: its code computes the full size everywhere.

    Args:
        size: The size.
        target: The dim that it should be.
        reads: Local sizes that code reads from tensors, on each rank.
    """
    whole = layout.dim_size(target)
    known = all(evaluate(size.expression, {}, read) == whole for read in reads)
    return known and not size.bound and size.caller is not None and _name(size) is not None


def _given(
    graph: Graph, sizes: Sequence[SizeArgument], dim_of: Callable[[str, int], Dim]
) -> tuple[CallSizes, list[SizeArgument]]:
    """Return the sizes to give to calls, and the `sizes` that cannot be given.

    A call in the code gets the same sizes each time that it runs.

    Args:
        graph: The traced model.
        sizes: The sizes to give.
        dim_of: Returns a dim of a tensor as a plan has it, with run-time sizes left open.
    """
    wanted = {id(size): str(simplify(dim_of(size.tensor, size.dim))) for size in sizes}
    texts: dict[tuple[object, int], set[str]] = {}
    for size in graph.sizes:
        if size.caller is not None and not size.bound:
            texts.setdefault((size.caller, size.place), set()).add(wanted.get(id(size), "?"))
    calls: dict[tuple[str, str], dict[int, str]] = {}
    for size in sizes:
        if len(texts[size.caller, size.place]) == 1:
            name = _name(size)
            assert name is not None, "it can be given"
            calls.setdefault((size.caller.module, name), {})[size.place] = wanted[id(size)]
    given = {
        key: ", ".join(dims.get(place, str(Atom(None))) for place in range(max(dims) + 1))
        for key, dims in calls.items()
    }
    return given, [size for size in sizes if len(texts[size.caller, size.place]) > 1]


def _name(size: SizeArgument) -> str | None:
    _, method, code, at = size.caller
    return name_of(method, code, at)
