"""Norms and losses that torch keeps as one op."""

from __future__ import annotations

from .call import OpCall, Table, axis_names


def _norm(call: OpCall) -> str:
    """layer_norm and rms_norm: the last dims, as many as `normalized_shape` has, stay whole."""
    n, k = len(call.operands[0]), len(call.arguments["normalized_shape"])
    names = axis_names(n)
    tail = " ".join(names[n - k :])
    operands = ", ".join([" ".join(names)] + [tail] * (len(call.operands) - 1))
    return f"{operands} -> {' '.join(names)} | whole {tail}"


def _native_norm(call: OpCall) -> str:
    n, k = len(call.operands[0]), len(call.arguments["normalized_shape"])
    names = axis_names(n)
    tail, kept = " ".join(names[n - k :]), " ".join(names[: n - k] + ["1"] * k)
    operands = ", ".join([" ".join(names)] + [tail] * (len(call.operands) - 1))
    return f"{operands} -> {' '.join(names)}, {kept}, {kept} | whole {tail}"


def _group_norm(call: OpCall) -> str:
    spatial = axis_names(len(call.operands[0]) - 2)
    groups = call.arguments.get("num_groups") or call.arguments.get("group")
    x = " ".join(["n (g c)", *spatial])
    operands = ", ".join([x] + ["(g c)"] * (len(call.operands) - 1))
    return f"{operands} -> {x} | whole {' '.join(['g', 'c', *spatial])} | size g={groups}"


def _cross_entropy(call: OpCall) -> str | None:
    """Logits [n, v] and class indices [n]; splitting v takes the vocabulary-parallel loss."""
    if len(call.shape("self")) != 2 or call.present("weight") or len(call.shape("target")) != 1:
        return None
    result = "n" if call.results[0] else ""
    return f"n v, n -> {result} | whole v" + ("" if result else " n")


TABLE: Table = {
    "cross_entropy_loss": _cross_entropy,
    "group_norm": _group_norm,
    "layer_norm": _norm,
    "native_layer_norm": _native_norm,
    "rms_norm": _norm,
}
