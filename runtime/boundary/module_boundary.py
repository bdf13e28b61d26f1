"""`ModuleBoundary`: what enters a module, what leaves it, and what its code sees.

Each module of a split model has one, as its attribute `_shardwright`, and one class in front of its
own (`module_class.py`). All differences between modules are data in this object.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.dims import Range
from shardwright.planner.contract.names import old_names, renamed
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.planner.contract.styles import UNCHANGED
from shardwright.runtime import slots
from shardwright.runtime.boundary.interface import AROUND, WITHIN, ModuleInterface
from shardwright.runtime.boundary.planned_call import ALWAYS, PlannedCall
from shardwright.runtime.boundary.transforms import check_no_transform
from shardwright.runtime.calls.plain_arguments import check_flags
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.logits.split_logits import SplitHead, SplitLogits
from shardwright.runtime.redistribution.draws import Part, drawing_for
from shardwright.runtime.redistribution.reshard import Reshard
from shardwright.runtime.slots import Keys, Rebuilt
from shardwright.runtime.tensors.by_name import NOW

if TYPE_CHECKING:
    from shardwright.runtime.boundary.model_boundary import ModelBoundary
    from shardwright.runtime.redistribution.dispatch import Dispatcher
    from shardwright.runtime.rows.attention_rows import AttentionRows


OF_EACH_COPY = (
    *("model", "kept_inputs", "kept_names", "inputs", "inputs_from_outer", "outputs", "attributes"),
    *("full_values", "draws"),
)
"""Attributes of a boundary that are copied with a module. Copies share the others."""


@dataclass
class SlotChange:
    """A tensor that enters or leaves a module, and its redistribution."""

    slot: str
    name: str
    keys: Keys
    reshard: Callable[[Tensor], Tensor]
    index: int | None = None
    head: SplitHead | None = None
    outer_slot: str | None = None
    outer_inputs: dict[str, Any] | None = None
    made: Callable[[], Tensor | None] = lambda: None
    """The last result for an attribute (`leave_attributes`), or None."""

    @property
    def outer_value(self) -> Any:
        """The tensor before the enclosing module that `outer_slot` names changed it."""
        assert self.outer_inputs is not None
        assert self.outer_slot is not None
        return self.outer_inputs[self.outer_slot.lstrip(".")]

    @property
    def only_in_backward(self) -> bool:
        """Whether it changes no tensor when no gradient is needed."""
        plain = self.head is None and self.outer_slot is None
        return plain and isinstance(self.reshard, Reshard) and not self.reshard.forward

    def find(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The key of the argument, or None if it is not given, and `args` or `kwargs`."""
        return slots.find_argument(self.name, self.index, args, kwargs)


