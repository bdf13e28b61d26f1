"""What hooks on a module see in a call by the model: whole tensors, and whole gradients of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.interface import Interface, Table, table
from shardwright.runtime.mesh import Mesh
from shardwright.runtime.slots import map_slots


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
        takes = ((p.slot, p.placement) for p in spec.takes)
        gives = ((p.slot, p.placement) for p in spec.gives)
        self.comes = table([*takes, *((c.slot, c.source) for c in spec.inputs)])
        self.goes = table([*gives, *((c.slot, c.target) for c in spec.outputs)])

    def check(self) -> None:
        """Check that tensors lie alike in all calls of the module.

        Raises:
            UsageError: they do not.
        """
        if self.spec.varies:
            raise UsageError(
                f"'{self.path}' has a hook, which should see whole tensors, and is called several "
                "times with tensors that lie otherwise over the ranks: put the hook on a module "
                "around it, or on one of those before and behind it"
            )

    def whole(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call by the model, whole."""
        return self.changed(args, kwargs, self.comes, "out")

    def cut(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Whole arguments as the model gives them."""
        return _owned(self.changed(args, kwargs, self.comes, "in"))

    def whole_output(self, output: Any) -> Any:
        """What the model gets of the module, whole."""
        return map_slots(output, "", self.change(self.goes, "out", "out"))

    def cut_output(self, output: Any) -> Any:
        """A whole output as the model gets it."""
        return _owned(map_slots(output, "", self.change(self.goes, "in", "out")))

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
        sizes = reshard.source.local_shape(self.mesh.coords)
        given = (n if known is None else known for n, known in zip(grad.shape, sizes, strict=True))
        with torch.enable_grad():
            near = grad.new_zeros([*given]).requires_grad_()
            far = reshard(near)
        (found,) = torch.autograd.grad(far, near, grad, create_graph=torch.is_grad_enabled())
        return found


def _owned(cut: Any) -> Any:
    """With copies of what autograd knows as views: nobody may write into those that we make."""
    return map_slots(cut, "", lambda x, _: x.clone() if x.requires_grad and x._is_view() else x)


def _slots(grads: Sequence[Any], placed: Table) -> list[str]:
    """Those of outputs, of which torch makes a tuple."""
    return [""] if len(grads) == 1 and "" in placed else [str(i) for i in range(len(grads))]
