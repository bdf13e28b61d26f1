"""Exceptions that stop a run which would need data."""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class NeedsData(Exception):
    """The result of a module depends on data; the message says why."""


class Unproven(NeedsData):
    """Code does something that cannot be proven correct; the message says what to do instead."""


class FailsOnMadeUpData(NeedsData):
    """The module does not run on made-up data."""


class BranchesOnData(NeedsData):
    """Traced call number `traced_call` branches on data at a line, and both branches go on."""

    def __init__(self, traced_call: int, line: tuple[str, int] | None = None) -> None:
        super().__init__("it branches on data")
        self.traced_call, self.line = traced_call, line


class AsksLess(RuntimeError):
    """Traced call number `traced_call` has more answers than the questions that it `asked`."""

    def __init__(self, traced_call: int, asked: int) -> None:
        super().__init__("code that depends on data does otherwise when it is run again")
        self.traced_call, self.asked = traced_call, asked


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, NeedsData)
"""Exceptions that are raised if a run would need data."""


UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)
IN_WORDS = (
    *("no fake impl registered", "no fake impl or Meta kernel registered"),
    "Cannot access data pointer",
)
"""How torch says that an op, or code that reads memory, does not run on tensors without data."""


def needs_memory(error: Exception) -> bool:
    """Whether code fails only because tensors have no data: an op has no kernel for that."""
    return isinstance(error, UNSUPPORTED) or any(words in str(error) for words in IN_WORDS)
