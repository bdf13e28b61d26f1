"""Readable names of axes and tensors: `mlp.up_proj.weight[0]`, not a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardwright.planner.contract.names import pattern
from shardwright.planner.graph.axes import ATOM, CONCAT, PRODUCT, Axes, Dim, atoms_of, find
from shardwright.planner.graph.graph import Graph, once_a_graph


def axis_names(graph: Graph, axes: Axes) -> dict[int, str]:
    """Return axis id -> name, after the first parameter with the axis, else the first tensor.

    `model.layers.*.mlp.up_proj.weight[0]` is dim 0 of that parameter; `[0.1]` its second factor, or
    its second segment if it is a concatenation. If several axes would have the same name (in
    similar layers that are not copies of each other), the later ones get a number.
    """
    out: dict[int, str] = {}
    taken: Counter[str] = Counter()
    for title, name in _titles(graph):
        for _, axis, place in places(axes.dims[name]):
            if axis not in out:
                text = f"{title}[{place}]"
                taken[text] += 1
                out[axis] = text if taken[text] == 1 else f"{text}'{taken[text]}"
    return out


def dim_text(dim: Dim, names: Mapping[int, str]) -> str:
    """Return a dim with its axes by name and size: `mlp.up_proj.weight[0]=128`.

    A dim without axes is written as its size.
    """
    dim = find(dim)
    if not any(True for _ in atoms_of(dim)):
        return str(dim.size)
    if dim.kind == ATOM:
        return f"{names[dim.id]}={dim.size}"
    inner = (dim_text(c, names) for c in dim.children)
    return "(" + (" * " if dim.kind == PRODUCT else " + ").join(inner) + ")"


@once_a_graph
def tensor_names(graph: Graph) -> dict[str, str]:
    """Return a unique readable name for each tensor that has a variable of its own.

    A stored parameter has its own name; as its module uses it, `NAME used`. A result is named after
    module and op; a tensor at a boundary after the module, side and slot. Layers that are alike
    have `*` for their number. If several tensors would have the same name, the later ones get a
    number.
    """
    titles = {out: (op.module, f":{op.call.op}") for op in graph.ops for out in op.outputs}
    titles |= {b.target: (b.module, f" {b.side} {b.slot}") for b in graph.boundaries}
    titles |= {u.used: (u.fqn, " used") for u in graph.uses}
    titles |= {u.stored: (u.fqn, "") for u in graph.uses}
    own = {n: titles.get(n, (n, "")) for n in graph.tensors if graph.representative(n) == n}
    kinds: dict[tuple[str, str], set[str]] = {}
    for module, what in own.values():
        kinds.setdefault((pattern(module), what), set()).add(module)
    taken: Counter[str] = Counter()
    out = {}
    for name, (module, what) in own.items():
        alike = pattern(module)
        title = ((alike if len(kinds[alike, what]) == 1 else module) + what).strip(": ")
        taken[title] += 1
        out[name] = title if taken[title] == 1 else f"{title}'{taken[title]}"
    return out


def places(
    dims: Sequence[Dim], which: Collection[int] | None = None
) -> Iterator[tuple[int, int, str]]:
    """Yield the axes of a tensor: number of the dim, id of the axis, position (0, 0.1).

    Only the dims `which` are visited; by default all.
    """
    for d, dim in enumerate(dims):
        if which is not None and d not in which:
            continue
        for place, atom in _places(dim, f"{d}"):
            yield d, atom.id, place


def _titles(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield (readable name, tensor) of all tensors: parameters, inputs, results."""
    for use in graph.uses:
        yield pattern(use.fqn), use.stored
    for name in graph.inputs:
        yield name, name
    for op in graph.ops:
        for name in op.outputs:
            yield f"{pattern(op.module)}:{op.call.op}".lstrip(":"), name
    for name in graph.tensors:
        yield name, name


def _places(dim: Dim, place: str) -> Iterator[tuple[str, Dim]]:
    """Yield the atoms of a dim, each with its position: 0, 0.1, 0.1.0."""
    dim = find(dim)
    if dim.kind == ATOM:
        yield place, dim
        return
    assert dim.kind in (PRODUCT, CONCAT)
    for i, child in enumerate(dim.children):
        yield from _places(child, f"{place}.{i}")
