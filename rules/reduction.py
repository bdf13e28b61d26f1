"""Ops that sum, average or scan along dims."""

from __future__ import annotations

from .call import OpCall, Table, axis_names


def _reduce(call: OpCall, clause: str, linear: bool) -> str:
    """A reduction over argument `dim`, with or without `keepdim`; `clause` is sum or whole."""
    n, gone = len(call.operands[0]), call.dims()
    names, keep = axis_names(n), len(call.results[0]) == len(call.operands[0]) and n > 0
    result = [("1" if keep else "") if i in gone else a for i, a in enumerate(names)]
    results = ", ".join([" ".join(r for r in result if r)] * len(call.results))
    over = [names[i] for i in gone if call.operands[0][i] != 1]
    text = f"{' '.join(names)} -> {results}"
    if over:
        text += f" | {clause} {' '.join(over)}"
    return text + (" | linear 0" if linear else "")


def _sum(call: OpCall) -> str:
    return _reduce(call, "sum", linear=True)


def _mean(call: OpCall) -> str:
    # A mean of local means is wrong for uneven parts, so the op itself may not be split.
    return _reduce(call, "whole", linear=True)


def _extreme(call: OpCall) -> str:
    return _reduce(call, "whole", linear=False)


def _scan(call: OpCall, linear: bool) -> str:
    n = len(call.operands[0])
    names = axis_names(n)
    dims = " ".join(names)
    over = [names[i] for i in call.dims()] if n else []
    text = f"{dims} -> {', '.join([dims] * len(call.results))}"
    return text + (f" | whole {' '.join(over)}" if over else "") + (" | linear 0" if linear else "")


def _cumsum(call: OpCall) -> str:
    return _scan(call, linear=True)


def _softmax(call: OpCall) -> str:
    return _scan(call, linear=False)


TABLE: Table = {
    **dict.fromkeys("all amax amin any argmax argmin logsumexp max min prod std var var_mean".split(), _extreme),
    **dict.fromkeys("_log_softmax _safe_softmax _softmax cumprod log_softmax softmax sort topk".split(), _softmax),
    "cumsum": _cumsum,
    "mean": _mean,
    "sum": _sum,
}
