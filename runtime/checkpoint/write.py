"""Saves a split model as a checkpoint that plain transformers loads."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.errors import CheckpointError, UsageError
from shardwright.planner.contract.names import dtype_name
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.checkpoint.commit import Draft
from shardwright.runtime.checkpoint.names import model_names
from shardwright.runtime.checkpoint.source import STEM
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.packages import config_of
from shardwright.runtime.quantized.kept import KeptWeight, StoredTensor
from shardwright.runtime.ranks.agreement import agree
from shardwright.runtime.tensors.parameters import full_of

T = TypeVar("T")

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def save(
    model: nn.Module,
    directory: str | Path,
    placements: Mapping[str, Placement],
    mesh: Mesh,
    max_shard_size: int | str = "5GB",
    dequantize: bool = False,
) -> None:
    """Write the unsharded model as safetensors files, an index if there are several, and configs.

    Every rank must call this. Tensors are gathered one at a time. Only rank 0 keeps them, up to
    `max_shard_size` at once, and writes. A checkpoint that is already in `directory` is replaced in
    one step after everything is written (see `commit.py`). Names are the model's own; tied
    parameters are written once.

    Args:
        model: the model with this rank's part of every parameter.
        directory: where to save; it is created if it does not exist, and other files in it stay.
        placements: parameter or buffer name -> its placement; a tensor without one is replicated.
        mesh: the ranks that share the model.
        max_shard_size: most bytes per file, or a number with KB, MB or GB. A single tensor may be
            larger.
        dequantize: write weights dense that are held as a quantized checkpoint stores them. By
            default their stored tensors are written again, byte for byte, under their own names.

    Raises:
        CheckpointError: the model has no weights yet, the directory cannot be written, or it holds
            a checkpoint with another config.
        DistributedError: another rank failed or died.
        UsageError: `max_shard_size` is not a size.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    limit = parse_size(max_shard_size)
    tensors = _to_save(model, placements)
    stored = {} if dequantize else _stored(tensors)
    shapes = {name: _whole_shape(tensor, placed) for name, (tensor, placed) in tensors.items()}
    sizes = {n: s.numel() * tensors[n][0].dtype.itemsize for n, s in shapes.items()}
    sizes |= {name: tensor.nbytes for name, tensor in stored.items()}
    config = _config(model)
    stem = getattr(config, "stem", STEM)
    if not getattr(config, "in_parts", True):
        limit = max(limit, sum(sizes.values()) + 1)
    files = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=limit,
    ).filename_to_tensors or {f"{stem}.safetensors": []}
    if stored:
        config = copy.deepcopy(config)
        config.quantization_config = dict(next(iter(stored.values())).quantization)
    draft = on_first(lambda: Draft.begin(Path(directory), config), directory)
    try:
        for file, names in files.items():
            whole: dict[str, Tensor] = {}
            for name in names:
                if name in stored:
                    if draft is not None:
                        whole[name] = stored[name].read()
                    continue
                tensor, placed = tensors[name]
                out = full_of(tensor.detach(), placed, mesh)
                if draft is not None:
                    assert out.shape == shapes[name]
                    # A copy: gathered tensors may be views, and safetensors refuses shared memory.
                    whole[name] = torch.empty(out.shape, dtype=out.dtype).copy_(out)
                del out
            on_first(lambda d=draft, f=file, w=whole: d and d.write(f, w), directory)
        on_first(lambda: draft and _finish(draft, model, config, files, sizes), directory)
    finally:
        if draft is not None:
            draft.close()


def on_first(work: Callable[[], T], directory: str | Path) -> T | None:
    """Run `work` on rank 0 and report its outcome to all ranks. Returns None on other ranks.

    Raises:
        CheckpointError: files could not be written; on all ranks.
        DistributedError: `work` failed otherwise on rank 0, or a rank died.
    """
    out, failure = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            out = work()
        except OSError as error:
            failure = CheckpointError(f"cannot write {directory}: {error.strerror or error}")
        except Exception as error:
            failure = error
    agree("saving", failure)
    return out


def _finish(
    draft: Draft,
    model: nn.Module,
    config: Any,
    files: Mapping[str, list[str]],
    sizes: Mapping[str, int],
) -> None:
    if config is not None:
        draft.add_configs(model, config)
    draft.commit({n: f for f, names in files.items() for n in names}, sum(sizes.values()))


def _config(model: nn.Module) -> Any:
    """Return the config to write, with this model's class and dtype; None if there is none."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return config_of(model)
    config.architectures = [type(model).__name__]
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    config.dtype = dtype_name(dtypes[0] if dtypes else torch.get_default_dtype())
    return config


def parse_size(size: int | str) -> int:
    """Parse "5GB", "200 MB", "1GiB" or a plain number to bytes.

    Raises:
        UsageError: it is none of these, or not above 0.
    """
    match = re.fullmatch(r"(\d+)\s*(?:([KMG]I?)?B)?", str(size).strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"'{size}' is not a size: give bytes, or a number with KB, MB or GB")
    return int(match[1]) * UNITS[(match[2] or "").upper()]


def _to_save(
    model: nn.Module, placements: Mapping[str, Placement]
) -> dict[str, tuple[Tensor, Placement | None]]:
    """Map the first name of each distinct tensor to its local tensor and placement.

    Leaves out what transformers does not save either and computes anew when it loads.
    """
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    anew = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    out: dict[str, tuple[Tensor, Placement | None]] = {}
    for every in model_names(model).groups:
        if not (group := [name for name in every if name not in anew]):
            continue
        placed = next((placements[name] for name in every if name in placements), None)
        out[group[0]] = (held[group[0]], placed if placed is not None and placed.meshes else None)
    if lost := [name for name, (tensor, _) in out.items() if tensor.is_meta]:
        raise CheckpointError(f"{lost[0]} has no value yet: load the weights before saving")
    return out


def _stored(tensors: dict[str, tuple[Tensor, Placement | None]]) -> dict[str, StoredTensor]:
    """Return the stored tensors, by key, of weights that are held so; drop these from `tensors`."""
    out: dict[str, StoredTensor] = {}
    for name, (tensor, _) in list(tensors.items()):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(local, KeptWeight):
            out |= local.held.stored
            del tensors[name]
    return out


def _whole_shape(tensor: Tensor, placement: Placement | None) -> torch.Size:
    if placement is None:
        return tensor.shape
    shape = placement.shape
    return torch.Size([tensor.shape[d] if n is None else n for d, n in enumerate(shape)])
