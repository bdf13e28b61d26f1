"""What rules forbid although it would be right, and what cannot be tried, each with its reason."""

from __future__ import annotations

VALUES_UNKNOWN = set(
    """
bernoulli empty empty_like empty_permuted exponential new_empty rand rand_like randint randn
randn_like randperm uniform
""".split()
)
"""Compared by shape only."""

NO_DERIVATIVE = {
    "_embedding_bag_forward_only.default",
    "bernoulli.p",
    "copy.default",
    "floor_divide.Scalar",
    "floor_divide.default",
    "scatter.reduce",
    "scatter.value_reduce",
}
"""Overloads that ATen has no gradient for."""

_STATISTICS = ("running_mean", "running_var")
CONSTANT = {
    "_native_batch_norm_legit_functional": _STATISTICS,
    "_native_batch_norm_legit_no_training": _STATISTICS,
    "fractional_max_pool2d": ("random_samples",),
    "fractional_max_pool3d": ("random_samples",),
}
"""Arguments that ATen has no gradient for."""

GRANULE = {"_grouped_mm": 4}
"""Its rows must be multiples of 16 bytes: what is split, is split so."""

_TRAINED = "statistics are taken over it when the model trains"
STRICT: dict[tuple[str, str], str] = {
    ("shardwright::attention_rows", "e"): "as of scaled_dot_product_attention",
    ("scaled_dot_product_attention", "e"): "the fast kernels want values as wide as keys",
    (
        "scaled_dot_product_attention",
        "q",
    ): "right without is_causal, but its size is a run-time one",
    ("_native_batch_norm_legit_no_training", "n"): _TRAINED,
    ("_native_batch_norm_legit_no_training", "a0"): _TRAINED,
    ("_native_batch_norm_legit_no_training", "a1"): _TRAINED,
    ("bincount", "n"): "a sum only where minlength is known to be more than all values",
    ("group_norm", "g"): "the number of groups is an argument that the runtime does not replace",
    ("native_group_norm", "g"): "the number of groups is an argument too",
}
"""(op, axis) -> why it may not be split."""

_PARAMETER = "weights and biases of norms are parameters, which never pend"
_IGNORED = "the values do not matter: a sum of zeros is no reason to let one pend"

LINEAR_BUT: dict[tuple[str, str], str] = {
    ("group_norm", "(1, 2)"): _PARAMETER,
    ("layer_norm", "(1, 2)"): _PARAMETER,
    ("rms_norm", "(1,)"): _PARAMETER,
    ("nan_to_num", "(0,)"): "only where all is finite",
    ("new_zeros", "(0,)"): _IGNORED,
    ("zeros_like", "(0,)"): _IGNORED,
    ("nextafter", "(0,)"): "one unit in the last place is below what we tell apart",
    ("nextafter", "(0, 1)"): "likewise",
}
"""(op, operands) -> why the rule does not say so."""
