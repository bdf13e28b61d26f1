"""The styles of parallel layers: what a module becomes where its weight is split.

The planner picks the first that fits, reports say its word, and the runtime has a class of its name
(`runtime/layers.py`). A module that none fits runs its own code on local parameters: `LOCAL`.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import NamedTuple

LOCAL = "LocalModule"


class LayerStyle(NamedTuple):
    """One style.

    Attributes:
        layer: Name of the layer, as plans have it.
        module: Class of modules that it takes the place of, as "package.module:Class".
        dim: The dim of `weight` that is split, as it is stored and as the module sees it.
        word: What reports say of such a weight.
    """

    layer: str
    module: str
    dim: int
    word: str

    @property
    def replaced(self) -> type:
        """The class of modules that the layer takes the place of."""
        return resolve_name(self.module)


STYLES = (
    LayerStyle("ColumnParallelLinear", "torch.nn:Linear", 0, "column"),
    LayerStyle("RowParallelLinear", "torch.nn:Linear", 1, "row"),
    LayerStyle("VocabParallelEmbedding", "torch.nn:Embedding", 0, "vocab"),
)


def style_of(layer: str) -> LayerStyle | None:
    """The style of a layer of this name; None for `LOCAL`, or one that is not known."""
    return next((style for style in STYLES if style.layer == layer), None)
