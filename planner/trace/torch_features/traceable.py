"""What holds wherever a model's code runs to be traced, or to be tried on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.utils import stateless

from shardwright.errors import ModelError
from shardwright.planner.trace.queries.questions import answered
from shardwright.planner.trace.runs.run import Runner
from shardwright.planner.trace.runs.training_runs import batches_counted
from shardwright.planner.trace.thread_patches import Patch, patched_in_this_thread
from shardwright.planner.trace.torch_features import flex_attention, higher_order_ops, torchscript
from shardwright.planner.trace.torch_features.recorded_outputs import collecting
from shardwright.runtime.boundary.patches import parametrizations_in_place
from shardwright.runtime.modules.attention import by_heads


@contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """Context manager in which code of `module` calls what can be recorded, and is answered."""
    own: list[Patch] = [
        (torch.utils, "swap_tensors", _refuse_swap),
        (nn.Module, "load_state_dict", _refuse_state),
        (stateless, "_functional_call", partial(_call_root, stateless._functional_call)),
        (nn.Module, "register_parameter", partial(_register, nn.Module.register_parameter)),
    ]
    features = *torchscript.PATCHES, *flex_attention.PATCHES, *higher_order_ops.PATCHES
    with (
        by_heads(module),
        batches_counted(module),
        torch.compiler.set_stance("force_eager"),
        answered(),
        parametrizations_in_place(),
        patched_in_this_thread([*features, *collecting(), *own]),
    ):
        yield


def _register(
    before: Callable[..., None], module: nn.Module, name: str, param: nn.Parameter | None
) -> None:
    """Set a parameter, but not to itself, as `self.weight *= 2` does. Torch refuses other tensors.

    A parameter that was computed with is no leaf, which torch refuses as well.
    """
    if param is None or module.__dict__.get("_parameters", {}).get(name) is not param:
        before(module, name, param)


def _refuse_state(module: nn.Module, *_: Any, **__: Any) -> NoReturn:
    raise ModelError(
        f"a forward loads a state dict into a {type(module).__name__}: write values to each of its "
        "parameters (with torch.no_grad(): p.copy_(q))"
    )


def _call_root(before: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with other parameters, as the trace itself does with its root.

    Raises:
        ModelError: model code does so.
    """
    if not isinstance(module, Runner):
        raise ModelError(
            f"a forward calls a {type(module).__name__} with other parameters (functional_call): "
            "compute with them by torch.nn.functional, or by torch.nn.utils.parametrize"
        )
    return before(module, *args, **kwargs)


def _refuse_swap(*_: Any) -> NoReturn:
    raise ModelError(
        "the model's code swaps tensors: set the data of parameters (self.weight.data = tensor)"
    )
