"""What a module with local parameters does around its own forward.

Inputs are redistributed as the plan says, the module's own code runs on local tensors, outputs are
redistributed. A parameter that the module should see otherwise than it is stored (a bias added on
one rank only) is a property of the module's class; `parameters()` and `state_dict()` see the leaf.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import Range
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.calls.caches import Caches
from shardwright.runtime.calls.filled import check_filled
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.outside.hooks import Hooked, check_kept
from shardwright.runtime.redistribution import overlap
from shardwright.runtime.redistribution.reshard import Reshard
from shardwright.runtime.running import ALWAYS, Always, Running
from shardwright.runtime.slots import Keys, replace
from shardwright.runtime.tensors import buffers

if TYPE_CHECKING:
    from shardwright.runtime.logits.split_logits import LossScope, SplitHead
    from shardwright.runtime.modules.given_sizes import GivenSizes
    from shardwright.runtime.outside.alone import Alone
    from shardwright.runtime.outside.shown import Shown
    from shardwright.runtime.rows.attention_rows import AttentionRows


def _nothing() -> None:
    return None


@dataclass
class Change:
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
    def idle(self) -> bool:
        """Whether it leaves every tensor as it is where no gradient is wanted."""
        plain = self.head is None and self.before is None
        return plain and isinstance(self.reshard, Reshard) and not self.reshard.forward


@dataclass
class LocalState:
    """What the plan says of one module, compiled for this rank."""

    mesh: Mesh
    layer: str = "LocalModule"
    path: str = ""
    placements: dict[str, Placement] = field(default_factory=dict)
    uses: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    sizes: dict[str, GivenSizes] = field(default_factory=dict)
    """Of calls in its code, by name."""
    attention: AttentionRows | None = None
    """Around the code of a module that attends with its part of a sequence."""
    inputs: list[Change] = field(default_factory=list)
    outputs: list[Change] = field(default_factory=list)
    attributes: list[Change] = field(default_factory=list)
    """Of tensors that the module's code sets as its attributes."""
    wholes: dict[str, Any] = field(default_factory=dict)
    """Attributes, with numbers of the whole, in whose place code in a call finds local ones."""
    rows: tuple[Range, ...] = ()
    """Of a table of tokens that is split by rows: those that this rank has."""
    others: tuple[Range, ...] = ()
    """And the rest."""
    padding: int | None = None
    scope: LossScope | None = None
    idle: tuple[bool, bool] = (True, True)
    """Whether inputs, and outputs, stay as they are where no gradient is wanted."""
    through: Reshard | None = None
    """Of a sole output, where that is all that becomes of it: done in the frame of `forward`."""
    running: Running | Always = ALWAYS
    """Of the model that the module is in."""
    caches: Caches = field(default_factory=Caches)
    """Of that model."""
    alone: Alone | None = None
    group: Group | None = None
    """The ranks over which gradients may be summed beside other work."""
    linear: bool = False
    """Whether the module's own forward is that of `nn.Linear`, as of most: done in its place."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Arguments as they came in, while the module runs: modules within may want them so."""
    keeps: set[str] = field(default_factory=set)
    has_originals: bool = False
    """Whether this call of the module was given its originals."""

    @property
    def shown(self) -> Shown | None:
        """What hooks on the module see."""
        return None if self.alone is None else self.alone.shown

    @property
    def goes_back(self) -> bool:
        """Whether an argument is taken as it was before a module around changed it, an original."""
        return any(change.origin is not None for change in self.inputs)

    def settle(self) -> None:
        """See what `inputs` and `outputs` come to, when all of them are there."""
        alone = not self.keeps
        self.idle = (
            alone and all(change.idle for change in self.inputs),
            alone and not self.attributes and all(change.idle for change in self.outputs),
        )
        self.through = None
        if alone and len(self.outputs) == 1 and not self.attributes:
            (sole,) = self.outputs
            if isinstance(sole.reshard, Reshard) and not sole.keys and sole.head is None:
                self.through = sole.reshard

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as the module's code should see them.

        One is changed as it comes, or as it was before a module around changed it.
        """
        given = list(args)
        for change in self.inputs:
            at, where = _place(change, given, kwargs)
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
        for change in self.inputs:
            at, where = _place(change, given, kwargs)
            if at is not None and change.origin is not None:
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

    def apply(self, change: Change, value: Any) -> Any:
        """`value` with one slot changed; errors name the module and the slot."""
        reshard = change.reshard
        if change.head is not None and self.scope is not None and self.scope.seal is not None:
            reshard = change.head.using(self.scope.seal)
        try:
            if not change.keys and isinstance(value, Tensor):
                return reshard(value)
            return replace(value, change.keys, reshard)
        except PlanError as error:
            where = f"'{change.slot}' of '{self.path}'" if change.slot else f"of '{self.path}'"
            raise PlanError(f"tensor {where}: {error}") from None

    def alone_with(
        self,
        module: nn.Module,
        code: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What the `code` of `module` gives, called from outside of a forward of the model."""
        alone, running = self.alone, self.running
        assert alone is not None
        assert isinstance(running, Running)
        running.now = True
        try:
            with alone.caches(args, kwargs, self.caches) as left:
                args, kwargs, kept = alone.enter(args, kwargs, self.keeps)
                filled = alone.may_be_filled(args, kwargs, self.caches)
                self.kept.update(kept)
                output = code(*args, **kwargs)
                self.leave_attributes(module)
                check_filled(filled, output)
                if left is not None:
                    left += self.caches.among(output, alone.arguments)
                if running.shown:
                    check_kept(running)
                return alone.leave(output)
        finally:
            running.now = False
            running.shown = ()


