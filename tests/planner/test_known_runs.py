"""What one set of runs shows is not found out again with another set."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.planner.trace import compared_runs, folded_trace, trace_runs
from shardwright.planner.trace.data_queries.branch_paths import MAX_IN_CHAIN, both, fewer
from shardwright.planner.trace.folded_trace import trace_all
from shardwright.planner.trace.model.source import Source
from shardwright.planner.trace.runs.known_runs import Known
from shardwright.planner.trace.runs.run import Run, RunRefused
from shardwright.planner.trace.runs.training_runs import in_training
from tests.planning import trace

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
    assert fewer(split, 4, 0) == (*split[:4], (3, ()))


def test_a_loop_that_goes_on_twice_is_taken_to_go_on() -> None:
    on = (False, False)
    assert (split := both(((0, on), (1, ())), 0, chain=True, ahead=True))
    assert split[0] == (0, (False,) * MAX_IN_CHAIN) and len(split) == MAX_IN_CHAIN
    assert both(split, 0, chain=True, ahead=True) is None
    ends = [(0, (*on, False, False)), (0, (*on, False, True)), (0, (*on, True)), (1, ())]
    assert [*fewer(split, 0, 4)] == ends


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


X = torch.empty(3, 5, device="meta")
GOOD, BAD = (
    [Run("", (), {"x": X, "fails": fails}, priced=False) for _ in range(3)]
    for fails in (False, True)
)


def with_wishes(wishes: tuple[tuple[Run, ...], ...]) -> Source:
    further = tuple(wish[0] for wish in wishes)
    return Source(
        Refuses().eval(), (X,), {}, "Refuses", "", torch.float32, further=further, wishes=wishes
    )


def counted(
    monkeypatch: pytest.MonkeyPatch, name: str, module: ModuleType = folded_trace
) -> list[Any]:
    """Return a list that gets an entry for each call of a function of a Python module."""
    calls: list[Any] = []
    called = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: (calls.append(a), called(*a, **k))[1])
    return calls


def test_alternatives_of_wishes_are_left_out_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wish has a second alternative, another has none left, and all others are traced."""
    traces = counted(monkeypatch, "_asked")
    source = with_wishes(((GOOD[0],), (BAD[0], GOOD[1]), (BAD[1],), (GOOD[2],)))
    assert [*map(id, trace_all(source)[0].further)] == [*map(id, GOOD)]
    assert len(traces) == 3  # two are refused, and each says what to leave out


def test_the_first_wish_is_not_left_out_if_it_is_needed() -> None:
    """Masks may need all blocks: these are tried before other wishes."""
    source = with_wishes(((BAD[0],), (GOOD[0],)))
    assert [*map(id, trace_all(source)[0].further)] == [id(GOOD[0])]


def test_all_steps_are_left_out_at_once_if_no_call_leaves_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them would be refused for the same reason, with all runs traced again."""
    steps = [run._replace(resumes=True) for run in GOOD]
    traces = counted(monkeypatch, "_asked")
    found = trace_all(with_wishes(((GOOD[0],), tuple(steps), tuple(steps[1:]), (GOOD[1],))))
    assert [*map(id, found[0].further)] == [*map(id, GOOD[:2])]
    assert len(traces) == 2


def test_a_step_that_can_do_without_a_cache_is_kept() -> None:
    """With embeddings it is a call of its own. Steps behind it may go on from what it leaves."""
    step, without = GOOD[0]._replace(resumes=True), GOOD[1]
    assert folded_trace._without_cache([(step, without), (step,)]) == [(without,), (step,)]
    assert folded_trace._without_cache([(step,), (step, step)]) == [(), ()]


class Towers(nn.Module):
    """Of two lists of equal blocks, one is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = (
            nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.ReLU()) for _ in range(9))
            for _ in range(2)
        )
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.used:
            x = block(x)
        return self.last(x)


def test_blocks_that_no_call_uses_are_left_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a trace with the end blocks apart, which cannot help."""
    traces = counted(monkeypatch, "_asked")
    source = Source(Towers().to("meta").eval(), (X,), {}, "Towers", "", torch.float32)
    found, unfolded, _ = trace_all(source)
    assert [stack.path for stack in unfolded.folding.stacks] == ["used"] and len(traces) == 2
    assert found.runs == source.runs


class Unlike(Towers):
    """Blocks that differ by the number of the block, with a flag and without."""

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        for n, block in enumerate(self.used):
            x = block(x) * n if n % 2 else block(x)
        return self.last(x)


def test_what_the_plain_call_shows_is_known_of_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stacks are not tried again, and all calls are traced with all blocks at once."""
    traces = counted(monkeypatch, "_asked")
    wishes = ((Run("", (X,), {"more": True}, priced=False),),)
    source = Source(
        Unlike().to("meta").eval(), (X,), {}, "", "", X.dtype,
        further=wishes[0], wishes=wishes,
    )  # fmt: skip
    found, unfolded, _ = trace_all(source)
    assert not unfolded.folding.stacks and found.further == source.further
    assert len(traces) == 4  # both stacks, the used one, with its ends apart, all blocks


class Counts(Towers):
    """Its code wants all blocks, whatever the call."""

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        return super().forward(x) * torch.stack([x] * (len(self.used) // 9)).sum(0)


def test_a_plain_call_that_fails_among_others_is_not_tried_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a block of each kind it fails in the first run: without the others it does as well."""
    traces = counted(monkeypatch, "_asked")
    wishes = ((Run("", (X,), {"more": True}, priced=False),),)
    source = Source(
        Counts().to("meta").eval(), (X,), {}, "", "", X.dtype,
        further=wishes[0], wishes=wishes,
    )  # fmt: skip
    found, unfolded, _ = trace_all(source)
    assert not unfolded.folding.stacks and found.further == source.further
    assert len(traces) == 2  # a block of each kind for both calls, and all blocks for both


class Asks(Towers):
    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        return super().forward(x)[: int(x.sum())]


def test_data_that_the_plain_call_needs_among_others_it_needs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If there are inputs with values, these come next."""
    traces = counted(monkeypatch, "_asked")
    wishes = ((Run("", (X,), {"more": True}, priced=False),),)
    source = Source(
        Asks().to("meta").eval(), (X,), {}, "", "", X.dtype,
        further=wishes[0], wishes=wishes,
    )  # fmt: skip
    with pytest.raises(ModelError, match="data-dependent"):
        trace_all(source, valued=True)
    assert len(traces) == 1


def test_stacks_that_some_runs_do_not_fold_are_left_out_of_more_runs() -> None:
    known = Known(unfoldable=[(RUNS[:1], frozenset({"a"})), (RUNS, frozenset({"b"}))])
    assert known.left_out(RUNS) == {"a", "b"}
    assert known.left_out(RUNS[:1]) == {"a"} and not known.left_out(RUNS[1:])


def test_what_depends_on_data_only_in_training_mode_is_known_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not the same in training mode: how it goes on is not looked at to find that."""
    records = counted(monkeypatch, "record", trace_runs)
    source = Source(Clamps().eval(), (X,), {}, "", "", X.dtype)
    graph, asked = folded_trace._asked(source)
    compared_runs.note_training(graph, source, asked)
    assert not graph.holds_in_training and len(records) == 2
