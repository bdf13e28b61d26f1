"""Let models of transformers collect hidden states and attentions while they are traced.

Under `torch.compile`, transformers keeps what it collects in a global variable, and a model within
the model empties it. Here Python code runs, so that a context variable does, as in eager mode.
"""

from __future__ import annotations

import sys
from typing import Any

from shardwright.planner.trace.thread_patches import Patch


def collecting() -> list[Patch]:
    """Return the patches with which outputs of modules are collected as in eager mode."""
    found: Any = sys.modules.get("transformers.utils.output_capturing")
    variable = getattr(found, "CompileableContextVar", None)
    return [(variable, "set", lambda one, value: one.context_var.set(value))] if variable else []
