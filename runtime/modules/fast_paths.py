"""Torch's own shortcuts through a layer: on the parts of one they would compute something else.

In eval mode without gradients `nn.TransformerEncoderLayer` hands all of its weights to one kernel,
past the modules in it, where the ranks exchange what they have; `nn.TransformerEncoder` hands its
layers nested tensors, which no layout speaks of. Both ask attributes of theirs first.
"""

from __future__ import annotations

from torch import nn

SHORTCUTS = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}
"""Class -> the attribute that lets it take its shortcut, which nothing else reads, and the value
with which it does not."""


def block_fast_paths(model: nn.Module) -> None:
    """Let no layer of a split model take a shortcut past its own modules."""
    for module in model.modules():
        for kind, (name, value) in SHORTCUTS.items():
            if isinstance(module, kind):
                setattr(module, name, value)
