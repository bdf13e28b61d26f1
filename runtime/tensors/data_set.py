"""The memory of a DTensor: torch sees to that of its wrapper, which nothing computes with.

So weights put in by `parameter.data = value` would be left out without a word, and `share_memory_`
ends the process. What the wrapper is around is seen to.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.runtime.tensors.dtensors import laid_out_as

_OWN: Any = torch.Tensor.data


@cache
def watch_data() -> None:
    """From now on, see to what is set as the data of a DTensor, and to what is shared of it."""
    DTensor.data = property(_OWN.__get__, _set_data)  # type: ignore[assignment, method-assign]
    DTensor.share_memory_ = _share_memory  # type: ignore[method-assign]
    DTensor.is_shared = _is_shared  # type: ignore[method-assign]


def _share_memory(self: Any) -> Any:
    self._local_tensor.share_memory_()
    return self


def _is_shared(self: Any) -> bool:
    return self._local_tensor.is_shared()


def _set_data(self: Any, value: Any) -> None:
    """Let `self` be around what the DTensor `value` is around, laid out as `self` is.

    Raises:
        UsageError: it is a plain tensor, or of another shape.
    """
    if not isinstance(value, DTensor):
        if isinstance(value, Tensor):
            raise UsageError(
                ".data of a parameter of a split model is set to a plain tensor, and it is a "
                "DTensor: put a whole weight in its place (module.weight = nn.Parameter(value)), "
                "or change it in place (load_state_dict)"
            )
        _OWN.__set__(self, value)  # raises
        return
    if value.shape != self.shape:
        raise UsageError(
            f".data of a parameter of a split model, {list(self.shape)}, is set to one of another "
            f"shape, {list(value.shape)}: change the model before it is planned and split"
        )
    value = laid_out_as(value, self)
    _OWN.__set__(self, value)
    self._local_tensor, self._spec = value._local_tensor, value._spec
