"""`VocabLookup`: the lookup of an embedding that is sharded by rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import local_ranges
from shardwright.runtime.boundary.module_boundary import ModuleBoundary


class VocabLookup(nn.Embedding):
    """Looks up ids whose rows this rank holds, and returns zeros for others: the output is Partial.

    It is a base after a model's own embedding class, whose `super().forward(ids)` calls it.
    """

    _shardwright: ModuleBoundary

    def set_up(self) -> None:
        """Note which rows this rank holds.

        Raises:
            PlanError: the plan does not place the weight, or an option forbids sharding rows.
        """
        boundary = self._shardwright
        path, placement = boundary.path, boundary.placements.get("weight")
        if placement is None:
            raise PlanError(f"'{path}' is to be split by rows, but its weight is not placed")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(self, option):
                raise PlanError(f"'{path}' has {option} set: its rows cannot be split")
        boundary.rows = tuple(local_ranges(placement.dims[0], boundary.mesh.coords))
        ends = [0, *(end for row in boundary.rows for end in row), placement.shape[0] or 0]
        boundary.other_rows = tuple(
            (a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b
        )
        held = 0
        for start, stop in boundary.rows:
            if self.padding_idx is not None and start <= self.padding_idx < stop:
                boundary.padding = self.padding_idx - start + held
            held += stop - start

    def forward(self, input: Tensor) -> Tensor:
        """Full ids [...] -> [..., embedding_dim], one term of a sum over the ranks."""
        boundary = self._shardwright
        if not boundary.rows:
            return self.weight.new_zeros((*input.shape, self.weight.shape[1]))
        # Ids outside the vocabulary are in the rows of no rank: they raise the usual error.
        local, held = input, 0
        for start, stop in boundary.rows:
            if start > held:
                moved = input - (start - held)
                local = torch.where(input >= start, moved, local) if held else moved
            held += stop - start
        foreign = None
        for start, stop in boundary.other_rows:
            inside = (input >= start) & (input < stop)
            foreign = inside if foreign is None else foreign | inside
        if foreign is None:
            return F.embedding(local, self.weight, boundary.padding)
        out = F.embedding(local.masked_fill(foreign, 0), self.weight, boundary.padding)
        return out.masked_fill(foreign.unsqueeze(-1), 0)
