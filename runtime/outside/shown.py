"""What hooks on a module see in a call by the model: whole tensors, and whole gradients of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.errors import UsageError
from shardwright.planner.contract.dims import dim_size, resolve
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.names import slot_pattern
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_file import ModuleCall, ModulePlan
from shardwright.runtime.code.call_sites import place_of_call
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.interface import Interface, Table, table
from shardwright.runtime.slots import map_slots, tensors
from shardwright.runtime.tensors.dtensors import coords_of_all

Seen = tuple[str, str, Tensor]
"""The side and slot of a tensor, and the tensor."""

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class Shown(Interface):
    """The tensors around one module, whole, and cut again.

    What is whole as it is stays the same object.
    """

    OF_SEQUENCE = (
        "has a hook, which should see whole tensors, and works on a part of the sequence: plan "
        "without sequence_parallel or cp"
    )

    def __init__(
        self, forward: Callable[..., Any], leaf: bool, spec: ModulePlan, mesh: Mesh, path: str
    ) -> None:
        super().__init__(forward, leaf, spec, mesh, path)
        self.comes, self.goes = self._around(spec)
        self.calls = [self._in_call(call) for call in spec.each]
        """The same for each call of the module, where these differ."""
        self.at = [frozenset(call.at) for call in spec.each]
        """Where these are in code."""

    def _around(self, call: ModuleCall | ModulePlan) -> tuple[Table, Table]:
        takes = ((p.slot, p.placement) for p in call.takes)
        gives = ((p.slot, p.placement) for p in call.gives)
        return (
            table([*takes, *((c.slot, c.source) for c in self.spec.inputs)]),
            table([*gives, *((c.slot, c.target) for c in self.spec.outputs)]),
        )

    def _in_call(self, call: ModuleCall) -> Shown:
        out = copy.copy(self)
        out.comes, out.goes = self._around(call)
        return out

    def check(self) -> None:
        """Check that tensors lie alike in all calls of the module.

        Raises:
            UsageError: they do not.
        """
        if self.spec.varies:
            raise UsageError(
                f"'{self.path}' has a hook, or another module in its place, which should see whole "
                "tensors, and is called several times with tensors that lie otherwise over the "
                "ranks, and nobody can tell which call this is: put the hook on a module around "
                "it, or on one of those before and behind it"
            )

    def call_of(
        self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _EMPTY, output: Any = None
    ) -> Shown:
        """The tensors around the module in the call that has these arguments and this output.

        Where calls differ, that is one at this place in code in which this rank has parts of these
        sizes.

        Raises:
            UsageError: several have, and lie otherwise.
        """
        if not self.spec.varies:
            return self
        given = {**dict(zip(self.names(args), args, strict=True)), **kwargs}
        seen = [("in", slot, x) for slot, x in tensors(given)]
        seen += [("out", slot, x) for slot, x in tensors(output)]
        return self._call_with(seen, self.place())

    def place(self) -> str:
        """Where in code the call is that runs now, if that is asked for and known."""
        asked = self.spec.varies and not torch.compiler.is_compiling()
        return place_of_call() if asked else ""

    def call_of_gradients(
        self, grads: Sequence[Sequence[Any]], sides: Sequence[str], place: str
    ) -> Shown:
        """The same for gradients as hooks are given them, of both sides or of outputs alone.

        Those of a call at a `place`.
        """
        if not self.spec.varies:
            return self
        seen = []
        for side, found in zip(sides, grads, strict=True):
            slots = self.names(tuple(found)) if side == "in" else _slots(found, self.goes)
            seen += [(side, n, g) for n, g in zip(slots, found, strict=True) if g is not None]
        return self._call_with(seen, place)

    def _call_with(self, seen: Sequence[Seen], place: str) -> Shown:
        floating = [x.is_floating_point() for _, _, x in seen]
        here = [c for c, at in zip(self.calls, self.at, strict=True) if place in at]
        known = here if here and all(self.at) else self.calls
        calls = [(call, [call._lies(*each) for each in seen]) for call in known]
        calls = [c for c in calls if all(p or not f for p, f in zip(c[1], floating, strict=True))]
        fit = [c for c in calls if all(map(self._fits, c[1], seen))]
        others = [p for _, p in calls if fit and _of_any_size(p) != _of_any_size(fit[0][1])]
        ranks = coords_of_all(self.mesh)  # all of them raise, or none
        if not fit or not all(_differ(fit[0][1], p, rank) for p in others for rank in ranks):
            self.check()
        return fit[0][0]

    def _lies(self, side: str, slot: str, x: Tensor) -> Placement | None:
        known = self.comes if side == "in" else self.goes
        return known.get(slot, known.get(slot_pattern(slot), {})).get(x.ndim)

    def _fits(self, placement: Placement | None, seen: Seen) -> bool:
        """Whether this rank's part of a tensor that lies so has the size of what is `seen`."""
        sizes = placement.local_shape(self.mesh.coords) if placement else seen[-1].shape
        return all(n in (None, size) for n, size in zip(sizes, seen[-1].shape, strict=True))

    def change(self, table: Table, side: str, at: str) -> Callable[[Tensor, str], Tensor]:
        """As for any interface, with copies of what shares memory with what was given.

        Into these code may write: a hook into what it is shown, the model into what it gets back.
        """
        plain = super().change(table, side, at)

        def change(x: Tensor, slot: str) -> Tensor:
            # What was made with gradients keeps them, also where code goes on without.
            with torch.set_grad_enabled(x.requires_grad or torch.is_grad_enabled()):
                out = plain(x, slot)
                return out.clone() if out is not x and _shares(out, x) else out

        return change

    def whole(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call by the model, whole."""
        return self.changed(args, kwargs, self.comes, "out")

    def cut(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Whole arguments as the model gives them."""
        return self.changed(args, kwargs, self.comes, "in")

    def whole_output(self, output: Any) -> Any:
        """What the model gets of the module, whole."""
        return map_slots(output, "", self.change(self.goes, "out", "out"))

    def cut_output(self, output: Any) -> Any:
        """A whole output as the model gets it."""
        return map_slots(output, "", self.change(self.goes, "in", "out"))

    def whole_gradients(self, grads: Sequence[Any], side: str) -> tuple[Any, ...]:
        """Gradients of arguments ("in") or outputs ("out"), as hooks are given them, whole."""
        return self._gradients(grads, side, "in")

    def cut_gradients(self, grads: Sequence[Any], side: str) -> tuple[Any, ...]:
        """Whole gradients as the model has them."""
        return self._gradients(grads, side, "out")

    def _gradients(self, grads: Sequence[Any], side: str, way: str) -> tuple[Any, ...]:
        placed = self.comes if side == "in" else self.goes
        slots = self.names(tuple(grads)) if side == "in" else _slots(grads, placed)
        return tuple(
            g if g is None else self._gradient(g, placed, slot, way)
            for g, slot in zip(grads, slots, strict=True)
        )

    def _gradient(self, grad: Tensor, placed: Table, slot: str, way: str) -> Tensor:
        """A gradient as it is at the near end of a redistribution that has it at the far end."""
        reshard = self.reshard(placed, way, slot, grad.ndim, grad.is_floating_point())
        if reshard is None or not reshard.steps:
            return grad
        sizes = self._other_end(reshard, grad.shape)
        with torch.enable_grad():
            # Of integers torch makes gradients, too: zeros of their kind.
            real = grad if grad.is_floating_point() or grad.is_complex() else grad.float()
            near = real.new_zeros(sizes).requires_grad_()
            far = reshard(near)
        (found,) = torch.autograd.grad(far, near, real, create_graph=torch.is_grad_enabled())
        return found.to(grad.dtype)

    def _other_end(self, reshard: Any, shape: Sequence[int]) -> list[int]:
        """This rank's sizes at the source, of a tensor that has this `shape` at the target."""
        coords, out = self.mesh.coords, []
        for source, target, size in zip(
            reshard.source.dims, reshard.target.dims, shape, strict=True
        ):
            whole = dim_size(resolve(target, size, coords))
            out.append(dim_size(resolve(source, whole or 0), coords) or 0)
        return out


def _shares(out: Tensor, x: Tensor) -> bool:
    """Whether `out` is a view, of `x` or for autograd."""
    if torch.compiler.is_compiling() or (out.requires_grad and out._is_view()):
        return out.requires_grad and out._is_view()
    return out.untyped_storage()._cdata == x.untyped_storage()._cdata


class Given(NamedTuple):
    """What a hook on the module `path` was shown, and what the model goes on with in its place."""

    path: str
    shown: StorageWeakRef
    model: Tensor
    stamp: int | Tensor

    @classmethod
    def pairs(cls, path: str, shown: Any, model: Any) -> Iterator[Given]:
        """Of tensors in two values that are made alike: those that are not the same."""
        found = zip(tensors(shown), tensors(model), strict=True)
        for (_, whole), (_, part) in found:
            if whole is not part:
                yield cls(path, StorageWeakRef(whole.untyped_storage()), part, stamp(part))

    def check(self) -> None:
        """Check that the model's code did not change it, where what was shown is still there.

        Raises:
            UsageError: it did: the unsplit model would show that.
        """
        if not self.shown.expired() and changed(self.model, self.stamp):
            raise UsageError(
                f"a hook on '{self.path}' keeps what it was shown, which the model's code then "
                "changes in place (as with inplace=True): let the hook keep a copy (.clone())"
            )


def stamp(x: Tensor) -> int | Tensor:
    """What `changed` compares a tensor with."""
    return x.clone() if x.is_inference() else x._version


def changed(x: Tensor, before: int | Tensor) -> bool:
    """Whether somebody wrote into a tensor since its `stamp` was made."""
    if isinstance(before, Tensor):
        return not torch.equal(_bytes(x), _bytes(before))  # NaN is like itself
    return x._version != before


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _of_any_size(placed: Sequence[Placement | None]) -> list[Placement | None]:
    return [p and p.of_any_size() for p in placed]


def _differ(
    one: Sequence[Placement | None], other: Sequence[Placement | None], coords: Coords
) -> bool:
    """Whether the rank at `coords` has other sizes of some tensor that lies as in the `other`."""
    return any(
        m != n
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
        for m, n in zip(a.local_shape(coords), b.local_shape(coords), strict=True)
        if m is not None and n is not None
    )


def _slots(grads: Sequence[Any], placed: Table) -> list[str]:
    """Those of outputs, of which torch makes a tuple."""
    return [""] if len(grads) == 1 and "" in placed else [str(i) for i in range(len(grads))]
