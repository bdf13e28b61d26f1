"""What is to be planned (hub id, directory, config or module) as a module on meta with inputs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from shardwright.errors import ModelError
from shardwright.planner.contract.names import MASKS
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ
from shardwright.planner.trace.inputs.input_values import remember
from shardwright.planner.trace.model import python_references
from shardwright.planner.trace.model.module_copies import duplicate
from shardwright.planner.trace.runs.decoding import SWITCH
from shardwright.planner.trace.runs.further_runs import SHOWS, Wish, decoded, wishes
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.unused_modules import more_runs
from shardwright.planner.trace.trace_lock import alone
from shardwright.runtime.model.config import read_config
from shardwright.runtime.model.hub import USUAL, Hub
from shardwright.runtime.model.identity import config_hash
from shardwright.runtime.slots import positions

OF_A_TRACE = (FakeTensor, FunctionalTensor)
"""What tensors are that model code makes while it is traced: it may plan a model with them."""


@dataclass(frozen=True)
class Source:
    """A module on meta, inputs to trace it with, and what identifies it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    architecture: str
    config_hash: str
    dtype: torch.dtype
    more: tuple[Run, ...] = ()
    """Runs that use parameters which the one with `args` and `kwargs` does not."""
    further: tuple[Run, ...] = ()
    """What else users call: with masks for padding, labels, hidden states."""
    wishes: tuple[Wish, ...] = ()
    """Where from these are: what may be traced in place of each."""
    valued: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The same `args` and `kwargs`, which remember the whole numbers that they were made of."""
    by_value: bool = False
    """Whether those are what is traced."""
    trains: bool = False
    """Whether the plan is to train with."""
    by_rows: bool = False
    """Whether attention may be given a part of the queries of a sequence."""
    keeps: bool = False
    """Whether modules keep something from one call for the next, which is then traced, too."""

    def masks(self) -> set[str]:
        """The masks for padding that further runs have."""
        runs = (run for run in self.further if not run.resumes)
        return {name for run in runs for name in run.kwargs if name in MASKS}

    def along_sequence(self, by_rows: bool = False) -> Source:
        """The same for hidden states that are split along the sequence: nobody is given those.

        A step with a cache is then one by as many tokens: one alone cannot be split. There is none
        where each rank attends `by_rows`, with its part of the queries.
        """
        kept = tuple(
            run
            for wish in self.wishes[:1]
            for run in wish
            if not run.kwargs.keys() & SHOWS and not run.kwargs.get(SWITCH)
        )
        inputs = named_inputs(self.module, self.args, self.kwargs) or {}
        steps = () if by_rows else decoded(self.module, inputs, tokens=(TRACE_SEQ,))
        wishes = tuple(wish for wish in (kept, *steps) if wish)
        found = replace(self, more=(), further=tuple(wish[0] for wish in wishes), wishes=wishes)
        return replace(found, by_rows=by_rows)

    def with_values(self) -> Source | None:
        """The same, traced with values; None where there are none."""
        if self.valued is None:
            return None
        args, kwargs = self.valued
        calls = _further(self.module, args, kwargs)
        return replace(self, args=args, kwargs=kwargs, by_value=True, **calls)

    @property
    def runs(self) -> list[Run]:
        """All runs that a plan must hold for; what it costs is what the first does."""
        first = Run("", self.args, self.kwargs, by_rows=self.by_rows)
        again = [first._replace(priced=False, again=True)] if self.keeps else []
        return [first, *again, *self.more, *self.further]


def read_source(
    model: Any,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    hub: Hub = USUAL,
) -> Source:
    """Prepare `model` for tracing; no weights are read or allocated.

    Args:
        model: Hub id, directory, transformers config, `nn.Module` (which is left as it is), or
            the name of code that makes one (`package.module:name`, `file.py:name`).
        args: Example inputs; a transformers text model needs none.
        kwargs: Example inputs by name.
        dtype: Of the parameters; else the config's own, else float32.
        trust_remote_code: Whether to run code that comes with the model.
        hub: Where a hub id leads.

    Raises:
        ModelError: not a model, unknown to transformers, or inputs are missing.
    """
    if python_references.is_code(model):
        model = python_references.made(model)
    if isinstance(model, (str, Path)):
        model = read_config(model, trust_remote_code, hub)
    made = not isinstance(model, nn.Module)
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    if not made:
        _refuse_compiled(model)
    if made:
        model = from_config(model, dtype, trust_remote_code, hub)
    module = model if made else copy_on_meta(model)
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    identity = type(model).__name__, config_hash(module), own
    given = args, kwargs or {}
    if not args and not kwargs:
        named = text_inputs(module)
        more = more_runs(module, Run("", (), named))
        fuller = (run.kwargs for run in more if not run.module)
        return Source(module, (), named, *identity, more, **_further(module, (), named, *fuller))
    on_meta: tuple[tuple[Any, ...], dict[str, Any]] = to_meta(given)
    calls, valued = _further(module, *on_meta), remember(given, on_meta)
    return Source(module, *on_meta, *identity, **calls, valued=valued)


def _further(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *fuller: Mapping[str, Any],
) -> dict[str, Any]:
    """What else users call than with these inputs; with `fuller` ones they decode as well."""
    inputs = named_inputs(module, args, kwargs)
    found = () if inputs is None else wishes(module, inputs)
    found = (*found, *(wish for given in fuller for wish in decoded(module, given)))
    return {"further": tuple(wish[0] for wish in found), "wishes": found}


def named_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The inputs of a call by name; None where one has none."""
    names, _ = positions(type(module).forward)
    if len(args) > len(names):
        return None
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"'{name}' in {type(model).__name__} is compiled by TorchScript, and compiled code "
                "cannot be split: put the module that it was made of there"
            )


