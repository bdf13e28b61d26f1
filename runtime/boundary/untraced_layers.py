"""Layers that no traced call ran, called directly: they compute with full parameters.

Other code took their weights (a head whose weight is one part of a larger one), so the plan says
how these are laid out, and nothing of what the layer takes and gives. Nothing need be known of that
where parameters are gathered: of its gradient each rank keeps what it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.code.attributes import set_sizes
from shardwright.runtime.code.copied import OWN

if TYPE_CHECKING:
    from shardwright.runtime.boundary.model_boundary import ModelBoundary


def is_untraced(spec: ModulePlan | None) -> bool:
    """Whether no call ran a module that the plan has, and it is not made for parts either."""
    if spec is None:
        return False
    known = (spec.takes, spec.gives, spec.inputs, spec.outputs)
    return not any((*known, spec.attributes, spec.sizes, spec.attention, spec.draws))


def with_full_parameters(
    module: nn.Module, original: type, model: ModelBoundary
) -> nn.Module | None:
    """The layer `module`, of class `original` before it was split, with full parameters.

    All ranks that share the model call it. None where the module has more than parameters that are
    DTensors over those ranks alone (buffers, what a style set up for its part).
    """
    stored: dict[str, Any] = {n: p for n, p in module._parameters.items() if p is not None}
    more = any(module._buffers) or hasattr(type(module), "set_up")
    if more or not all(map(model.has, stored.values())):
        return None
    layer = object.__new__(original)
    vars(layer).update({n: v for n, v in vars(module).items() if not n.startswith(OWN)})
    full = {name: parameter.full_tensor() for name, parameter in stored.items()}
    vars(layer)["_parameters"] = {**module._parameters, **full}
    if "weight" in full:
        set_sizes(layer, tuple(full["weight"].shape))
    return layer
