"""What a module gives out: found by running a copy of it on made-up data.

It is run several times: only what comes out alike each time counts as known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardwright.planner.trace.data_queries.errors import FailsOnMadeUpData, NeedsData
from shardwright.planner.trace.model.module_copies import duplicate
from shardwright.planner.trace.opaque.argument_objects import Change, Objects, Place, Watched
from shardwright.planner.trace.trace_lock import exporting
from shardwright.runtime.boundary.parametrized import values

SCALES = (0.1, 0.01, 1.0)
"""Of the weights in each of the runs."""

LARGE = 1 << 26
"""Bytes from which on the elements of a parameter are a single one in memory."""

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Spec(NamedTuple):
    """A tensor that comes out."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Such a tensor on meta."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Object:
    """Stands for an object among what goes in."""


class Given(NamedTuple):
    """What is known of what goes in."""

    leaves: tuple[Any, ...]
    """(shape, dtype) of tensors, plain values, and `Object`."""
    held: Any
    """Of its objects, as `Objects.described` has it."""

    def drawn(self) -> list[Any]:
        """(shape, dtype) of the tensors in its objects."""
        return [said for _, said in self.held[1] if type(said) is tuple]


class Outcome(NamedTuple):
    """What comes of a call: leaves of what it gives out, `Spec` for tensors, and their tree.

    And what it does to the objects that it is given: whose tensors it reads, and what it changes.
    """

    found: list[Any]
    tree: TreeSpec
    touched: list[Place]
    changes: list[Change]


def outcome(
    name: str, module: nn.Module, given: Given, spec: TreeSpec, objects: Objects
) -> Outcome:
    """What comes of a call of `module`, called `name`, that is given `objects` among others.

    Raises:
        NeedsData: that depends on data, or the module does more than to compute it.
    """
    found: list[Outcome] = []
    # No mode is on in another thread.
    with ThreadPoolExecutor(1) as thread, exporting(False):
        for seed in range(len(SCALES)):
            try:
                run = _run, module, given, spec, objects, seed
                found.append(thread.submit(copy_context().run, *run).result())
            except FailsOnMadeUpData:  # of some data nothing comes out
                if seed - len(found) > 0:
                    raise
    if any(other != found[0] for other in found):
        raise NeedsData(f"what '{name}' gives out depends on its data in shape")
    return found[0]


def stated(leaf: Any) -> Any:
    """What is known of an argument without data, as in `Given.leaves`.

    Raises:
        NeedsData: it is neither a tensor nor a plain value.
    """
    if isinstance(leaf, Tensor):
        return tuple(int(n) for n in leaf.shape), leaf.dtype
    if not isinstance(leaf, PLAIN):
        raise NeedsData(f"a {type(leaf).__name__} is among its arguments")
    if isinstance(leaf, bool):
        return bool(leaf)  # where only data has it, on one of its branch paths
    if isinstance(leaf, int):
        float(leaf)  # an integer that remembers where it comes from is a mere number from here on
        return int(leaf)
    return leaf


def state(module: nn.Module) -> Iterator[Tensor]:
    """Its parameters, then its buffers, and what is read in their place while it runs."""
    for kind in ("_parameters", "_buffers"):
        for part in module.modules():
            yield from (t for t in getattr(part, kind).values() if t is not None)
    for part in module.modules():
        yield from values(part)


def _held(module: nn.Module) -> list[Tensor]:
    """All tensors that the module and those within it hold, in any way."""
    leaves = (leaf for m in module.modules() for leaf in tree_leaves(dict(m.__dict__)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int, g: torch.Generator) -> Tensor:
    """Made-up data: of integers, 0 and 1 are good indices nearly everywhere, and 0 everywhere."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2 if seed else 1, shape, generator=g).to(dtype)
    return torch.randn(shape, generator=g, dtype=torch.float32).to(dtype)


def _weights(like: Tensor, seed: int, g: torch.Generator) -> Tensor:
    """Data for a parameter or buffer, each time larger: what is near a threshold crosses it."""
    shape = tuple(like.shape)
    large = math.prod(shape) * like.element_size() >= LARGE
    drawn = _draw((1,) * len(shape) if large else shape, like.dtype, seed, g)
    if like.dtype.is_floating_point:
        drawn *= SCALES[seed]
    return drawn.expand(shape)


def _real(module: nn.Module, seed: int, g: torch.Generator) -> nn.Module:
    """A copy of `module` with data in the place of what is on meta."""
    memo: dict[int, Any] = {}
    for t in _held(module):
        if t.is_meta and id(t) not in memo:
            new = _weights(t, seed, g)
            memo[id(t)] = nn.Parameter(new, False) if isinstance(t, nn.Parameter) else new
    return duplicate(module, memo)


def _run(module: nn.Module, given: Given, spec: TreeSpec, objects: Objects, seed: int) -> Outcome:
    """Run a copy of `module` once on data made up from `seed`."""
    g = torch.Generator().manual_seed(seed)
    real = _real(module, seed, g)
    drawn = [_draw(shape, dtype, seed, g) for shape, dtype in given.drawn()]
    theirs = objects.copied(drawn, torch.device("cpu"))
    copies = iter(theirs.objects)
    leaves = [_leaf(v, copies, seed, g) for v in given.leaves]
    args, kwargs = tree_unflatten(leaves, spec)
    held = _held(real)
    taken = [*held, *(t for t in leaves if isinstance(t, Tensor))]
    versions = [t._version for t in taken]
    watched = Watched(theirs)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), watched:
            found, out = tree_flatten(real(*args, **kwargs))
    except Exception as error:  # whatever model code raises
        text = str(error).strip().split("\n")[0][:200]
        raise FailsOnMadeUpData(
            f"on the CPU it fails as well: {type(error).__name__}: {text}"
        ) from error
    if versions != [t._version for t in taken] or list(map(id, held)) != list(map(id, _held(real))):
        raise NeedsData("it changes what it is given, or keeps something")
    touched, changes = watched.touched(), watched.changes()
    put = [change.value for change in changes if not change.written]
    # What is then changed in place would change twice, or not at all.
    made = [_place(t) for t in [*found, *put] if isinstance(t, Tensor) and t.numel()]
    if len(set(made)) < len(made) or not set(made).isdisjoint(map(_place, [*taken, *drawn])):
        raise NeedsData("it hands on what it is given")
    changed = [change._replace(value=_spec(change.value)) for change in changes]
    return Outcome([_spec(v) for v in found], out, touched, changed)


def _leaf(said: Any, copies: Iterator[Any], seed: int, g: torch.Generator) -> Any:
    """Something of which that is `said` in `Given.leaves`; objects are the next of `copies`."""
    if said is Object:
        return next(copies)
    return _draw(said[0], said[1], seed, g) if type(said) is tuple else said


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Spec(tuple(leaf.shape), leaf.stride(), leaf.dtype)
    if not isinstance(leaf, PLAIN):
        raise NeedsData(f"a {type(leaf).__name__} is among its results")
    return leaf
