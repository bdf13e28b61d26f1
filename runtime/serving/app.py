"""The HTTP side of the server: OpenAI's endpoints, errors as OpenAI's, health and metrics."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from shardwright.runtime.serving.engine import Asked, Engine, Piece, Refused
from shardwright.runtime.serving.schema import Chat, Completion, Request

LARGEST = 2**23
"""Most bytes of a request."""
PATIENCE = 0.25
"""Seconds between two looks at whether a client that waits for a whole answer is still there."""


@dataclass(frozen=True)
class Defaults:
    """What holds for a request that does not say it: the model's own generation config."""

    temperature: float
    top_p: float
    top_k: int | None


@dataclass(frozen=True)
class Served:
    """A model as clients see it.

    Attributes:
        name: Its name.
        engine: Runs its requests.
        tokenizer: Its tokenizer, with a chat template if it chats.
        defaults: What requests leave out.
        key: The API key that clients must give; "" for none.
    """

    name: str
    engine: Engine
    tokenizer: Any
    defaults: Defaults
    key: str = ""

    def prompt(self, request: Completion | Chat) -> list[int]:
        """The tokens of a request.

        Raises:
            Refused: the chat cannot be written as the model's template has it.
        """
        if isinstance(request, Completion):
            prompt = request.prompt
            return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        messages = [message.plain() for message in request.messages]
        try:
            found = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # whatever a template raises
            text = str(error).strip().splitlines()[:1]
            raise Refused(400, f"the chat template: {''.join(text) or 'refused'}") from error
        return found["input_ids"]

    def asked(self, request: Completion | Chat) -> Asked:
        """A request in tokens; without a number to generate, as many as there is room for.

        Raises:
            Refused: another model is asked for, or the prompt cannot be made.
        """
        if request.model != self.name:
            raise Refused(404, f"there is no model '{request.model:.100}' here, but '{self.name}'")
        tokens, own = self.prompt(request), self.defaults
        most = request.most or max(self.engine.limits.length - len(tokens), 1)
        temperature = own.temperature if request.temperature is None else request.temperature
        top_p, top_k = request.top_p or own.top_p, request.top_k or own.top_k
        return Asked(tokens, most, request.stops, temperature, top_p, top_k)


def make_app(served: Served) -> FastAPI:
    """Return the application."""
    app = FastAPI(title="Shardwright", docs_url=None, redoc_url=None, openapi_url=None)
    engine, metrics = served.engine, served.engine.metrics
    created, encoding = int(time.time()), asyncio.Lock()

    @app.middleware("http")
    async def guarded(
        request: HTTPRequest, then: Callable[[HTTPRequest], Awaitable[Response]]
    ) -> Response:
        size = request.headers.get("content-length", "0")
        if request.url.path.startswith("/v1/") and not allowed(request):
            return counted(failure(401, "give the API key: Authorization: Bearer KEY"))
        if not size.isdecimal() or int(size) > LARGEST:
            return counted(failure(413, f"a request has at most {LARGEST} bytes"))
        return counted(await then(request))

    def allowed(request: HTTPRequest) -> bool:
        given, own = request.headers.get("authorization", ""), f"Bearer {served.key}"
        return not served.key or secrets.compare_digest(given.encode(), own.encode())

    def counted(response: Response) -> Response:
        metrics.answers.labels(status=str(response.status_code)).inc()
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HTTPRequest, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return failure(400, f"{where}: {first['msg']}" if where else first["msg"], where or None)

    @app.exception_handler(HTTPException)
    async def unknown(_: HTTPRequest, error: HTTPException) -> Response:
        return failure(error.status_code, str(error.detail))

    @app.exception_handler(Refused)
    async def refused(_: HTTPRequest, error: Refused) -> Response:
        return failure(error.status, str(error))

    @app.post("/v1/completions")
    async def completions(request: Completion, http: HTTPRequest) -> Response:
        return await answer(request, http, COMPLETION)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Chat, http: HTTPRequest) -> Response:
        return await answer(request, http, CHAT)

    async def answer(request: Completion | Chat, http: HTTPRequest, form: Form) -> Response:
        async with encoding:  # fast tokenizers do not encode in two threads at once
            asked = await asyncio.to_thread(served.asked, request)
        engine.admit(asked)
        head = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }
        if request.stream:
            lines = streamed(engine, asked, request, head, form)
            return StreamingResponse(lines, media_type="text/event-stream")
        piece = await while_connected(engine.whole(asked), http)
        choice = {"index": 0, **form.whole(piece.text), "finish_reason": piece.finish}
        content = {**head, "object": form.kind, "choices": [choice], "usage": usage(asked, piece)}
        return JSONResponse(content)

    @app.get("/v1/models")
    async def models() -> Response:
        model = {"id": served.name, "object": "model", "created": created, "owned_by": ""}
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/health")
    async def health() -> Response:
        alive = engine.alive()
        return JSONResponse({"status": "ok" if alive else "ended"}, 200 if alive else 503)

    @app.get("/metrics")
    async def counters() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def failure(status: int, message: str, param: str | None = None) -> JSONResponse:
    """An error as an answer."""
    return JSONResponse(said(status, message, param), status)


def said(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's API writes it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


@dataclass(frozen=True)
class Form:
    """How an endpoint writes its answers.

    Attributes:
        prefix: How ids begin.
        kind: The class of a whole answer.
        part: The class of a part of a streamed answer.
        whole: A whole text, as a choice has it.
        delta: A part of a text; "" in the first and the last part.
        first: The part in front of all text; None for none.
    """

    prefix: str
    kind: str
    part: str
    whole: Callable[[str], dict[str, Any]]
    delta: Callable[[str], dict[str, Any]]
    first: dict[str, Any] | None


def _text(text: str) -> dict[str, Any]:
    return {"text": text, "logprobs": None}


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}, "logprobs": None}


def _delta(text: str) -> dict[str, Any]:
    return {"delta": {"content": text} if text else {}, "logprobs": None}


FIRST = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
COMPLETION = Form("cmpl", "text_completion", "text_completion", _text, _text, None)
CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk", _message, _delta, FIRST)


async def streamed(
    engine: Engine, asked: Asked, request: Request, head: dict[str, Any], form: Form
) -> AsyncIterator[str]:
    """Yield an answer as server-sent events; the last is [DONE], or an error."""
    counts = request.stream_options is not None and request.stream_options.include_usage

    def line(choices: list[dict[str, Any]], **more: Any) -> str:
        return event({**head, "object": form.part, "choices": choices, **more})

    def choice(content: dict[str, Any], finish: str | None = None) -> list[dict[str, Any]]:
        return [{"index": 0, **content, "finish_reason": finish}]

    last = Piece("", 0, None)
    try:
        if form.first is not None:
            yield line(choice(form.first))
        async with aclosing(engine.generate(asked)) as pieces:  # type: ignore[type-var]
            async for last in pieces:
                yield line(choice(form.delta(last.text), last.finish))
    except Refused as error:
        yield event(said(error.status, str(error)))
        return
    if counts:
        yield line([], usage=usage(asked, last))
    yield "data: [DONE]\n\n"


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def usage(asked: Asked, piece: Piece) -> dict[str, int]:
    """The tokens of a request and its answer."""
    prompt, made = len(asked.tokens), piece.tokens
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


async def while_connected(work: Awaitable[Piece], http: HTTPRequest) -> Piece:
    """Return the result of `work`, which is cancelled if the client leaves.

    Raises:
        Refused: the client has left.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=PATIENCE))[0]:
            if await http.is_disconnected():
                raise Refused(499, "the client has left")
        return task.result()
    finally:
        task.cancel()
