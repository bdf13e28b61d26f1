"""Prepare a model (hub id, directory, config or module) as a module on meta with inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shardwright.errors import ModelError
from shardwright.planner.contract.names import MASKS
from shardwright.planner.contract.plain_values import BLOCK_MASK
from shardwright.planner.graph.trace_sizes import TRACE_SEQ
from shardwright.planner.problem.pins import Pin
from shardwright.planner.trace.inputs.subject import floating_dtype
from shardwright.planner.trace.model import python_references
from shardwright.planner.trace.model.argument_trees import tree_map
from shardwright.planner.trace.model.input_values import ByName, calls_by_name, remember, remembered
from shardwright.planner.trace.model.module_copies import duplicate
from shardwright.planner.trace.model.quantized_parameters import Packing, quantized_parameters
from shardwright.planner.trace.model.shared_memory import note_shared
from shardwright.planner.trace.runs.batched_call import batched_call
from shardwright.planner.trace.runs.decoding import SWITCH
from shardwright.planner.trace.runs.example_calls import example_calls
from shardwright.planner.trace.runs.further_runs import SHOWS, Wish, decoded, wishes
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.unused_modules import more_runs, told_apart
from shardwright.planner.trace.state.code_state import look_anew
from shardwright.planner.trace.trace_lock import alone
from shardwright.runtime.boundary.module_boundary import mesh_of
from shardwright.runtime.model.build import as_dtype, building, move_to_meta
from shardwright.runtime.model.config import read_config
from shardwright.runtime.model.hub import USUAL, Hub
from shardwright.runtime.model.identity import config_hash
from shardwright.runtime.model.unregistered import refuse_unregistered
from shardwright.runtime.modules.global_modules import unshare_globals
from shardwright.runtime.quantized.config import Quantization, read_quantization
from shardwright.runtime.slots import positions


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
    """Runs that use parameters that the plain run does not use."""
    told_apart: frozenset[str] = frozenset()
    """Lists of blocks that code knows by number in these runs: they are not folded."""
    further: tuple[Run, ...] = ()
    """Other calls that users make: with padding masks, labels, hidden states."""
    wishes: tuple[Wish, ...] = ()
    """The alternatives for each further run."""
    valued: tuple[tuple[tuple[Any, ...], list[dict[str, Any]]], ...] = ()
    """Inputs with values attached, of integer tensors and then of floats too: `args`, and those by
    name of each call."""
    by_value: bool = False
    """Whether the inputs are the `valued` ones."""
    trains: bool = False
    """Whether the plan is for training."""
    by_rows: bool = False
    """Whether attention may get queries sharded along the sequence."""
    quantization: Quantization | None = None
    """What the config says of its checkpoint, if weights are to be held as they are stored."""
    quantized: Mapping[str, Packing] = field(default_factory=dict)
    """Parameters that are then quantized."""
    recomputed: Mapping[str, int] = field(default_factory=dict)
    """List of blocks -> how many of its first blocks are computed again in the backward pass."""
    batches: bool = False
    """Whether continuous batching is among the further calls."""
    others: tuple[Mapping[str, Any], ...] = ()
    """Inputs by name of the calls that the user gave besides the first."""
    keeps: bool = False
    """Whether modules keep state between calls, so that the first run is traced twice."""
    along: bool = False
    """Whether hidden states are sharded along the sequence: the first and the last block of a stack
    are then kinds of their own."""
    pins: tuple[Pin, ...] = ()
    """The user's pins. Blocks with different pins are not folded into one."""

    def masks(self) -> set[str]:
        """Return the names of padding masks in further runs."""
        runs = (run for run in self.further if not run.resumes)
        return {name for run in runs for name in run.kwargs if name in MASKS}

    def along_sequence(self, by_rows: bool = False) -> Source:
        """Return the source for hidden states sharded along the sequence.

        Runs that expose hidden states are left out. A step with a cache takes `TRACE_SEQ` tokens,
        because a single token cannot be sharded. With `by_rows`, each rank attends with its shard
        of the queries, and there are no steps with a cache.
        """
        kept = tuple(
            run
            for wish in self.wishes[:1]
            for run in wish
            if not run.kwargs.keys() & SHOWS and not run.kwargs.get(SWITCH)
            if not run.given
        )
        inputs = named_inputs(self.module, self.args, self.kwargs) or {}
        steps = () if by_rows else decoded(self.module, inputs, tokens=(TRACE_SEQ,))
        wishes = (kept, *((run,) for run in _others(self.args, self.others)), *steps)
        wishes = tuple(wish for wish in wishes if wish)
        found = replace(self, more=(), further=tuple(wish[0] for wish in wishes), wishes=wishes)
        return replace(found, by_rows=by_rows, along=True)

    def with_values(self) -> Iterator[Source]:
        """Yield the source with each of the `valued` inputs."""
        for args, (kwargs, *more) in self.valued:
            others = more[: len(self.others)]
            calls = _further(self.module, args, kwargs, others=more, batches=self.batches)
            calls |= {"args": args, "kwargs": kwargs, "others": tuple(others)}
            yield replace(self, by_value=True, **calls)

    @property
    def missing(self) -> list[Run]:
        """Further runs that the user asked for and that were not traced."""
        traced = {id(run.kwargs) for run in self.further}
        found = [run for run in _others(self.args, self.others) if id(run.kwargs) not in traced]
        if self.batches and not any(run.batched for run in self.further):
            found.append(batched_call(self.module))
        return found

    @property
    def runs(self) -> list[Run]:
        """All runs that a plan must hold for, the plain run first."""
        first = Run("", self.args, self.kwargs, by_rows=self.by_rows)
        again = [first._replace(priced=False, again=True)] if self.keeps else []
        return [first, *again, *self.more, *self.further]


