"""Layers that no proven call ran, called by themselves: they compute with whole parameters.

Other code took their weights (a head whose weight is one part of a larger one), so the plan says
how these lie, and nothing of what the layer takes and gives. Nothing need be known of that where
parameters are gathered: the layer's own code is then what it is in the unsplit model, and of its
gradient each rank keeps what it holds.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.code.attributes import set_sizes
from shardwright.runtime.code.copied import OWN


def never_ran(spec: ModulePlan) -> bool:
    """Whether no call ran a module that the plan has, and it is not made for parts either."""
    known = (spec.takes, spec.gives, spec.inputs, spec.outputs)
    return not any((*known, spec.attributes, spec.sizes, spec.attention, spec.draws))


def whole_layer(module: nn.Module, own: type) -> nn.Module | None:
    """The layer `module`, of class `own` before it was split, with whole parameters.

    All ranks that share the model call it. None where the module has more than parameters that are
    DTensors over those ranks alone (modules in it, buffers, what a style set up for its part).
    """
    calls = vars(module).get("_shardwright_calls")
    stored: dict[str, Any] = {n: p for n, p in module._parameters.items() if p is not None}
    more = any(module._modules) or any(module._buffers) or hasattr(type(module), "set_up")
    if more or calls is None or not all(map(calls.has, stored.values())):
        return None
    found = object.__new__(own)
    vars(found).update({n: v for n, v in vars(module).items() if not n.startswith(OWN)})
    whole = {name: parameter.full_tensor() for name, parameter in stored.items()}
    vars(found)["_parameters"] = {**module._parameters, **whole}
    if "weight" in whole:
        set_sizes(found, tuple(whole["weight"].shape))
    return found
