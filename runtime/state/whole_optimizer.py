"""Full optimizer state of a split model, to save it or to load it with any other placements."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardwright.runtime.tensors.parameters import cut


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with full tensors on every rank, as for the unsplit model.

    All ranks that share the parameters must call this.
    """
    return tree_map_only(DTensor, lambda x: x.full_tensor(), optimizer.state_dict())


def load_full_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the state from `full_optimizer_state` or from an unsplit optimizer.

    Args:
        optimizer: The optimizer of a model, which may have other placements than that of `state`,
            or be unsplit.
        state: The state dict with full tensors; each rank keeps its shards of those that have the
            shape of their parameter. Others (row sums of Adafactor) are full on each rank.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in state["param_groups"] for i in group["params"]]
    state = {**state, "state": {i: dict(kept) for i, kept in state["state"].items()}}
    for i, parameter in zip(indices, parameters, strict=False):  # load_state_dict checks the number
        for name, value in state["state"].get(i, {}).items():
            like = isinstance(value, Tensor) and value.shape == parameter.shape
            if like and value.dim() > 0 and isinstance(parameter, DTensor):
                state["state"][i][name] = cut(value, parameter, value.dtype)
    optimizer.load_state_dict(state)
