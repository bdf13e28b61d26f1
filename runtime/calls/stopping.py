"""Makes ranks that generate stop at the same token, whatever a rank's own clock says.

A rank that stops alone leaves the others waiting in their next forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.planner.contract.mesh import CP, TP
from shardwright.runtime.communication.collectives import all_gather
from shardwright.runtime.communication.mesh import Group, Mesh

OF_TRANSFORMERS = "transformers.generation.stopping_criteria"
OF_TIME = "MaxTimeCriteria"


def stopping_as_first(criteria: Any, mesh: Mesh) -> Any:
    """Let the first rank of a copy decide where `criteria` are of time, or of the caller's own.

    Those of transformers that look at tokens say the same on all ranks by themselves.

    Args:
        criteria: A `StoppingCriteriaList`.
        mesh: The mesh; ranks of its `cp` and `tp` share a model.
    """
    groups = [mesh[name] for name in (CP, TP) if name in mesh.groups and mesh[name].size > 1]
    if not groups:
        return criteria
    return type(criteria)(
        each
        if type(each).__module__ == OF_TRANSFORMERS and type(each).__name__ != OF_TIME
        else AsFirst(each, groups)
        for each in criteria
    )


class AsFirst:
    """A criterion that says on each rank what it says on the first.

    Args:
        own: The criterion.
        groups: The groups of ranks that share a model.
    """

    def __init__(self, own: Callable[..., Any], groups: list[Group]) -> None:
        self.own, self.groups = own, groups

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each sequence is done. All ranks must call it."""
        done = torch.as_tensor(self.own(input_ids, scores, **kwargs), device=input_ids.device)
        said = done.to(torch.uint8)
        for group in self.groups:
            said = all_gather(said, group)[0]
        return said.bool()