def read_source(
    model: Any,
    args: tuple[Any, ...] | torch.Tensor | None = (),
    kwargs: ByName = None,
    dtype: torch.dtype | str | None = None,
    hub: Hub = USUAL,
    dequantize: bool = False,
    batches: bool = False,
) -> Source:
    """Prepare `model` for tracing; no weights are read or allocated.

    Args:
        model: Hub id, directory, transformers config, `nn.Module` (which is not changed), or a
            Python reference to one (`package.module:name`, `file.py:name`).
        args: Example inputs; a transformers text model needs none.
        kwargs: Example inputs by name, or a list with those of several calls.
        dtype: Dtype of the parameters, or its name; by default the config's, else float32.
        hub: How hub ids are resolved, and whether to run code that comes with the model.
        dequantize: Whether weights of a quantized checkpoint are to be held dense.
        batches: Whether the model must be able to batch requests continuously.

    Raises:
        CheckpointError: the checkpoint is quantized in a way that is not known.
        ModelError: not a model, unknown to transformers, or inputs are missing.
    """
    look_anew()
    if python_references.is_code(model):
        model = python_references.made(model)
    if isinstance(model, (str, Path)):
        model = read_config(model, hub)
    made = not isinstance(model, nn.Module)
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args or ())
    if not made:
        _refuse_compiled(model)
        _refuse_split(model)
    quantization = None if dequantize else read_quantization(getattr(model, "config", model))
    if made:
        model = from_config(model, as_dtype(dtype), hub)
    module = model if made else copy_on_meta(model)
    identity = type(model).__name__, config_hash(module), floating_dtype(module)
    calls = calls_by_name(kwargs)
    known = bool(args or any(calls))
    given = (args, calls if known else example_calls(module))
    on_meta: tuple[tuple[Any, ...], list[dict[str, Any]]] = to_meta(given)
    first, *others = on_meta[1]
    # Floats come last: code may do something else for other values of them in every call.
    integers = remember(given, on_meta)
    floats = remember(given, on_meta, floats=True) if known else None
    plain = Run("", on_meta[0], integers[1][0] if integers else first)
    more = () if known else more_runs(module, plain)
    fuller = (run.kwargs for run in more if not run.module)
    further = _further(module, on_meta[0], first, *fuller, others=others, batches=batches)
    quantized = quantized_parameters(module, quantization)
    return Source(
        module,
        on_meta[0],
        first,
        *identity,
        more,
        **further,
        others=tuple(others) if known else (),
        told_apart=told_apart(module, more),
        valued=tuple(found for found in (integers, floats) if found is not None),
        quantization=quantization if quantized else None,
        quantized=quantized,
        batches=batches,
    )


def _further(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *fuller: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]] = (),
    batches: bool,
) -> dict[str, Any]:
    """Return further runs and wishes for these inputs, and decoding steps for `fuller` inputs.

    Calls with `others` are among them, and with `batches` those of continuous batching.
    """
    inputs = named_inputs(module, args, kwargs)
    found = () if inputs is None else wishes(module, inputs)
    found = (*found, *((run,) for run in _others(args, others)))
    found = (*found, *(wish for given in fuller for wish in decoded(module, given)))
    found += ((batched_call(module),),) if batches else ()
    return {"further": tuple(wish[0] for wish in found), "wishes": found}


