"""Attention with sharded queries: a rank's rows attend to all keys and values, with their own mask.

`scaled_dot_product_attention` is called in the middle of a module's code, so a mode around that
code redistributes its arguments (see `planner/trace/record/attention_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import shard_range
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.redistribution.lengths import Length
from shardwright.runtime.scopes import PerThread

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Arguments of `scaled_dot_product_attention` that may be given by position."""

Reshards = Mapping[str, Callable[[Tensor], Tensor]]
"""Argument of attention -> its redistribution."""


_in_attention: Any = PerThread(now=False)
"""Whether a mode has redistributed the arguments. Modes of enclosing modules see them too."""


class AttentionRows(TorchFunctionMode):
    """Inside, attention is computed for this rank's rows.

    Args:
        reshards: The redistribution of each argument that is in the plan.
        rows: The group and the sequence length, if queries are sharded.
        path: The name of the module, for error messages.
    """

    def __init__(self, reshards: Reshards, rows: tuple[Group, Length] | None, path: str) -> None:
        super().__init__()
        self.reshards, self.rows, self.path = reshards, rows, path

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call attention on redistributed arguments; any other function as it is."""
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or _in_attention.now:
            return func(*args, **kwargs)
        given = self.of_rows(dict(zip(ARGUMENTS, args, strict=False)) | kwargs)
        _in_attention.now = True
        try:
            return func(**given)
        finally:
            _in_attention.now = False

    def of_rows(self, given: dict[str, Any]) -> dict[str, Any]:
        """Redistribute the arguments of attention, and make the causal mask of this rank's rows.

        Raises:
            PlanError: there is a mask, and the plan has none; there are fewer than two tokens per
                rank; or causal attention has different numbers of queries and keys.
        """
        out = dict(given)
        for name in ("query", "key", "value", "attn_mask"):
            x = given.get(name)
            if x is None or (name == "attn_mask" and self.rows is None):
                continue
            if name not in self.reshards:
                raise PlanError(f"attention in '{self.path}' has a mask, in no call of the plan")
            out[name] = self._reshard(name, x)
        query, key = out["query"], out["key"]
        if self.rows is not None:
            group, length = self.rows
            whole = length.find(query.shape[-2], group)
            if whole < 2 * group.size:
                # Code takes a single query for a decode step, which is never masked.
                raise PlanError(
                    f"{whole} tokens over cp={group.size}: each rank needs two at least; pad the "
                    "batch, or plan with fewer ranks"
                )
            if given.get("is_causal"):
                if key.shape[-2] != whole:
                    raise PlanError(
                        f"causal attention in '{self.path}' has {whole} queries and "
                        f"{key.shape[-2]} keys: with cp there must be as many"
                    )
                start, stop = shard_range(whole, group.rank, group.size)
                seen = torch.ones(stop - start, whole, dtype=torch.bool, device=key.device)
                out |= {"attn_mask": seen.tril(start), "is_causal": False}
        return out

    def _reshard(self, name: str, x: Tensor) -> Tensor:
        try:
            return self.reshards[name](x)
        except PlanError as error:
            raise PlanError(f"'{name}' of attention in '{self.path}': {error}") from None

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionRows:
        return self
