"""Ops that multiply and sum over a shared axis."""

from __future__ import annotations

from .call import OpCall, Table


def _linear(call: OpCall) -> str:
    if call.present("bias"):
        return "... i, o i, o -> ... o | sum i | linear 0+2 1+2"
    return "... i, o i -> ... o | sum i | linear 0 1"


def _addmm(call: OpCall) -> str:
    added = {0: "", 1: "n", 2: "m n"}[len(call.shape("self"))]
    return f"{added}, m k, k n -> m n | sum k | linear 0+1 0+2"


def _attention(call: OpCall) -> str:
    """Scaled dot product attention, with or without a mask, query heads possibly in groups."""
    query, key = call.shape("query"), call.shape("key")
    mask = ", " + " ".join(["1"] * (len(call.shape("attn_mask")) - 2) + ["q k"]) if call.present("attn_mask") else ""
    if len(query) != 4:
        return f"... q d, ... k d, ... k e{mask} -> ... q e | whole q k d e | linear 2"
    h, g = ("(h g)", "h") if query[1] != key[1] else ("h", "h")
    if call.present("attn_mask"):
        shape = (1,) * (4 - len(call.shape("attn_mask"))) + call.shape("attn_mask")
        names = [a if n != 1 else "1" for a, n in zip(("b", h, "q", "k"), shape, strict=True)]
        mask = ", " + " ".join(names[4 - len(call.shape("attn_mask")) :])
    size = f" | size h={key[1]} g={query[1] // key[1]}" if query[1] != key[1] else ""
    return f"b {h} q d, b {g} k d, b {g} k e{mask} -> b {h} q e | whole q k d e | linear 2{size}"


def _mv(call: OpCall) -> str:
    return "m k, k -> m | sum k | linear 0 1"


TABLE: Table = {
    "addmm": _addmm,
    "baddbmm": "b m n, b m k, b k n -> b m n | sum k | linear 0+1 0+2",
    "bmm": "b m k, b k n -> b m n | sum k | linear 0 1",
    "dot": "k, k -> | sum k | linear 0 1",
    "linear": _linear,
    "mm": "m k, k n -> m n | sum k | linear 0 1",
    "mv": _mv,
    "scaled_dot_product_attention": _attention,
}
