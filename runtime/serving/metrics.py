"""What the server counts, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        kept = self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="shardwright", registry=kept)
        seconds = partial(Histogram, namespace="shardwright", registry=kept, buckets=SECONDS)
        self.answers = counter("answers", "Answers by HTTP status.", ["status"])
        self.prompts = counter("prompt_tokens", "Tokens of prompts.")
        self.generated = counter("generated_tokens", "Tokens that were generated.")
        self.running = Gauge("shardwright_requests", "Requests that wait or run.", registry=kept)
        self.first = seconds("first_token_seconds", "Time to the first token.")
        self.seconds = seconds("request_seconds", "Time to the last token.")

    @contextmanager
    def request(self, prompt: int) -> Iterator[Callable[[int], None]]:
        """Count a request, while it runs; what this gives is called with numbers of new tokens."""
        begun, first = time.monotonic(), True
        self.prompts.inc(prompt)
        self.running.inc()

        def seen(tokens: int) -> None:
            nonlocal first
            if first and tokens:
                self.first.observe(time.monotonic() - begun)
                first = False
            self.generated.inc(tokens)

        try:
            yield seen
        finally:
            self.running.dec()
            self.seconds.observe(time.monotonic() - begun)

    def text(self) -> bytes:
        """The counters as Prometheus reads them."""
        return generate_latest(self.registry)
