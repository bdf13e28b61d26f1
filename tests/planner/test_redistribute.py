"""The steps that are priced, told by masks, are those that the runtime does, told by placements."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.contract.mesh import coords_of
from shardwright.planner.contract.redistribution_steps import steps as done
from shardwright.planner.contract.transitions import Kind
from shardwright.planner.emit.layouts import Layouts
from shardwright.planner.graph.axes import refine
from shardwright.planner.strategies.mask_steps import steps
from shardwright.planner.strategies.state import kind_on
from shardwright.planner.strategies.states import States
from tests.planning import trace


class Heads(nn.Module):
    """Two heads, each of four axes: on 4 ranks the mesh dim is taken as two sub-axes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).unflatten(-1, (2, 4, 3)).tanh().flatten(-3))


class Segments(nn.Module):
    """A fused weight of which one part can be sharded; the other is needed whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).split([16, 8], -1)
        return self.down(a) + b.softmax(-1)


@pytest.mark.parametrize("module, ranks", [(Heads, 2), (Heads, 4), (Segments, 2)])
def test_what_is_priced_is_what_is_done(module: type[nn.Module], ranks: int) -> None:
    with torch.device("meta"):
        graph = trace(module(), (torch.zeros(3, 19, 8),), {})
    states = States(graph, axes := refine(graph), ranks)
    layouts, sub = Layouts(graph, states, {}), states.sub
    assert len(sub.sizes) == (2 if ranks == 4 else 1) and axes.dims
    coords = coords_of({"tp": ranks}, sub.table(), 0)
    ends = [(b.source, b.target) for b in graph.boundaries]
    ends += [(u.stored, u.used) for u in graph.uses]
    seen: set[tuple[Kind, Kind]] = set()
    for one, other in ends:
        for a in states.domain(one):
            for b in states.domain(other):
                covered = states.covered(one, a.shards), states.covered(one, b.shards)
                found = steps(a, b, covered, sub.bits)
                if found is None:
                    continue
                before, after = (layouts.placement(one, s, stored=True) for s in (a, b))
                told = [(s.mesh, s.transition) for s in done(before, after, coords)]
                assert [(sub.text(s.mask), s.transition) for s in found] == told
                for bit in sub.bits:
                    seen.add((kind_on(a, bit, covered[0]), kind_on(b, bit, covered[1])))
    assert (Kind.PARTIAL, Kind.SHARD) in seen and (Kind.REPLICATE, Kind.GRAD_PARTIAL) in seen
    assert ((Kind.SEGMENTS, Kind.SEGMENTS_GRAD_PARTIAL) in seen) == (module is Segments)
