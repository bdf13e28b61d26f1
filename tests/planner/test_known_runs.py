"""What one set of runs shows is not found out again with another set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.planner.trace.data_queries.branch_paths import both, fewer
from shardwright.planner.trace.folded_trace import trace_all
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.runs.known_runs import Known
from shardwright.planner.trace.runs.run import Run, RunRefused
from shardwright.planner.trace.runs.training_runs import in_training
from shardwright.planner.trace.trace_runs import trace

RUNS = [Run("", (), {"x": 1}), Run("", (), {"x": 1, "y": 2})]


def test_more_runs_differ_if_some_do() -> None:
    known = Known(differing=[RUNS[:1]])
    assert known.differs(RUNS)
    assert not known.differs(RUNS[1:])
    assert not known.differs(in_training(RUNS))


def test_the_same_runs_are_refused_again() -> None:
    known = Known()
    with pytest.raises(ModelError), known.refusing(RUNS):
        raise ModelError("why")
    with pytest.raises(ModelError, match="why"), known.refusing(RUNS):
        pytest.fail("tried again")
    with known.refusing(RUNS[:1]):
        pass


def test_runs_are_taken_to_ask_what_the_run_before_them_asked() -> None:
    paths = ((0, ()), (1, ()), (2, ()), (3, ()))
    assert (split := both(paths, 1, {1, 3}))
    assert split == ((0, ()), (1, (False,)), (1, (True,)), (2, ()), (3, (False,)), (3, (True,)))
    assert fewer(split, 4) == (*split[:4], (3, ()))


class Clamps(nn.Module):
    """Branches on data in training mode, if it is to."""

    def forward(self, x: Tensor, asks: bool = True) -> Tensor:
        if self.training and asks and x.isinf().any():
            x = x.clamp(-1, 1)
        return x * 2


@pytest.mark.parametrize("asks", [(True, True), (True, False), (False, True)])
def test_each_run_has_the_answers_to_its_own_questions(asks: tuple[bool, bool]) -> None:
    x = torch.empty(3, 5, device="meta")
    first, last = in_training([Run("", (), {"x": x, "asks": each}) for each in asks])
    graph = trace(Clamps().eval(), (x,), {}, [first, last])
    want = [(0, ())]
    for i, each in enumerate(asks):
        want += [(i + 1, (False,)), (i + 1, (True,))] if each else [(i + 1, ())]
    assert [*graph.branch_paths] == want


class Refuses(nn.Module):
    """Refuses calls with a flag."""

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        if fails:
            raise ValueError("not so")
        return x * 2


def test_an_error_says_which_run_is_refused() -> None:
    x = torch.empty(3, 5, device="meta")
    more = [Run("", (), {"x": x, "fails": fails}) for fails in (False, True, False)]
    with pytest.raises(RunRefused, match="not so") as refused:
        trace(Refuses().eval(), (x,), {}, more)
    assert refused.value.behind == 2


def test_alternatives_of_wishes_are_left_out_one_by_one() -> None:
    """One wish has a second alternative, another has none left, and all others are traced."""
    x = torch.empty(3, 5, device="meta")
    good, bad = (
        [Run("", (), {"x": x, "fails": fails}, priced=False) for _ in range(3)]
        for fails in (False, True)
    )
    wishes = ((good[0],), (bad[0], good[1]), (bad[1],), (good[2],))
    further = tuple(wish[0] for wish in wishes)
    source = Source(
        Refuses().eval(), (x,), {}, "Refuses", "", torch.float32, further=further, wishes=wishes
    )
    assert [*map(id, trace_all(source)[0].further)] == [*map(id, good)]
