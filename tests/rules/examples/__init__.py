"""Examples of every op of the tables, by family as the tables are."""

from ..draw import Example, Makers
from . import contraction, indexing, normalization, pointwise, reduction, shape

EXAMPLES: Makers = {}
NO_RULE: list[Example] = []
for _family in (contraction, indexing, normalization, pointwise, reduction, shape):
    EXAMPLES.update(_family.EXAMPLES)
    NO_RULE += _family.NO_RULE
