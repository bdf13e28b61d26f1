"""The HTTP side over an unsplit model: answers of `generate`, and errors for all that is wrong."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwright.runtime.serving.app import Defaults, Served, make_app
from shardwright.runtime.serving.engine import Engine, Limits
from shardwright.runtime.serving.rank import Serving, manager_of
from tests.serving.tiny import save_tiny

Body = dict[str, Any]
ASKED = Serving("", "", "tiny", "", 1, room=512)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    path: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def served(whole: tuple[Any, Any]) -> Iterator[Served]:
    model, tokenizer = whole
    manager = manager_of(model, ASKED)
    manager.warmup()
    manager.start()
    engine = Engine(manager, tokenizer, frozenset({1}), len(tokenizer), Limits(200, 8, 60.0))
    yield Served("tiny", engine, tokenizer, Defaults(0.0, 1.0, None))
    manager.stop(block=True)


@pytest.fixture
def client(served: Served) -> Iterator[TestClient]:
    with TestClient(make_app(served), raise_server_exceptions=False) as made:
        yield made


def generated(whole: tuple[Any, Any], ids: list[int], most: int) -> tuple[str, int]:
    model, tokenizer = whole
    out = model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False)[0, len(ids) :]
    return tokenizer.decode(out, skip_special_tokens=True).rstrip("\ufffd"), len(out)


@pytest.mark.parametrize("prompt", ["the quick", [5, 6, 7], "a"])
def test_a_completion_is_that_of_generate(
    client: TestClient, whole: tuple[Any, Any], prompt: str | list[int]
) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    ids = whole[1](prompt)["input_ids"] if isinstance(prompt, str) else prompt
    text, tokens = generated(whole, ids, 20)
    found = answer.json()
    assert found["choices"][0]["text"].rstrip("\ufffd") == text
    assert found["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": tokens,
        "total_tokens": len(ids) + tokens,
    }
    assert found["choices"][0]["finish_reason"] == ("length" if tokens == 20 else "stop")


def lines(client: TestClient, path: str, body: Body) -> list[Any]:
    with client.stream("POST", path, json=body) as answer:
        text = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert text[-1] == "[DONE]"
    return [json.loads(line) for line in text[:-1]]


def test_a_streamed_chat_says_the_same_as_a_whole_one(client: TestClient) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    body = {"model": "tiny", "messages": messages, "max_completion_tokens": 12}
    want = client.post("/v1/chat/completions", json=body).json()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *parts, counts = lines(client, "/v1/chat/completions", asked)
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == want["choices"][0]["message"]["content"]
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    assert parts[-1]["choices"][0]["finish_reason"] == want["choices"][0]["finish_reason"]
    assert counts["usage"] == want["usage"] and counts["choices"] == []


def test_a_stop_ends_a_text_and_frees_its_room(client: TestClient, served: Served) -> None:
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 60}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = text[8:11]
    found = client.post("/v1/completions", json={**body, "stop": [stop]}).json()["choices"][0]
    assert found["text"] == text[: text.index(stop)] and found["finish_reason"] == "stop"
    wait_until_idle(served)


def wait_until_idle(served: Served) -> None:
    scheduler = served.engine.manager.batch_processor.scheduler
    for _ in range(200):
        waits = scheduler.active_requests or scheduler.waiting_requests
        if not waits and not served.engine.running:  # which the end of a stream frees a bit later
            break
        time.sleep(0.05)
    assert not scheduler.active_requests and not served.engine.running


def test_a_client_that_leaves_frees_its_room(client: TestClient, served: Served) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 150, "stream": True, "temperature": 1}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_until_idle(served)


def test_settings_are_of_each_request(client: TestClient) -> None:
    """Drawn texts differ, and texts of a temperature of 0 do not."""
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 16}

    def texts(**more: Any) -> set[str]:
        found = (client.post("/v1/completions", json={**body, **more}).json() for _ in range(4))
        return {one["choices"][0]["text"] for one in found}

    assert len(texts(temperature=1.5)) > 1
    assert texts(temperature=0) == texts() == texts(temperature=2, top_k=1)
    assert len(texts()) == len(texts(temperature=1, top_p=1e-6)) == 1


GOOD: dict[str, Body] = {
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
    },
}
WRONG: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0, -1, "5", 1.5, 10**9, True]),
    ("temperature", [-1, 3, "hot", []]),
    ("top_p", [0, 2]),
    ("top_k", [0, 1.5]),
    ("stop", [["a"] * 5, "", 5]),
    ("n", [2, "1"]),
    ("seed", [1]),
    ("stream", ["yes", 1]),
    ("model", ["other", None]),
    ("logit_bias", [{"5": 1}]),
    ("frequency_penalty", [1]),
    ("stream_options", [5, {"x": 1}]),
    ("unheard_of", [1]),
    ("prompt", ["", [], [10**6], [-1], ["a", "b"], {}, None, "the fox " * 200]),
    ("messages", [[], [{}], "hi", [{"role": "tool", "content": "x"}], [{"role": "user"}]]),
]


@pytest.mark.parametrize(("field", "values"), WRONG)
@pytest.mark.parametrize("path", GOOD)
def test_wrong_values_are_refused(
    client: TestClient, path: str, field: str, values: list[Any]
) -> None:
    for value in values:
        answer = client.post(path, json={**GOOD[path], field: value})
        assert 400 <= answer.status_code < 500, (value, answer.text)
        assert answer.json()["error"]["message"]
    assert client.get("/health").json() == {"status": "ok"}


def test_nonsense_is_refused(client: TestClient) -> None:
    draw = random.Random(0)
    for path, good in GOOD.items():
        text = json.dumps(good).encode()
        cut = [text[: draw.randrange(len(text))] for _ in range(20)]
        noise = [draw.randbytes(draw.randrange(50)) for _ in range(20)]
        for body in (*cut, *noise, b"[]", b"null", b'"' + b"\\ud800" * 3 + b'"'):
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert 400 <= answer.status_code < 500, body
        assert client.get(path).status_code == 405
        big = client.post(path, content=b" ", headers={"content-length": str(2**30)})
        assert big.status_code == 413
    assert client.get("/nothing").json()["error"]["type"] == "invalid_request_error"


def test_too_many_and_too_slow(served: Served) -> None:
    engine, body = served.engine, GOOD["/v1/completions"]
    for limits, status in ((Limits(200, 0, 60.0), 429), (Limits(200, 8, 1e-6), 504)):
        local = replace(served, engine=replace(engine, limits=limits))
        with TestClient(make_app(local)) as client:
            assert client.post("/v1/completions", json=body).status_code == status
    wait_until_idle(served)


def test_a_key_is_asked_for(served: Served) -> None:
    with TestClient(make_app(replace(served, key="secret"))) as client:
        assert client.get("/v1/models").status_code == 401
        wrong = client.get("/v1/models", headers={"authorization": "Bearer secre"})
        assert wrong.status_code == 401
        right = client.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert [model["id"] for model in right.json()["data"]] == ["tiny"]
        assert client.get("/health").status_code == 200


def test_what_is_done_is_counted(client: TestClient) -> None:
    def counts() -> dict[str, float]:
        rows = (line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines())
        return {name: float(value) for name, value in rows if name.startswith("shardwright_")}

    before = counts()
    client.post("/v1/completions", json={**GOOD["/v1/completions"], "prompt": [5, 6, 7]})
    after = counts()
    grown = {name for name in after if after[name] > before.get(name, 0)}
    assert after["shardwright_prompt_tokens_total"] == before["shardwright_prompt_tokens_total"] + 3
    assert {"shardwright_generated_tokens_total", "shardwright_first_token_seconds_count"} <= grown
    assert after["shardwright_requests"] == 0
