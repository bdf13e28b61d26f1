"""The old location of `LocalModule`, for layer styles of other packages."""

from __future__ import annotations

import warnings
from typing import Any

from shardwright.runtime.boundary import module_class


def __getattr__(name: str) -> Any:
    if name != "LocalModule":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    warnings.warn(
        "LocalModule is in shardwright.runtime.boundary.module_class",
        DeprecationWarning,
        stacklevel=2,
    )
    return module_class.LocalModule
