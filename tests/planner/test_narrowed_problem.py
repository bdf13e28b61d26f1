"""A problem with fewer splits, narrowed from another: the same as one that is built anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.planner.prepare import prepare
from shardwright.planner.search.restrictions import Restrictions, formulate
from tests import zoo


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v2", "mamba2"])
def test_narrowed_is_built_anew(name: str) -> None:
    model: Any = zoo.build(name, randomize=False)[1]
    task = prepare(model, 2)
    before = formulate(task, Restrictions())
    states = before.costs.states
    names = [n for n in before.network.variables if len(states.splits(n)) > 1][::3]
    gone = frozenset((states.graph.representative(n), states.splits(n)[-1]) for n in names)
    fewer = replace(Restrictions(), forbidden=gone)
    narrowed, anew = formulate(task, fewer, before).network, formulate(task, fewer).network
    assert gone
    assert anew.problem.domains != before.network.problem.domains
    assert narrowed.problem == anew.problem
    assert narrowed.movable == anew.movable
    assert narrowed.variables == anew.variables
