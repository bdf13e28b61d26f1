"""What the demo finds out: comparisons with the unsplit model, and figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One comparison with the unsplit model."""

    what: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the difference is allowed; a NaN is not."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Outcome:
    """What the demo found out about one model."""

    plan: Any
    plan_seconds: float
    files: int
    parameters: int
    ranks: list[dict[str, Any]]
    checks: list[Check]
    remark: str