def from_config(
    config: Any,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    hub: Hub = USUAL,
) -> nn.Module:
    """A model of this config on meta, tied as transformers ties it.

    Raises:
        ModelError: it is no config, or none that a model can be built of.
    """
    from shardwright.runtime.model.build import building

    if not hasattr(config, "to_dict"):
        raise ModelError(
            f"cannot plan a {type(config).__name__}: "
            "give a hub id, a directory, a config or a module"
        )
    chosen = dtype or getattr(config, "dtype", None) or torch.float32
    how = building(config, trust_remote_code, hub)
    with how as cls, alone(), torch.device("meta"), _Uninitialised():
        model = cls._from_config(copy.deepcopy(config), dtype=chosen)
    return model.eval()


class _Uninitialised(TorchFunctionMode):
    """Within, weights are not drawn: on meta there is nothing to draw, and it takes most time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def copy_on_meta(module: nn.Module) -> nn.Module:
    """A copy of `module` on meta, for this plan alone: weights are not copied.

    It is in eval mode, but for that of a module that is on meta already.
    """
    stores = (s for m in module.modules() for s in (m._parameters, m._buffers) if s)
    tensors = [t for store in stores for t in store.values() if t is not None]
    if all(t.is_meta and not isinstance(t, OF_A_TRACE) for t in tensors):
        return duplicate(module)
    memo: dict[int, Any] = {}
    computed = (v for m in module.modules() for v in vars(m).values() if _is_computed(v))
    for t in {id(t): t for t in (*tensors, *computed)}.values():
        empty = _like_on_meta(t.detach())
        memo[id(t)] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
    return duplicate(module, memo).eval()


def _is_computed(value: Any) -> bool:
    """Whether it was made of parameters."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _like_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, OF_A_TRACE):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(tensor, device="meta")


def to_meta(value: Any) -> Any:
    """The same inputs with tensors on meta."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, OF_A_TRACE):
            return _like_on_meta(leaf)
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(moved, value)


GET_BASE = "get_base_model"
"""What peft calls the method that gives the model in which it put adapters."""


def text_inputs(module: nn.Module) -> dict[str, Any]:
    """Token ids for a transformers text model, of sizes that can be told from all others.

    Raises:
        ModelError: the model takes something else.
    """
    names = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", None)
    if main is None or "input_ids" not in names:
        inner = "plan what is in it (get_base_model()), or " if hasattr(module, GET_BASE) else ""
        raise ModelError(
            f"do not know the inputs of {type(module).__name__}: {inner}give example args or "
            f"kwargs (batch {TRACE_BATCH} and sequence {TRACE_SEQ} are good sizes)"
        )
    ids = torch.zeros(TRACE_BATCH, TRACE_SEQ, dtype=torch.int64, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = ids.clone()
    if "use_cache" in names or any(p.kind is p.VAR_KEYWORD for p in names.values()):
        inputs["use_cache"] = False
    return inputs
