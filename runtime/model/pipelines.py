"""Directories of pipelines: which of a pipeline's models is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwright.errors import ModelError
from shardwright.planner.contract.files import read_json
from shardwright.runtime.model.hub import USUAL, Hub

INDEX = "model_index.json"
"""The file by which diffusers recognises a pipeline."""

DENOISERS = ("transformer", "unet", "prior")
"""Names that pipelines give to the model that runs once a step; the first that exists is meant."""


def component(name: str | Path, hub: Hub = USUAL) -> str | Path:
    """Return the directory of the model that is meant; any other name as it is.

    Args:
        name: The directory of a pipeline, or any other name of a model.
        hub: Its `subfolder` is the component; by default a pipeline's denoiser is meant.

    Raises:
        ModelError: the pipeline has no such component, or no denoiser.
    """
    path, subfolder = Path(name), hub.subfolder
    if not is_directory(path) or (subfolder is None and not _is_pipeline(path)):
        return name
    known = components(path)
    wanted = (subfolder,) if subfolder else DENOISERS
    for one in wanted:
        plain = one not in (".", "..") and Path(one).name == one
        if plain and is_directory(path / one) and (path / one / "config.json").is_file():
            return path / one
    has = f"has {', '.join(known)}" if known else "has no models"
    if subfolder:
        raise ModelError(f"{name} has no model in '{subfolder:.80}': it {has}")
    raise ModelError(
        f"{name} is a pipeline without a {' or '.join(DENOISERS)}: it {has}: choose one with "
        "--subfolder (subfolder=...)"
    )


def is_directory(path: Path) -> bool:
    """Return whether `path` is a directory; a name that is too long, or has a NUL, is not."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # the name is too long, or contains a NUL
        return False


def components(pipeline: Path) -> list[str]:
    """Return the folders of a pipeline that hold a model."""
    return sorted(
        found.name
        for found in pipeline.iterdir()
        if (found / "config.json").is_file() and any(found.glob("*.safetensors*"))
    )


def _is_pipeline(path: Path) -> bool:
    """Return whether a directory holds a pipeline, and no model of its own."""
    if (path / "config.json").exists() or not (path / INDEX).is_file():
        return False
    try:
        found: Any = read_json(path / INDEX)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path / INDEX}: {error}") from None
    return isinstance(found, dict)
