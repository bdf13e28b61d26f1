"""`ModelBoundary`: the state that all modules of one split model share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.planner.contract.mesh import EP
from shardwright.runtime.boundary.attribute_access import seen_attribute
from shardwright.runtime.boundary.planned_call import PlannedCall
from shardwright.runtime.calls.caches import Caches
from shardwright.runtime.calls.proven import ProvenCalls
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.communication.replicas import Copies
from shardwright.runtime.logits.split_logits import LossScope
from shardwright.runtime.redistribution.lengths import Lengths
from shardwright.runtime.tensors.layouts import axes_of
from shardwright.runtime.tensors.parameters import check_own, cut

if TYPE_CHECKING:
    from shardwright.runtime.boundary.changes import ChangeDetection


class ModelBoundary:
    """The state that all modules of one split model share.

    Attributes:
        root: The model.
        mesh: The mesh, with the coordinates of this rank.
        call: Whether a planned call runs.
        modules: All modules of the model, as walking over it is slow.
        proven: The calls that the plan is proven for.
        draws: When random numbers are drawn: "", "training" or "always".
        positions: The index of each argument of the model that may be given by position.
        old_names: Old names for a cache -> the argument that the model has for it.
        own_rows: The ranks of `cp`, if each of them is given only its own rows.
        copies: The copies of the model over which it averages its gradients, if it does.
        owners: Id of a parameter or buffer -> its module and its name there, for `attribute`.
        changes: Changes to the model since it was split; None before its parameters are DTensors.
    """

    def __init__(self, root: nn.Module, mesh: Mesh, lengths: Lengths) -> None:
        self.root, self.mesh, self.lengths = root, mesh, lengths
        self.call, self.caches, self.loss = PlannedCall(), Caches(), LossScope()
        self.modules: list[nn.Module] = []
        self.proven: ProvenCalls | None = None
        self.draws = ""
        self.positions: dict[str, int] = {}
        self.old_names: dict[str, str] = {}
        self.own_rows: Group | None = None
        self.copies: Copies | None = None
        self.changes: ChangeDetection | None = None
        self.owners: dict[int, tuple[nn.Module, str]] = {}
        self.axes = 0
        """Number of mesh dims of parameters. FSDP2 stores parameters over more dims."""
        self.patched: Callable[[Any], Any] | None = None
        """Puts the patches of torch around a call that code of the model needs, if any."""

    def distribute(self, changes: ChangeDetection) -> None:
        """Note that parameters are DTensors from now on."""
        self.changes, self.axes = changes, len(axes_of(self.mesh))

    def has(self, parameter: Tensor | None) -> bool:
        """Whether `parameter` is a DTensor over the plan's mesh, so not managed by FSDP2."""
        return isinstance(parameter, DTensor) and len(parameter.placements) == self.axes

    def attribute(self, stored: Any) -> Callable[[], Any] | None:
        """Return a function that reads the attribute that has the DTensor `stored`, in this call.

        None if no attribute has it, or FSDP2 manages it.
        """
        if not (self.call.active and self.has(stored)):
            return None
        module, name = self.owners.get(id(stored), (self.root, ""))
        if not _has(module, name, stored):
            self.owners = {
                id(p): (module, name)
                for module in self.modules[::-1]  # a tied one has the name of the first
                for name, p in (*module._parameters.items(), *module._buffers.items())
            }
            module, name = self.owners.get(id(stored), (self.root, ""))
        found: Any = seen_attribute(name)
        return partial(found.fget, module) if _has(module, name, stored) else None

    def check_averaged(self, parameter: DTensor) -> None:
        """Check that FSDP2, if it manages `parameter`, averages its gradient over all copies.

        Raises:
            UsageError: it does not, and the model no longer would.
        """
        further = len(parameter.placements) - self.axes
        if self.copies is None or further <= 0:
            return
        groups, over = self.copies.groups, prod(parameter.device_mesh.shape[:further])
        if EP in groups or over != prod(group.size for group in groups.values()):
            raise UsageError(
                f"FSDP2 over {over} ranks around a model that averages gradients over "
                f"{', '.join(sorted(groups))}: leave out fully_shard, or plan without these dims"
            )

    def cut(self, value: Tensor, stored: DTensor, name: str) -> Tensor:
        """Shard a full `value` as `stored` is; a DTensor is returned as it is.

        Raises:
            UsageError: `value` is a DTensor that another rank saved.
        """
        if not isinstance(value, DTensor):
            return cut(value, stored)
        check_own(value, stored.device_mesh, name)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelBoundary:
        if id(self.root) not in memo:
            return self  # the copy of a submodule shares the model's state
        twin = memo[id(self)] = copy.copy(self)
        twin.root, twin.call = memo[id(self.root)], PlannedCall()
        twin.owners = {}
        twin.loss = LossScope(self.loss.traceable)
        twin.modules = copy.deepcopy(self.modules, memo)
        twin.changes = copy.deepcopy(self.changes, memo)
        return twin


def _has(module: nn.Module, name: str, stored: Tensor) -> bool:
    return stored is module._parameters.get(name) or stored is module._buffers.get(name)
