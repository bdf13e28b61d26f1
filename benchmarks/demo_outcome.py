"""The results of the demo: comparisons with the unsharded model, and figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One comparison with the unsharded model."""

    what: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Return whether the difference is allowed; NaN is not."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Outcome:
    """The demo's results for one model."""

    plan: Any
    plan_seconds: float
    files: int
    parameters: int
    ranks: list[dict[str, Any]]
    checks: list[Check]
    remark: str
