"""A split model within `torch.func.grad` and `vjp`: one function, with a backward of its own.

torch.func wraps each tensor, and collectives need what is in there. So the call of a model that is
given such tensors, as parameters (by `functional_call`) or as arguments, is one
`autograd.Function`: within it nothing is wrapped, and the model runs as ever, on tensors from which
autograd begins anew. Its backward is autograd's, from what came out to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import (  # pyright: ignore[reportMissingImports]
    TransformType,
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from shardwright.errors import UsageError
from shardwright.runtime.outside.hooks import is_hooked
from shardwright.runtime.slots import (
    StandsForTensor,
    is_own,
    leaves,
    map_slots,
    parameters_of,
    returned,
)

TENSORS = (Tensor, StandsForTensor)
KNOWN = "grad and vjp (for gradients of each sample, loop over them)"
PART = "of which a part is called by itself: call the whole model within"
WITHIN = "whose parameters its own code reads within a transform"


def is_transforming() -> bool:
    """Whether a transform of torch.func is around what runs now, which is not compiled.

    Raises:
        UsageError: forward-mode differentiation is.
    """
    if peek_interpreter_stack() is not None:
        return True
    if forward_ad._current_level >= 0:
        raise UsageError(
            "forward-mode differentiation of a split model: ranks do not exchange tangents, so "
            "take gradients by backward() or torch.autograd.grad"
        )
    return False


def as_one_function(model: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a split `model` as one function for the transform of torch.func around it.

    Raises:
        UsageError: (when called) it is another transform than `grad` or `vjp`, or some gradients of
            what the call reads or leaves behind would be lost.
    """

    def transformed(*args: Any, **kwargs: Any) -> Any:
        call = Call(model, forward, args, kwargs)
        made = _Whole.apply(call, *call.given)
        by_id = {id(old): new for old, new in zip(call.outputs, made, strict=True)}
        return map_slots(call.output, "", lambda x, _: by_id[id(x)], TENSORS)

    return transformed


