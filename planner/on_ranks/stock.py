"""Compares a model that another runtime split, on real ranks, with the unsharded model.

`Table` is transformers' own tensor parallelism, with its styles or with ours. `Source` is code that
calls torch's `parallelize_module`. A `Table` loads a checkpoint as users do, so that conversions
during loading are covered too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.on_ranks.launch import run_processes
from shardwright.planner.on_ranks.numeric import TOLERANCE, differences, in_dtype, run
from shardwright.runtime.boundary.module_boundary import mesh_of
from shardwright.runtime.in_transformers import tp_plan
from shardwright.runtime.model.config import read_config, trusting
from shardwright.runtime.ranks.agreement import gather
from shardwright.runtime.ranks.rendezvous import world
from shardwright.runtime.state.gather import full_tensors

CASTS = 1e-5
"""Tolerance for a float64 model that computes in float32 inside."""


@dataclass(frozen=True)
class Table:
    """Transformers splits the model by a table of its styles, or by a plan with our style.

    With rules for `experts`, these are spread over all ranks, and tokens are sent to them.
    """

    styles: Mapping[str, str] | Plan
    experts: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, cls: Any, directory: str, dtype: torch.dtype) -> nn.Module:
        """Load the split model from `directory`. All ranks must call this."""
        given = self.styles
        table = tp_plan(given) if isinstance(given, Plan) else dict(given)
        return _from_pretrained(cls, directory, dtype, table, dict(self.experts))


@dataclass(frozen=True)
class Source:
    """Python code with a function `parallelize(model, mesh)` splits the model."""

    text: str

    def __call__(self, cls: Any, directory: str, dtype: torch.dtype) -> nn.Module:
        """Load the unsharded model from `directory` and split it. All ranks must call this."""
        code: dict[str, Any] = {}
        exec(compile(self.text, "<export>", "exec"), code)
        model = whole(cls, directory, dtype)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        return code["parallelize"](model, mesh)


Way = Callable[[Any, str, torch.dtype], nn.Module]


@dataclass(frozen=True)
class Ran:
    """What a run of a split model measured; the largest differences of all ranks."""

    logits: float
    gradients: float
    worst: str
    tolerance: float
    bytes: int
    """Bytes of parameters and buffers on the fullest rank."""
    unsplit_bytes: int

    @property
    def share(self) -> float:
        """Return the fullest rank's share of all bytes."""
        return self.bytes / self.unsplit_bytes

    @property
    def ok(self) -> bool:
        """Return whether both differences are within the tolerance; NaN is not."""
        return self.logits <= self.tolerance and self.gradients <= self.tolerance


def whole(cls: Any, directory: str, dtype: torch.dtype) -> Any:
    """Load the unsharded model as transformers does."""
    with trusting(False):
        return cls.from_pretrained(directory, config=read_config(directory), dtype=dtype).eval()


def try_out(way: Way, cls: Any, directory: str, inputs: dict[str, Any], ranks: int) -> Ran:
    """Start `ranks` processes that split and compare; `directory` holds a small checkpoint.

    Raises:
        ShardwrightError: the other runtime raised an error, given in one line.
    """
    return run_processes(ranks, compared, way, cls, directory, inputs)[0]


@dataclass(frozen=True)
class Reference:
    """The unsharded model's results, their dtype and the tolerance."""

    logits: Tensor
    gradients: dict[str, Tensor]
    dtype: torch.dtype
    tolerance: float
    bytes: int


def reference(cls: Any, directory: str, inputs: dict[str, Any]) -> Reference:
    """Run the unsharded model in float64, or in float32 if its code fails in float64."""
    for dtype in (torch.float64, torch.float32):
        try:
            model = whole(cls, directory, dtype)
            with _Casts(dtype) as casts:
                logits, gradients = _seeded(model, inputs, dtype)
        except RuntimeError:
            if dtype == torch.float32:
                raise
            continue
        tolerance = CASTS if casts.found and dtype == torch.float64 else TOLERANCE[dtype]
        return Reference(logits, gradients, dtype, tolerance, _bytes(model))
    raise AssertionError


def compared(
    way: Way, cls: Any, directory: str, inputs: dict[str, Any], want: Reference | None = None
) -> Ran:
    """Compare on each rank of the current group; all ranks return the same answer."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    want = want or reference(cls, directory, inputs)
    model = way(cls, directory, want.dtype).eval()
    logits, gradients = _seeded(model, inputs, want.dtype)
    found = _whole_gradients(model, gradients)
    apart = float((_full(logits) - want.logits).abs().max())
    # If every key is masked, the unsharded model itself has gradients that are not finite.
    left_out = {n for n, g in want.gradients.items() if not (g.numel() and g.isfinite().all())}
    gradient, worst = differences(
        {n: g for n, g in found.items() if g.numel() and n not in left_out},
        {n: g for n, g in want.gradients.items() if n not in left_out},
    )
    mine = apart, gradient, worst, _bytes(model)
    every = gather("comparing", mine, world(), tuple[float, float, str, int])
    gradient, worst = max(((g, w) for _, g, w, _ in every), key=lambda at: (at[0] != at[0], at[0]))
    return Ran(
        logits=max((a for a, *_ in every), key=lambda value: (value != value, value)),
        gradients=gradient,
        worst=worst,
        tolerance=want.tolerance,
        bytes=max(held for *_, held in every),
        unsplit_bytes=want.bytes,
    )


def _from_pretrained(
    cls: Any, directory: str, dtype: torch.dtype, table: dict[str, str], experts: dict[str, str]
) -> Any:
    from transformers.distributed import DistributedConfig
    from transformers.utils import is_accelerate_available

    if not is_accelerate_available():
        raise UsageError("transformers splits no model without accelerate: pip install accelerate")
    ranks = dist.get_world_size()
    spread: Any = {"ep_size": ranks, "ep_plan": experts, "ep_implementation": "all_to_all"}
    how = DistributedConfig(tp_size=ranks, tp_plan=table, **(spread if experts else {}))
    config = read_config(directory)
    with trusting(False):
        return cls.from_pretrained(directory, config=config, distributed_config=how, dtype=dtype)


def _seeded(model: Any, inputs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return logits and gradients; random draws are the same each time, on all ranks."""
    experts = getattr(model, "get_experts_implementation", dict)()
    if dtype == torch.float64 and "grouped_mm" in experts.values():
        model.set_experts_implementation("batched_mm")  # torch's grouped mm has no float64
    torch.manual_seed(0)
    _, kwargs = in_dtype(((), inputs), dtype)
    return run(model, **kwargs)


def _whole_gradients(model: nn.Module, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    if mesh_of(model) is not None:
        return full_tensors(model, gradients)
    return {name: _full(gradient) for name, gradient in gradients.items()}


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    held = (t._local_tensor if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in held)


class _Casts(TorchDispatchMode):
    """Detects whether anything is computed in another floating dtype than `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.found = dtype, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t.dtype for t in tree_leaves(out) if isinstance(t, Tensor)]
        if self.dtype in given and any(d.is_floating_point and d != self.dtype for d in made):
            self.found = True
        return out
