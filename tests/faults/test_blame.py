"""When a rank leaves, all others name that one, and none waits for those that noticed before."""

from pathlib import Path

import pytest

from tests.faults import ranks
from tests.faults.conftest import Start, errors


@pytest.mark.parametrize("victim", range(4))
def test_all_name_the_one_that_died(folder: Path, start: Start, victim: int) -> None:
    model, plan = folder / "model", folder / "plan-4.json"
    ends = start(4, ranks.dies_in_forward, model, plan, victim, False)
    assert ends[victim].how == "killed"
    for text in errors(ends):
        assert f": no answer from rank {victim}, which died or hangs (" in text
        assert text.endswith(f"): look at the output of rank {victim}")


@pytest.mark.parametrize("victim", [0, 2])
def test_nobody_waits_for_those_that_noticed(folder: Path, start: Start, victim: int) -> None:
    """Each stays until all others have noticed: with gloo alone, one waits for the timeout."""
    model, plan = folder / "model", folder / "plan-4.json"
    ends = start(4, ranks.dies_in_forward, model, plan, victim, True)
    assert {end.log.strip().splitlines()[-1] for end in ends if end.how != "killed"} == {"all here"}
    assert all(f"no answer from rank {victim}," in text for text in errors(ends))


def test_one_that_hangs(folder: Path, start: Start) -> None:
    ends = start(4, ranks.hangs_in_forward, folder / "model", folder / "plan-4.json", 2)
    late = ends.pop(2)
    texts = errors(ends)
    assert all("no answer from rank 2, which died or hangs (" in text for text in texts)
    assert any("(Timed out after 4" in text for text in texts)  # the others hear it from that one
    assert late.how == "error" and "all_reduce failed on rank 2: " in late.text
