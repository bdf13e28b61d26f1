"""Ops that only move, split, join or copy elements: each is a renaming of axes."""

from __future__ import annotations

from .call import OpCall, Table, axis_names
from .notation import Shape


def factor_alike(source: Shape, target: Shape) -> list[tuple[list[int], list[int], int]] | None:
    """The common refinement of two shapes with the same number of elements.

    Returns one entry a factor, major to minor: the dims of source and target it is part of (one
    each; empty for a dim of size 1 on the other side only) and its size. None where the two have
    no common refinement, as (2, 3) and (3, 2).
    """
    out: list[tuple[list[int], list[int], int]] = []
    i, j = len(source) - 1, len(target) - 1
    a, b = (source[i] if i >= 0 else 1), (target[j] if j >= 0 else 1)
    while i >= 0 or j >= 0:
        if a == 1 and i >= 0:
            i -= 1
            a = source[i] if i >= 0 else 1
        elif b == 1 and j >= 0:
            j -= 1
            b = target[j] if j >= 0 else 1
        else:
            size = min(a, b)
            if size <= 1 or a % size or b % size:
                return None
            out.append(([i], [j], size))
            a, b = a // size, b // size
    return out[::-1]


def _view(call: OpCall) -> str | None:
    source, target = call.operands[0], call.results[0]
    if 0 in source:
        return None
    factors = factor_alike(source, target)
    if factors is None:
        return None
    names = axis_names(len(factors))
    sides = []
    for shape, side in ((source, 0), (target, 1)):
        parts: list[list[str]] = [[] for _ in shape]
        for name, factor in zip(names, factors, strict=True):
            parts[factor[side][0]].append(name)
        sides.append(" ".join(f"({' '.join(p)})" if len(p) > 1 else (p[0] if p else "1") for p in parts))
    sizes = " ".join(f"{n}={f[2]}" for n, f in zip(names, factors, strict=True))
    return f"{sides[0]} -> {sides[1]} | linear 0" + (f" | size {sizes}" if sizes else "")


