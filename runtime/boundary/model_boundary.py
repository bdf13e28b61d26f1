"""`ModelBoundary`: the state that all modules of one split model share."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.planner.contract.mesh import EP
from shardwright.planner.contract.names import old_names, renamed
from shardwright.planner.contract.plan_file import TracedCall
from shardwright.runtime.boundary.attribute_access import seen_attribute
from shardwright.runtime.boundary.hook_views import check_hook_views
from shardwright.runtime.boundary.planned_call import PlannedCall
from shardwright.runtime.calls.caches import Caches
from shardwright.runtime.calls.filled import check_filled, may_be_filled
from shardwright.runtime.calls.proven import ProvenCalls
from shardwright.runtime.communication.generators import any_trains, draw_as_first
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.communication.replicas import Copies
from shardwright.runtime.logits.split_logits import LossSeal
from shardwright.runtime.redistribution.lengths import Lengths
from shardwright.runtime.slots import names_of, positions
from shardwright.runtime.tensors.layouts import axes_of
from shardwright.runtime.tensors.parameters import cut_if_full

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
        traceable_loss: Whether torch.compile can trace the root's loss code with split logits.
        loss_seal: Seals the split logits of a forward with labels, while that runs.
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
        self.call, self.caches = PlannedCall(), Caches()
        self.modules = list(root.modules())
        self.proven: ProvenCalls | None = None
        self.draws = ""
        code = getattr(inspect.unwrap(type(root).forward), "__code__", None)
        self.traceable_loss = code is None or "CrossEntropyLoss" not in code.co_names
        self.loss_seal: LossSeal | None = None
        self.positions, _ = positions(type(root).forward)
        self.old_names = old_names(self.positions)
        self.own_rows: Group | None = None
        self.copies: Copies | None = None
        self.changes: ChangeDetection | None = None
        self.owners: dict[int, tuple[nn.Module, str]] = {}
        self.axes = 0
        """Number of mesh dims of parameters. FSDP2 stores parameters over more dims."""
        self.patched: Callable[[Any], Any] = _as_it_is
        """Puts the patches of torch around a function that code of the model needs, if any."""

    def prove(self, calls: Sequence[TracedCall]) -> None:
        """Note the calls that the plan is proven for."""
        forwards = {c.module: self.root.get_submodule(c.module).forward for c in calls}
        takes = {path: inspect.signature(forward).parameters for path, forward in forwards.items()}
        calls = [call.as_called(takes[call.module]) for call in calls]
        self.caches = Caches({name for call in calls for name in call.state})
        self.proven = ProvenCalls(self.root, calls)
        draws = {call.draws for call in calls} - {""}
        self.draws = "always" if "always" in draws else "".join(draws)

    def distribute(self, changes: ChangeDetection) -> None:
        """Note that parameters are DTensors from now on."""
        self.changes, self.axes = changes, len(axes_of(self.mesh))

    # --- planned calls

    def draw_as_first(self, module: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Let all ranks draw the same numbers in a call of `module`, if one of `modules` draws."""
        draws = self.draws == "always" or (self.draws and any_trains(modules))
        if draws and not torch.compiler.is_compiling():
            draw_as_first(module, self.mesh)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call of the root by name; "*0" is the first of *args."""
        given = dict(zip(names_of(args, self.positions), args, strict=True), **kwargs)
        for name in self.old_names:
            if name in kwargs:
                return renamed(given, self.old_names)
        return given

    def open(self, given: Mapping[str, Any], compiling: bool) -> tuple[list[Any], list[Any]]:
        """Open the caches among the arguments of a planned call, for `check_end`.

        Whoever calls this sets `call.active` and `NOW.attribute` in its own frame, and restores
        them: dynamo may compile each frame by itself.

        Returns:
            The caches, which are to be sealed when the call ends, and the arguments into which
            code may put tensors.
        """
        opened = self.caches.open(map(given.get, self.caches.names))
        return opened, [] if compiling else may_be_filled(given, self.caches.names)

    def check_end(
        self, output: Any, opened: list[Any], filled: list[Any], takes: Container[str]
    ) -> None:
        """Check what a planned call leaves in hooks and in its arguments; open its new caches.

        Args:
            output: What it returns.
            opened: What `open` returned; new caches come to it.
            filled: What `open` returned.
            takes: The names of the call's arguments. Without proven calls, only caches of known
                names are sealed.
        """
        if self.call.hook_views:
            check_hook_views(self.call)
        opened += self.caches.new_among(output, takes)
        if filled and self.proven is not None:
            check_filled(filled, output)

    # --- parameters

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

    cut = staticmethod(cut_if_full)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelBoundary:
        if id(self.root) not in memo:
            return self  # the copy of a submodule shares the model's state
        twin = memo[id(self)] = copy.copy(self)
        twin.root, twin.call = memo[id(self.root)], PlannedCall()
        twin.owners = {}
        twin.loss_seal = None
        twin.modules = copy.deepcopy(self.modules, memo)
        twin.changes = copy.deepcopy(self.changes, memo)
        return twin


def _as_it_is(function: Any) -> Any:
    return function


def _has(module: nn.Module, name: str, stored: Tensor) -> bool:
    return stored is module._parameters.get(name) or stored is module._buffers.get(name)
