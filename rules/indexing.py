"""Ops that read or write at positions given by data, and factories, which have no tensor operand."""

from __future__ import annotations

from .call import OpCall, Table, axis_names


def _index(call: OpCall) -> str | None:
    """x[i, :, j, …]: indexed dims stay whole; index tensors are whole; the rest passes.

    Advanced dims that stand together stay in place, else they come first (numpy's rule).
    """
    indices = call.arguments["indices"]
    n = len(call.operands[0])
    names = axis_names(n)
    used = [d for d, i in enumerate(indices) if i is not None]
    shapes = [call.operands[i.index] for i in indices if i is not None]
    if any(call.operand_dtypes[i.index].is_floating_point or call.operand_dtypes[i.index].itemsize == 0
           for i in indices if i is not None):
        return None
    if any(str(call.operand_dtypes[i.index]) == "torch.bool" for i in indices if i is not None):
        return None
    k = max(len(s) for s in shapes)
    result_rank = n - len(used) + k
    if result_rank != len(call.results[0]):
        return None
    together = used == list(range(used[0], used[-1] + 1))
    at = used[0] if together else 0
    kept = [a for d, a in enumerate(names) if d not in used]
    index_axes = [f"i{j}" for j in range(k)]
    result = kept[:at] + index_axes + kept[at:]
    operands = [" ".join(names)]
    for shape in shapes:
        aligned = index_axes[k - len(shape) :]
        sizes = [call.results[0][at + k - len(shape) + j] for j in range(len(shape))]
        operands.append(" ".join(a if s == want else "1" for a, s, want in zip(aligned, shape, sizes, strict=True)))
    whole = [names[d] for d in used]
    size = " ".join(f"{a}={call.results[0][at + j]}" for j, a in enumerate(index_axes))
    return (f"{', '.join(operands)} -> {' '.join(result)} | whole {' '.join(whole)} | linear 0"
            + (f" | size {size}" if size else ""))


def _gather(call: OpCall) -> str | None:
    source, index = call.operands
    dim, names = call.dim(), axis_names(len(source))
    if any(s != i for d, (s, i) in enumerate(zip(source, index, strict=True)) if d != dim):
        return None
    other = [*names[:dim], "j", *names[dim + 1 :]]
    return f"{' '.join(names)}, {' '.join(other)} -> {' '.join(other)} | whole {names[dim]} | linear 0"


def _index_select(call: OpCall) -> str:
    names, dim = axis_names(len(call.operands[0])), call.dim()
    out = [*names[:dim], "j", *names[dim + 1 :]]
    return f"{' '.join(names)}, j -> {' '.join(out)} | whole {names[dim]} | linear 0"


def _filled(call: OpCall) -> str:
    """A tensor of one value: any part of it is made like the whole."""
    return f" -> {' '.join(axis_names(len(call.results[0])))}"


def _new_filled(call: OpCall) -> str:
    """The same with an operand that gives no more than dtype and device: its dims are free axes."""
    mine = [f"s{i}" for i in range(len(call.operands[0]))]
    whole = f" | whole {' '.join(mine)}" if mine else ""
    return f"{' '.join(mine)} -> {' '.join(axis_names(len(call.results[0])))}{whole}"


def _counted(call: OpCall) -> str:
    names = axis_names(len(call.results[0]))
    return f" -> {' '.join(names)}" + (f" | whole {' '.join(names)}" if names else "")


TABLE: Table = {
    **dict.fromkeys("empty full ones zeros".split(), _filled),
    **dict.fromkeys("new_empty new_full new_ones new_zeros".split(), _new_filled),
    **dict.fromkeys("arange eye linspace scalar_tensor".split(), _counted),
    "embedding": "v e, ... -> ... e | lookup v | linear 0",
    "gather": _gather,
    "index": _index,
    "index_select": _index_select,
}
