"""What stops a run that would need data."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)


class NeedsData(Exception):
    """What a module gives depends on data; the message says why."""


class Unproven(NeedsData):
    """Code does what nobody can prove of it; the message says what, and what to do instead."""


class FailsOnMadeUpData(NeedsData):
    """It does not run on made-up data."""


class BranchesOnData(NeedsData):
    """Traced call number `traced_call` asked something of data, and goes on either way."""

    def __init__(self, traced_call: int) -> None:
        super().__init__("it branches on data")
        self.traced_call = traced_call


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, NeedsData)
"""What is raised where a run would need data."""
