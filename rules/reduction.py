"""Rules of ops that reduce, scan or pool along dims."""

from __future__ import annotations

from functools import partial

from .call import OpCall, Table, axis_names, clause

EXTREME = """
all amax amin any argmax argmin logsumexp max median min prod std var var_mean
"""
SCAN = """
_log_softmax _safe_softmax _softmax cummax cummin cumprod log_softmax logcumsumexp softmax sort
"""


def _reduce(call: OpCall, word: str, linear: bool) -> str:
    """A reduction over argument `dim`, with or without `keepdim`; `word` is sum or whole."""
    shape, gone = call.operands[0], call.dims()
    if call.arguments.get("dim") == [] and call.results[0] != shape:
        gone = list(range(len(shape)))  # an empty list means all dims for some ops
    names, keep = axis_names(len(shape)), len(call.results[0]) == len(shape)
    result = [("1" if keep else "") if i in gone else a for i, a in enumerate(names)]
    results = ", ".join([" ".join(r for r in result if r)] * len(call.results))
    text = f"{' '.join(names)} -> {results}"
    text += clause(word, (names[i] for i in gone))
    return text + (" | linear 0" if linear else "")


def _norm(call: OpCall) -> str:
    # The 1-norm is a sum of absolute values; other norms take a root at the end.
    return _reduce(call, "sum" if call.arguments["ord"] == 1 else "whole", linear=False)


def _extreme(call: OpCall) -> str:
    if call.present("other"):  # max and min of two tensors
        return "..., ... -> ..."
    return _reduce(call, "whole", linear=False)


def _scan(call: OpCall, linear: bool = False) -> str:
    names = axis_names(len(call.operands[0]))
    dims = " ".join(names)
    text = f"{dims} -> {', '.join([dims] * len(call.results))}"
    text += clause("whole", (names[i] for i in call.dims()))
    return text + (" | linear 0" if linear else "")


def _pooled(call: OpCall) -> int:
    """Return how many of the last dims the op pools over."""
    return 3 if "3d" in call.op else 2


def _average_pool(call: OpCall) -> str:
    """Windows over the last dims. A dim whose windows are single elements may be sharded."""
    names, given = axis_names(len(call.operands[0])), call.arguments
    sizes = (given["kernel_size"], given["stride"] or given["kernel_size"], given["padding"])
    windows = zip(*(n * _pooled(call) if len(n) == 1 else n for n in sizes), strict=True)
    head = len(names) - _pooled(call)
    moved = [head + i for i, window in enumerate(windows) if window != (1, 1, 0)]
    out = [f"w{i}" if i in moved else a for i, a in enumerate(names)]
    whole = [a for i in moved for a in (names[i], out[i])]
    return f"{' '.join(names)} -> {' '.join(out)}" + clause("whole", whole) + " | linear 0"


def _pool(call: OpCall) -> str:
    """Windows over the last dims, which stay unsharded: an index of a maximum counts along all."""
    names = axis_names(len(call.operands[0]))
    head = len(names) - _pooled(call)
    out = [a if i < head else f"w{i}" for i, a in enumerate(names)]
    samples = ", a0 a1 s" if call.present("random_samples") else ""
    results = ", ".join([" ".join(out)] * len(call.results))
    text = f"{' '.join(names)}{samples} -> {results}"
    text += clause("whole", [*names[head:], *out[head:], *(["s"] if samples else [])])
    return text + (" | linear 0" if "avg" in call.op else "")


def _topk(call: OpCall) -> str:
    names = axis_names(len(call.operands[0]))
    best = ["t" if i in call.dims() else a for i, a in enumerate(names)]
    text = f"{' '.join(names)} -> {' '.join(best)}, {' '.join(best)}"
    return text + clause("whole", (n for i in call.dims() for n in (names[i], "t")))


def _bincount(call: OpCall) -> str:
    if call.present("weights"):
        return "n, n -> b | whole n b | linear 1"
    return "n -> b | whole n b"


def _histc(call: OpCall) -> str:
    """Counts add up over ranks if the range of bins is given, not if it comes from the data."""
    names = axis_names(len(call.operands[0]))
    given = call.arguments["min"] != call.arguments["max"]
    word, whole = ("sum", ["n"]) if given else ("whole", [])
    text = f"{' '.join(names)} -> n" + clause(word, names)
    return text + clause("whole", whole or ["n"])


TABLE: Table = {
    **dict.fromkeys(EXTREME.split(), _extreme),
    **dict.fromkeys(SCAN.split(), _scan),
    **dict.fromkeys("_adaptive_avg_pool2d _adaptive_avg_pool3d".split(), _pool),
    **dict.fromkeys("adaptive_max_pool2d adaptive_max_pool3d".split(), _pool),
    **dict.fromkeys("max_pool2d_with_indices max_pool3d_with_indices".split(), _pool),
    **dict.fromkeys("fractional_max_pool2d fractional_max_pool3d".split(), _pool),
    "_fft_c2c": partial(_scan, linear=True),
    "_pdist_forward": "n m -> p | whole n m p",
    "avg_pool2d": _average_pool,
    "avg_pool3d": _average_pool,
    "bincount": _bincount,
    "cumsum": partial(_scan, linear=True),
    "histc": _histc,
    "linalg_vector_norm": _norm,
    # A mean of local means is wrong for uneven shards, so the reduced dims stay unsharded.
    "mean": partial(_reduce, word="whole", linear=True),
    "sum": partial(_reduce, word="sum", linear=True),
    "topk": _topk,
}
