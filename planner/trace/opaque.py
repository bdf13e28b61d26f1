"""Modules that cannot be traced, because what they do depends on data, stand for themselves.

Such a module is one op without a rule: what goes in, its parameters and what comes out are whole,
and on every rank it runs as it is. What it gives out for inputs of some shapes is found by running
a copy of it on made-up data, several times: only what comes out alike each time counts as known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardwright.planner.contract.names import pattern
from shardwright.planner.trace.data_dependent.branch_paths import Ways, both
from shardwright.planner.trace.duplicate import duplicate
from shardwright.planner.trace.one_at_a_time import exporting
from shardwright.planner.trace.traced_calls import Run

SCALES = (0.1, 0.01, 1.0)
"""Of the weights in each of the runs."""

LARGE = 1 << 26
"""Bytes from which on the elements of a parameter are a single one in memory."""

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Unknown(Exception):
    """It cannot be told what a module gives out; the message says why."""


class Fails(Unknown):
    """It does not run on made-up data."""


class Undecided(Unknown):
    """Run number `turn` asked something of data, and goes on either way."""

    def __init__(self, turn: int) -> None:
        super().__init__("it branches on data")
        self.turn = turn


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, Unknown)
"""What is raised where a run would need data."""


class Spec(NamedTuple):
    """A tensor that comes out."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Such a tensor on meta."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


Given = tuple[Any, ...]
"""Leaves of what goes in: (shape, dtype) of tensors, and plain values."""

Make = Callable[[str, list[Tensor], list[Spec]], list[Tensor]]
"""From the name of a module, the tensors it takes and what comes out to that."""


class Opaque:
    """The modules of `root` that are not traced; `root` itself is left as it is.

    `alike` maps each to one of them that does the same. `guesses` says whether numbers that only
    data has get a stand-in (see `numbers.py`), `guessed` whether one did, and `ways` which
    runs are then made, of those that are asked for (see `ways.py`).
    """

    def __init__(
        self,
        root: nn.Module,
        alike: Mapping[str, str] | None = None,
        guesses: bool = True,
        ways: Ways = (),
    ) -> None:
        self.root, self.guesses, self.guessed, self.ways = root, guesses, False, ways
        self.alike = dict(alike or {})
        self._copies = {n: duplicate(root.get_submodule(n)) for n in set(self.alike.values())}
        self._known: dict[tuple[str, Given, str], tuple[list[Any], TreeSpec]] = {}

    def after(self, error: Exception, entered: Sequence[str]) -> bool:
        """Take in what a run failed at; False where nothing is left to try."""
        if isinstance(error, Undecided) and (ways := both(self.ways, error.turn)):
            self.ways = ways
            return True
        if any(answers for _, answers in self.ways) and self._needs_data(error, entered):
            return True
        if self.guesses and self.guessed:
            self.stop_guessing()
            return True
        return self._needs_data(error, entered)

    def stop_guessing(self) -> None:
        """From here on numbers that only data has get no stand-in, so no questions are answered."""
        self.guesses, self.ways = False, ()

    def _needs_data(self, error: Exception, entered: Sequence[str]) -> bool:
        return isinstance(error, DATA_DEPENDENT) and self.widen(entered)

    def made(self, runs: Sequence[Run]) -> list[Run]:
        """`runs` as they are made: some of them twice. They may be the first of all runs."""
        self.ways = self.ways or tuple((i, ()) for i in range(len(runs)))
        return [runs[i]._replace(answers=a) for i, a in self.ways if i < len(runs)]

    def widen(self, entered: Sequence[str]) -> bool:
        """Take in the innermost of the modules `entered` that is not in yet, with others like it.

        False if that is `root` itself.
        """
        name = next((n for n in reversed(entered) if n not in self.alike), "")  # "" is `root`
        if not name:
            return False
        kind = type(self.root.get_submodule(name))
        for other, module in self.root.named_modules():
            if type(module) is kind and pattern(other) == pattern(name):
                self.alike[other] = other
                self._copies[other] = duplicate(module)
        return True

    def used_from_outside(self, called: Iterable[str]) -> list[str]:
        """Where one of the modules `called` is within one of these: the latter, and those around.

        A plan may change what such a module takes and gives, for all its calls.
        """
        seen = {id(self.root.get_submodule(name)) for name in called}
        for name in self.alike:
            parts = name.split(".")
            _, *within = self.root.get_submodule(name).modules()
            if not seen.isdisjoint(map(id, within)):
                return [".".join(parts[: i + 1]) for i in range(len(parts))]
        return []

    @contextmanager
    def standing_in(self, root: nn.Module, make: Make) -> Iterator[None]:
        """Within, calls of these modules in `root`, a copy maybe, give what `make` gives."""
        with ExitStack() as undo:
            for name in self.alike:
                module = root.get_submodule(name)
                before = module.__dict__.get("forward")
                module.__dict__["forward"] = self._forward(name, module, make)
                undo.callback(_restore, module, before)
            yield

    def _forward(self, name: str, module: nn.Module, make: Make) -> Callable[..., Any]:
        @wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            found, out = self._result(self.alike[name], tuple(map(_given, leaves)), spec)
            tensors = [t for t in [*leaves, *_state(module)] if isinstance(t, Tensor)]
            made = iter(make(name, tensors, [v for v in found if isinstance(v, Spec)]))
            return tree_unflatten([next(made) if isinstance(v, Spec) else v for v in found], out)

        return forward

    def _result(self, name: str, given: Given, spec: TreeSpec) -> tuple[list[Any], TreeSpec]:
        """What module `name` gives out: `Spec` for tensors, and plain values.

        Raises:
            Unknown: that depends on data, or the module does more than to compute it.
        """
        key = name, given, str(spec)
        if key not in self._known:
            runs: list[Any] = []
            # No mode is on in another thread.
            with ThreadPoolExecutor(1) as thread, exporting(False):
                for seed in range(len(SCALES)):
                    try:
                        made = _run, self._copies[name], given, spec, seed
                        runs.append(thread.submit(copy_context().run, *made).result())
                    except Fails:  # of some data nothing comes out
                        if seed - len(runs) > 0:
                            raise
            if any(run != runs[0] for run in runs):
                raise Unknown(f"what '{name}' gives out depends on its data in shape")
            self._known[key] = runs[0]
        return self._known[key]


