"""Ops that multiply and sum over a shared axis."""

from __future__ import annotations

from .call import OpCall, Table, axis_names, clause, size_clause


def _linear(call: OpCall) -> str:
    o = "o" if len(call.shape("weight")) == 2 else ""
    if call.present("bias"):
        return f"... i, {o} i, {o} -> ... {o} | sum i | linear 0+2 1+2"
    return f"... i, {o} i -> ... {o} | sum i | linear 0 1"


def _addmm(call: OpCall) -> str:
    added = " ".join(["m", "n"][2 - len(call.shape("self")) :])
    return f"{added}, m k, k n -> m n | sum k | linear 0+1 0+2"


def _baddbmm(call: OpCall) -> str:
    added = " ".join(["b", "m", "n"][3 - len(call.shape("self")) :])
    return f"{added}, b m k, b k n -> b m n | sum k | linear 0+1 0+2"


def _attention(call: OpCall) -> str:
    """Scaled dot product attention. The last leading dim is heads, grouped with `enable_gqa`."""
    query, key = call.shape("query"), call.shape("key")
    lead = axis_names(len(query) - 2)
    asked, held, sizes = list(lead), list(lead), {}
    if call.arguments.get("enable_gqa") and query[-3] != key[-3]:
        asked[-1], held[-1] = "(h g)", "h"
        sizes = {"h": key[-3], "g": query[-3] // key[-3]}
    q, kv = " ".join(asked), " ".join(held)
    mask = ""
    if call.present("attn_mask"):
        shape = call.shape("attn_mask")
        # Mask dims are aligned on the right. A dim of 1 is written 1: products do not broadcast.
        names = [*asked, "q", "k"][len(query) - len(shape) :]
        mask = ", " + " ".join("1" if n == 1 else a for a, n in zip(names, shape, strict=True))
    # For attention by rows the runtime makes the causal mask of each rank's queries.
    whole = "k d e" if call.op == "shardwright::attention_rows" else "q k d e"
    text = f"{q} q d, {kv} k d, {kv} k e{mask} -> {q} q e | whole {whole} | linear 2"
    return text + size_clause(sizes)


def _convolution(call: OpCall) -> str | None:
    """Channels may be in groups. Positions depend on neighbours, so these dims stay unsharded."""
    groups, n = call.arguments["groups"], len(call.shape("weight")) - 2
    space = " ".join(f"x{i}" for i in range(n))
    kernel = " ".join(f"k{i}" for i in range(n))
    out = " ".join(f"y{i}" for i in range(n))
    g_i, g_o = ("(g i)", "(g o)") if groups > 1 else ("i", "o")
    weight = f"{g_i} o" if call.arguments["transposed"] else f"{g_o} i"
    bias, linear = (f", {g_o}", "0+2 1+2") if call.present("bias") else ("", "0 1")
    text = f"n {g_i} {space}, {weight} {kernel}{bias} -> n {g_o} {out} | sum i"
    text += clause("whole", f"{space} {kernel} {out}".split()) + f" | linear {linear}"
    return text + (f" | size g={groups}" if groups > 1 else "")


def _bilinear(call: OpCall) -> str:
    if call.present("bias"):
        return "... i, ... j, o i j, o -> ... o | sum i j | linear 0+3 1+3 2+3"
    return "... i, ... j, o i j -> ... o | sum i j | linear 0 1 2"


def _grouped_mm(call: OpCall) -> str | None:
    """Rows sorted by expert, each times its expert's matrix. `offs` has row counts of all rows."""
    ranks = [len(s) for s in call.operands]
    if ranks != [2, 3, 1] or not call.present("offs"):
        return None
    return "t k, x k n, x -> t n | sum k | whole t x | linear 0 1"


ALIGNED = {"_grouped_mm": (("k", "n"), 16)}
"""Op -> axes whose local lengths must be multiples of so many bytes."""

TABLE: Table = {
    "_grouped_mm": _grouped_mm,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "bilinear": _bilinear,
    "bmm": "b m k, b k n -> b m n | sum k | linear 0 1",
    "conv_tbc": "x n i, k i o, o -> y n o | sum i | whole x k y | linear 0+2 1+2",
    "convolution": _convolution,
    "dot": "k, k -> | sum k | linear 0 1",
    "transformers::grouped_mm_fallback": _grouped_mm,  # for what _grouped_mm cannot do
    "linear": _linear,
    "mm": "m k, k n -> m n | sum k | linear 0 1",
    "mv": "m k, k -> m | sum k | linear 0 1",
    "scaled_dot_product_attention": _attention,
    "shardwright::attention_rows": _attention,
}
