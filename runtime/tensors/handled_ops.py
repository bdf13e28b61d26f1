"""Ops on DTensors for which torch has its own code: on the whole where that is not right.

- Random numbers. On the CPU torch draws for each part by itself, so ranks that stand alike get the
  same numbers for different parts. So they are drawn for the whole, by generators that stand where
  that of the first rank does.
- Convolutions. Torch takes whatever is split to be the last dim of an image.
- `argmin` and `argmax`. Torch does not ask how their result lies (`relied_on.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardwright.errors import UsageError
from shardwright.runtime.communication.generators import draw_alike
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.tensors.on_wholes import first_of, on_wholes
from shardwright.runtime.tensors.schemas import is_whole

aten = torch.ops.aten

DRAWING = (
    "rand randn randint rand_like randn_like randint_like random random_ normal normal_ uniform "
    "uniform_ bernoulli bernoulli_ exponential exponential_ cauchy cauchy_ geometric geometric_ "
    "log_normal log_normal_ binomial poisson multinomial _standard_gamma _sample_dirichlet "
    "native_dropout _fused_dropout rrelu_with_noise rrelu_with_noise_ "
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "  # made of
    "feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_"  # others, but in inference mode
)
"""Ops that draw for tensors; most, but not all, have a tag that says so."""

OWN_CODE = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.argmin.default,
    aten.argmax.default,
)

NO_RULE = (
    aten._is_any_true.default,  # by which autograd's anomaly mode looks for NaN
    aten._is_all_true.default,
    aten.allclose.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
)
"""Ops for which torch has none, and which say something of a tensor."""


@cache
def watch_handled_ops() -> None:
    """From now on, these ops give for DTensors what they give for the whole."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for name in DRAWING.split():
        packet = getattr(aten, name)
        handlers.update((getattr(packet, overload), drawn) for overload in packet.overloads())
    for op in OWN_CODE:
        handlers[op] = _unless_split(handlers[op])
    handlers.update((op, on_wholes) for op in NO_RULE)


def drawn(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `op` draws for whole tensors, of which each rank keeps its part; all ranks call it.

    Raises:
        UsageError: it is compiled, or would write to a view that is a copy.
    """
    if torch.compiler.is_compiling():
        raise UsageError(
            f"{op} for a parameter of a split model in compiled code: draw where it is not compiled"
        )
    first = first_of(args, kwargs)
    for i in range(first.device_mesh.ndim):
        group = Group.of(first.device_mesh.get_group(i))
        draw_alike(group, first.device, kwargs.get("generator"))
    return on_wholes(op, args, kwargs)


def _unless_split(torch_s: Callable[..., Any]) -> Any:
    """Do as torch does where no tensor is split, else on whole ones."""

    def handled(op: Any, args: Any, kwargs: Any) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, DTensor)]
        whole = all(is_whole(t._spec) for t in given)
        return (torch_s if whole else on_wholes)(op, args, kwargs)

    return handled
