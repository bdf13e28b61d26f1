"""What holds for all tests: which are long, plans that they share, and no time for hypothesis.

Other programs stretch the time that an example takes. What takes seconds to import is imported
when tests are collected: the controller of pytest-xdist, for which workers wait, collects none.
"""

import gc
from functools import cache

import pytest

from tests.marks import are_long


def pytest_collectstart() -> None:
    """Call `_untimed` before a test is imported.

    This is not called for the session itself, whose folder is not that of this file.
    """
    _untimed()


@cache
def _untimed() -> None:
    """Let examples take as long as they do."""
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("untimed", deadline=None, suppress_health_check=slow)
    settings.load_profile("untimed")


@pytest.fixture(scope="module", autouse=True)
def plans_before_ranks_start(request: pytest.FixtureRequest) -> None:
    """Make the plans that the tests of a file share."""
    from tests.planning import Once

    for shared in vars(request.module).values():
        if isinstance(shared, Once):
            shared.prepare()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that only `make long` runs."""
    for item, long in zip(items, are_long(item.nodeid for item in items), strict=True):
        if long:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Leave what imports made to itself: each full collection would go through all of it.

    That takes 0.3 to 0.7 s each time. What tests make is collected as before.
    """
    gc.collect()
    gc.freeze()
