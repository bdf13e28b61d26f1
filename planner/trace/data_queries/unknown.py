"""What stops a run that would need data."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)


class Unknown(Exception):
    """It cannot be told what a module gives out; the message says why."""


class Unproven(Unknown):
    """Code does what nobody can prove of it; the message says what, and what to do instead."""


class Fails(Unknown):
    """It does not run on made-up data."""


class Undecided(Unknown):
    """Traced call number `traced_call` asked something of data, and goes on either way."""

    def __init__(self, traced_call: int) -> None:
        super().__init__("it branches on data")
        self.traced_call = traced_call


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, Unknown)
"""What is raised where a run would need data."""
