"""Rules of norms and losses that are one op in torch."""

from __future__ import annotations

from .call import OpCall, Table, axis_names, clause

MEAN, SUM = 1, 2
"""The reductions of a loss, by their numbers in ATen."""


def _norm(call: OpCall) -> str:
    """layer_norm and rms_norm: the dims of `normalized_shape`, the last ones, stay unsharded."""
    n, k = len(call.operands[0]), len(call.arguments["normalized_shape"])
    names = axis_names(n)
    tail = " ".join(names[n - k :])
    operands = ", ".join([" ".join(names)] + [tail] * (len(call.operands) - 1))
    # native_layer_norm returns mean and rstd too.
    kept = " ".join(names[: n - k] + ["1"] * k)
    results = ", ".join([" ".join(names)] + [kept] * (len(call.results) - 1))
    return f"{operands} -> {results} | whole {tail}"


def _group_norm(call: OpCall) -> str:
    space = axis_names(len(call.operands[0]) - 2)
    groups = call.arguments.get("num_groups") or call.arguments["group"]
    x = " ".join(["n (g c)", *space])
    operands = ", ".join([x] + ["(g c)"] * (len(call.operands) - 1))
    results = ", ".join([x] + ["n g"] * (len(call.results) - 1))
    return f"{operands} -> {results} | whole {' '.join(['g', 'c', *space])} | size g={groups}"


def _batch_norm(call: OpCall) -> str:
    """Batch norm with given statistics: each channel is computed by itself.

    The other dims stay unsharded, because in training the same code computes the statistics over
    them. The returned statistics are empty, or only for the device's own use.
    """
    others = ["n", *axis_names(len(call.operands[0]) - 2)]
    x = " ".join([others[0], "c", *others[1:]])
    # (x - mean) weight / deviation + bias
    bias = [call.arguments["bias"].index] if call.present("bias") else []
    groups = [[0, call.arguments["running_mean"].index, *bias]]
    groups += [[call.arguments["weight"].index, *bias]] if call.present("weight") else []
    kept = "e" if call.results[1] == (0,) else "c"
    text = f"{x}{', c' * (len(call.operands) - 1)} -> {x}, {kept}, {kept}"
    text += clause("linear", ("+".join(map(str, g)) for g in groups)) + clause("whole", others)
    return text + (" | size e=0" if kept == "e" else "")


def _own_batch_norm(call: OpCall) -> str:
    """Batch norm with statistics of its input: each channel by itself, over all other dims."""
    others = ["n", *axis_names(len(call.operands[0]) - 2)]
    x = " ".join([others[0], "c", *others[1:]])
    text = f"{x}{', c' * (len(call.operands) - 1)} -> {x}{', c' * (len(call.results) - 1)}"
    return text + clause("whole", others)


def _ctc_loss(call: OpCall) -> str | None:
    """A loss for each sequence of a batch. There is no rule if lengths are plain numbers."""
    if not call.present("input_lengths") or [len(s) for s in call.operands] != [3, 2, 1, 1]:
        return None
    return "t n c, n s, n, n -> n, n t l | whole t c s l"


UPDATED = {"_native_batch_norm_legit_no_training": ("running_mean", "running_var")}
"""Arguments that the caller of this op changes in place in training mode."""


def _cross_entropy(call: OpCall) -> str | None:
    """Logits [n, v] and class indices [n]. Sharding v would need a vocabulary-parallel loss."""
    if len(call.shape("self")) != 2 or call.present("weight") or len(call.shape("target")) != 1:
        return None
    reduction = call.arguments["reduction"]
    if reduction == SUM:
        return "n v, n -> | sum n | whole v"
    # A mean is over the targets that are not ignored, whose count depends on data.
    return (
        "n v, n -> "
        + ("" if reduction == MEAN else "n")
        + clause("whole", ["v", "n"] if reduction == MEAN else ["v"])
    )


TABLE: Table = {
    "_ctc_loss": _ctc_loss,
    "_native_batch_norm_legit": _own_batch_norm,
    "_native_batch_norm_legit_functional": _own_batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "cross_entropy_loss": _cross_entropy,
    "group_norm": _group_norm,
    "layer_norm": _norm,
    "native_group_norm": _group_norm,
    "native_layer_norm": _norm,
    "rms_norm": _norm,
}
