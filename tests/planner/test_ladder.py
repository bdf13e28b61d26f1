"""What is tried after what: the steps that a search takes, and what it says of each."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import FrozenInstanceError, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import InfeasibleError, SolverError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.dry_run import dry_run
from shardwright.planner.dry_run.local_run import Mismatch
from shardwright.planner.prepare import prepare
from shardwright.planner.problem import optimize
from shardwright.planner.problem.conventions import PROJECTIONS, TABLES
from shardwright.planner.search import ladder
from shardwright.planner.search.ladder import FREE_TABLES, LADDER, SOLVING, climb, search
from shardwright.planner.search.recomputed_blocks import fewest
from shardwright.planner.search.restrictions import Restrictions
from shardwright.planner.search.search_state import Attempt, attempted, start
from shardwright.planner.search.solution import SolverOptions
from shardwright.planner.search.task import Task
from shardwright.planner.solvers.problem import Result
from tests import zoo
from tests.planner import mlps
from tests.planner import modules as m
from tests.planner.equal import RUN, features
from tests.planner.test_conventions import TABLE, TINY, config, slim
from tests.planner.test_gathered import WIDTH, Between
from tests.planner.test_search import Within
from tests.planning import ASKED

SOLVE, AGAIN, LESS, WHOLE, GATHER, SPLIT, LEAVE = (step.what for step in SOLVING)
FREE = FREE_TABLES.what
FEWER, ALONG, TRY, FORBID = (step.what for step in LADDER[len(SOLVING) :])


def task_of(model: Any, tp: int | None = 2, **options: Any) -> Task:
    if isinstance(model, torch.nn.Module) and not hasattr(model, "config"):
        batch, seq = RUN
        options |= {"args": features(m.WIDTH)(3, 19), "batch": batch, "seq": seq}
    return prepare(model, tp, **options)


@cache
def llama() -> Task:
    """Of a tiny llama; searches do not change it."""
    return task_of(config("LlamaForCausalLM", TINY))


def story(task: Task, asked: SolverOptions | None = None) -> tuple[list[Attempt], Plan | None]:
    """What was tried, and the plan if there is one."""
    told: list[Attempt] = []
    try:
        tell = lambda what, now: told.append(attempted(what, now))  # noqa: E731
        return told, search(task, asked or ASKED, tell).plan
    except InfeasibleError:
        return told, None


def test_the_first_solution_may_do() -> None:
    told, plan = story(llama())
    assert plan is not None and [t.what for t in told] == [SOLVE, TRY]
    assert told[0].outcome.startswith("proven optimal by cpsat (objective")
    assert told[0].figures["bytes"] > 0 and told[0].figures["time_ns"] == plan.predicted.time_ns
    assert told[0].restrictions == Restrictions(conventions=frozenset({TABLES}))
    assert (told[1].outcome, told[1].figures) == ("holds", {"failed before": 0})


def test_telling_changes_nothing() -> None:
    task = llama()
    assert story(task)[1] == search(task, ASKED).plan == climb(start(task, ASKED)).plan


def test_attention_is_split_in_a_second_attempt() -> None:
    told, _ = story(task_of(slim("Olmo2ForCausalLM")))
    assert [t.what for t in told] == [SOLVE, SPLIT, TRY]
    assert told[1].restrictions.conventions == {TABLES, PROJECTIONS}


def test_weights_are_gathered_in_a_second_attempt() -> None:
    task = prepare(Between().double(), 2, args=features(WIDTH)(3, 19))
    told, _ = story(task)
    assert [t.what for t in told] == [SOLVE, GATHER, TRY]
    assert not told[0].restrictions.gathered and len(told[1].restrictions.gathered) == 2


def test_over_memory_all_else_is_tried_before_the_sequence() -> None:
    told, plan = story(task_of(zoo.build("llama")[1]), replace(ASKED, memory=10))
    assert plan is None
    assert [t.what for t in told] == [SOLVE, FREE, ALONG, SOLVE, FREE]
    assert told[0].restrictions.conventions == {TABLES} and not told[1].restrictions.conventions
    assert told[1].figures["budget"] == 10 < told[1].figures["least"]
    assert "no plan fits 10 bytes a rank" in told[1].outcome
    assert told[2].outcome == "starts over"


def test_over_memory_in_training_blocks_are_computed_again() -> None:
    training: dict[str, Any] = {"phase": "train", "batch": 4, "seq": 64}
    model = zoo.build("llama")[1]
    asked = replace(ASKED, objective="time", memory=10)
    task = task_of(model, **training)
    told, plan = story(task, asked)
    again = [SOLVE, AGAIN, SOLVE]
    assert plan is None and [t.what for t in told] == [*again, ALONG, *again]
    told, _ = story(task_of(model, recompute=False, **training), asked)
    assert [t.what for t in told] == [SOLVE, ALONG, SOLVE]
    least = told[0].figures["least"]
    told, plan = story(task, replace(asked, memory=least - 1))
    assert plan is not None and plan.workload.recomputed
    assert [t.what for t in told] == [SOLVE, AGAIN, SOLVE, FEWER, TRY]


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=40))
def test_the_fewest_blocks_by_trying_all(over: list[int]) -> None:
    over.sort(reverse=True)
    most = len(over) - 1
    first = next((n for n in range(1, most) if over[n] <= 0), most)
    assert fewest(over.__getitem__, most) == first


def test_sequences_are_split_where_they_can_be() -> None:
    """The root's own code computes with the length of what blocks hand on: so that is whole."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(mlps.Mlp() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length = 0
            for block in self.blocks:
                x = block(x)
                length += x.shape[1]
            return x / length

    told, plan = story(task_of(Counting(), None, mesh={"cp": 2, "tp": 1}))
    assert plan is not None and [told[0].what, *(t.what for t in told[-2:])] == [SOLVE, WHOLE, TRY]


