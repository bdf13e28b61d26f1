"""What an optimizer of a split model keeps, whole: to save it for any other layout, or to go on."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardwright.errors import UsageError
from shardwright.runtime.tensors.parameters import cut


def full_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors, on every rank, as the unsplit model has it.

    All ranks that share the parameters must call it.
    """
    return tree_map_only(DTensor, lambda x: x.full_tensor(), optimizer.state_dict())


def load_full_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Go on from what `full_optimizer_state` gave, or an unsplit optimizer had.

    Args:
        optimizer: Of a model that may be split otherwise than that of `state`, or not at all.
        state: Whole tensors; each rank keeps its part of them.

    Raises:
        UsageError: there is a tensor that is neither a number nor of the shape of its parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in state["param_groups"] for i in group["params"]]
    state = {**state, "state": {i: dict(kept) for i, kept in state["state"].items()}}
    for i, parameter in zip(indices, parameters, strict=False):  # load_state_dict counts
        for name, value in state["state"].get(i, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and isinstance(parameter, DTensor):
                state["state"][i][name] = _part(value, parameter, name)
    optimizer.load_state_dict(state)


def _part(whole: Tensor, like: DTensor, name: str) -> DTensor:
    if whole.shape != like.shape:
        raise UsageError(
            f"the optimizer keeps a '{name}' of shape {list(whole.shape)} for a parameter of shape "
            f"{list(like.shape)}: of such, nobody knows how it lies over the ranks"
        )
    return cut(whole, like, whole.dtype)
