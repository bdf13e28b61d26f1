"""A call that a plan is proven for, as the plan says it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from shardwright.planner.contract.part import Part
from shardwright.planner.contract.plain_values import PlainValue

Draws = Literal["", "training", "always"]


class TracedCall(Part):
    """A call that the plan is proven for."""

    module: str = Field(default="", description="that was called; empty for the model itself")
    inputs: list[str] = Field(default=[], description="names of what was given; numbers without")
    values: dict[str, PlainValue] = Field(
        default={},
        description="argument -> its value, of those that are no tensors and may decide what code "
        "does, 'name.key' of what is in a dict, 'name.0' in a list; left out where there is none",
    )
    numbers: list[str] = Field(
        default=[],
        description="arguments for which any number will do; left out where there is none",
    )
    outputs: list[str] = Field(default=[], description="slots of what was returned")
    state: dict[str, str] = Field(
        default={},
        description="argument -> class of the cache that the call goes on with; left out where "
        "there is none",
    )
    several: bool = Field(
        default=False,
        description="whether it goes on with that by several tokens; left out where it does not",
    )
    training: bool = Field(
        default=False,
        description="whether it is proven in training mode; left out where it is not",
    )
    draws: Draws = Field(
        default="",
        description="when random numbers are drawn in it; left out where none are",
    )
    arrays: bool = Field(default=False, description="whether Python or NumPy draw arrays in it")

    asks_autocast: bool = Field(
        default=False,
        description="whether its code asks for autocast, and is not proven under it; left out "
        "where it is",
    )

    @model_serializer(mode="wrap")
    def _without_what_is_not(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a call has not is not written."""
        seldom = (
            "values",
            "numbers",
            "state",
            "several",
            "training",
            "draws",
            "arrays",
            "asks_autocast",
        )
        return {k: v for k, v in write(self).items() if v or k not in seldom}
