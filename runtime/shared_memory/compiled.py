"""`collectives.cpp` as a library: compiled when it is first needed, then kept."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from ctypes import c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("collectives.cpp")
FLAGS = ("-std=c++17", "-O3", "-fwrapv", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120.0
"""What the compiler may take: a few on a machine that does little else."""

CHECK = ctypes.CFUNCTYPE(c_int)
FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "bytes": (c_size_t, [c_size_t, c_size_t]),
    "state": (c_size_t, []),
    "open": (None, [c_void_p, c_void_p, c_size_t, c_size_t, c_size_t, c_uint64, CHECK]),
    "leave": (None, [c_void_p]),
    "all_reduce": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int]),
    "all_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t]),
    "reduce_scatter": (c_int, [c_void_p, c_void_p, c_void_p, c_size_t, c_int]),
}
"""Name -> what it returns, and what it takes."""


class UnavailableError(Exception):
    """There is no such library on this machine; the text says why."""


@cache
def library() -> ctypes.CDLL:
    """The library, compiled if nobody has done that for this user before.

    Raises:
        UnavailableError: there is no compiler, it fails, or there is no place for the library.
    """
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise UnavailableError(str(error).strip().splitlines()[0]) from error
    for name, (returns, takes) in FUNCTIONS.items():
        function = getattr(loaded, f"shardwright_{name}")
        function.restype, function.argtypes = returns, takes
    return loaded


def version() -> str:
    """What is the same for libraries that can talk to each other."""
    text = SOURCE.read_bytes() + " ".join((*FLAGS, platform.system(), platform.machine())).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _compiled() -> Path:
    """The file: made by one process, under a lock, and moved into its place when it is whole."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwright"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise OSError(f"{folder} can be written by others, and what is in it is run")
    file = folder / f"collectives-{version()}.so"
    if file.exists():
        return file
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed, or its process killed
        if not file.exists():
            part = file.with_suffix(f".{os.getpid()}")
            try:
                _compile(part)
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)
    return file


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
