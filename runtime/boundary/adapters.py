"""Makes peft create adapters with the full sizes when they are added to a split model.

peft takes a DTensor for a sign that a layer computes with local tensors, and asks for local sizes.
But a module that replaces a layer of a split model computes with full tensors (`changes.py`).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from shardwright.errors import UsageError
from shardwright.runtime.boundary.module_boundary import boundary_of

LORA = "peft.tuners.lora.layer"


def tell_full_sizes() -> None:
    """Patch peft, if it is imported, to use the full sizes of layers of split models."""
    lora: Any = getattr(sys.modules.get(LORA), "LoraLayer", None)
    own = getattr(lora, "_get_in_out_features", None)
    if own is None or hasattr(own, "_shardwright"):
        return

    @functools.wraps(own)
    def sizes(self: Any, module: nn.Module) -> Any:
        if boundary_of(module) is None or not isinstance(module, nn.Linear):
            return own(self, module)
        return module.in_features, module.out_features

    sizes._shardwright = True  # type: ignore[attr-defined]
    lora._get_in_out_features = sizes


def check_full_sizes(adapter: Any, layer: Any, path: str) -> None:
    """Check that an adapter that replaces `layer` has the full sizes of `layer`.

    Raises:
        UsageError: it has other sizes.
    """
    for name in ("in_features", "out_features"):
        if getattr(adapter, name, None) != getattr(layer, name, None):
            raise UsageError(
                f"the adapter for '{path}' is made for {name}={getattr(adapter, name)}, those of a "
                "part: import peft before the model is split, or add adapters before that"
            )
