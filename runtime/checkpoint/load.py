"""Fills a model whose parameters are on meta, from a checkpoint or with random numbers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from shardwright.errors import CheckpointError, PlanError
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.names import grouped
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.checkpoint.conversion import Conversions
from shardwright.runtime.checkpoint.names import all_tensors, match_names, model_names
from shardwright.runtime.checkpoint.read import Report, Wanted, matches, read_shards
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.quantized.kept import KeptWeight
from shardwright.runtime.redistribution.reshard import take_local


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    placements: Mapping[str, Placement],
    coords: Coords,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    allow_surplus: bool = False,
    progress: bool = False,
    conversions: Conversions | None = None,
    keep: bool = False,
) -> Report:
    """Give every parameter and buffer of `model` its value on this rank, on `device`.

    Parameters on meta are replaced by real ones, and real ones are filled in place. Tied names
    still share one parameter. Buffers that checkpoints do not hold keep their values and move to
    `device`. Parameters that a checkpoint may lack get the values that the model computes for them.

    Args:
        model: as `empty_model` builds it, or with layers replaced by local ones of the same names.
        checkpoint: where the weights are.
        placements: parameter or buffer name -> its placement; a tensor without one is replicated.
            For a tied parameter any one of its names is enough.
        coords: this rank's coordinate on each mesh dim.
        device: where tensors on meta are made real.
        dtype: what floating tensors are cast to; None keeps the checkpoint's dtypes. Those of
            `conversions.dtypes` get the dtype given there.
        allow_surplus: skip checkpoint tensors that the model has no place for.
        progress: show a bar on stderr if it is a terminal.
        conversions: made before layers were replaced; required if any layer was replaced.
        keep: hold quantized weights as they are stored; they are then frozen.

    Raises:
        CheckpointError: the checkpoint does not belong to this model.
    """
    names = model_names(model)
    conversions = conversions or Conversions(model)
    match = match_names(
        names,
        conversions.order(checkpoint.tensors),
        str(checkpoint.directory),
        conversions.rename,
        partial(conversions.convert, checkpoint.tensors),
        allow_surplus,
        checkpoint.adds_nothing,
    )
    tensors = all_tensors(model)
    group_of = {group[0]: group for group in names.groups}
    made = {n: conversions.computed.value(n) for n in match.computed if tensors[n].is_meta}
    if lacking := [name for name, value in made.items() if value is None]:
        raise CheckpointError(
            f"{checkpoint.directory} lacks {lacking[0]}, which {names.title} draws at random where "
            "it is missing: use a checkpoint that holds it"
        )
    placed = {name: _placement(placements, group_of[name]) for name in match.sources}
    wanted: dict[str, Wanted] = {}
    for name, source in match.sources.items():
        own = next((conversions.dtypes[n] for n in group_of[name] if n in conversions.dtypes), None)
        tensor = tensors[name]
        if own is not None and not isinstance(tensor, nn.Parameter):
            tensor = tensor.to(own)  # a buffer that is not on meta
        wanted[name] = Wanted(source, tensor, placed[name], own)
    filled, report = read_shards(
        checkpoint, wanted, coords, device=device, dtype=dtype, progress=progress, keep=keep
    )
    for name, twins in match.twins.items():
        for twin in twins:
            if not matches(checkpoint, twin, filled[name], placed[name], coords):
                raise CheckpointError(
                    f"{checkpoint.directory}: {match.sources[name].key} and {twin.key} differ, but "
                    f"{names.title} ties them: set tie_word_embeddings to false in its config"
                )
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in filled.items():
        if (there := tensor.to(device)) is not tensors[name]:
            put(modules, group_of[name], there)
    for name, value in made.items():
        assert value is not None
        placement = _placement(placements, group_of[name])
        part = value if placement is None else take_local(value, placement, coords)
        put(modules, group_of[name], part.to(device, conversions.dtypes.get(name, dtype)))
    kept = (*names.transient, *(name for name in match.computed if name not in made))
    for buffers in grouped((id(tensors[name]), name) for name in kept).values():
        put(modules, buffers, tensors[buffers[0]].to(device))
    checkpoint.check_unchanged()
    return replace(report, unread=match.unread)


def put(modules: Mapping[str, nn.Module], names: Iterable[str], tensor: torch.Tensor) -> None:
    """Set `tensor` as the parameter or buffer under each of `names`.

    `modules` maps names to all modules of the model.
    """
    made: nn.Parameter | None = None
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = modules[owner]
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
            continue
        old = module._parameters[leaf]
        assert old is not None
        if made is None:
            trained = old.requires_grad and not isinstance(tensor, KeptWeight)
            made = nn.Parameter(tensor.detach(), requires_grad=trained)
            vars(made).update(vars(old))
        module._parameters[leaf] = made


def _placement(placements: Mapping[str, Placement], group: tuple[str, ...]) -> Placement | None:
    """Return the one placement of a tied parameter, given under any of its names."""
    placed = {str(placements[name]): placements[name] for name in group if name in placements}
    if len(placed) > 1:
        raise PlanError(
            f"{', '.join(group)} are one parameter, but the plan places it as "
            f"{' and as '.join(repr(text) for text in placed)}: make the plan again for this model"
        )
    return next(iter(placed.values()), None)


SPREAD = 0.02
"""Standard deviation of the random numbers, the one most models are initialised with."""


def without_weights(model: nn.Module, device: torch.device | str) -> None:
    """Make all meta parameters and buffers of `model` real, and move all tensors to `device`.

    The random numbers depend only on names and shapes, so ranks with equal shapes get the same.
    Tied names still share one parameter.
    """
    tensors = all_tensors(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for names in grouped((id(tensor), name) for name, tensor in tensors.items()).values():
        tensor = tensors[names[0]]
        if not tensor.is_meta:
            put(modules, names, tensor.detach().to(device))
            continue
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        if made.is_floating_point() or made.is_complex():
            generator = torch.Generator(device).manual_seed(zlib.crc32(names[0].encode()))
            made.normal_(0, SPREAD, generator=generator)
        put(modules, names, made)
