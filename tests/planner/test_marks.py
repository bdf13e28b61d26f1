"""Marks: passes treat all kinds alike; problem and checker read one table of demands."""

from dataclasses import replace
from typing import Any

import pytest

from shardwright.errors import SolverError
from shardwright.planner.graph.marks import KINDS, Demand, Marks
from shardwright.planner.problem.builder import MEETS
from shardwright.planner.strategies.state import REPLICATED, State
from shardwright.planner.verify.check import check, meets
from tests.planner.toys import toy

SPLIT, PARTIAL = State(frozenset({(0, 1, 1)})), State(partial=1)


def every(names: str) -> Marks:
    """An entry of each kind, of tensors with these names."""
    out = Marks()
    for name, kind in KINDS.items():
        several = kind.demand is Demand.ONE_STATE or name in ("beside_lost", "cut_by")
        setattr(out, name, {kind.naming(("", 7), tuple(names if several else names[0]))})
    return out


def test_renamed_marks_follow_the_tensor_and_those_of_a_place_go_with_it() -> None:
    found = every("ab").renamed({"a": "x"})
    assert found == replace(every("xb"), in_regions=set())
    assert every("ab").renamed({"c": "x"}) == every("ab")


def test_kept_marks_are_those_of_tensors_that_are_kept() -> None:
    assert every("ab").kept("ab") == every("ab")
    alone = every("ab").kept("a")
    pairs: dict[str, set[Any]] = dict.fromkeys(
        (
            *("changed_in_regions", "resumed", "handed_on", "modes", "in_place"),
            *("beside_lost", "cut_by"),
        ),
        set(),
    )
    assert alone == replace(every("ab"), written=set(), **pairs)
    assert every("ab").kept("b") == Marks()


def test_copies_have_every_mark() -> None:
    """Tensors of one entry are copied together."""
    found = every("ab").copied(lambda names: [tuple(n + at for n in names) for at in "12"])
    assert found.changed_in_regions == {("a1", "b1"), ("a2", "b2")}
    assert found.fixed == {("a1", 7), ("a2", 7)}
    assert found.read_values == {"a1", "a2"}


def test_what_holds_of_one_tensor_holds_of_those_like_it() -> None:
    found = every("ab").spread(lambda name: {name, "c"})
    assert (found.carried, found.counted) == ({"a", "c"}, {("a", 7), ("c", 7)})
    assert found.changed_in_regions == {("a", "b")}


def test_names_are_all_that_have_a_mark() -> None:
    assert every("ab").names() == {"a", "b"}
    assert Marks(counted={("y", 0)}, changed_in_regions={("x", "z")}).names() == {"x", "y", "z"}


def test_what_demands_something_says_why() -> None:
    assert {k for k, kind in KINDS.items() if kind.reason} == {k for k, *_ in every("ab").demands()}


@pytest.mark.parametrize("demand", MEETS)
def test_problem_and_checker_agree_on_each_demand(demand: Demand) -> None:
    for state in (REPLICATED, SPLIT, PARTIAL, State(grad_partial=1), State(SPLIT.shards, 0, 2)):
        assert MEETS[demand](state) == meets(demand, [state])


@pytest.mark.parametrize(
    ("kind", "state"),
    [("joined", SPLIT), ("read_values", SPLIT), ("read_values", PARTIAL), ("logits", PARTIAL)],
)
def test_checker_refuses_what_a_mark_forbids(kind: str, state: State) -> None:
    it = toy("column, row")
    name = next(iter(it.graph.inputs))
    marks = Marks()
    setattr(marks, kind, {name})
    graph = replace(it.graph, marks=marks, ops=[], boundaries=[], inputs=[])
    found = dict.fromkeys(it.graph.tensors, REPLICATED)
    check(graph, it.states, found)
    with pytest.raises(SolverError, match=KINDS[kind].reason):
        check(graph, it.states, {**found, name: state})


def test_checker_wants_tensors_that_are_written_in_one_state() -> None:
    it = toy("column, row")
    use = it.graph.uses[0]
    marks = Marks(written={(use.stored, use.used, use.used)})
    found = {**dict.fromkeys(it.graph.tensors, REPLICATED), use.used: SPLIT}
    with pytest.raises(SolverError, match="what is written into a parameter has its placement"):
        check(replace(it.graph, marks=marks, ops=[], boundaries=[]), it.states, found)
