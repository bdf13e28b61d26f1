"""Functions of torch by what they do with the integers that they are given."""

SIZED = set(
    """
view reshape expand unflatten new_zeros new_ones new_empty new_full zeros ones full empty
_unsafe_view resize broadcast_to
""".split()
)
"""Functions whose integers are sizes of the result."""

LITERAL = {"view", "reshape", "expand", "unflatten", "_unsafe_view", "broadcast_to"}
"""Those in which a bare number is a size that the result must have on every rank."""

SPLIT = {"split", "split_with_sizes"}
CONVOLUTIONS = {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
COUNTING = CONVOLUTIONS | set(
    """
arange chunk permute transpose unsqueeze squeeze flatten repeat repeat_interleave narrow pad
layer_norm rms_norm embedding one_hot topk __setitem__ to tile group_norm roll
select sum mean tril triu scaled_dot_product_attention
""".split()
)
"""Functions that take counts and positions, not numbers to compute with."""

CREATING = {"arange", "zeros", "ones", "full", "empty", "eye", "linspace", "rand", "randn"}
"""Functions that make a tensor of nothing but sizes."""
