"""What each rank of a server runs: it loads its part of the model, and the first one listens."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwright.errors import DistributedError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import load
from shardwright.runtime.model.config import read_config
from shardwright.runtime.model.hub import Hub

KEY = "SHARDWRIGHT_API_KEY"
"""The environment variable with the API key; it is not an option, which others could read."""
LOOK = 0.5
"""Seconds between two looks at whether the ranks still generate."""
PAGE = 16
"""Tokens in a page of the KV cache."""
CACHE, BATCH = 2**14, 512
"""Tokens in the KV cache, and most tokens in a forward pass, on the CPU by default. On a GPU
transformers finds both by the memory that is free."""


@dataclass(frozen=True)
class Serving:
    """What is served, and where.

    Attributes:
        model: Directory or hub id.
        plan: The plan as JSON.
        name: The model's name for clients.
        host: The address to listen on.
        port: The port.
        length: The most tokens of a request.
        room: The tokens in the KV cache; None for what the memory of a GPU has room for.
        requests: The most requests at once.
        seconds: The longest time for a request.
        how: Other arguments of `load`.
    """

    model: str
    plan: str
    name: str
    host: str
    port: int
    length: int | None = None
    room: int | None = None
    requests: int = 256
    seconds: float = 600.0
    how: Mapping[str, Any] = field(default_factory=dict)


def serve_on_rank(asked: Serving) -> None:
    """Load the model and answer requests until a signal ends the server. All ranks call it.

    Raises:
        UsageError: the model has no tokenizer that can stream, or the port is taken.
        DistributedError: the ranks could not go on.
    """
    tokenizer = tokenizer_of(asked.model, asked.how)
    opened = _listening(asked) if dist.get_rank() == 0 else None
    model = load(asked.model, Plan.from_json(asked.plan), **asked.how)
    manager = manager_of(model, asked)
    manager.warmup()  # makes the cache, and raises here if that fails
    manager.start()
    try:
        if opened is not None:
            _answer(model, manager, tokenizer, opened, asked)
        else:
            manager._generation_thread.join()
    finally:
        manager.stop(block=True)
    if (failed := manager.background_thread_status.fatal_error) is not None:
        raise DistributedError(f"rank {dist.get_rank()} stopped generating: {failed}")


def tokenizer_of(model: str, how: Mapping[str, Any]) -> Any:
    """Return the tokenizer of a model, if it can stream.

    Args:
        model: Directory or hub id.
        how: Arguments of `load`, of which some hold for tokenizers, too.

    Raises:
        ModelError: there is no such model.
        UsageError: it has no such tokenizer.
    """
    from transformers import AutoTokenizer

    hub = Hub(**{name: how[name] for name in Hub._fields if name in how})
    read_config(model, hub)
    names = ("trust_remote_code", "revision", "cache_dir", "local_files_only")
    how = {name: how[name] for name in names if name in how}
    try:
        found: Any = AutoTokenizer.from_pretrained(model, **how)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{model} has no tokenizer that transformers can read: save a fast one "
            "(tokenizer.json) with the model"
        ) from error
    if not getattr(found, "is_fast", False):
        raise UsageError(
            f"the tokenizer of {model} is a {type(found).__name__}, which cannot stream: "
            "save a fast one (tokenizer.json) with the model"
        )
    return found


def manager_of(model: Any, asked: Serving) -> Any:
    """Return the manager of the model. It can draw tokens after settings of each request."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    on_gpu = model.device.type == "cuda"
    room = asked.room or (None if on_gpu else CACHE)
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=None if room is None else -(-room // PAGE),
        max_batch_tokens=None if on_gpu else BATCH,
        per_request_processors=True,
        auto_switch_to_flash=False,
        disable_nccl_graph_mixing=on_gpu,
        seed=0,
    )
    # Values other than those that change nothing, or there would be no processors for requests.
    draws = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=2, top_p=0.5, eos_token_id=-1, pad_token_id=0
    )
    return model.init_continuous_batching(draws, batching)


def _listening(asked: Serving) -> socket.socket:
    """Return the socket of the server.

    Raises:
        UsageError: it cannot listen there.
    """
    family = socket.AF_INET6 if ":" in asked.host else socket.AF_INET
    try:
        return socket.create_server((asked.host, asked.port), family=family)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]
        raise UsageError(f"cannot listen on {asked.host}:{asked.port}: {why}") from error


def _answer(
    model: Any, manager: Any, tokenizer: Any, opened: socket.socket, asked: Serving
) -> None:
    """Answer requests until a signal, or until the manager ends."""
    import uvicorn

    from shardwright.runtime.serving.app import Defaults, Served, make_app
    from shardwright.runtime.serving.engine import Engine, Limits

    config, own = model.config.get_text_config(), model.generation_config
    room = manager.batch_processor.cache.num_blocks * PAGE
    most = min(getattr(config, "max_position_embeddings", None) or room, room)
    if asked.length is not None and asked.length > most:
        raise UsageError(f"requests of {asked.length} tokens do not fit: {most} do")
    ends = own.eos_token_id
    engine = Engine(
        manager,
        tokenizer,
        frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,)),
        config.vocab_size,
        Limits(asked.length or most, asked.requests, asked.seconds),
    )
    samples = bool(own.do_sample)
    defaults = Defaults(
        (own.temperature if own.temperature is not None else 1.0) if samples else 0.0,
        own.top_p or 1.0,
        own.top_k or None,
    )
    app = make_app(Served(asked.name, engine, tokenizer, defaults, os.environ.get(KEY, "")))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async def watch() -> None:
            while engine.alive():
                await asyncio.sleep(LOOK)
            server.should_exit = True

        watching = asyncio.create_task(watch())
        where = f"http://{asked.host}:{asked.port}"
        ranks, limit = dist.get_world_size(), engine.limits.length
        print(
            f"Serving '{asked.name}' on {where}: {ranks} ranks, up to {limit} tokens a request",
            file=sys.stderr,
            flush=True,
        )
        yield
        watching.cancel()

    app.router.lifespan_context = lifespan
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn raises it again when it has ended
    server.run(sockets=[opened])
