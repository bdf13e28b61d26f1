"""Let models of transformers collect hidden states and attentions while they are traced.

Under `torch.compile`, transformers keeps what it collects in a global variable, and a model within
the model empties it. Here Python code runs, so that a context variable does, as in eager mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwright.planner.trace.thread_patches import patched_in_this_thread


@contextmanager
def outputs_collected() -> Iterator[None]:
    """Context manager in which this thread collects outputs of modules as in eager mode."""
    found: Any = sys.modules.get("transformers.utils.output_capturing")
    variable = getattr(found, "CompileableContextVar", None)
    put = lambda one, value: one.context_var.set(value)  # noqa: E731
    with patched_in_this_thread([(variable, "set", put)] if variable else []):
        yield
