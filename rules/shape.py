"""Rules of ops that only move, split, join or copy elements: each is a renaming of axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from .call import OpCall, Table, axis_names, clause, size_clause
from .notation import Shape


class Factor(NamedTuple):
    """An axis of a reshape. `source` or `target` is None if that side does not have it."""

    source: int | None
    target: int | None
    size: int


def factor_alike(source: Shape, target: Shape) -> list[Factor]:
    """Return the common refinement of two shapes of the same number of elements, major to minor.

    A factor is a part of one dim of each shape; dims of size 1 have none. Dims without a common
    refinement, such as (2, 3) and (3, 2), become factors of one side each, up to where the shapes
    agree again.
    """
    out: list[Factor] = []
    left = [(d, n) for d, n in enumerate(source) if n != 1]
    right = [(d, n) for d, n in enumerate(target) if n != 1]
    while left:
        # The fewest dims at the right of both shapes with the same number of elements.
        i = j = 1
        while (a := prod(n for _, n in left[-i:])) != (b := prod(n for _, n in right[-j:])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        out = _refine(left[-i:], right[-j:]) + out
        del left[-i:], right[-j:]
    return out


def _refine(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> list[Factor]:
    lost = [Factor(d, None, n) for d, n in left] + [Factor(None, d, n) for d, n in right]
    left, right, out = list(left), list(right), list[Factor]()
    while left:
        (i, a), (j, b) = left.pop(), right.pop()
        size = min(a, b)
        if a % size or b % size:
            return lost
        out.insert(0, Factor(i, j, size))
        left += [(i, a // size)] if a > size else []
        right += [(j, b // size)] if b > size else []
    return out


def _view(call: OpCall) -> str | None:
    source, target = call.operands[0], call.results[0]
    if 0 in source or "dtype" in call.arguments:  # view.dtype reads the bits as other numbers
        return None
    factors = factor_alike(source, target)
    names = axis_names(len(factors))
    made = list(zip(names, factors, strict=True))
    before = _products([[a for a, f in made if f.source == d] for d in range(len(source))])
    after = _products([[a for a, f in made if f.target == d] for d in range(len(target))])
    lost = [a for a, f in made if f.source is None or f.target is None]
    text = f"{before} -> {after}" + clause("whole", lost) + " | linear 0"
    return text + size_clause({a: f.size for a, f in made})


def _products(dims: Sequence[Sequence[str]]) -> str:
    return " ".join(f"({' '.join(d)})" if len(d) > 1 else d[0] if d else "1" for d in dims)


def _renamed(names: list[str], out: list[str]) -> str:
    return f"{' '.join(names)} -> {' '.join(out)} | linear 0"


def _permute(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    return _renamed(names, [names[d] for d in call.arguments["dims"]])


def _transpose(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    out = list(names)
    if names:
        i, j = call.dim("dim0"), call.dim("dim1")
        out[i], out[j] = out[j], out[i]
    return _renamed(names, out)


def _t(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    return _renamed(names, names[::-1])


def _unsqueeze(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    out = list(names)
    out.insert(call.dim(ndim=len(names) + 1), "1")
    return _renamed(names, out)


def _squeeze(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    gone = {d for d in call.dims() if call.operands[0][d] == 1}
    return _renamed(names, [a for i, a in enumerate(names) if i not in gone])


def _expand(call: OpCall) -> str:
    source, target = call.operands[0], call.results[0]
    names, skip = axis_names(len(target)), len(target) - len(source)
    kept = ["1" if n == 1 else names[skip + i] for i, n in enumerate(source)]
    return _renamed(kept, names) + size_clause(dict(zip(names, target, strict=True)))


def _bounds(call: OpCall, n: int) -> tuple[int, int]:
    """Return start and end of a slice of a dim of size `n`, both within 0 … n."""
    start, end = call.arguments.get("start"), call.arguments.get("end")
    start = 0 if start is None else max(start + n, 0) if start < 0 else min(start, n)
    end = n if end is None else max(end + n, 0) if end < 0 else min(end, n)
    return start, max(start, end)


BEFORE, KEPT, AFTER = "p0", "k", "p2"
"""The parts of a dim that a slice or select cuts: before, kept and after.

