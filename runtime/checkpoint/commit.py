"""A folder that holds one checkpoint at any time: the old one, until one step makes it the new.

Readers take `model.safetensors` where there is one, else the files that the index names. So a new
checkpoint is written into a folder within, which nobody reads, and then one step commits:

one file        it is renamed to `model.safetensors`, whatever was there before
several files   the index is renamed to its name; over a checkpoint of one file, which readers would
                still prefer, the step is that file's removal

What no longer belongs to the checkpoint is removed after that, also what a process that was killed
has left. All of it lies in the folder itself, so it may be a mount point or a link. Configs go in
place right before the commit; one that says other than the old one cannot be switched in the same
step as the weights, and is refused.
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
from shardwright.runtime.checkpoint.source import INDEX, SINGLE

PREFIX = ".shardwright-"
"""A folder that begins so has a checkpoint that is not committed: nobody reads it."""

STEM = SINGLE.removesuffix(".safetensors")

LABELS = {"transformers_version", "dtype", "torch_dtype", "architectures", "_name_or_path"}
"""Keys of a config that may differ: with either of both the weights mean the same."""


@dataclass
class Draft:
    """A checkpoint that is being written into a folder; `close` it, committed or not.

    Attributes:
        folder: where it will be.
        made: whether the folder was made for it.
        lock: an open file that keeps other savers away; it is let go when the process ends.
        files: names of the draft -> final names, in the order in which they are put in place.
        placed: final names of those that are in place, of a checkpoint that is not committed.
    """

    folder: Path
    made: bool
    lock: int
    token: str = field(default_factory=lambda: secrets.token_hex(4))
    files: dict[Path, Path] = field(default_factory=dict)
    placed: list[Path] = field(default_factory=list)

    @classmethod
    def begin(cls, folder: Path, config: Any = None) -> Draft:
        """Begin one in `folder`, which is made if need be.

        Args:
            folder: where to.
            config: that of the new checkpoint, to be compared with that of an older one there.

        Raises:
            CheckpointError: it is a file, another process saves into it, or it holds a checkpoint
                with another config.
        """
        if "\0" in str(folder):
            raise CheckpointError("no directory has a name with a NUL character: give another")
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file: give a directory to save into")
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        draft = cls(folder, made, _locked(folder))
        try:
            draft._check_config(config)
        except BaseException:
            draft.close()
            raise
        return draft

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write a file of weights; `name` is what it is called where no older one is there."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        final = name
        if name != SINGLE and self._has_weights():  # which may have files of that name
            final = f"{STEM}-{self.token}{name.removeprefix(STEM)}"
        draft = self._named(final)
        try:
            save_file(tensors, str(draft), metadata={"format": "pt"})  # transformers wants it
        except SafetensorError as error:
            raise CheckpointError(f"cannot write {self.folder / name}: {error}") from None
        draft.chmod(0o644)

    def add_configs(self, model: Any) -> None:
        """Write config.json and generation_config.json, as `save_pretrained` of each does."""
        inside = self._inside() / "configs"
        inside.mkdir()
        model.config.save_pretrained(inside)
        generation = getattr(model, "generation_config", None)
        if generation is not None and getattr(model, "can_generate", lambda: False)():
            generation.save_pretrained(inside)
        self.files.update({p: self.folder / p.name for p in sorted(inside.iterdir())})

    def commit(self, weights: Mapping[str, str], total: int) -> None:
        """Make the draft the folder's checkpoint, and remove what was there before.

        Args:
            weights: tensor -> the file that it was written to, by the name given to `write`.
            total: bytes of all tensors.
        """
        single, index = self.folder / SINGLE, self.folder / INDEX
        shards = {d: f for d, f in self.files.items() if f.suffix == ".safetensors"}
        last = next((d for d, f in shards.items() if f == single), None)
        if last is None:
            called = dict(zip(dict.fromkeys(weights.values()), shards.values(), strict=True))
            named = {tensor: called[file].name for tensor, file in weights.items()}
            last = self._named(INDEX)
            text = {"metadata": {"total_size": total}, "weight_map": named}
            last.write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
        for draft in self.files:
            _flush(draft)
        for draft, final in self.files.items():
            if draft != last:
                draft.replace(final)
                self.placed.append(final)
        _flush(self.folder)
        kept = {*self.files.values()}
        last.replace(self.files[last])
        if index in kept:
            single.unlink(missing_ok=True)
        self.placed.clear()
        _flush(self.folder)
        self._remove(path for path in self._weights() if path not in kept)

    def close(self) -> None:
        """Remove what was not committed, and let other savers in."""
        self._remove(f for f in self.placed if self.made or f.suffix == ".safetensors")
        self._remove(self.folder.glob(f"{PREFIX}*"))
        if self.made and not any(self.folder.iterdir()):
            self.folder.rmdir()
        os.close(self.lock)

    def _named(self, final: str) -> Path:
        """The file of the draft that becomes `final`."""
        draft = self._inside() / final
        self.files[draft] = self.folder / final
        return draft

    def _inside(self) -> Path:
        """Where the draft is written, and what safetensors writes on the way to a file of its."""
        inside = self.folder / f"{PREFIX}{self.token}"
        inside.mkdir(exist_ok=True)
        return inside

    def _weights(self) -> Iterable[Path]:
        """Weight files and index of checkpoints that were saved here."""
        yield from self.folder.glob(f"{STEM}-*[0-9]-of-[0-9]*.safetensors")
        yield from (p for p in (self.folder / SINGLE, self.folder / INDEX) if p.exists())

    def _has_weights(self) -> bool:
        return any(True for _ in self._weights())

    def _check_config(self, config: Any) -> None:
        """Refuse to replace a checkpoint by one that is read in another way."""
        old = self.folder / "config.json"
        if config is None or not self._has_weights() or not old.exists():
            return
        try:
            read = type(config).from_dict(json.loads(old.read_text()))
            told, new = read.to_dict(), config.to_dict()
        except Exception:  # a config that is damaged, or of another class, is another one
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
        """Remove what nobody reads; what cannot be removed now goes with the next save."""
        for path in list(paths):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def _locked(folder: Path) -> int:
    """An open folder, which nobody else has open so."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: then nobody is kept away
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"another process is saving into {folder}: wait for it"
                ) from None
    except CheckpointError:
        os.close(handle)
        raise
    return handle


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems cannot do that with a folder
            raise
    finally:
        os.close(handle)
