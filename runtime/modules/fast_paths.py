"""Disables torch's fast paths through a layer, which would be wrong on local tensors.

In eval mode without gradients, `nn.TransformerEncoderLayer` passes all its weights to one kernel
and bypasses its submodules, where ranks communicate. `nn.TransformerEncoder` passes nested tensors
to its layers, for which there are no placements. Both first check an attribute.
"""

from __future__ import annotations

from torch import nn

SHORTCUTS = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
"""Class -> the attribute that enables its fast path, which nothing else reads, and the value that
disables it."""


def block_fast_paths(model: nn.Module) -> None:
    """Disable the fast paths of all layers of a split model."""
    for module in model.modules():
        for kind, (name, value) in SHORTCUTS.items():
            if isinstance(module, kind):
                setattr(module, name, value)
