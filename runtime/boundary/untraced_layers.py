"""Direct calls of layers that no traced call ran: they compute with full parameters.

Other code uses the weights of these layers (for example a head whose weight is part of a larger
one). The plan has placements for the parameters, but none for inputs and outputs. None are needed
if the parameters are gathered. Each rank then keeps its shard of their gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.code.attributes import PREFIX, set_sizes

if TYPE_CHECKING:
    from shardwright.runtime.boundary.model_boundary import ModelBoundary


def is_untraced(spec: ModulePlan | None) -> bool:
    """Whether the plan has the module, but without inputs, outputs or changes to its code."""
    if spec is None:
        return False
    known = (spec.takes, spec.gives, spec.inputs, spec.outputs)
    return not any((*known, spec.attributes, spec.sizes, spec.attention, spec.draws))


def with_full_parameters(
    module: nn.Module, original: type, model: ModelBoundary
) -> nn.Module | None:
    """Make a layer of class `original` with the gathered parameters of `module`.

    All ranks that share the model call this. Returns None if the module has buffers, state that a
    layer style has set up, or parameters that are not DTensors over those ranks.
    """
    stored: dict[str, Any] = {n: p for n, p in module._parameters.items() if p is not None}
    more = any(module._buffers) or hasattr(type(module), "set_up")
    if more or not all(map(model.has, stored.values())):
        return None
    layer = object.__new__(original)
    vars(layer).update({n: v for n, v in vars(module).items() if not n.startswith(PREFIX)})
    full = {name: parameter.full_tensor() for name, parameter in stored.items()}
    vars(layer)["_parameters"] = {**module._parameters, **full}
    if "weight" in full:
        set_sizes(layer, tuple(full["weight"].shape))
    return layer
