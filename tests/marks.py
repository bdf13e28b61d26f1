"""Marks of tests: `make long` runs those that are `long`, and `make test` the others.

A long case takes seconds, and proves for one more model what others prove.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long(*values: Any) -> Any:
    """A case of `parametrize` that is run by `make long`."""
    return pytest.param(*values, marks=pytest.mark.long)


def sampled(cases: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
    """The cases, those in `rest` as long ones."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    known = [case if isinstance(case, tuple) else (case,) for case in rest]
    return [long(*case) if case in known else pytest.param(*case) for case in values]
