"""Compiles `collectives.cpp` to a library when it is first needed, and keeps the library.

It is kept in the user's cache folder, under a name with a digest of its source and of the compiler
flags. Since a library is code, that folder is used only if nobody else can write to it. Otherwise
each process compiles its own library in a temporary folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.errors import first_line

SOURCE = Path(__file__).with_name("collectives.cpp")
FLAGS = ("-std=c++17", "-O3", "-fwrapv", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120.0
"""Time limit for the compiler, which takes a few seconds on an idle machine."""

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""File mode bits that let others write to a file."""

CHECK = ctypes.CFUNCTYPE(c_int)
SIZES = ctypes.POINTER(c_uint64)
FUNCTIONS: dict[str, tuple[type | None, list[Any]]] = {
    "bytes": (c_size_t, [c_size_t, c_size_t]),
    "state": (c_size_t, []),
    "open": (None, [c_void_p, c_void_p, c_size_t, c_size_t, c_size_t, c_uint64, CHECK]),
    "leave": (None, [c_void_p]),
    "all_reduce": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int]),
    "all_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t]),
    "reduce_scatter": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int]),
    "all_to_all": (c_int, [c_void_p, c_void_p, c_void_p, SIZES, SIZES]),
}
"""Function name -> its return type and argument types."""


class UnavailableError(Exception):
    """The library cannot be had on this machine; the text says why."""


@cache
def library() -> ctypes.CDLL:
    """Return the library, compiled now if this user does not have it yet.

    Raises:
        UnavailableError: there is no compiler, it fails, or the library cannot be stored.
    """
    try:
        kept = _kept()
        if kept is not None:
            try:
                return _loaded(kept)
            except (OSError, AttributeError):  # an incomplete file, for example after a full disk
                kept.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
            file = Path(folder) / "collectives.so"
            _compile(file)
            return _loaded(file)
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        raise UnavailableError(first_line(error)) from error


def _loaded(file: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(file))
    for name, (returns, takes) in FUNCTIONS.items():
        function = getattr(loaded, f"shardwright_{name}")
        function.restype, function.argtypes = returns, takes
    return loaded


def version() -> str:
    """Return a digest that is equal for libraries that can share memory."""
    text = SOURCE.read_bytes() + " ".join((*FLAGS, platform.system(), platform.machine())).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _kept() -> Path | None:
    """Return the library in the cache folder, compiled by one process if it is not there yet.

    Returns None if others could have written it, or could replace it before it is loaded.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)
        lock = (folder / "lock").open("w")
    except OSError:  # for example, the home folder is not writable
        return None
    file = folder / f"collectives-{version()}.so"
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or the process dies
        if not _is_ours(folder) or not all(map(_is_safe, folder.parents)):
            return None
        if not _is_ours(file):
            part = file.with_suffix(f".{os.getpid()}")
            try:
                _compile(part)
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)
        return file


def _is_ours(path: Path) -> bool:
    """Return whether `path` exists, belongs to this user, and nobody else can write to it."""
    if path.is_symlink() or not path.exists():
        return False
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & WRITABLE_BY_OTHERS


def _is_safe(folder: Path) -> bool:
    """Return whether nobody else can replace our folder inside `folder`."""
    about = folder.stat()
    shared = about.st_mode & WRITABLE_BY_OTHERS and not about.st_mode & stat.S_ISVTX
    return about.st_uid in (0, os.getuid()) and not shared


def _compile(out: Path) -> None:
    asked = os.environ.get("CXX")
    compiler = next(filter(None, map(shutil.which, [asked] if asked else COMPILERS)), None)
    if compiler is None:
        raise OSError(f"there is no C++ compiler ({asked or ', '.join(COMPILERS)})")
    done = subprocess.run(
        [compiler, *FLAGS, "-o", str(out), str(SOURCE)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise OSError(f"{compiler} failed: {(done.stderr.strip() or 'no message').splitlines()[0]}")
