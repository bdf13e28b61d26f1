"""Chunks of tensors in an order of their own, as `torch.distributed.checkpoint` asks for them."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOptionalSubscript=false

from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwright.planner.contract.notation import parse
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.reshard import take_local
from shardwright.runtime.tensors.checkpoint_chunks import chunks
from shardwright.runtime.tensors.layouts import PlannedShard, placements_of
from shardwright.runtime.tensors.split_tensor import SplitTensor
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    ("layout", "sub_axes"),
    [
        ("4@tp + 4@tp, 8", []),  # fused
        ("4@tp + 3 + 2@tp, 8", []),  # ranks have rows in common, and cut them at other places
        ("3@tp*2, 4", []),  # uneven
        ("5, 4@tp + 4@tp, 3", []),  # fused, and not along the dim that FSDP2 cuts
        ("2@tp.0*2@tp.1*2 + 2@tp.0*3, 4", [2, 2]),  # heads of keys shared by pairs of ranks
    ],
)
def test_chunks_of_all_ranks_are_the_whole_once(layout: str, sub_axes: list[int]) -> None:
    """In FSDP2: what several ranks name is the same box, and no other overlaps it."""
    placement = parse(layout)
    w = torch.arange(prod(placement.shape)).double().view(*placement.shape)

    def work(mesh: Mesh) -> list[tuple[Any, torch.Tensor]]:
        ranks = mesh.with_sub_axes({"tp": sub_axes} if sub_axes else {})
        spec = DTensorSpec(ranks.parameter_mesh(), placements_of(placement, ranks))
        assert any(isinstance(p, PlannedShard) for p in spec.placements)
        module = nn.Module()
        local = take_local(w, placement, ranks.coords)
        module.weight = nn.Parameter(SplitTensor.of(local, spec, w.shape))
        fully_shard(module, mesh=mesh.device_mesh["dp"])
        held: Any = SplitTensor.adopt(module.weight.detach())
        found = [(p, p.of(held.to_local())) for p in chunks(held)]
        assert sum(part.numel() for _, part in found) == held.to_local().numel()
        listed = held.__create_chunk_list__()
        assert [(c.offsets, c.sizes) for c in listed] == [(p.offsets, p.sizes) for p, _ in found]
        return found

    tp = prod(sub_axes) if sub_axes else 2
    boxes = {}
    for found in run_ranks(2 * tp, work, {"dp": 2, "tp": tp}):
        for piece, part in found:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            torch.testing.assert_close(part, w[box])
            assert boxes.setdefault(piece.offsets, piece.sizes) == piece.sizes
    assert sum(map(prod, boxes.values())) == w.numel()
