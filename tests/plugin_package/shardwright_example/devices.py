"""A device profile: a dict as here, or the path of a JSON file."""

_LINK = {"latency_ns": 50_000, "bytes_per_s": 10**9}

SLOW_RING = {
    "source": "made up",
    "memory_bytes": 16 * 2**30,
    "memory_bytes_per_s": 10**11,
    "flops_per_s": {"bfloat16": 10**13, "float16": 10**13, "float32": 10**12, "float64": 10**11},
    "links": {"all_reduce": _LINK, "all_gather": _LINK, "reduce_scatter": _LINK},
}