def _permute(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    order = [d % len(names) for d in call.arguments["dims"]] if names else []
    return f"{' '.join(names)} -> {' '.join(names[d] for d in order)} | linear 0"


def _transpose(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    out = list(names)
    i, j = call.dim("dim0"), call.dim("dim1")
    out[i], out[j] = out[j], out[i]
    return f"{' '.join(names)} -> {' '.join(out)} | linear 0"


def _t(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    return f"{' '.join(names)} -> {' '.join(reversed(names))} | linear 0"


def _unsqueeze(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    out = list(names)
    out.insert(call.dim(ndim=len(names) + 1), "1")
    return f"{' '.join(names)} -> {' '.join(out)} | linear 0"


def _squeeze(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    gone = [d for d in call.dims() if call.operands[0][d] == 1]
    kept = [a for i, a in enumerate(names) if i not in gone]
    return f"{' '.join(names)} -> {' '.join(kept)} | linear 0"


def _expand(call: OpCall) -> str:
    source, target = call.operands[0], call.results[0]
    names, skip = axis_names(len(target)), len(target) - len(source)
    kept = ["1" if n == 1 else names[skip + i] for i, n in enumerate(source)]
    return f"{' '.join(kept)} -> {' '.join(names)} | linear 0 | size " + " ".join(
        f"{a}={n}" for a, n in zip(names, target, strict=True)
    ) if target else " -> | linear 0"


def _slice_bounds(call: OpCall, n: int) -> tuple[int, int]:
    start, end = call.arguments.get("start"), call.arguments.get("end")
    start = 0 if start is None else max(start + n, 0) if start < 0 else min(start, n)
    end = n if end is None else max(end + n, 0) if end < 0 else min(end, n)
    return start, end


def _cut(names: list[str], dim: int, sizes: list[int], kept: int, keepdim: bool = True) -> str:
    """Dim `dim` is a concatenation of parts of `sizes`, of which only part `kept` goes on."""
    parts = [f"p{i}" if i != kept else "k" for i in range(len(sizes))]
    present = [(p, n) for p, n in zip(parts, sizes, strict=True) if n]
    whole = " + ".join(p for p, _ in present)
    source = [*names[:dim], f"({whole})", *names[dim + 1 :]]
    target = [*names[:dim], *(["k"] if keepdim else []), *names[dim + 1 :]]
    size = " ".join(f"{p}={n}" for p, n in present)
    return f"{' '.join(source)} -> {' '.join(target)} | linear 0 | size {size}"


def _slice(call: OpCall) -> str | None:
    shape, dim = call.operands[0], call.dim()
    n, step = shape[dim], call.arguments.get("step", 1)
    start, end = _slice_bounds(call, n)
    names = axis_names(len(shape))
    if end <= start:
        target = [*names[:dim], "e", *names[dim + 1 :]]
        return f"{' '.join(names)} -> {' '.join(target)} | whole e | linear 0 | size e=0"
    if step == 1:
        if (start, end) == (0, n):
            return f"{' '.join(names)} -> {' '.join(names)} | linear 0"
        return _cut(names, dim, [start, end - start, n - end], 1)
    if n % step == 0 and start < step and end > n - step + start:
        source = [*names[:dim], f"({names[dim]} m)", *names[dim + 1 :]]
        return f"{' '.join(source)} -> {' '.join(names)} | linear 0 | whole m | size m={step}"
    return None


def _select(call: OpCall) -> str:
    shape, dim = call.operands[0], call.dim()
    index = call.arguments["index"] % shape[dim]
    return _cut(axis_names(len(shape)), dim, [index, 1, shape[dim] - index - 1], 1, keepdim=False)


def _split_sizes(call: OpCall) -> str:
    shape, dim = call.operands[0], call.dim()
    sizes = [result[dim] for result in call.results]
    names = axis_names(len(shape))
    if len(sizes) == 1:
        return f"{' '.join(names)} -> {' '.join(names)} | linear 0"
    parts = [f"p{i}" if n else "" for i, n in enumerate(sizes)]
    source = [*names[:dim], f"({' + '.join(p for p in parts if p)})", *names[dim + 1 :]]
    results = [" ".join([*names[:dim], p or "e", *names[dim + 1 :]]) for p in parts]
    size = " ".join(f"{p}={n}" for p, n in zip(parts, sizes, strict=True) if p)
    empty = " e=0" if 0 in sizes else ""
    return f"{' '.join(source)} -> {', '.join(results)} | linear 0 | size {size}{empty}"


def _cat(call: OpCall) -> str | None:
    kept = [i for i, s in enumerate(call.operands) if s != (0,)]
    target = call.results[0]
    dim = call.dim(ndim=len(target))
    names = axis_names(len(target))
    if any(len(call.operands[i]) != len(target) for i in kept) or len(kept) != len(call.operands):
        return None
    parts = [f"p{i}" for i in kept]
    sources = [" ".join([*names[:dim], p, *names[dim + 1 :]]) for p in parts]
    sizes = [call.operands[i][dim] for i in kept]
    full = [p for p, n in zip(parts, sizes, strict=True) if n] or parts[:1]
    joined = full[0] if len(full) == 1 else f"({' + '.join(full)})"
    result = [*names[:dim], joined, *names[dim + 1 :]]
    size = " ".join(f"{p}={n}" for p, n in zip(parts, sizes, strict=True))
    return f"{', '.join(sources)} -> {' '.join(result)} | linear {'+'.join(map(str, kept))} | size {size}"


def _stack(call: OpCall) -> str:
    n, names = len(call.operands), axis_names(len(call.operands[0]))
    dim = call.dim(ndim=len(names) + 1)
    result = [*names[:dim], "n", *names[dim:]]
    sources = ", ".join([" ".join(names)] * n)
    return f"{sources} -> {' '.join(result)} | whole n | linear {'+'.join(map(str, range(n)))} | size n={n}"


def _repeat(call: OpCall) -> str:
    source, target = call.operands[0], call.results[0]
    times, skip = call.arguments["repeats"], len(target) - len(source)
    names = axis_names(len(target))
    kept, out, sizes = [], [], []
    for i, (name, n) in enumerate(zip(names, times, strict=True)):
        inner = [name] if i >= skip and source[i - skip] != 1 else []
        outer = [f"r{i}"] if n != 1 else []
        if i >= skip:
            kept.append(inner[0] if inner else "1")
        out.append("1" if not inner + outer else f"({' '.join(outer + inner)})")
        sizes += [f"r{i}={n}"] if outer else []
    text = f"{' '.join(kept)} -> {' '.join(out)} | linear 0"
    return text + (f" | size {' '.join(sizes)}" if sizes else "")


def _flip(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    moved = " ".join(names[d] for d in call.dims("dims"))
    return f"{' '.join(names)} -> {' '.join(names)} | whole {moved} | linear 0"


def _roll(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    dims = call.arguments.get("dims") or range(len(names))
    moved = " ".join(names[d] for d in dims)
    return f"{' '.join(names)} -> {' '.join(names)} | whole {moved} | linear 0"


def _triangle(call: OpCall) -> str:
    return "... r c -> ... r c | whole r c | linear 0"


def _pad(call: OpCall) -> str:
    pad, names = call.arguments["pad"], axis_names(len(call.operands[0]))
    moved = [names[-1 - i] for i in range(len(pad) // 2) if any(pad[2 * i : 2 * i + 2])]
    out = [f"q{i}" if a in moved else a for i, a in enumerate(names)]
    gone = " ".join([*moved, *(b for b in out if b.startswith("q"))])
    zero = not call.arguments.get("value")
    text = f"{' '.join(names)} -> {' '.join(out)}"
    return text + (f" | whole {gone}" if gone else "") + (" | linear 0" if zero else "")


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
    "slice": _slice,
    "split": _split_sizes,
    "split_with_sizes": _split_sizes,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": _t,
    "transpose": _transpose,
    "tril": _triangle,
    "triu": _triangle,
    "unsqueeze": _unsqueeze,
    "view": _view,
}
