"""Who starts ranks takes them along when it ends, whatever ends it, and leaves no file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.marks import long

RANKS = 2

COMMAND = """
import sys, time
from shardwright.planner.on_ranks.launch import ended_in_order
try:
    with ended_in_order():
        try:
            print("in", flush=True)
            time.sleep(60)
        finally:
            print("ending", flush=True)
            time.sleep(0.5)
            print("ended", flush=True)
finally:
    print("not reached", flush=True)
"""


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_blocks_end_and_then_ends_the_process(number: int, again: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in\n"
    process.send_signal(number)
    assert process.stdout.readline() == "ending\n"
    if again:
        process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert out == "ended\n" and process.returncode == -number


@pytest.mark.parametrize("name", ["SIGTERM", long("SIGHUP"), long("SIGINT"), "SIGKILL"])
def test_check_leaves_no_ranks(folder: Path, tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "shardwright", "check", str(folder / "plan-2.json")]
    process = subprocess.Popen(
        [*command, str(folder / "model"), "--numeric"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ranks = wait_for_ranks(process)
        time.sleep(0.3)
        process.send_signal(getattr(signal, name))
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    wait_until_gone(ranks)
    assert process.returncode == (1 if name == "SIGINT" else -getattr(signal, name))
    assert stderr in ("", "Aborted!\n", "\nAborted!\n")
    assert not [*tmp_path.glob("shardwright*")]


def wait_for_ranks(process: subprocess.Popen[str]) -> list[int]:
    """Its ranks, and the process with which `multiprocessing` counts what they share."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        if len(found := children.read_text().split()) == RANKS + 1:
            return [int(pid) for pid in found]
        time.sleep(0.05)
    raise AssertionError(process.communicate())


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{left} are left"
        time.sleep(0.1)
