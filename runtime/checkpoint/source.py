"""Opens a directory of safetensors files, or fetches it from the Hub, reading headers only."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from shardwright.errors import CheckpointError, first_line, in_one_line
from shardwright.planner.contract.files import read_json
from shardwright.runtime.checkpoint.header import Entry, read_header
from shardwright.runtime.checkpoint.mapped import StoredFile
from shardwright.runtime.checkpoint.names import few
from shardwright.runtime.checkpoint.quantized import as_dense
from shardwright.runtime.model.hub import USUAL, Hub
from shardwright.runtime.model.packages import STEMS as PACKAGE_STEMS
from shardwright.runtime.model.pipelines import component
from shardwright.runtime.quantized.config import Quantization
from shardwright.runtime.quantized.layout import QuantizedWeight

STEM = "model"
SINGLE, INDEX = f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"

STEMS = (STEM, *sorted({*PACKAGE_STEMS.values()} - {STEM}))
"""How the names of weight files begin, which `save_pretrained` of transformers or others writes."""

LONGEST_NAME = 255
"""Most bytes of a file name."""

SAMPLE = 1024
"""Bytes of a tensor that a digest reads at a time."""

SAMPLES = 16
"""Samples of each tensor at least; shorter tensors are read in full."""

SAMPLED = 4 << 20
"""Bytes of a long tensor per sample: about one byte in 4,000 is read."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory with safetensors files. Opening it reads their headers and no tensor.

    The files stay open for as long as this object exists. Tensors are read from the files whose
    headers were read, even if another checkpoint is saved in their place meanwhile.

    Attributes:
        tensors: what can be read; of a quantized checkpoint that is shown as dense, the weights.
        stored: what the files hold.
        quantized: the weights that are computed from what is stored.
        quantization: the `quantization_config` that they are computed by.
    """

    directory: Path
    tensors: dict[str, Entry]
    files: dict[Path, StoredFile]
    stored: dict[str, Entry]
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    quantization: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path, hub: Hub = USUAL) -> Checkpoint:
        """Find the tensors under `path`.

        Args:
            path: a directory, or the id of a model on the Hugging Face Hub.
            hub: options for fetching such an id.

        Raises:
            CheckpointError: there is no such directory, it has no safetensors files, or files are
                missing, damaged or truncated.
        """
        path = component(path, hub)
        directory = Path(path)
        if not directory.exists() and _is_hub_id(str(path)):
            directory = _download(str(path), hub)
        if not directory.is_dir():
            what = "is a file" if directory.exists() else "does not exist"
            raise CheckpointError(
                f"{path} {what}: give the directory that holds the model's safetensors files, "
                "or the model's id on the Hugging Face Hub"
            )
        paths, named = _files(directory)
        files = {path: _opened(path) for path in paths}
        tensors = _merge(files.values(), named)
        checkpoint = cls(directory, tensors, files, tensors)
        if len(files) > 1 and not all(file.is_in_place() for file in files.values()):
            raise CheckpointError(f"{directory} was saved anew while it was opened: load it again")
        return checkpoint

    def dequantized(self, quantization: Quantization, dtype: torch.dtype) -> Checkpoint:
        """Return the same checkpoint with dense weights of `dtype`, computed where they are read.

        Raises:
            CheckpointError: the tensors are not stored as `quantization` says.
        """
        tensors, weights = as_dense(self.stored, quantization, dtype, self._bytes)
        fields = quantization.fields
        return replace(self, tensors=tensors, quantized=weights, quantization=fields)

    def _bytes(self, entry: Entry) -> bytes:
        file = self.files[entry.file]
        return file.bytes_at(file.data + entry.offset, entry.nbytes)

    def adds_nothing(self, key: str) -> bool:
        """Return whether `key` is a bias of zeros, which packers store of modules without bias."""
        module, _, leaf = key.rpartition(".")
        quantized = leaf == "bias" and f"{module}.weight" in self.quantized
        return quantized and not any(self._bytes(self.stored[key]))

    def check_unchanged(self) -> None:
        """Check that nobody wrote into the files since they were opened.

        Raises:
            CheckpointError: a file was changed.
        """
        for path, file in self.files.items():
            if file.is_changed():
                raise CheckpointError(
                    f"{path} was written into while it was loaded: load it again when it is saved"
                )

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the floating dtype of most bytes, ignoring 8-bit floats; None if none."""
        sizes: Counter[torch.dtype] = Counter()
        for entry in self.stored.values():
            if entry.dtype.is_floating_point and entry.dtype.itemsize > 1:
                sizes[entry.dtype] += entry.nbytes
        return sizes.most_common(1)[0][0] if sizes else None

    def digest(self) -> str:
        """Return a digest of the headers and of bytes sampled from all over each tensor.

        Ranks compare it to see that all read the same weights. Further training, or one tensor of
        another checkpoint, changes it. Two checkpoints that differ in only a few numbers of a long
        tensor may have the same digest.
        """
        found = sha256()
        for name, entry in sorted(self.stored.items()):
            found.update(f"{name} {entry.dtype} {entry.shape} {entry.nbytes}\n".encode())
            file = self.files[entry.file]
            for start, count in _samples(entry.nbytes):
                found.update(file.bytes_at(file.data + entry.offset + start, count))
        return f"digest {found.hexdigest()[:12]}"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(entry.nbytes for entry in self.stored.values())


