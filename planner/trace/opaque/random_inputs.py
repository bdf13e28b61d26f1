"""Find the outputs of an opaque module by running a copy of it on made-up data.

The copy runs several times with different data. The outcomes must agree. Data that is known, such
as integers that the user gave and buffers of integers, is not made up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardwright.errors import in_one_line
from shardwright.planner.graph.buffer_values import value_of
from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.data_queries.errors import FailsOnMadeUpData, NeedsData
from shardwright.planner.trace.data_queries.known_values import on_data
from shardwright.planner.trace.model.module_copies import duplicate
from shardwright.planner.trace.opaque.argument_objects import Change, Objects, Place, Watched
from shardwright.planner.trace.state.attribute_contents import KeptContents
from shardwright.planner.trace.trace_lock import exporting
from shardwright.runtime.boundary.parametrized import values

SCALES = (0.1, 0.01, 1.0)
"""Scale of the weights in each of the runs."""

LARGE = 1 << 26
"""Parameters of this many bytes or more are a single element in memory, expanded."""

PLAIN_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Spec(NamedTuple):
    """Shape, strides and dtype of an output tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Return such a tensor on meta."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class Valued(NamedTuple):
    """A tensor with a known value: its dtype, shape and bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    value: bytes

    @classmethod
    def of(cls, value: Tensor) -> Valued:
        """Return a value as what can be compared."""
        with on_data():
            plain = value.contiguous().flatten().view(torch.uint8).numpy()
        return cls(value.dtype, tuple(value.shape), plain.tobytes())

    def tensor(self) -> Tensor:
        """Return a tensor with the value."""
        if not self.value:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.value), dtype=self.dtype).view(self.shape)


class Object:
    """Marks an object among the arguments."""


class Given(NamedTuple):
    """The known facts about the arguments of a call."""

    leaves: tuple[Any, ...]
    """(shape, dtype) of tensors or `Valued`, plain values, and `Object`."""
    held: Any
    """The result of `Objects.described` for the objects."""

    def drawn(self) -> list[Any]:
        """Return (shape, dtype) of each tensor in the objects."""
        return [said for _, said in self.held[1] if type(said) is tuple]


class Outcome(NamedTuple):
    """The outcome of a call.

    Attributes:
        found: Leaves of the result, with a `Spec` for each tensor.
        tree: The tree of the leaves.
        touched: Places of tensors in argument objects that the call reads or writes.
        changes: Changes of the argument objects.
        stateful: Whether the call changes attributes of the module.
    """

    found: list[Any]
    tree: TreeSpec
    touched: list[Place]
    changes: list[Change]
    stateful: bool


def outcome(
    name: str, module: nn.Module, given: Given, spec: TreeSpec, objects: Objects
) -> Outcome:
    """Return the outcome of a call of `module` (named `name`) with `objects` among its arguments.

    Raises:
        NeedsData: the outcome depends on data, or the module has other side effects.
    """
    found: list[Outcome] = []
    # No torch mode is active in another thread.
    with ThreadPoolExecutor(1) as thread, exporting(False):
        for seed in range(len(SCALES)):
            try:
                run = _run, module, given, spec, objects, seed
                found.append(thread.submit(copy_context().run, *run).result())
            except FailsOnMadeUpData:  # the module may fail on some of the data
                if seed - len(found) > 0:
                    raise
    if any(other != found[0] for other in found):
        raise NeedsData(f"what '{name}' gives out depends on its data in shape")
    return found[0]


def stated(leaf: Any, known: Callable[[Tensor], Tensor | None] = lambda x: None) -> Any:
    """Return what is known of an argument, as in `Given.leaves`; `known` returns known values.

    Raises:
        NeedsData: the argument is neither a tensor nor a plain value.
    """
    if isinstance(leaf, Tensor):
        if (value := known(inner(leaf))) is not None:
            return Valued.of(value)
        return tuple(int(n) for n in leaf.shape), leaf.dtype
    if not isinstance(leaf, PLAIN_TYPES):
        raise NeedsData(f"a {type(leaf).__name__} is among its arguments")
    if isinstance(leaf, bool):
        return bool(leaf)  # a stand-in gets the answer of the current branch path
    if isinstance(leaf, int):
        float(leaf)  # notes that a `SourcedInt` is used as a number from here on
        return int(leaf)
    return leaf


def state(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, then buffers, then the values of parametrized parameters."""
    for kind in ("_parameters", "_buffers"):
        for part in module.modules():
            yield from (t for t in getattr(part, kind).values() if t is not None)
    for part in module.modules():
        yield from values(part)