def _others(args: tuple[Any, ...], others: Iterable[Mapping[str, Any]]) -> list[Run]:
    return [Run("", args, other, priced=False, given=True) for other in others]


def named_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the inputs of a call by name; None if a positional input has no name."""
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


def _refuse_split(model: nn.Module) -> None:
    if mesh_of(model) is not None:
        raise ModelError(
            f"this {type(model).__name__} is split already, and plans are for whole models: give "
            "the model as it was before, its config or its directory"
        )


def from_config(config: Any, dtype: torch.dtype | None = None, hub: Hub = USUAL) -> nn.Module:
    """Build a model from a config on meta, with weights tied as in transformers.

    Raises:
        ModelError: `config` is no config, or no model can be built from it.
    """
    if not hasattr(config, "to_dict"):
        raise ModelError(
            f"cannot plan a {type(config).__name__}: "
            "give a hub id, a directory, a config or a module"
        )
    chosen = dtype or getattr(config, "dtype", None) or torch.float32
    with building(config, hub) as cls, alone(), torch.device("meta"), _Uninitialised():
        model = cls._from_config(copy.deepcopy(config), dtype=chosen)
    refuse_unregistered(model)
    unshare_globals(model)
    move_to_meta(model)
    for module in model.modules():  # buffers of `torch.tensor(values)` and the like
        for name, buffer in module._buffers.items():
            if buffer is not None:
                on_meta = buffer.to("meta")
                own = name in module._non_persistent_buffers_set
                module._buffers[name] = remembered(buffer, on_meta) if own else on_meta
    return model.eval()


class _Uninitialised(TorchFunctionMode):
    """Mode that skips `torch.nn.init`: on meta it has no effect, but takes most of the time.

    An integer that code makes a tensor of (a buffer) is on the CPU, to be known.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        if func is torch.tensor and args and type(args[0]) is int:
            kwargs = {"device": "cpu", **(kwargs or {})}
        return func(*args, **(kwargs or {}))


def copy_on_meta(module: nn.Module) -> nn.Module:
    """Return a copy of `module` on meta; weights are not copied.

    The copy is in eval mode, unless the module is on meta already: then it keeps its mode.

    Raises:
        ModelError: a lazy module has no sizes yet.
    """
    stores = (s for m in module.modules() for s in (m._parameters, m._buffers) if s)
    tensors = [t for store in stores for t in store.values() if t is not None]
    if any(map(is_lazy, tensors)):
        raise ModelError(
            f"a {type(module).__name__} has lazy modules (LazyLinear, say), which have no sizes "
            "yet: call it once with real inputs, then plan it"
        )
    if all(t.is_meta for t in tensors):
        copied = duplicate(module)
        note_shared(module, copied)
        return copied
    memo: dict[int, Any] = {}
    kept = (v for m in module.modules() for v in vars(m).values() if isinstance(v, torch.Tensor))
    stored = {  # a checkpoint may have others
        id(t)
        for m in module.modules()
        for name, t in (*m._parameters.items(), *m._buffers.items())
        if name not in m._non_persistent_buffers_set
    }
    for t in {id(t): t for t in (*tensors, *kept, *_of_block_masks(module))}.values():
        empty = torch.empty_like(t.detach(), device="meta").requires_grad_(t.requires_grad)
        empty = empty if id(t) in stored else remembered(t, empty)
        memo[id(t)] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
    copied = duplicate(module, memo).eval()
    note_shared(module, copied)
    return copied


def _of_block_masks(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of block masks in attributes: `flex_attention` takes them on its device."""
    from torch.nn.attention.flex_attention import BlockMask

    values = (v for m in module.modules() for v in vars(m).values())
    for mask in (v for v in values if isinstance(v, BlockMask)):
        yield from (t for t in mask.as_tuple() if isinstance(t, torch.Tensor))


def to_meta(value: Any) -> Any:
    """Return the inputs with tensors moved to meta.

    Raises:
        ModelError: a block mask of `flex_attention` or a nested tensor is among them.
    """

    def moved(leaf: Any) -> Any:
        if type(leaf).__name__ == BLOCK_MASK:
            raise ModelError(
                "a BlockMask is among the example inputs, and the mask function in it may be "
                "another in each call: give the tensors that it is made of, and call "
                "create_block_mask in the model's forward"
            )
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise ModelError(
                "a nested (jagged) tensor is among the example inputs: give a padded tensor and a "
                "mask of it"
            )
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(moved, value)
