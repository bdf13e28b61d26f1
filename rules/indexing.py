"""Ops that read or write at positions given by data, and factories, which read no tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .call import OpCall, Table, axis_names, clause, size_clause
from .notation import Shape


class _Indexed(NamedTuple):
    """The axes of x[i, :, j, …]: of x, of each index tensor and of the selection."""

    source: list[str]
    indices: list[str]
    selection: list[str]
    used: list[str]
    sizes: dict[str, int]


def _indexed(call: OpCall) -> _Indexed | None:
    """Return the axes of an index op; None for masks.

    As in NumPy, adjacent indexed dims stay in place; otherwise they come first.
    """
    names = axis_names(len(call.operands[0]))
    dims = [d for d, i in enumerate(call.arguments["indices"]) if i is not None]
    given = [call.arguments["indices"][d].index for d in dims]
    if any(call.operand_dtypes[i] in (torch.bool, torch.uint8) for i in given):
        return None  # a mask: the count of selected elements depends on data
    shapes = [call.operands[i] for i in given]
    shape = torch.broadcast_shapes(*shapes)
    axes = [f"i{j}" for j in range(len(shape))]
    together = dims == list(range(dims[0], dims[-1] + 1))
    at = dims[0] if together else 0
    kept = [a for d, a in enumerate(names) if d not in dims]
    return _Indexed(
        source=names,
        indices=[_broadcast(axes[len(axes) - len(s) :], s, shape) for s in shapes],
        selection=kept[:at] + axes + kept[at:],
        used=[names[d] for d in dims],
        sizes=dict(zip(axes, shape, strict=True)),
    )


def _broadcast(axes: list[str], shape: Shape, full: Shape) -> str:
    sizes = full[len(full) - len(shape) :]
    return " ".join(a if n == m else "1" for a, n, m in zip(axes, shape, sizes, strict=True))


def _index(call: OpCall) -> str | None:
    """Indexed dims stay unsharded; other dims and those of the index tensors may be sharded."""
    it = _indexed(call)
    if it is None:
        return None
    text = f"{', '.join([' '.join(it.source), *it.indices])} -> {' '.join(it.selection)}"
    return text + clause("whole", it.used) + " | linear 0" + size_clause(it.sizes)


def _index_put(call: OpCall) -> str | None:
    it = _indexed(call)
    if it is None:
        return _put_by_mask(call)
    last = len(call.operands) - 1
    shape = call.operands[last]
    values = " ".join(it.selection[len(it.selection) - len(shape) :])
    source, whole = " ".join(it.source), [*it.used, *it.sizes]
    sizes = dict(it.sizes) | dict(zip(it.source, call.operands[0], strict=True))
    text = f"{', '.join([source, *it.indices, values])} -> {source}"
    return text + clause("whole", whole) + f" | linear 0+{last}" + size_clause(sizes)


def _put_by_mask(call: OpCall) -> str | None:
    """Write values at a mask. The masked dims become one dim, whose length depends on data.

    If the values do not have that dim, each selected position gets the same values.
    """
    given = [(d, i.index) for d, i in enumerate(call.arguments["indices"]) if i is not None]
    (dim, mask), *more = given
    depth = len(call.operands[mask])
    if more or not depth or call.operand_dtypes[mask] not in (torch.bool, torch.uint8):
        return None
    names, last = axis_names(len(call.operands[0])), len(call.operands) - 1
    chosen, shape = names[dim : dim + depth], call.operands[last]
    selection = [*names[:dim], "1", *names[dim + depth :]]
    # With that dim, each row of values has its own position.
    rows = len(shape) >= len(selection) - dim and shape[len(shape) - (len(selection) - dim)] != 1
    selection[dim] = "j" if rows else "1"
    source, sizes = " ".join(names), dict(zip(names, call.operands[0], strict=True))
    values = " ".join(selection[len(selection) - len(shape) :])
    text = f"{source}, {' '.join(chosen)}, {values} -> {source}"
    text += clause("whole", [*chosen, "j"] if rows else [])
    return text + f" | linear 0+{last}" + size_clause(sizes)


class _Along(NamedTuple):
    """The axes of a tensor and of an index along one of its dims."""

    source: str
    entries: str
    dim: str


def _along(call: OpCall) -> _Along | None:
    """Return the axes; None if another dim of the index is shorter, as that has no common axis."""
    source, index = call.operands[0], call.shape("index")
    if not source or not index:
        return None
    dim, names = call.dim(), axis_names(len(source))
    if source[:dim] + source[dim + 1 :] != index[:dim] + index[dim + 1 :]:
        return None
    return _Along(" ".join(names), " ".join([*names[:dim], "j", *names[dim + 1 :]]), names[dim])


def _gather(call: OpCall) -> str | None:
    it = _along(call)
    return it and f"{it.source}, {it.entries} -> {it.entries} | whole {it.dim} | linear 0"


def _scatter(call: OpCall) -> str | None:
    """Write, add or multiply at positions of one dim."""
    it = _along(call)
    if it is None:
        return None
    added = call.op == "scatter_add" or (
        call.arguments.get("reduce") in ("add", "sum") and call.arguments.get("include_self", True)
    )
    operands, linear = f"{it.source}, {it.entries}", ""
    if call.present("src"):
        if call.shape("src") != call.shape("index"):
            return None
        operands += f", {it.entries}"
        linear = "0+2" if added or call.arguments.get("reduce") is None else ""
    elif call.arguments.get("value") == 0 or call.arguments.get("reduce") == "multiply":
        linear = "0"
    # If each rank adds its own entries of the index, the results are Partial.
    entries = " | sum j" if added and call.present("src") else " | whole j"
    return f"{operands} -> {it.source} | whole {it.dim}{entries}" + clause("linear", linear.split())


def _index_select(call: OpCall) -> str | None:
    names, dim = axis_names(len(call.operands[0])), call.dim()
    if not names:
        return None
    j = "j" if call.shape("index") else "1"
    out = [*names[:dim], j, *names[dim + 1 :]]
    index = j.replace("1", "")
    return f"{' '.join(names)}, {index} -> {' '.join(out)} | whole {names[dim]} | linear 0"


def _embedding_bag(call: OpCall) -> str:
    """Columns may be sharded. The other results, for the backward pass, index rows and bags."""
    others = ["n", "o", "n"][: len(call.operands) - 1]
    made = ["b e" if len(s) == 2 else f"r{i}" for i, s in enumerate(call.results)]
    text = f"v e, {', '.join(others)} -> {', '.join(made)}"
    whole = ["v", *dict.fromkeys(others), "b", *(m for m in made if m != "b e")]
    return text + clause("whole", whole)


def _grid_sample(call: OpCall) -> str:
    """Read an image at the positions that a grid gives for each element of the result."""
    space = [f"x{i}" for i in range(len(call.operands[0]) - 2)]
    out = [f"y{i}" for i in range(len(space))]
    text = f"n c {' '.join(space)}, n {' '.join(out)} g -> n c {' '.join(out)}"
    return text + clause("whole", [*space, "g"]) + " | linear 0"


NO_VALUE = set("empty empty_permuted new_empty new_zeros zeros".split())
"""Ops that make zeros or uninitialised tensors."""


def _filled(call: OpCall) -> str:
    """A tensor of one value: each shard of it is made like the full tensor."""
    return f" -> {' '.join(axis_names(len(call.results[0])))}{_if_zero(call)}"


def _new_filled(call: OpCall) -> str:
    """A tensor of one value, with an operand that gives only dtype and device."""
    mine = [f"s{i}" for i in range(len(call.operands[0]))]
    made = axis_names(len(call.results[0]))
    return f"{' '.join(mine)} -> {' '.join(made)}{_if_zero(call)}" + clause("free", mine)


def _if_zero(call: OpCall) -> str:
    """Return the `linear zero` clause if the values are zero or uninitialised."""
    zero = call.op in NO_VALUE or call.arguments.get("fill_value") == 0
    return " | linear zero" if zero and call.result_dtypes[0].is_floating_point else ""


def _counted(call: OpCall) -> str:
    """Values that depend on their position."""
    names = axis_names(len(call.results[0]))
    return f" -> {' '.join(names)}" + clause("whole", names)


TABLE: Table = {
    **dict.fromkeys("empty empty_permuted full ones zeros".split(), _filled),
    **dict.fromkeys("new_empty new_full new_ones new_zeros".split(), _new_filled),
    **dict.fromkeys("arange eye linspace scalar_tensor".split(), _counted),
    **dict.fromkeys("rand randint randn randperm".split(), _counted),
    **dict.fromkeys("_embedding_bag _embedding_bag_forward_only".split(), _embedding_bag),
    **dict.fromkeys("grid_sampler_2d grid_sampler_3d".split(), _grid_sample),
    **dict.fromkeys("scatter scatter_add scatter_reduce".split(), _scatter),
    "_unsafe_index": _index,
    "_unsafe_index_put": _index_put,
    "bucketize": "..., b -> ... | sum b",
    "embedding": "v e, ... -> ... e | lookup v | linear 0",
    "gather": _gather,
    "index": _index,
    "index_put": _index_put,
    "index_select": _index_select,
    "one_hot": "... -> ... c | whole c",
}
