"""Replaces the checkpoint in a folder atomically: it holds the old one until one commit step.

Readers take `model.safetensors` if it exists, and otherwise the files that the index names. A new
checkpoint is therefore written into a hidden subfolder first. One step then commits it:

one file        the file is renamed to `model.safetensors`, replacing any older one
several files   the index is renamed to its final name; where the old checkpoint is a single file,
                which readers would still prefer, the step is the removal of that file

Files of the old checkpoint are removed after the commit, and so is what a killed process left.
Everything is inside the folder itself, so the folder may be a mount point or a link. Configs are
put in place right before the commit. A config that differs from the old one in meaning is refused,
because config and weights cannot be replaced in the same step.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.runtime.checkpoint.source import STEM

PREFIX = ".shardwright-"
"""Prefix of folders that hold an uncommitted checkpoint. Readers ignore them."""

LABELS = {
    "transformers_version", "_diffusers_version", "dtype", "torch_dtype", "architectures",
    "_name_or_path",
}  # fmt: skip
"""Config keys that may differ from the old config: they do not change what the weights mean."""


BESIDE = (
    "tokenizer*", "*token*.json", "vocab*", "merges.txt", "*.tiktoken", "spiece.model",
    "sentencepiece*.model", "chat_template*", "*processor_config.json",
)  # fmt: skip
"""Names of files that belong to a tokenizer or a processor."""


def _beside(name: str | None) -> list[Path]:
    """Return the files of a tokenizer or processor in the directory of a checkpoint."""
    if not name or not (Path(name) / "config.json").is_file():  # made in code, or a hub id
        return []
    directory = Path(name)
    found = {file for pattern in BESIDE for file in directory.glob(pattern) if file.is_file()}
    return sorted(found)


@dataclass
class Draft:
    """A checkpoint that is being written. Call `close` at the end, whether committed or not.

    Attributes:
        folder: the folder that the checkpoint will be in.
        made: whether `begin` created the folder.
        stem: how the names of weight files begin.
        lock: file descriptor of the lock against other savers; closing it releases the lock, and
            so does the end of the process.
        token: random part of the draft folder's name.
        files: draft file -> final file, in the order in which they are put in place.
        placed: new final files already in place, while the checkpoint is not committed.
    """

    folder: Path
    made: bool
    lock: int
    stem: str = STEM
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    files: dict[Path, Path] = field(default_factory=dict)
    placed: list[Path] = field(default_factory=list)

    @classmethod
    def begin(cls, folder: Path, config: Any) -> Draft:
        """Begin a draft in `folder`, which is created if it does not exist.

        Args:
            folder: the folder to save into.
            config: the new checkpoint's config, compared with that of an older checkpoint there.

        Raises:
            CheckpointError: `folder` is a file, another process is saving into it, or it holds a
                checkpoint with another config.
        """
        if "\0" in str(folder):
            raise CheckpointError("no directory has a name with a NUL character: give another")
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file: give a directory to save into")
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        draft = cls(folder, made, _locked(folder), getattr(config, "stem", STEM))
        try:
            draft._check_config(config)
        except BaseException:
            draft.close()
            raise
        return draft

    @property
    def single(self) -> Path:
        """Where the weights are if they are one file."""
        return self.folder / f"{self.stem}.safetensors"

    @property
    def index(self) -> Path:
        """Where the index is if they are several."""
        return self.folder / f"{self.stem}.safetensors.index.json"

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write a weight file. It gets another final name if an older checkpoint may use `name`."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        final = name
        if name != self.single.name and self._has_weights():  # an old file may have this name
            final = f"{self.stem}-{self.token}{name.removeprefix(self.stem)}"
        draft = self._named(final)
        try:
            save_file(tensors, str(draft), metadata={"format": "pt"})  # transformers requires it
        except SafetensorError as error:
            raise CheckpointError(f"cannot write {self.folder / name}: {error}") from None
        draft.chmod(0o644)

    def add_configs(self, model: Any, config: Any) -> None:
        """Write `config` and generation_config.json with their `save_pretrained`.

        Files of a tokenizer or processor are copied from the directory that the model was loaded
        from, unless the folder has them.
        """
        inside = self._inside() / "configs"
        inside.mkdir()
        config.save_pretrained(inside)
        generation = getattr(model, "generation_config", None)
        if generation is not None and getattr(model, "can_generate", lambda: False)():
            try:
                generation.save_pretrained(inside)
            except ValueError as error:  # settings that contradict each other
                raise CheckpointError(
                    "the model's generation_config cannot be saved as it is: change it, and save "
                    f"again ({' '.join(str(error).split()):.400})"
                ) from None
        for file in _beside(getattr(config, "name_or_path", None)):
            if not (self.folder / file.name).exists():
                shutil.copyfile(file, inside / file.name)
        self.files.update({p: self.folder / p.name for p in sorted(inside.iterdir())})

    def commit(self, weights: Mapping[str, str], total: int) -> None:
        """Make the draft the folder's checkpoint, and remove the old one.

        Args:
            weights: tensor name -> the name given to `write` for its file.
            total: bytes of all tensors.
        """
        single, index = self.single, self.index
        shards = {d: f for d, f in self.files.items() if f.suffix == ".safetensors"}
        last = next((d for d, f in shards.items() if f == single), None)
        if last is None:
            called = dict(zip(dict.fromkeys(weights.values()), shards.values(), strict=True))
            named = {tensor: called[file].name for tensor, file in weights.items()}
            last = self._named(index.name)
            text = {"metadata": {"total_size": total}, "weight_map": named}
            last.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
        for draft in self.files:
            _flush(draft)
        for draft, final in self.files.items():
            if draft != last:
                is_new = not final.exists()
                draft.replace(final)
                self.placed += [final] if is_new else []
        _flush(self.folder)
        kept = {*self.files.values()}
        last.replace(self.files[last])
        if index in kept:
            single.unlink(missing_ok=True)
        self.placed.clear()
        _flush(self.folder)
        self._remove(path for path in self._weights() if path not in kept)

    def close(self) -> None:
        """Remove everything that is not committed, and release the lock."""
        self._remove(self.placed)
        self._remove(self.folder.glob(f"{PREFIX}*"))
        if self.made and not any(self.folder.iterdir()):
            self.folder.rmdir()
        os.close(self.lock)

    def _named(self, final: str) -> Path:
        """Return the draft file for the final name `final`, and record the pair."""
        draft = self._inside() / final
        self.files[draft] = self.folder / final
        return draft

    def _inside(self) -> Path:
        """Return the draft folder; temporary files of safetensors are in it too."""
        inside = self.folder / f"{PREFIX}{self.token}"
        inside.mkdir(exist_ok=True)
        return inside

    def _weights(self) -> Iterable[Path]:
        """Yield the weight files and index of all checkpoints saved in this folder."""
        yield from self.folder.glob(f"{self.stem}-*[0-9]-of-[0-9]*.safetensors")
        yield from (p for p in (self.single, self.index) if p.exists())

    def _has_weights(self) -> bool:
        return any(True for _ in self._weights())

    def _check_config(self, config: Any) -> None:
        """Refuse to replace a checkpoint whose config gives the weights another meaning."""
        old = self.folder / "config.json"
        if config is None or not self._has_weights() or not old.exists():
            return
        try:
            read = type(config).from_dict(json.loads(old.read_text()))
            told, new = read.to_dict(), config.to_dict()
        except Exception:  # a damaged config, or one of another class, counts as different
            told, new = {}, {"model_type": None}
        differ = [k for k in sorted(told.keys() | new.keys()) if told.get(k) != new.get(k)]
        if other := [k for k in differ if k not in LABELS]:
            raise CheckpointError(
                f"{self.folder} holds a checkpoint with another config ('{other[0]}' differs), and "
                "config and weights cannot be replaced in one step: save into a new directory, or "
                "remove the old checkpoint first"
            )

    @staticmethod
    def _remove(paths: Iterable[Path]) -> None:
        """Remove files and folders. What cannot be removed now is removed by the next save."""
        for path in list(paths):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def _locked(folder: Path) -> int:
    """Open the folder with an exclusive lock, and return its file descriptor."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CheckpointError(f"another process is saving into {folder}: wait for it") from None
    except OSError:
        pass  # on a file system without locks, savers do not exclude each other
    return handle


def _flush(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems cannot fsync a folder
            raise
    finally:
        os.close(handle)