def _place(change: Change, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Where the argument of a `change` is: its key, or None, and what it is the key of."""
    if change.name in kwargs:
        return change.name, kwargs
    given = change.index is not None and change.index < len(args)
    return (change.index if given else None), args


class LocalModule(Hooked):
    """Mixin in front of a module's own class; its `_shardwright` is set by `apply_module`."""

    _shardwright: LocalState

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        buffers.show(self, destination, prefix)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        buffers.cut(self, *args[:2])
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward between the redistributions in and out.

        It runs for each module and token, so what most modules need is done here, and no function
        is called for what a module does not need.
        """
        state = self._shardwright
        alone: Any = state.alone
        if state.running.now:
            if not alone.inside:
                alone.inside = True
        elif state.running.left or not alone.again():
            if alone.proven is not None:
                alone.proven.check_modes(self.modules(), alone.path)  # type: ignore[attr-defined]
            if alone.as_first is not None:
                alone.as_first(self)
            if (layer := alone.unrun(self)) is not None:
                return layer.forward(*args, **kwargs)
            return state.alone_with(self, super().forward, args, kwargs)  # type: ignore[misc]
        trains = torch.is_grad_enabled()
        idle_in, idle_out = state.idle
        if state.inputs and (trains or not idle_in):
            args, kwargs = state.enter(args, kwargs)  # type: ignore[assignment]
        spent = state.linear and len(args) == 1 and not kwargs
        if spent:  # a bias that is not there needs no look-up, which is a call
            bias: Any = self._parameters.get("bias", self)  # type: ignore[attr-defined]
            bias = bias if bias is None else self.bias  # type: ignore[attr-defined]
            output: Any = (
                overlap.linear(*args, self.weight, bias, state.group)  # type: ignore[attr-defined]
                if trains
                else F.linear(*args, self.weight, bias)  # type: ignore[attr-defined]
            )
        else:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if idle_out and not trains:
            return output
        through = state.through
        if through is None or not isinstance(output, Tensor):
            some = state.outputs or state.keeps or state.attributes
            return state.leave(output, self) if some else output  # type: ignore[arg-type]
        shape = output.shape
        if len(shape) != len(through.shape):
            return state.leave(output, self)  # type: ignore[arg-type]  # raises
        for dim, size in through.known:
            if shape[dim] != size:
                return state.leave(output, self)  # type: ignore[arg-type]
        if trains:
            steps: Any = through.steps
        else:
            steps = through.spent if spent else through.forward
        for step in steps:
            output = step(output)
        return output

    def extra_repr(self) -> str:
        """What the module says of itself, and the local and whole sizes of what is split."""
        state = self._shardwright
        parts = [super().extra_repr()]  # type: ignore[misc]
        parts += [
            f"{name}: {list(p.local_shape(state.mesh.coords))} of {list(p.shape)}"
            for name, p in state.placements.items()
            if p.meshes
        ]
        return ", ".join(p for p in parts if p)


def link_origins(model: nn.Module) -> None:
    """Show each redistribution that goes back behind that of a module around where its tensor is.

    Raises:
        PlanError: that module changes no such argument.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        state: LocalState | None = module.__dict__.get("_shardwright")
        for change in [] if state is None else state.inputs:
            if change.before is None:
                continue
            levels = len(change.before) - len(change.before.lstrip("."))
            slot = change.before.lstrip(".")
            around = ".".join(path.split(".")[:-levels])
            outer: LocalState | None = modules[around].__dict__.get("_shardwright")
            if outer is None or slot not in {c.slot for c in outer.inputs}:
                raise PlanError(f"'{path}' wants '{slot}' as '{around}' took it, which it does not")
            outer.keeps.add(slot)
            outer.settle()
            change.origin = outer.kept


def placements(model: nn.Module) -> dict[str, Placement]:
    """Placement of each parameter and buffer that a plan speaks of, by its name in `model`."""
    out = {}
    for path, module in model.named_modules(remove_duplicate=False):
        state = module.__dict__.get("_shardwright")
        for name, placement in state.placements.items() if state else ():
            out[f"{path}.{name}" if path else name] = placement
    return out


def mesh_of(model: nn.Module) -> Mesh | None:
    """The mesh that a plan was applied to `model` over, be it of one rank; None if none was."""
    if (mesh := model.__dict__.get("_shardwright_mesh")) is not None:
        return mesh
    for module in model.modules():
        if (state := module.__dict__.get("_shardwright")) is not None:
            return state.mesh
    return None
