"""What a module with local parameters does around its own forward.

Inputs are redistributed as the plan says, the module's own code runs on local tensors, outputs are
redistributed. A parameter that the module should see otherwise than it is stored (a bias added on
one rank only) is a property of the module's class; `parameters()` and `state_dict()` see the leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import Range
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.caches import Caches
from shardwright.runtime.hooks import Hooked
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.slots import Keys, replace

if TYPE_CHECKING:
    from shardwright.runtime.alone import Alone
    from shardwright.runtime.given_sizes import GivenSizes
    from shardwright.runtime.running import Running
    from shardwright.runtime.split_logits import LossScope, SplitHead


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
    inputs: list[Change] = field(default_factory=list)
    outputs: list[Change] = field(default_factory=list)
    rows: tuple[Range, ...] = ()
    vocabulary: int = 0
    scope: LossScope | None = None
    running: Running | None = None
    """Of the model that the module is in; None for a layer that was made by itself."""
    caches: Caches = field(default_factory=Caches)
    """Of that model."""
    alone: Alone | None = None
    kept: dict[str, Any] = field(default_factory=dict)
    """Arguments as they came in, while the module runs: modules within may want them so."""
    keeps: set[str] = field(default_factory=set)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as the module's code should see them."""
        args_, kwargs = list(args), dict(kwargs)
        for change in self.inputs:
            if change.name in kwargs:
                kwargs[change.name] = self.take(change, kwargs[change.name])
            elif change.index is not None and change.index < len(args_):
                args_[change.index] = self.take(change, args_[change.index])
        return tuple(args_), kwargs

    def take(self, change: Change, value: Any) -> Any:
        """An argument with one slot changed, or what it was before a module around changed it."""
        if change.name in self.keeps:
            self.kept[change.name] = value
        if change.origin is not None:
            assert change.before is not None
            value = change.origin[change.before.lstrip(".")]
        return self.apply(change, value)

    def leave(self, output: Any) -> Any:
        """The output as the rest of the model should see it."""
        if self.keeps:
            self.kept.clear()
        for change in self.outputs:
            output = self.apply(change, output)
        return output

    def apply(self, change: Change, value: Any) -> Any:
        """`value` with one slot changed; errors name the module and the slot."""
        reshard = change.reshard
        if change.head is not None and self.scope is not None and self.scope.seal is not None:
            reshard = change.head.using(self.scope.seal)
        try:
            return replace(value, change.keys, reshard)
        except PlanError as error:
            where = f"'{change.slot}' of '{self.path}'" if change.slot else f"of '{self.path}'"
            raise PlanError(f"tensor {where}: {error}") from None


class LocalModule(Hooked):
    """Mixin in front of a module's own class; its `_shardwright` is set by `apply_module`."""

    _shardwright: LocalState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward between the redistributions in and out."""
        state = self._shardwright
        if not (state.running is None or state.running.now):
            assert state.alone is not None
            if not state.alone.again():
                with (
                    state.running.forward(),
                    state.alone.caches(args, kwargs, state.caches) as left,
                ):
                    args, kwargs, kept = state.alone.enter(args, kwargs, state.keeps)
                    state.kept.update(kept)
                    output = super().forward(*args, **kwargs)  # type: ignore[misc]
                    left += state.caches.among(output)
                    return state.alone.leave(output)
        elif state.alone is not None and not state.alone.inside:
            state.alone.inside = True
        args, kwargs = state.enter(args, kwargs)  # type: ignore[assignment]
        return state.leave(super().forward(*args, **kwargs))  # type: ignore[misc]

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
        for change in state.inputs if state else ():
            if change.before is None:
                continue
            levels = len(change.before) - len(change.before.lstrip("."))
            slot = change.before.lstrip(".")
            around = ".".join(path.split(".")[:-levels])
            outer: LocalState | None = modules[around].__dict__.get("_shardwright")
            if outer is None or slot not in {c.slot for c in outer.inputs}:
                raise PlanError(f"'{path}' wants '{slot}' as '{around}' took it, which it does not")
            outer.keeps.add(slot)
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
