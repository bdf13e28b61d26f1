"""What holds for all tests: which are long, plans that they share, and no time for hypothesis.

Other programs stretch the time that an example takes. What takes seconds to import is imported
when tests are collected: the controller of pytest-xdist, for which workers wait, collects none.
"""

import gc

import pytest

from tests.marks import are_long


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Let examples take as long as they do, before the first test is imported."""
    if isinstance(collector, pytest.Session):
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
    """Collect garbage more seldom, and leave what imports made to itself.

    Each full collection would go through all of it, which takes 0.3 to 0.7 s each time. A plan
    makes 20 to 40 thousand objects in cycles, and a collection after each goes through all that
    is new: 0.12 s, where one in ten plans takes 0.4 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(300_000, 3, 3)
