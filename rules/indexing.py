"""Ops that read or write at positions given by data, and factories, which read no tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .call import OpCall, Table, axis_names, clause, size_clause
from .notation import Shape


class _Indexed(NamedTuple):
    """x[i, :, j, …] as axes: those of x, of each index tensor and of the selection."""

    source: list[str]
    indices: list[str]
    selection: list[str]
    used: list[str]
    sizes: dict[str, int]


def _indexed(call: OpCall) -> _Indexed | None:
    """Advanced dims that stand together stay in place, else they come first (numpy's rule)."""
    names = axis_names(len(call.operands[0]))
    dims = [d for d, i in enumerate(call.arguments["indices"]) if i is not None]
    given = [call.arguments["indices"][d].index for d in dims]
    if any(call.operand_dtypes[i] in (torch.bool, torch.uint8) for i in given):
        return None  # a mask: how many it selects, only the data say
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
    """Indexed dims stay whole; the others and those of the index tensors pass."""
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
    """What a mask over some dims selects becomes one dim, of a length that only the data say.

    Where the values do not have that dim, each place that is selected gets the same ones.
    """
    given = [(d, i.index) for d, i in enumerate(call.arguments["indices"]) if i is not None]
    (dim, mask), *more = given
    depth = len(call.operands[mask])
    if more or not depth or call.operand_dtypes[mask] not in (torch.bool, torch.uint8):
        return None
    names, last = axis_names(len(call.operands[0])), len(call.operands) - 1
    chosen, shape = names[dim : dim + depth], call.operands[last]
    selection = [*names[:dim], "1", *names[dim + depth :]]
    # As many as are selected, or fewer dims: each row of values has its place.
    rows = len(shape) >= len(selection) - dim and shape[len(shape) - (len(selection) - dim)] != 1
    selection[dim] = "j" if rows else "1"
    source, sizes = " ".join(names), dict(zip(names, call.operands[0], strict=True))
    values = " ".join(selection[len(selection) - len(shape) :])
    text = f"{source}, {' '.join(chosen)}, {values} -> {source}"
    text += clause("whole", [*chosen, "j"] if rows else [])
    return text + f" | linear 0+{last}" + size_clause(sizes)


class _Along(NamedTuple):
    """Axes of a tensor and of an index along one of its dims."""

    source: str
    entries: str
    dim: str


def _along(call: OpCall) -> _Along | None:
    """The other dims must be as long: an index that leaves some out has no axis for these."""
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
    """Written, added or multiplied at positions of one dim."""
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
    # Each rank may add its own entries of the index: the results are then terms of a sum.
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
    """Columns pass. Which row an entry is of, and how long bags are, comes back for backward."""
    others = ["n", "o", "n"][: len(call.operands) - 1]
    made = ["b e" if len(s) == 2 else f"r{i}" for i, s in enumerate(call.results)]
    text = f"v e, {', '.join(others)} -> {', '.join(made)}"
    whole = ["v", *dict.fromkeys(others), "b", *(m for m in made if m != "b e")]
    return text + clause("whole", whole)


def _grid_sample(call: OpCall) -> str:
    """An image, read at places that a grid states for each of those of the result."""
    space = [f"x{i}" for i in range(len(call.operands[0]) - 2)]
    out = [f"y{i}" for i in range(len(space))]
    text = f"n c {' '.join(space)}, n {' '.join(out)} g -> n c {' '.join(out)}"
    return text + clause("whole", [*space, "g"]) + " | linear 0"


NO_VALUE = set("empty empty_permuted new_empty new_zeros zeros".split())
"""Ops that make zeros, or whatever is there."""


def _filled(call: OpCall) -> str:
    """A tensor of one value: any part of it is made like the whole."""
    return f" -> {' '.join(axis_names(len(call.results[0])))}{_if_zero(call)}"


def _new_filled(call: OpCall) -> str:
    """The same with an operand that gives no more than dtype and device."""
    mine = [f"s{i}" for i in range(len(call.operands[0]))]
    made = axis_names(len(call.results[0]))
    return f"{' '.join(mine)} -> {' '.join(made)}{_if_zero(call)}" + clause("free", mine)


def _if_zero(call: OpCall) -> str:
    """What is in a tensor that is not filled is as good as zero: any rank may have any of it."""
    zero = call.op in NO_VALUE or call.arguments.get("fill_value") == 0
    return " | linear zero" if zero and call.result_dtypes[0].is_floating_point else ""


def _counted(call: OpCall) -> str:
    """Values that depend on where they stand."""
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
