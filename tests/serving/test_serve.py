"""`shardwright serve` on two ranks, with OpenAI's own client; and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import APIConnectionError, APIStatusError, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.demo_launch import free_port
from tests import planning
from tests.cli.conftest import Run, run  # noqa: F401 a fixture
from tests.serving.tiny import save_tiny

KEY = "secret"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return path


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], OpenAI]]:
    """Start a server, and wait until it answers."""
    port = free_port()
    command = [sys.executable, "-m", "shardwright", "serve", *map(str, arguments)]
    with subprocess.Popen(
        [*command, "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SHARDWRIGHT_API_KEY": KEY},
    ) as process:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
        try:
            for _ in range(240):
                try:
                    client.models.list()
                    break
                except APIConnectionError:
                    assert process.poll() is None, process.communicate()[1]
                    time.sleep(0.25)
            yield process, client
        finally:
            process.terminate()
            process.communicate(timeout=60)


def ask(client: OpenAI, model: Path, **more: Any) -> Any:
    how = {"max_tokens": 12, "temperature": 0, **more}
    return client.completions.create(model=str(model), prompt="the quick fox", **how)


def test_two_ranks_answer_and_end_after_their_requests(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    planning.plan(tiny, tp=2, continuous_batching=True).save(file)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    words = AutoTokenizer.from_pretrained(tiny)
    ids = torch.tensor([words("the quick fox")["input_ids"]])
    want = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    with serving(tiny, "--plan", file) as (process, client):
        assert ask(client, tiny).choices[0].text == words.decode(want).rstrip("\ufffd")
        with pytest.raises(APIStatusError, match=r"n: Input should be 1"):
            ask(client, tiny, n=2)
        parts = ask(client, tiny, stream=True, max_tokens=150, temperature=1)
        next(parts)
        process.send_signal(signal.SIGTERM)
        *_, last = parts
        assert last.choices[0].finish_reason in ("stop", "length")
        assert process.wait(timeout=60) == 0


def test_a_rank_that_dies_ends_the_server(tiny: Path) -> None:
    with serving(tiny, "--tp", 2) as (process, _):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [p for p in children if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
        os.kill(int(ranks[-1]), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "Error: rank 1 died (SIGKILL, out of memory?)" in said.splitlines()


def test_an_interrupt_while_the_model_is_loaded(tiny: Path) -> None:
    """No rank is blamed for what the user asked for."""
    command = [sys.executable, "-m", "shardwright", "serve", tiny, "--tp", "2"]
    with subprocess.Popen(
        [*command, "--port", str(free_port())], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "Loading" in process.stderr.readline()
        time.sleep(1)  # the ranks are started, and import torch
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (1, "Aborted!")


def test_what_cannot_be_served(run: Run, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    def said(*arguments: object) -> str:
        result = run("serve", *arguments)
        assert result.exit_code in (1, 2) and result.stderr.count("\n") == 1, result.stderr
        return result.stderr

    assert "give the number of ranks with --tp, or a plan with --plan" in said(tiny)
    file = tmp_path / "plan.json"
    planning.plan(tiny, tp=2).save(file)
    assert "is not proven for continuous batching" in said(tiny, "--plan", file)
    assert "cannot read" in said(tiny, "--plan", tmp_path / "none.json")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said_by_server = subprocess.run(
            [sys.executable, "-m", "shardwright", "serve", tiny, "--tp", "2", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert said_by_server.returncode == 2
    wanted = f"Error: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert wanted in said_by_server.stderr.splitlines()
