"""transformers' continuous batching on a split model: `generate_batch` and what servers use.

Its manager runs in a thread on each rank. The first rank takes requests and sends them to the
others, all schedule them alike, and each rank keeps keys and values of its own heads.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwright.errors import UsageError
from shardwright.planner.contract.mesh import TP
from shardwright.planner.contract.names import PAGED
from shardwright.runtime.calls import paged
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.ranks.agreement import gather
from shardwright.runtime.scopes import replaced

MAX_MEMORY = 0.6
"""The share of a machine's memory that caches on its CPU take together by default."""

MESH = "_device_mesh"
"""The attribute of a model in which transformers looks for the ranks that share it."""


def init_continuous_batching(
    model: Any, mesh: Mesh, own: Callable[..., Any], config: Any = None
) -> Any:
    """Return the manager that `own` makes for a split model. All ranks call it.

    Args:
        model: The split model, whose plan is proven for continuous batching.
        mesh: Its mesh.
        own: Makes the manager of the model, or returns the one that it has.
        config: A `ContinuousBatchingConfig`.

    Raises:
        UsageError: the ranks are not in a `DeviceMesh`, or a cache of transformers cannot hold the
            keys and values of a rank.
    """
    config = shared(config, model.device, mesh[TP].size)
    if mesh[TP].size == 1:
        return own(continuous_batching_config=config)
    if mesh.device_mesh is None:
        raise UsageError("continuous batching on ranks needs a DeviceMesh: apply the plan with one")
    vars(model)[MESH] = mesh.device_mesh
    try:
        manager = own(continuous_batching_config=config)
    finally:
        del vars(model)[MESH]
    if not isinstance(manager, split_manager()):
        manager.__class__ = split_manager()
        manager.local_heads = local_heads(model)
        helper = manager.distributed_helper
        helper.__class__ = split_helper()
        helper.tp_plan = {}  # else it would divide these heads by the ranks
    return manager


def shared(config: Any, device: torch.device, ranks: int) -> Any:
    """The config for ranks: they keep the attention of the plan, and share the memory of a CPU.

    transformers would take flash attention where it is installed, and let each rank take 60 % of
    the memory. What the config says of memory holds.
    """
    from transformers import ContinuousBatchingConfig

    config = copy.copy(config) or ContinuousBatchingConfig()
    config.auto_switch_to_flash = False
    if device.type == "cpu" and config.num_blocks is None and config.max_memory_percent is None:
        config.max_memory_percent = MAX_MEMORY / ranks
    return config


@functools.cache
def split_manager() -> type:
    """The class of managers of split models, made when transformers is needed."""
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    class SplitManager(ContinuousBatchingManager):
        """A manager whose cache has the key heads of one rank."""

        local_heads: int

        def _create_batch_processor(self) -> Any:
            whole: Any = self.model
            config = _LocalConfig(whole.config.get_text_config(), self.local_heads)
            with replaced(self, model=_Described(whole, config)):
                made = super()._create_batch_processor()
            _check_alike(made.cache, self.distributed_helper.cpu_comm_group)
            return made

    return SplitManager


class SentRequest(NamedTuple):
    """A new request, as the first rank sends it to the others: arguments of a `RequestState`."""

    request_id: str
    initial_tokens: list[int]
    streaming: bool
    record_timestamps: bool
    max_new_tokens: int | None
    eos_token_id: int | list[int] | None
    num_children: int
    logit_processor_kwargs: dict[str, bool | int | float | str]


class News(NamedTuple):
    """New requests, the ids of requests that are cancelled, and whether more news follow."""

    requests: list[SentRequest]
    cancelled: list[str]
    more: bool


AT_ONCE = 200_000
"""About so many tokens of prompts are sent in one message."""


def in_messages(requests: Sequence[SentRequest], cancelled: list[str]) -> list[News]:
    """Return the messages in which news are sent; all but the last say that more follow."""
    parts: list[list[SentRequest]] = [[]]
    for request in requests:
        if sum(len(each.initial_tokens) for each in parts[-1]) >= AT_ONCE:
            parts.append([])
        parts[-1].append(request)
    last = len(parts) - 1
    return [News(p, [] if i < last else cancelled, i < last) for i, p in enumerate(parts)]


@functools.cache
def split_helper() -> type:
    """The class that connects managers of split models, made when transformers is needed."""
    from transformers.generation.continuous_batching.distributed import DistributedHelper
    from transformers.generation.continuous_batching.requests import RequestState

    class SplitHelper(DistributedHelper):
        """Sends requests as JSON: transformers would unpickle what other ranks send."""

        def tp_broadcast_object_from_rank_0(self, obj: Any) -> Any:
            """Return the first rank's new requests and the ids of cancelled ones."""
            states, cancelled = obj
            fields = SentRequest._fields
            mine = [SentRequest(*(getattr(state, f) for f in fields)) for state in states]
            messages, sent, group = in_messages(mine, cancelled), [], self.cpu_comm_group
            while True:
                told = messages[min(len(sent), len(messages) - 1)]
                sent.append(gather("continuous batching", told, group, News)[0])  # type: ignore[arg-type]
                if not sent[-1].more:
                    break
            if self.is_tp_driver:
                return obj
            new = [RequestState(**each._asdict()) for news in sent for each in news.requests]
            return new, sent[-1].cancelled

    return SplitHelper


class _LocalConfig:
    """A config with the key heads of one rank. Setting them in some configs sets other numbers."""

    def __init__(self, config: Any, heads: int) -> None:
        self._config, self.num_key_value_heads = config, heads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Described(SimpleNamespace):
    """What a manager asks of a model when it makes a cache, with a config of its own."""

    def __init__(self, model: Any, config: _LocalConfig) -> None:
        asked = ("device", "dtype", "_supports_logits_to_keep")
        known = {name: getattr(model, name) for name in asked if hasattr(model, name)}
        super().__init__(**known, config=SimpleNamespace(get_text_config=lambda: config))


def local_heads(model: Any) -> int:
    """Return the key heads of this rank, as a call with one token shows them. All ranks call it.

    Raises:
        UsageError: layers differ.
    """
    sizes: dict[str, Any] = {"tokens": 1, "read": 1, "requests": 1}
    kinds = paged.attention_kinds(model)
    one = paged.batch_arguments(kinds, **sizes, dtype=model.dtype, device=model.device)
    cache = paged.traced_cache(model)
    with torch.no_grad(), paged.paged_attention(model):
        model(**one, **{PAGED: cache})
    heads = {rows.shape[1] for kept in cache.kept.values() for rows in kept}
    if len(heads) != 1:
        raise UsageError(
            f"layers of {type(model).__name__} have {' or '.join(map(str, sorted(heads)))} key "
            "heads on a rank, and a paged cache has one number for all: use generate()"
        )
    return heads.pop()


def _check_alike(cache: Any, group: Any) -> None:
    """Check that all ranks can hold the same requests.

    Raises:
        UsageError: they cannot, so each would schedule other requests.
    """
    blocks = [allocator.num_blocks for allocator in cache.cache_allocators.values()]
    room = torch.tensor([cache.num_blocks, cache.max_batch_tokens, *blocks])
    least, most = room.clone(), room
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    if not torch.equal(least, most):
        raise UsageError(
            "ranks have different numbers of key heads, and so room for different requests: set "
            "num_blocks and max_batch_tokens of ContinuousBatchingConfig"
        )
