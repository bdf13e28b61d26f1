"""The integers of a tensor's axes and sub-axes say the same as its state."""

import pytest

from shardwright.planner.problem.axis_variables import GRADIENT, VALUE, axis_variables
from shardwright.planner.strategies.state import State
from tests.planner.toys import TOYS, toy


@pytest.mark.parametrize("name", TOYS)
def test_states_and_integers_are_one_to_one(name: str) -> None:
    it = toy(name)
    for tensor, parts in axis_variables(it.graph, it.states).items():
        domain = it.states.domain(tensor)
        keys = [tuple(part.values[i] for part in parts) for i in range(len(domain))]
        assert len(set(keys)) == len(domain)


@pytest.mark.parametrize("name", TOYS)
def test_integers_are_masks_and_what_is_partial(name: str) -> None:
    """Each split axis and each pending sum of a state stands in an integer, and nothing else."""
    it = toy(name)
    for tensor, parts in axis_variables(it.graph, it.states).items():
        for i, state in enumerate(it.states.domain(tensor)):
            axes = [p.values[i] for p in parts if " partial on " not in p.name]
            kinds = [p.values[i] for p in parts if " partial on " in p.name]
            assert sorted(filter(None, axes)) == sorted(m for _, _, m in state.shards)
            assert kinds.count(VALUE) == state.partial.bit_count()
            assert kinds.count(GRADIENT) == state.grad_partial.bit_count()
            assert not state.partial & state.grad_partial  # no rule gives both


@pytest.mark.parametrize("name", TOYS)
def test_names_are_unique_and_tell_tensor_and_axis(name: str) -> None:
    it = toy(name)
    parts = axis_variables(it.graph, it.states)
    names = [part.name for found in parts.values() for part in found]
    assert len(set(names)) == len(names)
    stored = {u.stored: u.fqn for u in it.graph.uses}
    for tensor, fqn in stored.items():
        for part in parts.get(tensor, ()):
            assert part.name.startswith(f"{fqn}[")


def test_names_of_a_column_and_a_row() -> None:
    it = toy("column, row")
    parts = axis_variables(it.graph, it.states)
    stored = {u.fqn: [p.name for p in parts[u.stored]] for u in it.graph.uses}
    assert stored["inner.up.weight"] == ["inner.up.weight[0]"]
    assert stored["inner.down.weight"][-1] == "inner.down.weight[1: inner.up.weight[0]]"
    used = next(u for u in it.graph.uses if u.fqn == "inner.up.bias")
    assert [p.name for p in parts[used.used]][-1] == "inner.up.bias used partial on tp"
    assert State(grad_partial=1) in it.states.domain(used.used)
