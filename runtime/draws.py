"""Random numbers: ranks that share a model draw those of the unsplit one.

What all ranks have is dropped alike where all draw alike, from generators that stand alike
(`draw_alike`). For a part of a tensor each rank draws the numbers of the whole, and keeps those of
its part. So no rank falls behind, and what is dropped is what the unsplit model would drop.
"""

from __future__ import annotations

import math
import operator
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import Atom, Dim, dim_size, is_split, resolve
from shardwright.planner.contract.mesh import CP, TP
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import RandomNumbers
from shardwright.runtime.collectives import all_gather
from shardwright.runtime.lengths import Length, Lengths
from shardwright.runtime.mesh import Group, Mesh
from shardwright.runtime.reshard import take_local
from shardwright.runtime.running import Running
from shardwright.runtime.subclasses import subclass

aten = torch.ops.aten

AGAIN = "plan the model again as it is now"


def draw_alike(group: Group, device: torch.device) -> None:
    """Put the generators of all ranks where that of the first stands; all call it."""
    if group.size == 1 or group.pg is None or device.type == "meta":
        return
    if device.type == "cpu":
        torch.set_rng_state(all_gather(torch.get_rng_state(), group)[0])
        return
    module: Any = torch.get_device_module(device)
    state = all_gather(module.get_rng_state(device).to(device), group)[0]
    module.set_rng_state(state.cpu(), device)


def draw_arrays_alike(group: Group, device: torch.device) -> None:
    """The same for the generators of Python and NumPy."""
    if group.size == 1 or group.pg is None or device.type == "meta":
        return
    import numpy as np

    version, numbers, normal = random.getstate()
    of_numpy: Any = np.random.get_state()
    kind, keys, *rest = of_numpy
    # As floats, which have room for the 32 bits of each word of a state.
    own = [*numbers, math.nan if normal is None else normal, *keys.tolist(), *rest]
    state = torch.tensor(own, dtype=torch.float64, device=device)
    first = all_gather(state, group)[0].tolist()
    words, (normal, *first) = first[: len(numbers)], first[len(numbers) :]
    random.setstate((version, tuple(map(int, words)), None if math.isnan(normal) else normal))
    *keys, at, has_normal, normal = first
    np.random.set_state((kind, np.array(keys, np.uint32), int(at), int(has_normal), normal))


