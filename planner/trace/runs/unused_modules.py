"""Runs for modules that the plain call leaves unused: cross-attention, image and audio towers.

A parameter that no traced run uses stays replicated, because nothing is known about it. A decoder
with cross-attention uses it if it gets `encoder_hidden_states`. A module with a config of its own
can run by itself (`example_inputs.py`). Modules that do not run on meta are skipped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from shardwright.planner.blocks.stacks import find_stacks, shortened
from shardwright.planner.contract.names import MASKS, is_within, pattern
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SOURCE
from shardwright.planner.trace.data_queries.errors import DATA_DEPENDENT
from shardwright.planner.trace.inputs.example_inputs import example_inputs
from shardwright.planner.trace.inputs.subject import floating_dtype, number
from shardwright.planner.trace.model.input_values import moved
from shardwright.planner.trace.model.module_copies import duplicated
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.record.fake_mode import TooManyOps
from shardwright.planner.trace.runs.decoding import GROWING, SWITCH
from shardwright.planner.trace.runs.lone_modules import MIN_SHARE, lone_runs
from shardwright.planner.trace.runs.optional_arguments import optional_runs
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.trial.fake_tensor_bridge import follow, run_on_fake

CROSS_INPUTS = ("encoder_hidden_states", "encoder_outputs")
"""Arguments for the output of an encoder: the tensor, or a tuple whose first entry it is."""

MAX_OPS = 8_000
"""A tower that calls more ops stays replicated: recurrent layers call some for each place."""


def more_runs(root: nn.Module, plain: Run) -> tuple[Run, ...]:
    """Return runs that use parameters of `root` that `plain` does not; fuller calls come first."""
    more = optional_runs(root, plain)
    if not (_attends(root) or any(True for _ in _parts(root)) or any(True for _ in more)):
        return ()
    for stacks in (find_stacks(root), []):
        with suppress(Exception), shortened(root, stacks):  # the code may need all blocks
            return tuple(_found(root, plain))
    return ()


def told_apart(root: nn.Module, runs: Sequence[Run]) -> frozenset[str]:
    """Return stacks in towers whose code knows blocks by number: behind some it calls more.

    These must not be folded. `runs` are those of `more_runs`.
    """
    runs, found = [run for run in runs if run.module], set[str]()
    stacks = find_stacks(root) if runs else []
    for run in runs:
        paths = [s.path for s in stacks if is_within(s.path, run.module)]
        if not paths:
            continue
        with suppress(Exception):  # that is found out when it is traced
            with shortened(root, stacks):
                few = _used(root, run)
            more = _used(root, run) - few
            if any(not any(is_within(n, p) for p in paths) for n in more):
                found |= {*paths}
    return frozenset(found)


def _found(root: nn.Module, plain: Run) -> Iterator[Run]:
    used = _used(root, plain)
    idle = {n for n, m in root.named_modules() if _owns(m)} - used
    if idle and _attends(root):
        for run in _fuller(root, plain):
            with suppress(Exception):  # no cross-attention, or another width
                if idle & (now := _used(root, run)):
                    used |= now
                    yield run
                    break
    done: list[str] = []
    for name, module in _parts(root):
        if any(is_within(name, n) for n in done) or any(is_within(n, name) for n in used):
            continue
        for run in _alone(name, module):
            try:
                used |= _used(root, run, MAX_OPS)
            except TooManyOps:  # it stays replicated
                done.append(name)
                break
            except Exception:  # the module takes other inputs
                continue
            done.append(name)
            yield run
            break
    turned_on = [] if done else [*_with_options(root, plain, used)]
    yield from turned_on
    if _of_text(plain) and not turned_on:
        for run in lone_runs(root, used | {*done}):
            with suppress(Exception):  # it calls too many ops, or makes tensors for data
                _used(root, run, MAX_OPS)
                yield run


def _with_options(root: nn.Module, plain: Run, used: set[str]) -> Iterator[Run]:
    """Yield calls with optional arguments that run modules with parameters that are not `used`.

    All that they run is traced: a module that depends on data would stay whole in all calls. None
    of the modules runs by itself in another call: the root would then take any arguments, while
    what these calls make is not full everywhere.
    """
    own = {n: sum(p.numel() for p in m.parameters(recurse=False)) for n, m in root.named_modules()}
    left = own.keys() - used
    for run in optional_runs(root, plain):
        if sum(own[n] for n in left) < MIN_SHARE * sum(own.values()):
            return
        with suppress(Exception):  # no such call, or it needs other arguments as well
            opaque = Opaque(root)
            now = _used(root, run, MAX_OPS, opaque)
            if any(own[n] for n in now & left) and not opaque.alike:
                left -= now
                yield run


def _of_text(plain: Run) -> bool:
    """Return whether the call has tokens alone: what parts make is put among their embeddings."""
    return not plain.args and {*plain.kwargs} <= {*GROWING, *MASKS, SWITCH}


def _alone(name: str, module: nn.Module) -> Iterator[Run]:
    """Yield calls of a module in its own dtype, then in float32, as code may not support all.

    Integers that have values keep them: the grid of an image, for example.
    """
    own = floating_dtype(module)
    for dtype in dict.fromkeys((own, torch.float32)):
        for inputs in example_inputs(module, dtype):
            yield Run(name, (), moved(inputs), None if dtype == own else dtype)


def _attends(root: nn.Module) -> bool:
    """Return whether the model takes outputs of an encoder and is no encoder-decoder itself."""
    config, names = getattr(root, "config", None), inspect.signature(root.forward).parameters
    if not hasattr(config, "to_dict") or getattr(config, "is_encoder_decoder", False):
        return False
    return any(name in names for name in CROSS_INPUTS)


def _fuller(root: nn.Module, plain: Run) -> Iterator[Run]:
    config: Any = root.config
    dtype = next(p.dtype for p in root.parameters())
    names = inspect.signature(root.forward).parameters
    name = next(n for n in CROSS_INPUTS if n in names)
    widths = (number(config, k) for k in ("cross_attention_hidden_size", "hidden_size"))
    for width in dict.fromkeys(w for w in widths if w):
        encoded = torch.empty(TRACE_BATCH, TRACE_SOURCE, width, dtype=dtype, device="meta")
        given = encoded if name == CROSS_INPUTS[0] else (encoded,)
        yield plain._replace(kwargs={**plain.kwargs, name: given})


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _parts(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with parameters and their own config outside of blocks, outer modules first."""
    for name, module in root.named_modules():
        config = module.__dict__.get("config")
        own = hasattr(config, "to_dict") and config is not getattr(root, "config", None)
        if own and pattern(name) == name and any(True for _ in module.parameters()):
            yield name, module


def settles(root: nn.Module, run: Run) -> bool:
    """Return whether `run` comes to its end if modules that depend on data are not traced."""
    with suppress(Exception), shortened(root, find_stacks(root)):  # the code may raise anything
        _used(root, run)
        return True
    return False


def _used(
    root: nn.Module, run: Run, most: int | None = None, opaque: Opaque | None = None
) -> set[str]:
    """Return the modules that run, and all modules inside one that depends on data.

    These are added to `opaque`.

    Raises:
        TooManyOps: the code calls more than `most` ops, if that is given.
    """
    opaque = opaque or Opaque(root)
    while True:
        found = set[str]()
        with duplicated(root) as module:
            entered = follow(module, lambda name, _output, found=found: found.add(name))
            try:
                run_on_fake(module, [run], opaque, most=most)
            except DATA_DEPENDENT:
                if not opaque.widen([n for n in entered if n != run.module]):
                    raise
                continue
        names = [n for n, _ in root.named_modules()]
        return found | {n for n in names if any(is_within(n, o) for o in opaque.alike)}