def test_what_pins_forbid_is_not_tried_otherwise() -> None:
    """With table and head pinned, no convention is left to give up."""
    model = config("LlamaForCausalLM", TINY)
    pins = {TABLE: "shard:1", "lm_head.weight": "shard:1"}
    told, plan = story(task_of(model, pins=pins))
    assert plan is None and [t.what for t in told] == [SOLVE]
    assert "lm_head.weight=shard:1 cannot hold" in told[0].outcome


def test_what_fails_its_dry_run_is_forbidden_until_a_plan_holds(monkeypatch: Any) -> None:
    def fails_if_split(*run: Any) -> Mismatch | None:
        return Mismatch("inner.up", "no") if run[2].module("inner.up") else None

    monkeypatch.setattr(dry_run, "run_local", fails_if_split)
    told, plan = story(task_of(Within(mlps.Mlp())))
    rounds = sum(t.what == FORBID for t in told)
    others = [t.what for t in told if t.what != GATHER]  # which may serve where splits do not
    assert others == [SOLVE, TRY, FORBID] * rounds + [SOLVE, TRY]
    assert told[1].outcome == "fails in 'inner.up': no" and told[1].figures["splits"] > 0
    sizes = [len(t.restrictions.forbidden) for t in told if t.what == SOLVE]
    assert sizes == sorted(set(sizes)) and sizes[0] == 0
    assert plan is not None and told[-1].figures == {"failed before": rounds}


def test_past_the_time_limit_nothing_is_tried_again(monkeypatch: Any) -> None:
    """The first plan may still be solved: a slow trace leaves the solver a tenth of the limit."""
    late = replace(ASKED, seconds=20, since=time.monotonic() - 30)
    assert late.left < 0 and late.for_solver == 2
    task = task_of(Within(mlps.Mlp()))
    assert story(task, late)[1] is not None
    monkeypatch.setattr(dry_run, "run_local", lambda *_: Mismatch("inner.up", "no"))
    with pytest.raises(SolverError, match="time limit of 20 seconds: 1 failed on meta, .* no;"):
        _ = search(task_of(Within(mlps.Mlp())), late).plan


@pytest.mark.parametrize(
    "make, what, note",
    [
        (lambda: task_of(slim("Olmo2ForCausalLM")), SPLIT, "shard attention"),
        (
            lambda: prepare(Between().double(), 2, args=features(WIDTH)(3, 19)),
            GATHER,
            "shard weights that are all-gathered at each use",
        ),
    ],
)
def test_a_step_without_time_keeps_the_solution_at_hand(
    make: Any, what: str, note: str, monkeypatch: Any
) -> None:
    """The first attempt has all the time, and later ones a billionth of a second."""
    solve, first = ladder.solve, list[Any]()

    def late(task: Task, formulation: Any, asked: SolverOptions) -> Any:
        if not first:
            first.append(solve(task, formulation, asked))
            return first[0]
        monkeypatch.setattr(optimize, "solve_residual", lambda *_: Result("unknown", None, 0))
        return solve(task, formulation, replace(asked, seconds=1e-9))

    monkeypatch.setattr(ladder, "solve", late)
    told, plan = story(make())
    assert [t.what for t in told] == [SOLVE, what, TRY] and plan is not None
    assert plan.solver.note == f"there was no time left to {note}: raise --time-limit"
    assert plan.solver.objective == first[0].report.objective


def test_without_time_all_blocks_are_computed_again(monkeypatch: Any) -> None:
    """What as few as fit would be is found after a plan with all of them is at hand."""
    training: dict[str, Any] = {"phase": "train", "batch": 4, "seq": 64}
    model: Any = zoo.build("llama")[1]
    solve = ladder.solve
    least = [
        climb(start(task_of(model, recompute=again, **training), ASKED), SOLVING).solution
        for again in (False, True)
    ]
    room = sum(each.unfolded.memory.total for each in least) // 2

    def late(task: Task, formulation: Any, asked: SolverOptions) -> Any:
        if asked.objective == "memory":
            monkeypatch.setattr(optimize, "solve_residual", lambda *_: Result("unknown", None, 0))
            asked = replace(asked, seconds=1e-9)
        return solve(task, formulation, asked)

    monkeypatch.setattr(ladder, "solve", late)
    asked = replace(ASKED, objective="time", memory=room)
    told, plan = story(task_of(model, **training), asked)
    assert plan is not None and FEWER in [t.what for t in told]
    assert plan.workload.recomputed == {"model.layers": len(model.model.layers)}
    note = "there was no time left to compute fewer blocks again: raise --time-limit"
    assert note in plan.solver.note


class Endless(torch.nn.Linear):
    """Its code goes on, whatever is raised."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        while torch.is_tensor(input):
            with suppress(Exception):
                input = input + self.weight.sum()
        return input


def test_a_trace_ends_with_the_time_limit() -> None:
    with pytest.raises(SolverError, match="the model was still being traced; raise --time-limit"):
        prepare(Endless(8, 8), 2, args=features(8)(3, 19), until=time.monotonic() + 1)
    assert task_of(Within(mlps.Mlp())).graph.ops


def test_a_task_is_never_changed() -> None:
    """So that another search of it comes to the same, whatever was found out in one."""
    task = prepare(Between().double(), 2, args=features(WIDTH)(3, 19))
    first, second = story(task), story(task)
    assert first == second
    with pytest.raises(FrozenInstanceError):
        task.pins = ()  # type: ignore[misc]
