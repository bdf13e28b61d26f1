"""A placement of each kind, and what ranks really send between two placements."""

import torch

from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.transitions import Kind
from shardwright.runtime.communication.audit import Call, count_collectives
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.reshard import Reshard
from tests.ranks import run_ranks

EXAMPLES = {
    Kind.REPLICATE: "4, 6",
    Kind.PARTIAL: "4, 6 | partial tp",
    Kind.GRAD_PARTIAL: "4, 6 | grad-partial tp",
    Kind.SHARD: "4, 4@tp + 2@tp",
    Kind.SEGMENTS: "4, 4@tp + 2",
    Kind.SEGMENTS_GRAD_PARTIAL: "4, 4@tp + 2 | grad-partial tp",
}
"""All of one tensor."""


def sent(
    source: str, target: str, ranks: int, sub_axes: dict[str, list[int]] | None = None
) -> tuple[list[Call], list[Call]]:
    """The collectives of the first rank when a tensor is redistributed, forward and backward."""
    a, b = parse(source), parse(target)

    def work(mesh: Mesh) -> tuple[list[Call], list[Call]]:
        finer = mesh.with_sub_axes(sub_axes or {})
        sizes = [n or 1 for n in a.local_shape(finer.coords)]
        x = torch.ones(sizes, requires_grad=True)
        with count_collectives() as forward:
            out = Reshard(a, b, finer)(x)
        with count_collectives() as backward:
            out.sum().backward()
        return forward, backward

    return run_ranks(ranks, work)[0]