`planner/strategies/op_strategies.py` relies on these names: sharding one of these axes changes an
index that a model's code may have as a literal number. No other rule for `slice` and `select` uses
them.
"""


def _cut(n: int, start: int, end: int) -> tuple[str, dict[str, int]]:
    """Return a dim of size `n` as a concatenation of its non-empty parts, and their sizes."""
    sizes = {BEFORE: start, KEPT: end - start, AFTER: n - end}
    sizes = {part: size for part, size in sizes.items() if size}
    return f"({' + '.join(sizes)})", sizes


def _slice(call: OpCall) -> str | None:
    n, dim, step = call.operands[0][call.dim()], call.dim(), call.arguments.get("step", 1)
    start, end = _bounds(call, n)
    names = axis_names(len(call.operands[0]))
    head, mine, tail = names[:dim], names[dim], names[dim + 1 :]
    if (start, end, step) == (0, n, 1):
        return _renamed(names, names)
    if start == end:
        return _renamed(names, [*head, "e", *tail]) + f" | free {mine} | size e=0"
    if step == 1:
        dims, sizes = _cut(n, start, end)
        return _renamed([*head, dims, *tail], [*head, KEPT, *tail]) + size_clause(sizes)
    if n % step == 0 and start < step and end > n - step + start:
        whole = " | whole m" + size_clause({"m": step})
        return _renamed([*head, f"({mine} m)", *tail], names) + whole
    return _renamed(names, [*head, "e", *tail]) + f" | whole {mine} e"


def _select(call: OpCall) -> str:
    dim, names = call.dim(), axis_names(len(call.operands[0]))
    n = call.operands[0][dim]
    index = call.arguments["index"] % n
    dims, sizes = _cut(n, index, index + 1)
    head, tail = names[:dim], names[dim + 1 :]
    return _renamed([*head, dims, *tail], [*head, *tail]) + size_clause(sizes)


def _slice_scatter(call: OpCall) -> str:
    """Replace a slice of the first operand by the second operand."""
    n, dim, names = call.operands[0][call.dim()], call.dim(), axis_names(len(call.operands[0]))
    start, end = _bounds(call, n)
    if call.arguments.get("step", 1) == 1 and start < end:
        return _written(call, dim, start, end, [KEPT])
    # A slice with a step, or an empty one.
    out, kept = " ".join(names), " ".join([*names[:dim], "e", *names[dim + 1 :]])
    whole = f" | whole {names[dim]} e" if start < end else ""
    return f"{out}, {kept} -> {out} | linear 0+1{whole}" + size_clause({"e": call.operands[1][dim]})


def _select_scatter(call: OpCall) -> str:
    dim = call.dim()
    index = call.arguments["index"] % call.operands[0][dim]
    return _written(call, dim, index, index + 1, [])


def _written(call: OpCall, dim: int, start: int, end: int, kept: list[str]) -> str:
    names = axis_names(len(call.operands[0]))
    dims, sizes = _cut(call.operands[0][dim], start, end)
    head, tail = names[:dim], names[dim + 1 :]
    out = " ".join([*head, dims, *tail])
    return f"{out}, {' '.join([*head, *kept, *tail])} -> {out} | linear 0+1" + size_clause(sizes)


def _split(call: OpCall) -> str:
    """Split a dim, a concatenation of parts, into one result per part."""
    dim, names = call.dim(), axis_names(len(call.operands[0]))
    head, tail = names[:dim], names[dim + 1 :]
    sizes = {f"p{i}": result[dim] for i, result in enumerate(call.results)}
    # Empty parts are left out of the concatenation, unless all are empty.
    full = [p for p, n in sizes.items() if n] or ["p0"]
    source = " ".join([*head, f"({' + '.join(full)})", *tail])
    results = ", ".join(" ".join([*head, p, *tail]) for p in sizes)
    return f"{source} -> {results} | linear 0" + size_clause(sizes)


def _cat(call: OpCall) -> str:
    target = call.results[0]
    dim, names = call.dim(ndim=len(target)), axis_names(len(target))
    head, tail = names[:dim], names[dim + 1 :]
    # torch ignores an empty vector, whatever the number of dims of the others.
    absent = [i for i, s in enumerate(call.operands) if s == (0,) and len(target) > 1]
    joined = [i for i in range(len(call.operands)) if i not in absent]
    sizes = {f"p{i}": (0 if i in absent else s[dim]) for i, s in enumerate(call.operands)}
    full = [p for p, n in sizes.items() if n] or [f"p{joined[0]}"]
    sources = [p if i in absent else " ".join([*head, p, *tail]) for i, p in enumerate(sizes)]
    result = " ".join([*head, f"({' + '.join(full)})", *tail])
    linear = "+".join(map(str, joined))
    return f"{', '.join(sources)} -> {result} | linear {linear}" + size_clause(sizes)


def _stack(call: OpCall) -> str:
    n, names = len(call.operands), axis_names(len(call.operands[0]))
    dim = call.dim(ndim=len(names) + 1)
    result = " ".join([*names[:dim], "n", *names[dim:]])
    sources = ", ".join([" ".join(names)] * n)
    return f"{sources} -> {result} | whole n | linear {'+'.join(map(str, range(n)))}"


def _unbind(call: OpCall) -> str:
    dim, names = call.dim(), axis_names(len(call.operands[0]))
    result = " ".join([*names[:dim], *names[dim + 1 :]])
    results = ", ".join([result] * len(call.results))
    return f"{' '.join(names)} -> {results} | whole {names[dim]} | linear 0"


def _unfold(call: OpCall) -> str:
    """Windows over a dim, with a new last dim for the elements of a window."""
    names = axis_names(len(call.operands[0]))
    if not names:
        return " -> w | whole w | linear 0"
    dim = call.dim("dimension")
    out = [*names[:dim], "n", *names[dim + 1 :], "w"]
    return _renamed(names, out) + f" | whole {names[dim]} n w"


def _repeat(call: OpCall) -> str:
    source, target = call.operands[0], call.results[0]
    skip, names = len(target) - len(source), axis_names(len(target))
    times = {f"r{i}": n for i, n in enumerate(call.arguments["repeats"]) if n != 1}
    kept = ["1" if n == 1 else names[skip + i] for i, n in enumerate(source)]
    inner = ["1"] * skip + kept
    out = [[a for a in (f"r{i}", inner[i]) if a in times or a in names] for i in range(len(target))]
    return _renamed(kept, [_products(out)]) + size_clause(times)


def _flip(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    return _renamed(names, names) + clause("whole", (names[d] for d in call.dims("dims")))


def _roll(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    dims = call.arguments.get("dims")
    moved = names if not dims else list(dict.fromkeys(names[d] for d in dims))
    return _renamed(names, names) + clause("whole", moved)


def _pad(call: OpCall) -> str:
    pad, names = call.arguments["pad"], axis_names(len(call.operands[0]))
    moved = [names[-1 - i] for i in range(len(pad) // 2) if any(pad[2 * i : 2 * i + 2])]
    out = [f"q{i}" if a in moved else a for i, a in enumerate(names)]
    text = f"{' '.join(names)} -> {' '.join(out)}"
    text += clause("whole", [*moved, *(a for a in out if a not in names)])
    # A Partial tensor may be padded with zeros, or cropped.
    zeros = not call.arguments.get("value") or max(pad, default=0) <= 0
    return text + (" | linear 0" if zeros else "")


TABLE: Table = {
    "_unsafe_view": _view,
    "cat": _cat,
    "constant_pad_nd": _pad,
    "expand": _expand,
    "flip": _flip,
    "permute": _permute,
    "repeat": _repeat,
    "reshape": _view,
    "roll": _roll,
    "select": _select,
    "select_scatter": _select_scatter,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": _t,
    "transpose": _transpose,
    "tril": "... r c -> ... r c | whole r c | linear 0",
    "triu": "... r c -> ... r c | whole r c | linear 0",
    "unbind": _unbind,
    "unbind_copy": _unbind,
    "unfold": _unfold,
    "unsqueeze": _unsqueeze,
    "view": _view,
}
