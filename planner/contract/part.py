"""What all parts of a plan have in common: keys that are not known are errors."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """An object in a plan."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