class Call:
    """One call of a model, and what it depends on.

    Attributes:
        given: The tensors that it depends on: of the model, and among its arguments.
        inputs: Those from which autograd begins anew in their place; None for one that wants none.
        output: What the model gave.
        outputs: The tensors in that, or what stands for one.
        made: Those tensors.
    """

    def __init__(
        self, model: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        _check(model)
        self.model, self.forward, self.arguments = model, forward, (args, kwargs)
        self.trains = torch.is_grad_enabled()
        self.inputs: list[Tensor | None] = []
        self.output: Any = None
        self.outputs: list[Any] = []
        self.made: list[Tensor] = []
        found = {id(x): x for _, _, x in _held(model) if _counts(x)}
        map_slots(self.arguments, "", lambda x, _: found.setdefault(id(x), x))
        hidden = any(id(x) not in found for _, x in leaves(self.arguments) if isinstance(x, Tensor))
        if hidden or any(map(is_own, (*args, *kwargs.values()))):
            refuse("that is given a cache, or another object of its own kind")
        self.given = list(found.values())

    def run(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the model makes of these, which are what was in the tensors of its own `given`."""
        wanted = [_counts(x) and (x.is_floating_point() or x.is_complex()) for x in self.given]
        fresh = [x.detach().requires_grad_(w) for x, w in zip(given, wanted, strict=True)]
        self.inputs = [x if w else None for x, w in zip(fresh, wanted, strict=True)]
        at = {id(old): new for old, new in zip(self.given, fresh, strict=True)}
        args, kwargs = map_slots(self.arguments, "", lambda x, _: at[id(x)])
        with torch.set_grad_enabled(self.trains), _holding(self.model, at):
            self.output = self.forward(*args, **kwargs)
            map_slots(self.output, "", lambda x, _: self.outputs.append(x), TENSORS)
            self.made = [x if isinstance(x, Tensor) else x.whole() for x in self.outputs]
        self._check_left()
        return tuple(x.detach() for x in self.made)

    def _check_left(self) -> None:
        """Look for tensors of the call that whoever called it can reach, but not by its output."""
        known, takes = set(map(id, self.outputs)), parameters_of(type(self.model).forward)
        inside = [x for _, x in returned(self.output, takes) if id(x) not in known]
        inside += [x for m in self.model.modules() for x in vars(m).values()]
        if any(isinstance(x, Tensor) and x.grad_fn is not None for x in inside):
            refuse("that leaves tensors in attributes, or gives them in objects of its own classes")

    def backward(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The gradients of `given`, from those of what was made."""
        pairs = [(x, g) for x, g in zip(self.made, grads, strict=True) if g is not None]
        outputs = [x for x, _ in pairs]
        of_these = [g.full_tensor() if isinstance(g, DTensor) else g for _, g in pairs]
        inputs = [x for x in self.inputs if x is not None]
        how: Any = {"allow_unused": True, "retain_graph": True}
        found = iter(torch.autograd.grad(outputs, inputs, of_these, **how))
        return tuple(None if x is None else next(found) for x in self.inputs)


class _Whole(torch.autograd.Function):
    """A call of the model."""

    @staticmethod
    def forward(call: Call, *given: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return call.run(given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *given = inputs
        ctx.call = call
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        constant = [new for new, x in zip(output, call.made, strict=True) if not x.requires_grad]
        ctx.mark_non_differentiable(*constant)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        # Of what was given, too, so that nobody takes it for a constant.
        return None, *_Backward.apply(ctx.call, len(grads), *grads, *ctx.saved_tensors)


class _Backward(torch.autograd.Function):
    """Its backward pass, which cannot be differentiated again."""

    @staticmethod
    def forward(call: Call, made: int, *tensors: Tensor | None) -> Any:  # type: ignore[override]
        return call.backward(tensors[:made])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:  # type: ignore[override]
        refuse("twice: collectives have no second derivatives")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        refuse(f"by anything but {KNOWN}")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *_: Any) -> NoReturn:
        refuse(f"by anything but {KNOWN}")


def _check(model: Any) -> None:
    """Look whether gradients of a call would be lost.

    Raises:
        UsageError: they would.
    """
    calls = model._shardwright_calls
    if any(transform.key() != TransformType.Grad for transform in get_interpreter_stack()):
        refuse(f"by anything but {KNOWN}")
    if calls.copies is not None or "_shardwright_rows" in vars(model):
        refuse("whose ranks have samples or rows of their own (their gradients belong together)")
    if any(isinstance(x, DTensor) and not calls.has(x) for x in model.parameters()):
        refuse("whose parameters FSDP2 keeps")
    if any(is_hooked(m) for m in model.modules() if m is not model):
        refuse("with hooks on modules within, which would see tensors without their gradients")


def _counts(x: Tensor) -> bool:
    """Whether somebody may want the gradient of `x`."""
    return x.requires_grad or is_functorch_wrapped_tensor(x)


def _held(model: Any) -> list[tuple[dict[str, Any], str, Tensor]]:
    """The parameters and buffers of a model, and where they are kept."""
    homes = [home for m in model.modules() for home in (m._parameters, m._buffers)]
    return [(home, name, x) for home in homes for name, x in home.items() if x is not None]


@contextmanager
def _holding(model: Any, at: dict[int, Tensor]) -> Iterator[None]:
    """Within, the model has tensors of `at` in the place of those whose ids these are under."""
    replaced = [held for held in _held(model) if id(held[2]) in at]
    try:
        for home, name, x in replaced:
            home[name] = at[id(x)]
        yield
    finally:
        for home, name, x in replaced:
            home[name] = x


def refuse(what: str) -> NoReturn:
    """Raise UsageError: torch.func cannot transform a split model `what`."""
    raise UsageError(
        f"torch.func cannot transform a split model {what}; backward() and torch.autograd.grad "
        "can take gradients, too"
    )
