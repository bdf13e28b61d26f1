"""Starts a module on several ranks with torchrun, and ends all of them if one hangs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class RanksFailed(Exception):
    """The ranks ended with an error or not at all; the text is what they wrote to stderr."""


def torchrun(
    module: str,
    args: Sequence[str | Path],
    *,
    ranks: int = 2,
    timeout: float = 300,
    options: Sequence[str] = (),
) -> str:
    """Run `python -m module args` on `ranks` ranks of this machine, and return its stdout.

    Args:
        module: importable from the root of the repository.
        args: passed to every rank.
        ranks: number of processes, with one thread each.
        timeout: seconds after which all are killed.
        options: options of torchrun itself.

    Raises:
        RanksFailed: a rank failed, or the time is up.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *options,
        *("-m", module, *map(str, args)),
    ]
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # This checkout, whether it is installed or only on the caller's path.
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *_given("PYTHONPATH")]),
        # The demo must run on any machine: with GPUs visible, only some ranks might get one.
        "CUDA_VISIBLE_DEVICES": "",
    }
    if sys.platform == "linux":  # a host name that does not resolve must not stop local ranks
        quiet["GLOO_SOCKET_IFNAME"] = "lo"
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **quiet},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the ranks can be ended with torchrun
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        _, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RanksFailed(f"no end after {timeout:.0f} s\n{err}") from None
        raise
    if process.returncode:
        raise RanksFailed(err)
    return out


def _given(name: str) -> list[str]:
    return [os.environ[name]] if os.environ.get(name) else []


def free_port() -> int:
    """Return a port that nobody listens on at present."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
