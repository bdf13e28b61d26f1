"""transformers' continuous batching on a split model: `generate_batch` and what servers use.

Its manager runs in a thread on each rank. The first rank takes requests and sends them to the
others, all schedule them alike, and each rank keeps keys and values of its own heads.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shardwright.errors import UsageError
from shardwright.planner.contract.mesh import TP
from shardwright.runtime.calls.paged import PAGED, batch_arguments, traced_cache
from shardwright.runtime.communication.mesh import Mesh

MOST_MEMORY = 0.6
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
    if mesh[TP].size == 1:
        return own(continuous_batching_config=config)
    if mesh.device_mesh is None:
        raise UsageError("continuous batching on ranks needs a DeviceMesh: apply the plan with one")
    vars(model)[MESH] = mesh.device_mesh
    try:
        manager = own(continuous_batching_config=shared(config, model.device, mesh[TP].size))
    finally:
        del vars(model)[MESH]
    if not isinstance(manager, split_manager()):
        manager.__class__ = split_manager()
        manager.local_heads = local_heads(model)
        manager.distributed_helper.tp_plan = {}  # else it would divide these heads by the ranks
    return manager


def shared(config: Any, device: torch.device, ranks: int) -> Any:
    """The config, with the memory of a CPU shared by the ranks if it says nothing of memory.

    transformers would let each rank take 60 % of it.
    """
    from transformers import ContinuousBatchingConfig

    config = config or ContinuousBatchingConfig()
    if device.type == "cpu" and config.num_blocks is None and config.max_memory_percent is None:
        config = copy.copy(config)
        config.max_memory_percent = MOST_MEMORY / ranks
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
            self.model: Any = _Described(whole, config)
            try:
                made = super()._create_batch_processor()
            finally:
                self.model = whole
            _check_alike(made.cache, self.distributed_helper.cpu_comm_group)
            return made

    return SplitManager


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
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    kinds = [*group_layers_by_attn_type(model.config.get_text_config())]
    sizes: dict[str, Any] = {"tokens": 1, "read": 1, "requests": 1}
    one = batch_arguments(kinds, **sizes, dtype=model.dtype, device=model.device)
    cache = traced_cache(model)
    with torch.no_grad():
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
