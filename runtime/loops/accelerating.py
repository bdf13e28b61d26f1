"""`SplitAccelerator`: accelerate for a split model. Ranks that share it count as one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.contract.mesh import CP, TP
from shardwright.runtime.boundary.module_boundary import mesh_of
from shardwright.runtime.boundary.root import takes_own_rows
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.ranks.agreement import gather
from shardwright.runtime.ranks.rendezvous import world
from shardwright.runtime.state.gather import full_tensors


class SplitAccelerator(Accelerator):
    """accelerate's `Accelerator` for a split model.

    `num_processes` and `process_index` count copies of the model. The ranks of one copy get the
    same batches, and gathering and reducing count each copy once. The model is not wrapped: it
    already averages its gradients over its copies, or is in FSDP2.

    Args:
        model: The split model, or a module that contains it.
        **options: Options of `Accelerator`, except `parallelism_config`.

    Raises:
        UsageError: no plan was applied to `model`.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        _mesh(model)  # refuse before accelerate sets its global state
        super().__init__(**options)
        self.count_copies(model)

    def count_copies(self, model: nn.Module) -> None:
        """From now on, count the ranks that share `model` as one process; all ranks call this.

        Raises:
            UsageError: no plan was applied to `model`, or its ranks pass their own rows.
        """
        mesh = _mesh(model)
        mine = dist.get_rank()
        for group in mesh.process_groups(mesh.groups.keys() & {TP, CP}):
            mine = min(gather("counting copies", mine, group, int))
        self._split_model = model
        self._firsts = sorted(set(gather("counting copies", mine, world(), int)))
        """The first rank of each copy."""
        self._copy = self._firsts.index(mine)

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """The number of copies of the model."""
        return len(self._firsts) if hasattr(self, "_firsts") else super().num_processes

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """The index of the copy that this rank belongs to."""
        return self._copy if hasattr(self, "_copy") else super().process_index

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare `model` with autocast and compilation as requested, without any wrapper."""
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def gather(self, tensor: Any) -> Any:
        """Gather the values of all copies in order, from one rank of each."""
        return recursively_apply(self._once_a_copy, super().gather(tensor))

    def _once_a_copy(self, gathered: Tensor) -> Tensor:
        ranks = super().num_processes
        return gathered.unflatten(0, (ranks, -1))[self._firsts].flatten(0, 1)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without samples that were added to fill the last batch.

        Raises:
            UsageError: there are objects other than tensors.
        """
        if use_gather_object or not _all_tensors(input_data):
            raise UsageError("gather_for_metrics of a split model: gather tensors, not objects")
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Compute the sum or mean over all copies."""
        out = super().reduce(tensor, reduction, scale)
        ranks = super().num_processes // self.num_processes
        return recursively_apply(lambda x: x / ranks, out) if reduction == "sum" else out

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Parameters and buffers, full on every rank; all ranks call this."""
        inner: Any = self.unwrap_model(model) if unwrap else model
        return full_tensors(inner, inner.state_dict())


def _mesh(model: nn.Module) -> Mesh:
    """The mesh of a split `model`.

    Raises:
        UsageError: as in `SplitAccelerator.count_copies`.
    """
    mesh = mesh_of(model)
    if mesh is None:
        raise UsageError(f"this {type(model).__name__} is not split: use accelerate's own")
    if takes_own_rows(model):
        raise UsageError('ranks of a copy get the same batches: apply the plan with cp="whole"')
    return mesh


def _all_tensors(value: Any) -> bool:
    try:
        recursively_apply(lambda x: x, value, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(f"{name} of a split model would take shards for full tensors: {instead}")

    return refuse


DCP = "use torch.distributed.checkpoint (examples/train_3d.py)"
REFUSED = {
    "save_state": DCP,
    "load_state": DCP,
    "save_model": "write it with shardwright.save(model, directory)",
    "split_between_processes": "give all ranks of a copy the same inputs",
}
"""Methods that do not know which copy a rank belongs to, and what to do instead."""

for _name, _instead in REFUSED.items():
    setattr(SplitAccelerator, _name, _refused(_name, _instead))
