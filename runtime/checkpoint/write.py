"""Save a split model as a checkpoint that plain transformers loads."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.errors import CheckpointError, UsageError
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.checkpoint.names import model_names
from shardwright.runtime.checkpoint.source import INDEX, SINGLE

if TYPE_CHECKING:
    from shardwright.runtime.mesh import Mesh

Gather = Callable[[Tensor, Placement, Any], Tensor]
"""(local tensor, its placement, the mesh) -> the whole tensor, on every rank."""

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def save(
    model: nn.Module,
    directory: str | Path,
    placements: Mapping[str, Placement],
    mesh: Mesh,
    *,
    max_shard_size: int | str = "5GB",
    gather: Gather | None = None,
) -> None:
    """Write `model` whole: safetensors with an index where there are several files, and configs.

    Every rank calls this; tensors are gathered one at a time, and rank 0 alone keeps them, up to
    `max_shard_size` of them, and writes. What is in `directory` is replaced only once all is
    written. Names are the model's own; tied parameters are written once.

    Args:
        model: with this rank's part of every parameter.
        directory: where to; it is made if need be, and other files in it stay.
        placements: parameter or buffer name -> how it lies over the mesh; a name that is absent
            is whole on each rank.
        mesh: the ranks that share the model.
        max_shard_size: bytes, or a number with KB, MB or GB, of one file at most, unless a single
            tensor is larger.
        gather: what makes tensors whole; `runtime.reshard.gather_whole` unless given.

    Raises:
        CheckpointError: the model has no weights yet, or the directory cannot be written.
        UsageError: `max_shard_size` is not a size.
    """
    if gather is None:
        from shardwright.runtime.reshard import gather_whole as gather
    limit = parse_size(max_shard_size)
    tensors = _to_save(model, placements)
    shapes = {name: _whole_shape(tensor, placed) for name, (tensor, placed) in tensors.items()}
    sizes = {n: s.numel() * tensors[n][0].dtype.itemsize for n, s in shapes.items()}
    files = _split(sizes, limit)
    writer = _rank() == 0
    target = Path(directory)
    staging = _staging(target) if writer else None
    try:
        for file, names in files.items():
            whole: dict[str, Tensor] = {}
            for name in names:
                tensor, placed = tensors[name]
                out = tensor.detach() if placed is None else gather(tensor, placed, mesh)
                if writer:
                    assert out.shape == shapes[name]
                    # A copy: what is gathered may be a view, and safetensors refuses shared memory.
                    whole[name] = torch.empty(out.shape, dtype=out.dtype).copy_(out)
                del out
            if staging is not None:
                _save_file(whole, staging / file)
        if staging is not None:
            _write_index(staging, files, sizes)
            _write_configs(model, staging)
            _replace(staging, target)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror or error}") from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    _barrier()  # no rank may look for the files before they are there


def parse_size(size: int | str) -> int:
    """Bytes in "5GB", "200 MB", "1GiB" or a plain number.

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
    """The first name of each distinct tensor -> (the local tensor, how it is placed)."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    out: dict[str, tuple[Tensor, Placement | None]] = {}
    for group in model_names(model).groups:
        placed = next((placements[name] for name in group if name in placements), None)
        out[group[0]] = (held[group[0]], placed if placed is not None and placed.meshes else None)
    if lost := [name for name, (tensor, _) in out.items() if tensor.is_meta]:
        raise CheckpointError(f"{lost[0]} has no value yet: load the weights before saving")
    return out


def _whole_shape(tensor: Tensor, placement: Placement | None) -> torch.Size:
    if placement is None:
        return tensor.shape
    shape = placement.shape
    return torch.Size([tensor.shape[d] if n is None else n for d, n in enumerate(shape)])


def _split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """File name -> the tensors in it, in the model's order, filling one file after the other."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    stem = SINGLE.removesuffix(".safetensors")
    return {
        f"{stem}-{i:05}-of-{len(shards):05}.safetensors": names
        for i, names in enumerate(shards, start=1)
    }


def _save_file(tensors: dict[str, Tensor], file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, str(file), metadata={"format": "pt"})  # transformers wants the format
    except SafetensorError as error:
        raise CheckpointError(f"cannot write {file}: {error}") from None
    file.chmod(0o644)


def _write_index(directory: Path, files: dict[str, list[str]], sizes: Mapping[str, int]) -> None:
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_configs(model: nn.Module, directory: Path) -> None:
    """config.json and generation_config.json, for models that have them."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config.architectures = [type(model).__name__]
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    config.dtype = str(dtypes[0] if dtypes else torch.get_default_dtype()).removeprefix("torch.")
    config.save_pretrained(directory)
    can_generate = getattr(model, "can_generate", None)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None and can_generate is not None and can_generate():
        generation.save_pretrained(directory)


def _staging(target: Path) -> Path:
    """An empty directory beside `target`, on the same file system."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file: give a directory to save into")
        return Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror}") from None


def _replace(staging: Path, target: Path) -> None:
    """Put the finished files in place; a new directory in one step, else file by file."""
    if not target.exists():
        staging.chmod(0o755)
        staging.rename(target)
        return
    fresh = sorted(path.name for path in staging.iterdir())
    for name in sorted(fresh, key=_weights_first):
        (staging / name).replace(target / name)
    for stale in _weights_of(target):
        if stale.name not in fresh:
            stale.unlink()


def _weights_first(name: str) -> tuple[bool, str]:
    return not name.endswith(".safetensors"), name


def _weights_of(directory: Path) -> Iterable[Path]:
    """The weight files and index of a checkpoint saved here before."""
    stem = SINGLE.removesuffix(".safetensors")
    yield from directory.glob(f"{stem}-[0-9]*-of-[0-9]*.safetensors")
    yield from (path for path in (directory / SINGLE, directory / INDEX) if path.exists())


def _rank() -> int:
    return torch.distributed.get_rank() if _distributed() else 0


def _barrier() -> None:
    if _distributed():
        torch.distributed.barrier()


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