def _samples(size: int) -> list[tuple[int, int]]:
    """Return (start, length) of a tensor's samples: evenly spaced, the first and last bytes too."""
    if size <= SAMPLES * SAMPLE:
        return [(0, size)]
    count = max(SAMPLES, size // SAMPLED)
    return [(i * (size - SAMPLE) // (count - 1), SAMPLE) for i in range(count)]


def _opened(path: Path) -> StoredFile:
    try:
        return StoredFile(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None


def _files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the checkpoint's safetensors files, and the index's map (empty if none)."""
    for stem in STEMS:
        if (directory / f"{stem}.safetensors").is_file():
            return [directory / f"{stem}.safetensors"], {}
    indices = sorted(directory.glob("*.safetensors.index.json"))
    for usual in (directory / f"{stem}.safetensors.index.json" for stem in reversed(STEMS)):
        indices = [usual] if usual in indices else indices
    if len(indices) > 1:
        raise CheckpointError(
            f"{directory} has several indices ({few(i.name for i in indices)}) and none is "
            f"{INDEX}: keep one of them"
        )
    if indices:
        return _indexed(indices[0])
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files, {}
    if files:
        raise CheckpointError(
            f"{directory} has {len(files)} safetensors files and neither {SINGLE} nor {INDEX}: "
            "save the model again with save_pretrained, which writes the index"
        )
    if pickled := sorted(
        [*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")]
    ):
        raise CheckpointError(
            f"{directory} has pickled weights only ({pickled[0].name}), which cannot be read in "
            "part: load it once with transformers and save_pretrained() it as safetensors"
        )
    raise CheckpointError(
        f"{directory} has no safetensors file: give the directory that holds {SINGLE} or {INDEX}"
    )


def _indexed(index: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files that `index` names, and its map of tensor name -> file name."""
    try:
        named = read_json(index)["weight_map"]
        names = sorted(set(named.values()))
        files = [index.parent / name for name in names]
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"{index} is not a safetensors index (JSON with a 'weight_map'): fetch it again"
        ) from None
    if outside := [n for n in names if Path(n).name != n or len(n.encode()) > LONGEST_NAME]:
        raise CheckpointError(
            f"{index} names '{outside[0]:.80}', which is not in its own directory: files in other "
            "directories are not read"
        )
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(
            f"{index} names {few(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            "not there: fetch the rest of the checkpoint"
        )
    return files, named


def _merge(files: Iterable[StoredFile], named: dict[str, str]) -> dict[str, Entry]:
    """Collect the tensors of `files`; each must be in one file only, and where the index says."""
    tensors: dict[str, Entry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in tensors:
                raise CheckpointError(
                    f"{file.path.parent}: {name} is in both {tensors[name].file.name} and "
                    f"{file.path.name}: "
                    "remove the file that does not belong to this checkpoint"
                )
            tensors[name] = entry
    for name, file_name in named.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise CheckpointError(
                f"the index says that {name} is in {file_name}, but it is not: "
                f"fetch {file_name} and its index again, from the same revision"
            )
    return tensors


def _is_hub_id(text: str) -> bool:
    """Return whether `text` is `name` or `owner/name`, and does not look like a path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", text) is not None


def _download(model_id: str, hub: Hub) -> Path:
    """Fetch a model's JSON files, then only the safetensors files that belong to it."""
    from huggingface_hub import errors, snapshot_download

    def fetch(*patterns: str) -> Path:
        found = snapshot_download(model_id, allow_patterns=list(patterns), **hub.options())
        return Path(found)

    try:
        directory = fetch("*.json")
        # Some repositories hold the weights twice (a "consolidated" copy): fetch only one of them.
        index = directory / INDEX
        named = json.loads(index.read_text())["weight_map"] if index.is_file() else {"": SINGLE}
        directory = fetch(*set(named.values()))
        if not any(directory.glob("*.safetensors")):
            directory = fetch("*.safetensors")
    except errors.GatedRepoError:
        why = "access to it is gated: accept its terms on its page, then run `hf auth login`"
    except errors.RepositoryNotFoundError:
        why = "neither a directory nor a model on the hub has this name: check it"
    except errors.RevisionNotFoundError:
        why = f"it has no revision {hub.revision}"
    except (OSError, ValueError, KeyError) as error:
        # Offline mode, a missing network and an empty cache all raise one of these.
        why = first_line(error).rstrip(". ")
        why = f"{why}. If you meant a directory, there is none of that name here"
    except Exception as error:  # the hub's HTTP client has its own exceptions
        why = f"{in_one_line(error).rstrip('. ')}."
    else:
        return directory
    raise CheckpointError(f"cannot fetch {model_id} from the Hugging Face Hub: {why}")