def _restore(module: nn.Module, forward: Any) -> None:
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward


def _given(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(int(n) for n in leaf.shape), leaf.dtype
    if not isinstance(leaf, PLAIN):
        raise Unknown(f"a {type(leaf).__name__} is among its arguments")
    if isinstance(leaf, bool):
        return bool(leaf)  # where only data has it, in one of its ways
    if isinstance(leaf, int):
        float(leaf)  # an integer that remembers where it comes from is a mere number from here on
        return int(leaf)
    return leaf


def _state(module: nn.Module) -> Iterator[Tensor]:
    """Its parameters, then its buffers."""
    for kind in ("_parameters", "_buffers"):
        for part in module.modules():
            yield from (t for t in getattr(part, kind).values() if t is not None)


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


def _run(module: nn.Module, given: Given, spec: TreeSpec, seed: int) -> tuple[list[Any], TreeSpec]:
    """Run a copy of `module` once on data made up from `seed`."""
    g = torch.Generator().manual_seed(seed)
    real = _real(module, seed, g)
    leaves = [_draw(v[0], v[1], seed, g) if type(v) is tuple else v for v in given]
    args, kwargs = tree_unflatten(leaves, spec)
    held = _held(real)
    taken = [*held, *(t for t in leaves if isinstance(t, Tensor))]
    versions = [t._version for t in taken]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found, out = tree_flatten(real(*args, **kwargs))
    except Exception as error:  # whatever model code raises
        text = str(error).strip().split("\n")[0][:200]
        raise Fails(f"on the CPU it fails as well: {type(error).__name__}: {text}") from error
    if versions != [t._version for t in taken] or list(map(id, held)) != list(map(id, _held(real))):
        raise Unknown("it changes what it is given, or keeps something")
    # What is then changed in place would change twice, or not at all.
    made = [_place(t) for t in found if isinstance(t, Tensor) and t.numel()]
    if len(set(made)) < len(made) or not set(made).isdisjoint(map(_place, taken)):
        raise Unknown("it hands on what it is given")
    return [_spec(v) for v in found], out


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Spec(tuple(leaf.shape), leaf.stride(), leaf.dtype)
    if not isinstance(leaf, PLAIN):
        raise Unknown(f"a {type(leaf).__name__} is among its results")
    return leaf
