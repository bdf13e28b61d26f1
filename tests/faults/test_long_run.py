"""A sample of `benchmarks/long_run.py`: what ranks hold does not grow with steps or tokens."""

from benchmarks.long_run import growth, run


def test_nothing_grows() -> None:
    for rank in run(steps=20, tokens=200):
        for early, late in rank.values():
            assert not growth(early, late)


def test_growth_is_seen() -> None:
    early = {"memory": 10**8, "files": 5, "threads": 3, "tensors": 70}
    assert growth(early, {**early, "memory": 2 * 10**8}) == ["memory by 100000000"]
    assert growth(early, {**early, "files": 6, "tensors": 71}) == ["files by 1", "tensors by 1"]
