"""The boundary of one module: what enters it, what leaves it, and what its code sees.

A module of a split model has one `ModuleBoundary`, as its attribute `_shardwright`, and one class
in front of its own (`module_class.py`). All in which modules differ is data in this object.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.dims import Range
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.planner.contract.styles import UNCHANGED
from shardwright.runtime.boundary.hook_views import check_hook_views
from shardwright.runtime.boundary.interface import AROUND, WITHIN, ModuleInterface
from shardwright.runtime.boundary.planned_call import ALWAYS, AlwaysPlanned, PlannedCall
from shardwright.runtime.boundary.transforms import check_no_transform
from shardwright.runtime.boundary.untraced_layers import is_untraced, with_full_parameters
from shardwright.runtime.calls.filled import check_filled, may_be_filled
from shardwright.runtime.calls.plain_arguments import check_flags
from shardwright.runtime.communication.generators import any_trains, draw_as_first
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.redistribution.draws import Part, drawing_for
from shardwright.runtime.redistribution.reshard import Reshard
from shardwright.runtime.slots import Keys, map_slots, replace, returned

if TYPE_CHECKING:
    from shardwright.runtime.boundary.model_boundary import ModelBoundary
    from shardwright.runtime.logits.split_logits import SplitHead
    from shardwright.runtime.rows.attention_rows import AttentionRows


OF_EACH_COPY = (
    *("model", "kept", "keeps", "inputs", "taken_before", "outputs", "attributes"),
    *("full_values", "draws"),
)
"""What copies of a module have each their own of."""


def _nothing() -> None:
    return None


@dataclass
class SlotChange:
    """A tensor on its way in or out, and what becomes of it."""

    slot: str
    name: str
    keys: Keys
    reshard: Callable[[Tensor], Tensor]
    index: int | None = None
    head: SplitHead | None = None
    before: str | None = None
    origin: dict[str, Any] | None = None
    made: Callable[[], Tensor | None] = _nothing
    """What was made of an attribute that the last call has set."""

    @property
    def original(self) -> Any:
        """The tensor as it was before the module around that `before` names changed it."""
        assert self.origin is not None
        assert self.before is not None
        return self.origin[self.before.lstrip(".")]

    @property
    def only_in_backward(self) -> bool:
        """Whether it leaves every tensor as it is where no gradient is wanted."""
        plain = self.head is None and self.before is None
        return plain and isinstance(self.reshard, Reshard) and not self.reshard.forward

    def find(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Where the argument is: its key, or None, and what it is the key of."""
        if self.name in kwargs:
            return self.name, kwargs
        given = self.index is not None and self.index < len(args)
        return (self.index if given else None), args


