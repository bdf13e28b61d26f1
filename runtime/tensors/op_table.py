"""Tables of the ops on SplitTensors that need less than full tensors.

Any other op runs on full tensors, which is always correct and costs an all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch

aten = torch.ops.aten

Kind = Literal[
    "elementwise", "lists", "view", "random", "norm", "sum", "made new", "asks", "unscale",
    "refused", "composite", "full",
]  # fmt: skip

ELEMENTWISE = frozenset(
    "copy_ fill_ zero_ _to_copy _pin_memory empty_like zeros_like ones_like full_like".split()
)
"""Elementwise ops that lack the tag "pointwise"."""

NOT_ELEMENTWISE = frozenset("equal _foreach_norm _foreach_max _foreach_mm _foreach_powsum".split())
"""Ops that are not elementwise, although a tag or their name suggests it."""

LISTS = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
"""Name prefixes of elementwise ops over lists of tensors."""

MADE_NEW = frozenset("new_empty new_zeros new_ones new_full new_empty_strided".split())
"""Ops that take only dtype and device from a tensor."""

ASKS = frozenset("is_pinned record_stream".split())
"""Ops about the memory of a tensor, which run on the local tensor."""

REFUSED = {
    "set_": "give it values with copy_",
    "resize_": "change the model before it is planned and split",
    "resize_as_": "change the model before it is planned and split",
}
"""Ops that change the memory or shape of a tensor, and what to do instead."""

RANDOM = frozenset(
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "
    "feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ rand_like randn_like randint_like "
    "random random_ normal normal_ uniform uniform_ bernoulli bernoulli_ exponential exponential_ "
    "cauchy cauchy_ geometric geometric_ log_normal log_normal_ binomial poisson multinomial "
    "_standard_gamma _sample_dirichlet native_dropout _fused_dropout rrelu_with_noise "
    "rrelu_with_noise_".split()
)
"""Ops that draw random numbers. Not all of them have torch's tag for that."""

NORMS = frozenset("linalg_vector_norm _foreach_norm".split())


@cache
def kind_of(op: Any) -> Kind:
    """How `op` runs on SplitTensors."""
    name = name_of(op)
    named: dict[Any, Kind] = {
        ELEMENTWISE: "elementwise", MADE_NEW: "made new", ASKS: "asks", RANDOM: "random",
        NORMS: "norm", frozenset(REFUSED): "refused", frozenset(["sum"]): "sum",
        frozenset(["_amp_foreach_non_finite_check_and_unscale_"]): "unscale",
    }  # fmt: skip
    for names, kind in named.items():
        if name in names:
            return kind
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "random"
    if name not in NOT_ELEMENTWISE:
        if name.startswith(LISTS):
            return "lists"
        if _is_pointwise(op) or (written(op) and _is_pointwise_packet(name.removesuffix("_"))):
            return "elementwise"
    if _is_composite(op):
        return "composite"
    returned = [r.alias_info for r in op._schema.returns]
    views = any(alias is not None and not alias.is_write for alias in returned)
    return "view" if views else "full"


def name_of(op: Any) -> str:
    """The name of an op without namespace and overload: `add_`."""
    return op._schema.name.partition("::")[2]


@cache
def written(op: Any) -> list[int]:
    """The indices of the arguments that an op writes to; of a collective, all that it may."""
    if op.namespace == "c10d":  # its schemas do not say
        return [i for i, a in enumerate(op._schema.arguments) if "Tensor" in str(a.type)]
    given = [a.alias_info for a in op._schema.arguments]
    return [i for i, alias in enumerate(given) if alias is not None and alias.is_write]


def _is_pointwise(op: Any) -> bool:
    makes_tensors = all("Tensor" in str(returned.type) for returned in op._schema.returns)
    return torch.Tag.pointwise in op.tags and makes_tensors


def _is_pointwise_packet(name: str) -> bool:
    packet = getattr(aten, name, None)
    return packet is not None and any(
        _is_pointwise(getattr(packet, overload)) for overload in packet.overloads()
    )


def _is_composite(op: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def kept_dims(op: Any, args: Sequence[Any], shape: Sequence[int]) -> list[int | None] | None:
    """For each dim of a view, the dim of the tensor that it is all of; None for any other dim.

    Returns None if `op` is not known: its view is made of the full tensor.
    """
    every: list[int | None] = [*range(len(shape))]
    name, rest = name_of(op), list(args[1:])

    def at(number: int, dims: int = len(shape)) -> int:
        return rest[number] % max(dims, 1) if len(rest) > number else 0

    if name == "alias":
        return every
    if name in ("view", "_unsafe_view", "expand") and rest[0] == [*shape]:
        return every
    if name == "view_as_real":  # as optimizers take complex parameters
        return [*every, None]
    if name == "view_as_complex":
        return every[:-1]
    if name == "permute":
        return [d % len(shape) for d in rest[0]]
    if name == "t":
        return every[::-1]
    if name == "transpose":
        one, other = at(0), at(1)
        every[one], every[other] = every[other], every[one]
        return every
    if name == "unsqueeze":
        every.insert(at(0, len(shape) + 1), None)
        return every
    if name == "select":
        return every[: at(0)] + every[at(0) + 1 :]
    if name == "slice":
        every[at(0)] = None
        return every
    return None
