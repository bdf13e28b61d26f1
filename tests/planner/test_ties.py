"""What tensors come from, and the chains of ops that tie parameters together."""

from collections.abc import Callable
from itertools import pairwise

import networkx as nx
import pytest
from torch import nn

from shardwright.planner.graph.as_networkx import sources
from shardwright.planner.graph.axes import atoms_of
from shardwright.planner.graph.graph import Op
from shardwright.planner.graph.ties import Place, ties
from shardwright.planner.graph.views import moved
from tests.planner.mlps import Mlp
from tests.planner.modules import Attention, Fused, Grouped
from tests.planner.test_axes import Refined, refined

MODULES = [Mlp, Attention, Grouped, lambda: Fused("chunk"), lambda: Fused("slice", rotated=True)]


def atoms(it: Refined, place: Place) -> list[int]:
    name, dim = place
    return [a.id for a in atoms_of(it.axes.dims[name][dim])]


def stored(it: Refined, fqn: str) -> str:
    return next(u.stored for u in it.graph.uses if u.fqn == fqn)


def chain(it: Refined, one: Place, other: Place) -> list[str]:
    """Calls and modules from a parameter to another."""
    start, end = ((stored(it, fqn), dim) for fqn, dim in (one, other))
    found = ties(it.graph, it.axes, start, atoms(it, start))[end]
    return [f"{op.call.op} {op.module}".strip() for op in found]


# --- sources


def test_sources_are_chains() -> None:
    """Through boundaries and through what only moves values, back to where these were made."""
    graph = refined(Attention).graph
    before = sources(graph, moved)
    assert all(degree <= 1 for _, degree in before.out_degree())
    attention = next(op for op in graph.ops if op.call.op == "scaled_dot_product_attention")
    made = {op.outputs[0]: op for op in graph.ops}
    ends = [[*nx.dfs_preorder_nodes(before, name)][-1] for name in attention.inputs[:3]]
    assert [made[end].call.op for end in ends] == ["linear"] * 3


# --- chains


def test_what_ties_the_parameters_of_an_mlp() -> None:
    it = refined(Mlp)
    assert chain(it, ("up.weight", 0), ("down.weight", 1)) == ["linear up", "relu", "linear down"]
    assert chain(it, ("up.weight", 0), ("up.bias", 0)) == ["linear up"]
    assert chain(it, ("up.weight", 0), ("up.weight", 0)) == []
    start = stored(it, "up.weight"), 0
    assert (stored(it, "down.weight"), 0) not in ties(it.graph, it.axes, start, atoms(it, start))


def test_heads_are_tied_by_attention() -> None:
    it = refined(Attention)
    found = chain(it, ("q.weight", 0), ("o.weight", 1))
    assert (found[0], found[-1]) == ("linear q", "linear o")
    assert "scaled_dot_product_attention" in found


@pytest.mark.parametrize("make", MODULES)
def test_every_parameter_with_an_axis_is_reached(make: Callable[[], nn.Module]) -> None:
    """Op by op: each takes or makes a tensor that the one before takes or makes, and has it."""
    it = refined(make)
    same = nx.Graph([(u.stored, u.used) for u in it.graph.uses])
    same.add_edges_from((b.source, b.target) for b in it.graph.boundaries)
    same.add_nodes_from(it.graph.tensors)
    number = {n: i for i, found in enumerate(nx.connected_components(same)) for n in found}

    def touched(op: Op, atom: int) -> set[int]:
        names = {*op.inputs, *op.outputs}
        return {number[n] for n in names for i in dims(n) if atom in atoms(it, (n, i))}

    def dims(name: str) -> range:
        return range(len(it.graph.tensors[name].shape))

    places = [(u.stored, i) for u in it.graph.uses for i in dims(u.stored)]
    for start in places:
        for atom in atoms(it, start):
            found = ties(it.graph, it.axes, start, [atom])
            assert found.keys() == {p for p in places if atom in atoms(it, p)}
            for (name, _), ops in found.items():
                assert len({op.name for op in ops}) == len(ops)
                steps = [{number[start[0]]}, *(touched(op, atom) for op in ops), {number[name]}]
                assert all(a & b for a, b in pairwise(steps))
