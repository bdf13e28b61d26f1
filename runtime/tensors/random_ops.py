"""Ops that draw random numbers for DTensors: those that the unsplit model would draw.

On the CPU torch draws for each part by itself, so ranks that stand alike get the same numbers for
different parts. So numbers are drawn for the whole, by generators that stand where that of the
first rank does, and each rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.errors import UsageError
from shardwright.runtime.communication.generators import draw_alike
from shardwright.runtime.communication.mesh import Group
from shardwright.runtime.tensors.written_views import is_copied, refuse_writing

aten = torch.ops.aten


@cache
def watch_random_ops() -> None:
    """From now on, what is drawn for a DTensor is its part of what is drawn for the whole."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for name in RANDOM.split():
        packet = getattr(aten, name)
        handlers.update((getattr(packet, overload), drawn) for overload in packet.overloads())


RANDOM = (
    "rand randn randint rand_like randn_like randint_like random random_ normal normal_ uniform "
    "uniform_ bernoulli bernoulli_ exponential exponential_ cauchy cauchy_ geometric geometric_ "
    "log_normal log_normal_ binomial poisson multinomial _standard_gamma _sample_dirichlet "
    "native_dropout _fused_dropout rrelu_with_noise rrelu_with_noise_ "
    "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "  # made of
    "feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_"  # others, but in inference mode
)
"""Ops that draw for tensors; most, but not all, have a tag that says so."""


def drawn(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `op` gives on whole tensors, of which each rank keeps its part; all ranks call it.

    Raises:
        UsageError: it is compiled, or would write to a view that is a copy.
    """
    if torch.compiler.is_compiling():
        raise UsageError(
            f"{op} for a parameter of a split model in compiled code: draw where it is not compiled"
        )
    first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, DTensor))
    written = [*_written(op, args, kwargs)]
    if any(is_copied(part._spec) for part in written):
        refuse_writing(op)
    wholes = {id(t): _room_for(t) for t in written if "rrelu" not in op._schema.name}

    def whole(value: Any) -> Any:
        if isinstance(value, DTensor) and id(value) not in wholes:
            read: Any = value.detach()
            wholes[id(value)] = read.full_tensor()
        return wholes.get(id(value), value)

    own, named = tree_map(whole, (tuple(args), dict(kwargs)))
    for i in range(first.device_mesh.ndim):
        draw_alike(Group.of(first.device_mesh.get_group(i)), first.device, named.get("generator"))
    made = op(*own, **named)
    given = {id(wholes[id(part)]): part for part in written}
    for part in written:
        part._local_tensor.copy_(_part(wholes[id(part)], part)._local_tensor)

    def shown(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given[id(value)] if id(value) in given else _part(value, first)

    return tree_map(shown, made)


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[DTensor]:
    """The DTensors that `op` writes to."""
    for i, argument in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(value, DTensor):
            yield value


def _room_for(part: DTensor) -> Tensor:
    """Room for the whole of what is written without being read."""
    local = part._local_tensor
    return torch.empty_strided(part.shape, part.stride(), dtype=local.dtype, device=local.device)


def _part(whole: Tensor, like: DTensor) -> DTensor:
    """The DTensor of a `whole` tensor: laid out as `like`, where it has its shape."""
    mesh = like.device_mesh
    everywhere = (Replicate(),) * mesh.ndim
    out = DTensor.from_local(whole, mesh, everywhere, run_check=False)
    if whole.shape != like.shape or any(p.is_partial() for p in like.placements):
        return out
    return out.redistribute(placements=like.placements)