@dataclass(eq=False, repr=False)
class ModuleBoundary:
    """The plan's entry for one module, prepared for this rank."""

    mesh: Mesh
    """The mesh, with the coordinates of this rank."""
    module: InitVar[nn.Module]
    """The module, before its class is changed."""
    path: str = ""
    """The name of the module."""
    spec: ModulePlan | None = None
    """The plan's entry for the module; None if there is none."""

    unsplit_class: type = field(init=False)
    shown_class: type = field(init=False)
    """The class whose name the module's new class has."""
    bases: tuple[type, ...] = ()
    """The bases of the module's new class, once it has one."""
    code: Callable[..., Any] = field(init=False)
    """The module's own forward, perhaps recompiled with local sizes."""
    leaf: bool = field(init=False)
    """Whether it has no modules inside."""
    changes_tensors: bool = field(init=False)
    """Whether a direct call shards full tensors here. If not, the modules inside do it."""
    computes_with_full: bool = False
    """Whether the module replaces another: it takes and returns full tensors."""
    model: ModelBoundary | None = None
    call: PlannedCall = ALWAYS
    was_planned: bool = False
    """Whether the model has called the module so far."""
    was_direct: bool = False
    """Whether other code has called the module so far."""

    placements: dict[str, Placement] = field(default_factory=dict)
    """Placements of parameters and buffers."""
    uses: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Redistributions of parameters that the code sees in another placement than is stored."""
    assigned: tuple[str, ...] = ()
    """Parameters whose `data`, flags, gradient or hooks the model's code has to do with."""
    full_values: dict[str, Any] = field(default_factory=dict)
    """Sizes of the unsplit model, by attribute. In a planned call code sees local sizes."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Local sizes of calls in the module's code (`GivenSizes`), by name of the call."""
    dispatcher: Dispatcher | None = None
    """Sends the tokens of a mixture to the ranks that hold their experts."""
    attention: AttentionRows | None = None
    """Mode around the code of a module whose attention sees a shard of the sequence."""
    draws: list[Part] | None = None
    """What the module's code draws random numbers for, where each rank holds a shard."""
    draws_apart: bool = False
    """Whether it draws random numbers for full tensors: it or a module around has `draws`."""
    inputs: list[SlotChange] = field(default_factory=list)
    outputs: list[SlotChange] = field(default_factory=list)
    attributes: list[SlotChange] = field(default_factory=list)
    """Redistributions of tensors that the module's code sets as its attributes."""
    group: Group | None = None
    """The ranks over which a gradient may be summed while other work runs."""
    linear: bool = False
    """Whether the module's own forward is that of `nn.Linear`, as in most modules."""

    inputs_from_outer: list[SlotChange] = field(default_factory=list)
    """Inputs that the module takes as they were before an enclosing module changed them."""
    containers: list[Rebuilt] = field(default_factory=list)
    """Containers among the arguments that `enter` has rebuilt, until the code runs."""
    kept_names: set[str] = field(default_factory=set)
    """Arguments that modules inside take as they were before redistribution."""
    kept_inputs: dict[str, Any] = field(default_factory=dict)
    """These arguments, while the module runs."""
    has_outer_inputs: bool = False
    """Whether this call was already given the original arguments."""

    rows: tuple[Range, ...] = ()
    """The rows of this rank, if the module is a token table that is sharded by rows."""
    other_rows: tuple[Range, ...] = ()
    """The rows of such a table on other ranks."""
    padding: int | None = None
    """The row of such a table that gets no gradient, among those of this rank."""

    def __post_init__(self, module: nn.Module) -> None:
        self.unsplit_class = self.shown_class = type(module)
        self.code = type(module).forward
        self.leaf = next(module.children(), None) is None
        self.changes_tensors = self.spec is not None and self.spec.layer != UNCHANGED
        self.settle()

    def settle(self) -> None:
        """Derive flags for a fast call, once `inputs` and `outputs` are complete."""
        self.checked = self.spec is not None and self.spec.checked
        """Whether its flags are compared in calls that the model makes, too."""
        self.nested = any(change.keys for change in self.inputs)
        """Whether tensors in containers are redistributed."""
        special = self.attention, self.draws_apart, self.computes_with_full, self.dispatcher
        self.apart = any(special) or self.checked or self.nested
        """Whether the module's code needs `compute`, rather than a plain call."""
        alone = not self.kept_names
        self.idle_in = alone and all(change.only_in_backward for change in self.inputs)
        """Whether no argument changes if no gradient is needed."""
        unchanged = alone and not self.attributes
        self.idle_out = unchanged and all(change.only_in_backward for change in self.outputs)
        """Whether no output changes if no gradient is needed."""
        self.leaves = bool(self.outputs or self.kept_names or self.attributes)
        """Whether the module's code needs `leave` behind it."""
        self.sole_output: Reshard | None = None
        """The redistribution of the output, if that is one tensor and nothing else is changed."""
        if unchanged and len(self.outputs) == 1:
            (sole,) = self.outputs
            if isinstance(sole.reshard, Reshard) and not sole.keys and sole.head is None:
                self.sole_output = sole.reshard

    def take_place_of(self, place: ModuleBoundary) -> None:
        """Let this module, which replaces the one of `place`, take and return full tensors."""
        self.computes_with_full, self.changes_tensors = True, False
        self.model, self.call = place.model, place.call
        self.inputs_from_outer = place.inputs_from_outer
        vars(self)["interface"] = place.interface
        self.settle()

    @cached_property
    def interface(self) -> ModuleInterface | None:
        """The placements of the inputs and outputs; None if the plan has no entry."""
        if self.spec is None:
            return None
        forward = self.unsplit_class.forward
        return ModuleInterface(forward, self.leaf, self.spec, self.mesh, self.path)

    # --- a planned call

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Redistribute the arguments as the module's code should see them.

        Inputs in `inputs_from_outer` start from the tensor before an enclosing module changed it.
        """
        given, outer = list(args), {**kwargs} if self.nested else kwargs
        for change in self.inputs:
            at, where = change.find(given, kwargs)
            if at is None:
                continue
            if change.outer_inputs is not None and not self.has_outer_inputs:
                where[at] = change.outer_value
            if change.name in self.kept_names:
                self.kept_inputs[change.name] = where[at]
            where[at] = self.apply(change, where[at])
        if self.nested:
            self.containers = slots.rebuilt((*args, *outer.values()), (*given, *kwargs.values()))
        return given, kwargs

    def with_outer_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Undo changes of enclosing modules to arguments; `kwargs` is changed in place."""
        given = list(args)
        for change in self.inputs_from_outer:
            at, where = change.find(given, kwargs)
            if at is not None:
                where[at] = change.outer_value
        return tuple(given)

    def leave(self, output: Any, module: nn.Module) -> Any:
        """Redistribute the output, and the attributes that `module` has set."""
        if self.kept_names:
            self.kept_inputs.clear()
        if self.attributes:
            self.leave_attributes(module)
        for change in self.outputs:
            output = self.apply(change, output)
        return output

    def leave_attributes(self, module: nn.Module) -> None:
        """Redistribute the attributes that the code of `module` has set in this call."""
        for change in self.attributes:
            value = vars(module).get(change.slot)
            if isinstance(value, Tensor) and value is not change.made():
                vars(module)[change.slot] = value = self.apply(change, value)
                change.made = weakref.ref(value)

    def apply(self, change: SlotChange, value: Any) -> Any:
        """Return `value` with one slot redistributed. Errors name the module and the slot."""
        reshard, seal = change.reshard, None if self.model is None else self.model.loss_seal
        if change.head is not None and seal is not None:
            reshard = partial(SplitLogits, head=change.head, seal=seal)
        try:
            if not change.keys and isinstance(value, Tensor):
                return reshard(value)
            return slots.replace(value, change.keys, reshard)
        except PlanError as error:
            where = f"'{change.slot}' of '{self.path}'" if change.slot else f"of '{self.path}'"
            raise PlanError(f"tensor {where}: {error}") from None

    def compute(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's own code, with what its random draws and its attention need."""
        if self.computes_with_full:
            return self.compute_with_full(module, args, kwargs)
        if self.checked:
            self.check_flags(args, kwargs, by_itself=False)
        always = self.model is not None and self.model.draws == "always"
        draws = self.draws if module.training or always else None
        if draws is not None and not module.training:  # plans of earlier versions do not say which
            draws = [part for part in draws if part.always] or draws
        # Compiled code uses the same dropout mask on the shard of each rank.
        apart = self.draws_apart and not torch.compiler.is_compiling()
        drawing = drawing_for(module, draws) if apart else nullcontext()
        containers, self.containers = self.containers, []
        with self.attention or nullcontext(), drawing:
            if self.dispatcher is not None:
                return self.dispatcher.run(self.code, module, args, kwargs)
            output = self.code(module, *args, **kwargs)
        if containers:
            slots.give_back(containers)
        return output

    def compute_with_full(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module that replaces another on full tensors, and shard its output again.

        Raises:
            UsageError: it is compiled, or the plan does not know the placements here.
        """
        if torch.compiler.is_compiling():
            raise UsageError(
                f"'{self.path}' replaced a module after the model was split, which torch.compile "
                "does not support: change the model before it is split, or do not compile it"
            )
        interface = self.interface
        if interface is None:
            return self.run_with_full_tensors(module, args, kwargs)
        interface.check_alike()
        args, kwargs = interface.arguments_as(args, kwargs, AROUND, full=True)
        output = self.run_with_full_tensors(module, args, kwargs)
        return interface.output_as(output, AROUND, full=False)

    # --- direct calls, from outside of a planned call

    def note_call(self) -> bool:
        """Note a call, and return whether the model makes it, with tensors in planned placements.

        Raises:
            UsageError: a backward pass recomputes it, and it is unknown which call that repeats.
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
        """Whether a backward pass runs a planned call again (gradient checkpointing).

        Raises:
            UsageError: there were planned and direct calls, and it is unknown which is repeated.
        """
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            return False
        if self.was_planned and self.was_direct:
            raise UsageError(
                f"gradient checkpointing runs '{self.path}' again, and it was called both by the "
                "model and directly, so the two cannot be told apart: checkpoint only one of them"
            )
        return self.was_planned

    def call_directly(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module by itself, with full tensors: values and gradients are full."""
        model = self.model
        assert model is not None
        check_no_transform()
        if not self.call.full:
            model.draw_as_first(module, module.modules())
        if not self.changes_tensors:
            return self.run_with_full_tensors(module, args, kwargs)
        if model.proven is not None:
            model.proven.check_modes(module.modules())
        if model.own_rows is not None:
            raise UsageError(
                f"'{self.path}' is called directly, and would take the rows of a rank for a "
                'sequence: apply the plan with cp="whole"'
            )
        interface = self.interface
        assert interface is not None
        given, compiling = self.check_flags(args, kwargs, True), torch.compiler.is_compiling()
        opened, filled = model.open(given, compiling)
        call, outer = self.call, (self.call.hook_views, NOW.attribute)
        call.active, call.hook_views = True, ()
        if not compiling:
            NOW.attribute = model.attribute
        try:
            for name in self.kept_names & given.keys():
                around = interface.change(AROUND, "in", full=False)
                self.kept_inputs[name] = slots.map_slots(given[name], name, around)
            args, kwargs = interface.arguments_as(args, kwargs, WITHIN, full=False)
            output = self.compute(module, args, kwargs)
            self.leave_attributes(module)
            model.check_end(output, opened, filled, interface.arguments)
            for slot, leaf in slots.returned(output, interface.arguments):
                if not isinstance(leaf, Tensor):
                    raise interface.not_known("out", slot)
                interface.reshard(WITHIN, "out", True, slot, leaf)
            return interface.output_as(output, WITHIN, full=True)
        finally:
            call.active, (call.hook_views, NOW.attribute) = False, outer
            model.caches.seal(opened)

    def check_flags(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], by_itself: bool
    ) -> dict[str, Any]:
        """Check the flags of a call, and return its arguments by name.

        Raises:
            UsageError: a flag has another value than in the plan.
        """
        interface = self.interface
        assert interface is not None
        given = dict(zip(interface.names(args), args, strict=True)) | kwargs
        if by_itself:
            given = renamed(given, old_names(interface.arguments))
        defaults = interface.arguments.values()
        defaults = {p.name: p.default for p in defaults if p.default is not p.empty}
        check_flags(self.path, given, defaults, interface.spec.flags, by_itself)
        return given

    def repeat(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run `forward` of a module in the backward pass again, as in a planned call."""
        assert self.model is not None
        self.call.active, NOW.attribute = True, self.model.attribute
        try:
            return self.model.patched(forward)(module, *args, **kwargs)
        finally:
            self.call.active, NOW.attribute = False, None

    def run_with_full_tensors(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the module's code on full tensors; it calls the modules inside directly."""
        call = self.call
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
    """The boundary of a module; None if it is in no split model."""
    return vars(module).get("_shardwright")


def boundaries(model: nn.Module) -> Iterator[tuple[str, ModuleBoundary]]:
    """The boundaries of the modules of `model`, by name."""
    for path, module in model.named_modules():
        if (boundary := boundary_of(module)) is not None:
            yield path, boundary


def link_origins(model: nn.Module) -> None:
    """Connect inputs in `inputs_from_outer` to the enclosing module that keeps the original tensor.

    Raises:
        PlanError: the enclosing module has no such input.
    """
    found = dict(boundaries(model))
    for path, boundary in found.items():
        for change in boundary.inputs_from_outer:
            assert change.outer_slot is not None
            slot = change.outer_slot.lstrip(".")
            levels = len(change.outer_slot) - len(slot)
            around = ".".join(path.split(".")[:-levels])
            outer = found.get(around)
            if outer is None or slot not in {c.slot for c in outer.inputs}:
                raise PlanError(
                    f"the plan gives '{path}' the input '{slot}' of '{around}' from before its "
                    "redistribution, and that input is not redistributed: plan again"
                )
            outer.kept_names.add(slot)
            outer.settle()
            change.outer_inputs = outer.kept_inputs


def placements(model: nn.Module) -> dict[str, Placement]:
    """The placement of each parameter and buffer in the plan, by its name in `model`."""
    out = {}
    for path, module in model.named_modules(remove_duplicate=False):
        boundary = boundary_of(module)
        for name, placement in boundary.placements.items() if boundary else ():
            out[f"{path}.{name}" if path else name] = placement
    return out


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh over which a plan was applied to `model`, even of one rank; None if none was."""
    if (mesh := model.__dict__.get("_shardwright_mesh")) is not None:
        return mesh
    return next((boundary.mesh for _, boundary in boundaries(model)), None)