def draw_as_first(
    module: nn.Module, mesh: Mesh, alike: Callable[[Group, torch.device], None] = draw_alike
) -> None:
    """Put generators alike on all ranks of `mesh` that share a model, of which `module` is a part.

    `alike` does it for one group: that is `draw_alike`, or `draw_arrays_alike`.
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    for name in (CP, TP):
        if name in mesh.groups:
            alike(mesh[name], device)


def any_trains(modules: Iterable[nn.Module]) -> bool:
    """Whether one of them is in training mode."""
    return any(map(_TRAINING, modules))


_TRAINING = operator.attrgetter("training")  # no frame of Python for each: it is asked each step


class AsFirst:
    """Before a part of a model that is called by itself: it draws as on the first rank.

    Args:
        mesh: Where this rank stands.
        always: Whether numbers are drawn in eval mode, too.
    """

    def __init__(self, mesh: Mesh, always: bool) -> None:
        self.mesh, self.always = mesh, always

    def __call__(self, module: nn.Module) -> None:
        """Put generators alike if `module` may draw; all ranks call it."""
        if not torch.compiler.is_compiling() and (self.always or any_trains(module.modules())):
            draw_as_first(module, self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> AsFirst:
        return self


class Around:
    """Mixin in front of a module that the plan leaves as it is, and that has split ones within."""

    _shardwright_called_in: Running
    _shardwright_as_first: AsFirst

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if not self._shardwright_called_in.now:
            self._shardwright_as_first(self)  # type: ignore[arg-type]
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def draw_alike_alone(model: nn.Module, running: Running, always: bool) -> None:
    """Let all parts of `model` that have split modules in them draw alike when called alone."""
    for module in model.modules():
        states = (s for m in module.modules() if (s := vars(m).get("_shardwright")) is not None)
        if module is model or (state := next(states, None)) is None:
            continue
        as_first, own = AsFirst(state.mesh, always), vars(module).get("_shardwright")
        if own is not None:
            own.alone.as_first = as_first
        elif type(module).forward is not nn.Module.forward:
            vars(module).update(_shardwright_called_in=running, _shardwright_as_first=as_first)
            module.__class__ = subclass(type(module), Around)


class Part:
    """For what numbers are drawn in one place, and which part of it this rank has.

    Args:
        drawn: What the plan says of it.
        mesh: Where this rank stands.
        lengths: Of the model.
    """

    def __init__(self, drawn: RandomNumbers, mesh: Mesh, lengths: Lengths) -> None:
        self.dims, self.mesh = parse(drawn.placement).dims, mesh
        self.length = None if drawn.length is None else Length(lengths, drawn.length)

    def whole(self, sizes: Sequence[int]) -> Placement:
        """How the whole lies of which this rank has a part of these `sizes`.

        Raises:
            PlanError: it can have no such part.
            UsageError: it has another number of dims.
        """
        if len(sizes) != len(self.dims):
            raise UsageError(
                f"random numbers are drawn for a tensor of {len(sizes)} dims, where the plan has "
                f"'{Placement(self.dims)}': {AGAIN}"
            )
        return Placement(tuple(map(self._whole, self.dims, sizes)))

    def _whole(self, dim: Dim, size: int) -> Dim:
        if isinstance(dim, Atom) and dim.size is None and dim.mesh and self.length is not None:
            return Atom(self.length.find(size, self.mesh[dim.mesh]), dim.mesh)
        return resolve(dim, size, self.mesh.coords)


class Wholes(TorchDispatchMode):
    """Within, what the own code of `module` drops of parts it drops as the unsplit model does."""

    def __init__(self, module: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__()
        self.module, self.parts = module, parts
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Draw for the whole, and keep this rank's part; what else is done is done."""
        kwargs = kwargs or {}
        if func is aten.bernoulli_.float and self._own():
            x, *rest = args
            return x.copy_(self._part(x, lambda whole: func(whole, *rest, **kwargs)))
        if func is aten.native_dropout.default and self._own():  # on GPUs
            x, p, train = args
            mask = self._part(x, lambda whole: func(torch.ones_like(whole), p, train)[1])
            return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask
        return func(*args, **kwargs)

    def _part(self, like: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """This rank's part of what `draw` makes of a new tensor for the whole."""
        if self.number == len(self.parts):
            self.refuse()
        part = self.parts[self.number]
        self.number += 1
        layout = part.whole(like.shape)
        sizes = [dim_size(dim) or 0 for dim in layout.dims]
        # In memory it lies as the part does: numbers are drawn in that order.
        order = list(range(like.ndim))
        if not like.is_contiguous():
            order.sort(key=lambda d: -like.stride(d))
        drawn = draw(torch.empty_permuted(sizes, order, dtype=like.dtype, device=like.device))
        return take_local(drawn, layout, part.mesh) if any(map(is_split, layout.dims)) else drawn

    def refuse(self) -> None:
        """Raise: code draws as it did not when it was traced."""
        raise UsageError(
            f"a {type(self.module).__name__} draws random numbers for other tensors than those "
            f"that the plan has ({len(self.parts)}): {AGAIN}"
        )

    def _own(self) -> bool:
        """Whether the module is the innermost that runs: those within draw for themselves."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code is not _CALL:
            frame = frame.f_back
        return frame is not None and frame.f_locals.get("self") is self.module


_CALL = nn.Module._call_impl.__code__


class Drawing:
    """Mixin in front of a module's own class."""

    _shardwright_parts: Sequence[Part]
    _shardwright_always = False
    """Whether numbers are drawn in eval mode, too."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, which drops as the unsplit model does.

        Compiled, it drops of each rank's part alike.

        Raises:
            UsageError: it draws otherwise than the plan has it.
        """
        draws = self.training or self._shardwright_always
        if not draws or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with sdpa_kernel(SDPBackend.MATH), Wholes(self, self._shardwright_parts) as mode:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        if mode.number not in (0, len(mode.parts)):
            mode.refuse()
        return output


def drawing_class(original: type) -> type:
    """`original` with `Drawing` in front of its forward."""
    return subclass(original, Drawing)
