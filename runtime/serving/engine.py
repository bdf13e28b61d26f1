"""`Engine` gives requests to the manager of continuous batching, and their text to clients."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tokenizers.decoders import DecodeStream

from shardwright.runtime.serving.metrics import Metrics

Finish = Literal["stop", "length"]


class Piece(NamedTuple):
    """The next text of a request, the tokens so far, and why it is the last, if it is."""

    text: str
    tokens: int
    finish: Finish | None


class Refused(Exception):
    """A request is refused, with an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """A request in tokens.

    Attributes:
        tokens: The prompt.
        most: The most tokens to generate.
        stops: Texts at which generation stops.
        temperature: 0 for the most likely token each time.
        top_p: Share of the probability from which tokens are drawn.
        top_k: Number of tokens from which one is drawn; None for all.
    """

    tokens: Sequence[int]
    most: int
    stops: Sequence[str] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None


@dataclass(frozen=True)
class Limits:
    """What the server takes.

    Attributes:
        length: The most tokens of a request, prompt and answer.
        requests: The most requests at once, also those that wait for room.
        seconds: The longest time for a request.
    """

    length: int
    requests: int
    seconds: float


@dataclass
class Engine:
    """Runs requests on a manager, all scheduled together.

    Attributes:
        manager: transformers' manager of continuous batching. It draws tokens by the temperature,
            top k and top p of each request.
        tokenizer: A tokenizer of transformers.
        ends: The tokens that end a text.
        words: The size of the vocabulary.
        limits: What is taken.
        metrics: Counts what is done.
    """

    manager: Any
    tokenizer: Any
    ends: frozenset[int]
    words: int
    limits: Limits
    metrics: Metrics = field(default_factory=Metrics)
    running: set[str] = field(default_factory=set)

    def alive(self) -> bool:
        """Whether requests are answered."""
        return self.manager.is_running()

    def admit(self, asked: Asked) -> None:
        """Check that a request fits the limits.

        Raises:
            Refused: it does not.
        """
        if not self.alive():
            raise Refused(503, "the server is ending")
        if len(self.running) >= self.limits.requests:
            raise Refused(429, f"{len(self.running)} requests wait or run: try again later")
        if not asked.tokens:
            raise Refused(400, "the prompt has no tokens")
        if wrong := [t for t in asked.tokens if not 0 <= t < self.words]:
            raise Refused(400, f"token {wrong[0]} is not among the model's {self.words}")
        if len(asked.tokens) + asked.most > self.limits.length:
            raise Refused(
                400,
                f"{len(asked.tokens)} tokens of prompt and {asked.most} to generate are more than "
                f"{self.limits.length}",
            )

    async def generate(self, asked: Asked) -> AsyncIterator[Piece]:
        """Yield the text of a request. If the caller stops early, its room is freed.

        Raises:
            Refused: the request does not fit the limits, takes too long, or failed.
        """
        self.admit(asked)
        name, outputs = uuid.uuid4().hex, asyncio.Queue[Any]()
        greedy = asked.temperature == 0
        how = {
            "temperature": 1.0 if greedy else float(asked.temperature),
            "top_k": 1 if greedy else min(asked.top_k or self.words, self.words),
            "top_p": 1.0 if greedy else float(asked.top_p),
        }
        self.running.add(name)
        end = asyncio.get_running_loop().time() + self.limits.seconds
        text, finish = Text(self.tokenizer, asked.stops), None
        try:
            with self.metrics.request(len(asked.tokens)) as seen:
                self.manager.register_result_handler(name, outputs.put_nowait)
                self.manager.add_request(
                    list(asked.tokens),
                    request_id=name,
                    max_new_tokens=asked.most,
                    eos_token_id=[*self.ends],
                    streaming=True,
                    **how,
                )
                while finish is None:
                    # Not around the yield: there a timeout would cancel whatever the caller awaits.
                    async with asyncio.timeout_at(end):
                        output = await outputs.get()
                    if output.error is not None:
                        raise Refused(500, f"the request failed: {output.error}")
                    new = output.generated_tokens[text.tokens :]
                    seen(len(new))
                    finish = self._finish(output)
                    more = text.add(new, last=finish is not None)
                    finish = "stop" if text.stopped else finish
                    if more or finish:
                        yield Piece(more, text.tokens, finish)
        except TimeoutError:
            seconds = f"{self.limits.seconds:g}"
            raise Refused(504, f"the request was not done in {seconds} seconds") from None
        finally:
            self.running.discard(name)
            if finish is None or text.stopped:
                self.manager.output_router.result_handlers.pop(name, None)
                self.manager.cancel_request(name)

    def _finish(self, output: Any) -> Finish | None:
        if not output.is_finished():
            return None
        tokens = output.generated_tokens
        return "stop" if tokens and tokens[-1] in self.ends else "length"

    async def whole(self, asked: Asked) -> Piece:
        """Return all text of a request as one piece.

        Raises:
            Refused: as `generate`.
        """
        found: list[Piece] = []
        async with aclosing(self.generate(asked)) as pieces:  # type: ignore[type-var]
            found = [piece async for piece in pieces]
        return Piece("".join(piece.text for piece in found), *found[-1][1:])


class Text:
    """Text that grows by tokens. It holds back what may be the beginning of a stop.

    Args:
        tokenizer: A fast tokenizer of transformers.
        stops: Texts at which it ends, which are not part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.stream = DecodeStream(skip_special_tokens=True)
        self.backend, self.stops = tokenizer.backend_tokenizer, stops
        self.tokens, self.held_back, self.stopped = 0, "", False

    def add(self, tokens: Sequence[int], last: bool) -> str:
        """Return the text that `tokens` add; all that was held back if they are the last."""
        self.tokens += len(tokens)
        new = (self.stream.step(self.backend, token) for token in tokens)
        text = self.held_back + "".join(part for part in new if part)
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        back = 0 if last else max((beginning(text, stop) for stop in self.stops), default=0)
        open_end = len(text) - back  # a stop that begins here may end in the next tokens
        end = min(*found, open_end) if found else open_end
        self.stopped = bool(found) and min(found) <= open_end
        self.held_back = text[end:]
        return text[:end]


def beginning(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