def _held(module: nn.Module) -> list[Tensor]:
    """Return all tensors in attributes of the module and its submodules."""
    leaves = (leaf for m in module.modules() for leaf in tree_leaves(dict(m.__dict__)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int, g: torch.Generator) -> Tensor:
    """Make up data. Integers are 0 or 1 (0 for the first seed), which are mostly valid indices."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2 if seed else 1, shape, generator=g).to(dtype)
    return torch.randn(shape, generator=g, dtype=torch.float32).to(dtype)


def _weights(like: Tensor, seed: int, g: torch.Generator) -> Tensor:
    """Make up data for a parameter or buffer, with another scale per seed to cross thresholds."""
    shape = tuple(like.shape)
    large = math.prod(shape) * like.element_size() >= LARGE
    drawn = _draw((1,) * len(shape) if large else shape, like.dtype, seed, g)
    if like.dtype.is_floating_point:
        drawn *= SCALES[seed]
    return drawn.expand(shape)


def _real(module: nn.Module, seed: int, g: torch.Generator) -> nn.Module:
    """Return a copy of `module` with made-up data for tensors on meta."""
    memo: dict[int, Any] = {}
    for t in _held(module):
        if t.is_meta and id(t) not in memo:
            value = value_of(t)
            new = _weights(t, seed, g) if value is None else value.clone()
            memo[id(t)] = nn.Parameter(new, False) if isinstance(t, nn.Parameter) else new
    return duplicate(module, memo)


def _run(module: nn.Module, given: Given, spec: TreeSpec, objects: Objects, seed: int) -> Outcome:
    """Run a copy of `module` once on data made up from `seed`; returns the outcome."""
    g = torch.Generator().manual_seed(seed)
    real = _real(module, seed, g)
    drawn = [_draw(shape, dtype, seed, g) for shape, dtype in given.drawn()]
    theirs = objects.copied(drawn, torch.device("cpu"))
    copies = iter(theirs.objects)
    leaves = [_leaf(v, copies, seed, g) for v in given.leaves]
    args, kwargs = tree_unflatten(leaves, spec)
    held = _held(real)
    taken = [*held, *(t for t in leaves if isinstance(t, Tensor))]
    before = [(t._version, t.dtype, t.data_ptr()) for t in taken]
    attributes, watched = KeptContents(real), Watched(theirs)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), watched:
            torch.default_generator.manual_seed(seed)  # so that plans do not depend on its state
            found, out = tree_flatten(real(*args, **kwargs))
    except Exception as error:  # any exception of model code
        raise FailsOnMadeUpData(
            f"its results depend on data, and on made-up data it fails: {in_one_line(error):.200}"
        ) from error
    still = list(map(id, tree_leaves((args, kwargs)))) == list(map(id, leaves))
    still = still and list(map(id, held)) == list(map(id, _held(real)))
    if any(map(_is_changed, taken, before)) or not still:
        raise NeedsData("it changes what it is given, or keeps something")
    touched, changes = watched.touched(), watched.changes()
    put = [change.value for change in changes if not change.written]
    # A later in-place change of an alias would be made twice, or not at all.
    made = [_place(t) for t in [*found, *put] if isinstance(t, Tensor) and t.numel()]
    if len(set(made)) < len(made) or not set(made).isdisjoint(map(_place, [*taken, *drawn])):
        raise NeedsData("it hands on what it is given")
    changed = [change._replace(value=_spec(change.value)) for change in changes]
    return Outcome([_spec(v) for v in found], out, touched, changed, attributes.changed())


def _leaf(said: Any, copies: Iterator[Any], seed: int, g: torch.Generator) -> Any:
    """Return an argument that matches `said` of `Given.leaves`; objects come from `copies`."""
    if said is Object:
        return next(copies)
    if type(said) is Valued:
        return said.tensor()
    return _draw(said[0], said[1], seed, g) if type(said) is tuple else said


def _is_changed(tensor: Tensor, before: tuple[int, torch.dtype, int]) -> bool:
    """Whether values were written, or `data` set, which leaves the version. A cast is no write."""
    version, dtype, place = before
    return tensor._version != version or (tensor.dtype == dtype and tensor.data_ptr() != place)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Spec(tuple(leaf.shape), leaf.stride(), leaf.dtype)
    if not isinstance(leaf, PLAIN_TYPES):
        raise NeedsData(f"a {type(leaf).__name__} is among its results")
    return leaf
