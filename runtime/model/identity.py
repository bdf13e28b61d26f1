"""Checks that a model is the one that the plan was made for; the error says what differs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.names import lookup
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.model.packages import is_of_diffusers, own_fields

VOLATILE = frozenset(
    "_name_or_path architectures distributed_config dtype quantization_config torch_dtype "
    "transformers_version use_cache output_attentions output_hidden_states".split()
)
"""Config keys that do not affect the shape of the computation."""


def config_hash(module: nn.Module) -> str:
    """Return the SHA-256 of the config without volatile keys, or of the shapes if none.

    In configs of diffusers, keys with an underscore say who wrote them, and when.
    """
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        data = _lasting(config.to_dict())  # type: ignore[union-attr]
    elif is_of_diffusers(module):
        data = _lasting({k: v for k, v in own_fields(module).items() if not k.startswith("_")})
    else:
        data = {n: list(p.shape) for n, p in module.named_parameters(remove_duplicate=False)}
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _lasting(v) for k, v in value.items() if k not in VOLATILE}
    return value


def check_identity(model: nn.Module, plan: Plan) -> None:
    """Compare the unsharded `model` with the one that the plan was made for.

    Raises:
        PlanError: it is another model; the message says what differs.
    """
    name = type(model).__name__
    if name != plan.model.architecture:
        raise PlanError(
            f"the plan is for a {plan.model.architecture}, not a {name}: make a plan for this model"
        )
    for parameter, tensor in model.named_parameters(remove_duplicate=False):
        shape = lookup(plan.model.parameters, parameter)
        if shape is None:
            raise PlanError(f"the plan is for another {name}: it knows no parameter '{parameter}'")
        if list(tensor.shape) != shape:
            raise PlanError(
                f"the plan is for another {name}: there '{parameter}' has shape {shape}, "
                f"here {list(tensor.shape)}"
            )
    if config_hash(model) != plan.model.config_hash:
        raise PlanError(f"the plan is for a {name} with another config: make a plan for this one")