class ModuleBoundary:
    """What the plan says of one module, compiled for this rank.

    Args:
        mesh: Where this rank stands.
        module: The module, before its class is changed.
        path: Its name.
        spec: What the plan says of it; None where it says nothing.
    """

    def __init__(
        self, mesh: Mesh, module: nn.Module, path: str = "", spec: ModulePlan | None = None
    ) -> None:
        self.mesh, self.path, self.spec = mesh, path, spec
        self.original = self.named = type(module)
        self.bases: tuple[type, ...] = ()
        self.code: Callable[..., Any] = type(module).forward
        """What the module computes with: its own forward, maybe compiled anew."""
        self.leaf = next(module.children(), None) is None
        self.changes_tensors = spec is not None and spec.layer != UNCHANGED
        """Whether calls from outside make full tensors parts; else modules within do."""
        self.computes_with_full = False
        """Whether the module came in the place of another: it takes and gives full tensors."""
        self.model: ModelBoundary | None = None
        self.call: PlannedCall | AlwaysPlanned = ALWAYS
        self.was_planned = self.was_direct = False
        """Whether the model called the module so far, and whether somebody else did."""

        self.placements: dict[str, Placement] = {}
        """Of parameters and buffers."""
        self.uses: dict[str, Callable[[Tensor], Tensor]] = {}
        """Parameters that its code sees otherwise than they are stored."""
        self.full_values: dict[str, Any] = {}
        """Attributes with sizes of the unsplit model, in whose place code in a call finds local
        ones."""
        self.sizes: dict[str, Any] = {}
        """Of calls in its code, by name (`GivenSizes`)."""
        self.attention: AttentionRows | None = None
        """Around the code of a module that attends with its part of a sequence."""
        self.draws: list[Part] | None = None
        """For what its code draws random numbers of which a rank has a part."""
        self.draws_apart = False
        """Whether the module does, or is in one that does, and draws for itself."""
        self.inputs: list[SlotChange] = []
        self.outputs: list[SlotChange] = []
        self.attributes: list[SlotChange] = []
        """Of tensors that the module's code sets as its attributes."""
        self.group: Group | None = None
        """The ranks over which gradients may be summed beside other work."""
        self.linear = False
        """Whether the module's own forward is that of `nn.Linear`, as of most."""

        self.taken_before: list[SlotChange] = []
        """Inputs that the module takes as they were before a module around changed them."""
        self.keeps: set[str] = set()
        self.kept: dict[str, Any] = {}
        """Arguments as they came in, while the module runs: modules within may want them so."""
        self.has_originals = False
        """Whether this call of the module was given the arguments before a module around."""

        self.rows: tuple[Range, ...] = ()
        """Of a table of tokens that is split by rows: those that this rank has."""
        self.other_rows: tuple[Range, ...] = ()
        self.padding: int | None = None
        self.settle()

    def settle(self) -> None:
        """See what `inputs` and `outputs` come to, when all of them are there."""
        alone = not self.keeps
        self.apart = self.attention is not None or self.draws_apart or self.computes_with_full
        """Whether more than calling it is needed to run the module's code."""
        self.idle_in = alone and all(change.only_in_backward for change in self.inputs)
        self.idle_out = alone and all(change.only_in_backward for change in self.outputs)
        self.idle_out = self.idle_out and not self.attributes
        self.leaves = bool(self.outputs or self.keeps or self.attributes)
        self.sole_output: Reshard | None = None
        """Of an output that is one tensor, where that is all that becomes of it."""
        if alone and len(self.outputs) == 1 and not self.attributes:
            (sole,) = self.outputs
            if isinstance(sole.reshard, Reshard) and not sole.keys and sole.head is None:
                self.sole_output = sole.reshard

    def take_place_of(self, place: ModuleBoundary) -> None:
        """Let the module, which came in the place of another, take and give full tensors there."""
        self.computes_with_full, self.changes_tensors = True, False
        self.model, self.call, self.taken_before = place.model, place.call, place.taken_before
        vars(self)["interface"] = place.interface
        self.settle()

    @cached_property
    def interface(self) -> ModuleInterface | None:
        """The placements of what enters and leaves the module; None where all is full as it is."""
        if self.spec is None:
            return None
        return ModuleInterface(self.original.forward, self.leaf, self.spec, self.mesh, self.path)

    # --- a planned call

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as the module's code should see them.

        One is changed as it comes, or as it was before a module around changed it.
        """
        given = list(args)
        for change in self.inputs:
            at, where = change.find(given, kwargs)
            if at is None:
                continue
            if change.origin is not None and not self.has_originals:
                where[at] = change.original
            if change.name in self.keeps:
                self.kept[change.name] = where[at]
            where[at] = self.apply(change, where[at])
        return given, kwargs

    def originals(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments, those that a module around changed as before; `kwargs` in place."""
        given = list(args)
        for change in self.taken_before:
            at, where = change.find(given, kwargs)
            if at is not None:
                where[at] = change.original
        return tuple(given)

    def leave(self, output: Any, module: nn.Module) -> Any:
        """The output of `module` as the rest of the model should see it, and its attributes."""
        if self.keeps:
            self.kept.clear()
        if self.attributes:
            self.leave_attributes(module)
        for change in self.outputs:
            output = self.apply(change, output)
        return output

    def leave_attributes(self, module: nn.Module) -> None:
        """Change those that the code of `module` has set in this call."""
        for change in self.attributes:
            value = vars(module).get(change.slot)
            if isinstance(value, Tensor) and value is not change.made():
                vars(module)[change.slot] = value = self.apply(change, value)
                change.made = weakref.ref(value)

    def apply(self, change: SlotChange, value: Any) -> Any:
        """`value` with one slot changed; errors name the module and the slot."""
        reshard = change.reshard
        if change.head is not None and self.model is not None and self.model.loss.seal is not None:
            reshard = change.head.using(self.model.loss.seal)
        try:
            if not change.keys and isinstance(value, Tensor):
                return reshard(value)
            return replace(value, change.keys, reshard)
        except PlanError as error:
            where = f"'{change.slot}' of '{self.path}'" if change.slot else f"of '{self.path}'"
            raise PlanError(f"tensor {where}: {error}") from None

    def compute(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's own code gives, where it draws numbers or attends with its rows."""
        if self.computes_with_full:
            return self.compute_with_full(module, args, kwargs)
        always = self.model is not None and self.model.draws == "always"
        draws = self.draws if module.training or always else None
        # Compiled, it drops of each rank's part alike.
        apart = self.draws_apart and not torch.compiler.is_compiling()
        drawing = drawing_for(module, draws) if apart else nullcontext()
        with self.attention or nullcontext(), drawing:
            return self.code(module, *args, **kwargs)

    def compute_with_full(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a module that came in the place of another gives, on full tensors.

        Raises:
            UsageError: it is compiled, or the plan does not say how tensors are laid out here.
        """
        if torch.compiler.is_compiling():
            raise UsageError(
                f"'{self.path}' came into the model after it was split, and torch.compile cannot "
                "make of it what it is: change the model before it is split, or do not compile it"
            )
        interface = self.interface
        if interface is None:
            return self.run_with_full_tensors(module, args, kwargs)
        interface.check_alike()
        args, kwargs = interface.arguments_as(args, kwargs, AROUND, full=True)
        output = self.run_with_full_tensors(module, args, kwargs)
        return interface.output_as(output, AROUND, full=False)

    # --- calls from outside of a planned call

    def is_planned(self) -> bool:
        """Whether the module is called by the model, so that tensors are laid out as planned.

        Raises:
            UsageError: it runs again for a backward pass, and nobody can tell what that repeats.
        """
        call = self.call
        if call.active:
            self.was_planned = True
            return True
        if not call.in_hook and not call.full and self.runs_again():
            return True
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.was_direct = True
        return False

    def runs_again(self) -> bool:
        """Whether a backward pass runs a planned call again, to make what it did not keep.

        Raises:
            UsageError: there were direct calls, too, so that nobody can tell.
        """
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return False
        if self.was_planned and self.was_direct:
            raise UsageError(
                f"'{self.path}' runs again for a backward pass, and was called both by the model "
                "and by itself: use gradient checkpointing for one of the two"
            )
        return self.was_planned

    def call_directly(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the module gives of full tensors: full ones, value and gradient."""
        call, model = self.call, self.model
        assert isinstance(call, PlannedCall)
        assert model is not None
        check_no_transform()
        compiling = torch.compiler.is_compiling()
        always = model.draws == "always"
        draws = model.draws and not call.full and (always or any_trains(module.modules()))
        if draws and not compiling:
            draw_as_first(module, self.mesh)
        if not self.changes_tensors:
            return self.run_with_full_tensors(module, args, kwargs)
        if model.proven is not None:
            model.proven.check_modes(module.modules(), self.path)
        if model.own_rows is not None:
            raise UsageError(
                f"'{self.path}' is called by itself: it would take the rows of a rank for a "
                'sequence: apply the plan with cp="whole"'
            )
        if self.leaf and is_untraced(self.spec):
            layer = with_full_parameters(module, self.original, model)
            if layer is not None:
                return layer.forward(*args, **kwargs)
        interface = self.interface
        assert interface is not None
        given = dict(zip(interface.names(args), args, strict=True)) | kwargs
        defaults = interface.arguments.values()
        defaults = {p.name: p.default for p in defaults if p.default is not p.empty}
        check_flags(self.path, given, defaults, interface.spec.flags)
        filled = [] if compiling else may_be_filled(given, model.caches.names)
        opened = model.caches.open(map(given.get, model.caches.names))
        views, call.active, call.hook_views = call.hook_views, True, ()
        try:
            for name in self.keeps & given.keys():
                around = interface.change(AROUND, "in", full=False)
                self.kept[name] = map_slots(given[name], name, around)
            args, kwargs = interface.arguments_as(args, kwargs, WITHIN, full=False)
            output = self.compute(module, args, kwargs)
            self.leave_attributes(module)
            check_filled(filled, output)
            opened += model.caches.new_among(output, interface.arguments)
            check_hook_views(call)
            for slot, leaf in returned(output, interface.arguments):
                if not isinstance(leaf, Tensor):
                    raise interface.not_known("out", slot)
                interface.reshard(WITHIN, "out", True, slot, leaf)
            return interface.output_as(output, WITHIN, full=True)
        finally:
            call.active, call.hook_views = False, views
            model.caches.seal(opened)

    def run_with_full_tensors(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What code gives that takes full tensors, and whose modules are called directly."""
        call: Any = self.call
        outer, call.active, call.full = (call.active, call.full), False, True
        try:
            return self.code(module, *args, **kwargs)
        finally:
            call.active, call.full = outer

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleBoundary:
        twin = memo[id(self)] = copy.copy(self)
        for name in OF_EACH_COPY:
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        twin.call = ALWAYS if twin.model is None else twin.model.call
        return twin


def boundary_of(module: nn.Module) -> ModuleBoundary | None:
    """The boundary of a module; None where it is in no split model."""
    return vars(module).get("_shardwright")


def link_origins(model: nn.Module) -> None:
    """Show each redistribution of what a module around was given where that tensor is.

    Raises:
        PlanError: that module changes no such argument.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        state = boundary_of(module)
        for change in [] if state is None else state.taken_before:
            assert change.before is not None
            levels = len(change.before) - len(change.before.lstrip("."))
            slot = change.before.lstrip(".")
            around = ".".join(path.split(".")[:-levels])
            outer = boundary_of(modules[around])
            if outer is None or slot not in {c.slot for c in outer.inputs}:
                raise PlanError(f"'{path}' wants '{slot}' as '{around}' took it, which it does not")
            outer.keeps.add(slot)
            outer.settle()
            change.origin = outer.kept


def placements(model: nn.Module) -> dict[str, Placement]:
    """Placement of each parameter and buffer that a plan speaks of, by its name in `model`."""
    out = {}
    for path, module in model.named_modules(remove_duplicate=False):
        state = boundary_of(module)
        for name, placement in state.placements.items() if state else ():
            out[f"{path}.{name}" if path else name] = placement
    return out


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh that a plan was applied to `model` over, be it of one rank; None if none was."""
    if (mesh := model.__dict__.get("_shardwright_mesh")) is not None:
        return mesh
    return next((s.mesh for m in model.modules() if (s := boundary_of(m)) is not None), None)
