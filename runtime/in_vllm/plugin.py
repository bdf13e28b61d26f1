"""The plugin of vLLM (`vllm.general_plugins`): models for which there is a plan use it.

vLLM calls it in each of its processes. It does nothing unless an environment variable names a plan.
"""

from __future__ import annotations

import os
from typing import Any

from shardwright.planner.contract.plan_file import Plan

PLAN = "SHARDWRIGHT_PLAN"
"""The environment variable with the plan's file."""

MODEL = "shardwright.runtime.in_vllm.model:PlannedForCausalLM"
BACKEND = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
"""vLLM's own names for models of transformers (`--model-impl transformers`)."""


def register() -> None:
    """Let vLLM build the model of the plan with `PlannedForCausalLM`.

    Raises:
        PlanError: the plan cannot be read.
    """
    file = os.environ.get(PLAN)
    if not file:
        return
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]

    registry: Any = ModelRegistry
    for name in (Plan.load(file).model.architecture, *BACKEND):
        registry.register_model(name, MODEL)
