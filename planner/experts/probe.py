"""Tests by numbers whether a module's tokens may travel to the ranks that hold their experts.

A mixture's module gets tokens [T, H], the numbers [T, k] of each token's experts, and weights
[T, k]. Its tokens may travel if

- the output for a token depends on that token, its experts and their weights alone,
- it is the sum over the token's experts of what the module gives for each of them alone,
- and a module with some of the experts, numbered from 0, gives the same for these.

Parameters may have rows for the first of the experts only, if the others compute without.

Or its tokens lie by expert: as many for each, [E * T, H] or [E, T, H], or [T, H] and the number of
each expert's. They may travel if each is computed by itself, and a module with some of the experts
gives the same for their tokens.

What code sorts, counts and scatters by data cannot be followed in a graph of calls. But apart from
this, code computes with real functions, which are equal if they are equal at random points. So a
small copy of the module, with few experts and narrow features, runs on random numbers: in eval and
in training mode, with tokens that share an expert, and experts without tokens. So does one with all
experts, if it is not too large.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import pairwise, product, takewhile
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from shardwright.errors import first_line
from shardwright.planner.contract.plain_values import is_plain

OF_ANY_MODULE = vars(nn.Module()).keys()
"""Attributes that torch gives each module."""
TOKENS, EXPERTS, FIRST = 5, 4, 2
"""Tokens, experts of a copy, and how many have rows where not all have."""
MANY = 16_392
"""Most tokens with which code is tried that does something else from a number of them on."""
WORK = 1 << 27
"""Most tokens times elements of a copy, in such a try."""
NARROW = 8
"""What the greatest common divisor of the features' sizes becomes: kernels want multiples of it."""
LARGEST = 1 << 24
"""Most elements of a copy: it takes seconds."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of sums in another order, relative to the largest element. Another expert makes far more.

Grouped products of torch take no float64.
"""


@dataclass(frozen=True)
class Mixture:
    """A module's arguments and parameters, as a mixture of experts.

    Attributes:
        tokens: The argument with the hidden states.
        experts: The argument with each token's experts, by number. None if tokens lie by expert.
        weights: The argument with their weights, likewise.
        count: All experts.
        chosen: Experts of a token; 0 if tokens lie by expert, as many for each.
        width: Elements of a token.
        parameters: Parameters with the same number of rows for each expert, in turn -> how many
            experts have rows: all, or the first.
        attributes: Integers of the module that are one of these numbers.
    """

    tokens: str
    experts: str | None
    weights: str | None
    count: int
    chosen: int
    width: int
    parameters: dict[str, int]
    attributes: dict[str, int]
    columns: int = 1
    """Experts that code is told of a token that has come: 2 if it fails with 1. The second is the
    first again, with weight 0."""
    dims: int = 2
    """Dims of the tokens, if they lie by expert: 3 if one of them is that of the experts."""
    counts: str | None = None
    """The argument with how many tokens each expert has, if they lie by expert and these differ."""
    listed: bool = False
    """Whether that is a list of integers, not a tensor."""
    given: int | None = None
    """Elements of what it gives for a token, if these are not `width`."""

    @property
    def first(self) -> int:
        """How many experts have rows in all parameters."""
        return min(self.parameters.values())


class Pairs(NamedTuple):
    """Tokens [T, H], their experts [T, k] and weights [T, k].

    If they lie by expert, tokens [T, E, H], and k is 0.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor

    def rows(self, at: Tensor) -> Pairs:
        """Return some of the tokens."""
        return Pairs(*(each[at] for each in self))


def same_settings(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules without submodules have the same class and the same settings."""
    if type(one) is not type(other) or one._modules or other._modules:
        return False
    mine, others = (
        {k: v for k, v in vars(m).items() if k not in OF_ANY_MODULE} for m in (one, other)
    )
    return mine.keys() == others.keys() and all(
        v is others[k] or (is_plain(v) and v == others[k]) for k, v in mine.items()
    )


def fault(module: nn.Module, mixture: Mixture) -> str | None:
    """Return why the tokens of a module on the meta device may not travel; None if they may."""
    common = gcd(*_features(module, mixture))
    text = "its experts are too large to be tried with random numbers"
    for factor in [common // NARROW] * (common >= 2 * NARROW) + [1]:
        ran = False
        for dtype in TOLERANCE:  # code that rounds to float32 itself may yet pass in float32
            copies = [_Probe(module, mixture, factor, dtype, all_of) for all_of in (False, True)]
            too_large = [copy.elements > LARGEST for copy in copies]
            if too_large[mixture.first < mixture.count]:
                continue
            try:
                with torch.random.fork_rng(devices=()), torch.enable_grad(), torch.device("cpu"):
                    faults = (copy.fault() for copy in copies if copy.elements <= LARGEST)
                    found = next((fault for fault in faults if fault is not None), None)
            except Exception as error:  # whatever the model's code raises
                text = f"its code fails on random numbers: {first_line(error)}"
                continue
            if found is None:
                return None
            text, ran = found, True
        if ran:
            break  # copies that are not narrow are tried with fewer tokens
    return text


class _Probe:
    """The test of one module with few experts or all, features divided by `factor`, in a dtype."""

    def __init__(
        self, module: nn.Module, mixture: Mixture, factor: int, dtype: torch.dtype, all_of: bool
    ) -> None:
        self.module, self.mixture, self.all_of = module, mixture, all_of
        self.dtype, self.tolerance = dtype, TOLERANCE[dtype]
        self.random = torch.Generator().manual_seed(0)
        self.count, self.width = self._experts(mixture.count), mixture.width // factor
        self.narrow = {n: n // factor for n in _features(module, mixture)}
        """Size of features -> the size in the copy."""
        self.shapes = {n: self._shape(n, p.shape) for n, p in module.named_parameters()}
        self.elements = sum(prod(self.shapes[name]) for name in mixture.parameters)

    def _experts(self, number: int) -> int:
        """Return how many experts the copy has, of all of the module's or of the first."""
        return number if self.all_of else EXPERTS if number == self.mixture.count else FIRST

    def _shape(self, name: str, shape: Sequence[int]) -> list[int]:
        sizes = [self.narrow.get(n, n) for n in shape]
        if (experts := self.mixture.parameters.get(name)) is not None:
            rows = shape[0] // experts
            sizes[0] = self._experts(experts) * (1 if rows == 1 else self.narrow[rows])
        return sizes

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Random numbers for each parameter, which do not grow from layer to layer."""
        return {n: self._drawn(*s) / max(1, *s[-1:]) ** 0.5 for n, s in self.shapes.items()}

    def _drawn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=self.dtype, generator=self.random)

    def fault(self) -> str | None:
        """Return what differs, if anything does."""
        if any(True for _ in self.module.buffers()):
            return "it has buffers, whose values are not known"
        for training, pairs in product((False, True), self._cases()):
            if (found := self._compared(pairs, training)) is not None:
                return found + (", in training mode" if training else "")
        return None

    def _cases(self) -> Sequence[Pairs]:
        """Return tokens with random experts, and tokens, few and many, that share their experts."""
        most = TOKENS if self.all_of else max(TOKENS, min(MANY, WORK // self.elements))
        numbers = sorted({TOKENS, most})
        if not self.mixture.chosen:
            none = (torch.zeros(n, 0) for n in numbers)
            return [Pairs(self._drawn(len(x), self.count, self.width), x, x) for x in none]
        k, count = min(self.mixture.chosen, self.count), self.count
        if self.all_of:
            order = torch.randperm(count, generator=self.random)
            return [self._told(torch.cat([order, order[: -count % k]]).view(-1, k))]
        orders = [torch.randperm(count, generator=self.random) for _ in range(TOKENS)]
        shared = {0, count - k} if self.mixture.first < self.mixture.count else {0}
        return [
            self._told(torch.stack(orders)[:, :k]),
            *(
                self._told(torch.arange(first, first + k).repeat(n, 1))
                for n, first in product(numbers, sorted(shared))
            ),
        ]

    def _told(self, experts: Tensor) -> Pairs:
        """Return random tokens and weights for their experts."""
        tokens, weights = self._drawn(len(experts), self.width), self._drawn(*experts.shape)
        return Pairs(tokens, experts, weights.abs() + 0.1)

    def _compared(self, pairs: Pairs, training: bool) -> str | None:
        whole = self._copy(0, self.count, training)
        before = _attributes(whole)
        want, gradients = self._with_gradients(pairs, lambda p: self._run(whole, p), [whole])
        for name, values in _attributes(whole).items():
            was = before.get(name, ())
            if len(was) != len(values) or any(a is not b for a, b in zip(was, values, strict=True)):
                return f"it changes its attribute '{name}', which other code may read"
        turned = torch.arange(len(pairs.tokens) - 1).flip(0)
        for some in (turned, turned[-TOKENS:]) if len(turned) > TOKENS else (turned,):
            if not self._close(self._run(whole, pairs.rows(some)), want[some]):
                return "its output for a token depends on the other tokens"
        first = self._experts(self.mixture.first)
        ends = {0, 1, min(first + 1, self.count), self.count - 1, self.count}
        ranges = [*pairwise(sorted(ends))]
        parts = [self._copy(*each, training) for each in ranges]
        found, others = self._with_gradients(pairs, lambda p: self._apart(parts, ranges, p), parts)
        if not self._close(found, want):
            return "its output for a token is not the sum of the outputs of the token's experts"
        terms = len(pairs.tokens)
        if not all(self._close(o, g, terms) for o, g in zip(others, gradients, strict=True)):
            return "its gradients are not the sums over single tokens and experts"
        return None

    def _copy(self, first: int, last: int, training: bool) -> nn.Module:
        """Return the module with some of the experts, with random numbers."""
        small = copy.deepcopy(self.module).train(training)
        for name, values in self.values.items():
            owner, _, last_name = name.rpartition(".")
            part = values
            if name in self.mixture.parameters:
                experts = self._experts(self.mixture.parameters[name])
                rows = len(values) // experts
                part = values[min(first, experts) * rows : min(last, experts) * rows]
            setattr(small.get_submodule(owner), last_name, nn.Parameter(part.clone()))
        for path, each in small.named_modules():
            for name, value in [*vars(each).items()]:
                if f"{path}.{name}".lstrip(".") in self.mixture.attributes:
                    experts = self._experts(value)
                    setattr(each, name, min(last, experts) - min(first, experts))
                elif type(value) is int and value in self.narrow:
                    setattr(each, name, self.narrow[value])
        return small

    def _run(self, module: nn.Module, pairs: Pairs) -> Tensor:
        at = self.mixture
        if at.counts is not None:
            return self._sorted(module, at.counts, pairs)
        if at.experts is None:
            lying = pairs.tokens.transpose(0, 1)
            made = module(lying if at.dims == 3 else lying.flatten(0, 1))
            return made.view(lying.shape).transpose(0, 1).flatten(1)
        names: Any = at.tokens, at.experts, at.weights
        given = dict(zip(names, pairs, strict=True))
        return _called(module, given).reshape(len(pairs.tokens), -1)

    def _sorted(self, module: nn.Module, counts: str, pairs: Pairs) -> Tensor:
        """Run a module that is told how many tokens each expert has."""
        chosen = pairs.experts.flatten()
        held = module.get_parameter(next(iter(self.mixture.parameters)))
        each = chosen.bincount(minlength=len(held))
        order = chosen.argsort(stable=True)
        told = each.tolist() if self.mixture.listed else each
        made = _called(module, {self.mixture.tokens: pairs.tokens[order], counts: told})
        return made[order.argsort()]

    def _apart(
        self, parts: Sequence[nn.Module], ranges: Sequence[tuple[int, int]], pairs: Pairs
    ) -> Tensor:
        """Return the sum over experts, each pair computed by the module that has its expert."""
        if not self.mixture.chosen:
            own = (pairs._replace(tokens=pairs.tokens[:, a:b]) for a, b in ranges)
            return torch.cat(list(map(self._run, parts, own)), 1)
        k = pairs.experts.shape[1]
        alone = Pairs(
            pairs.tokens.repeat_interleave(k, 0),
            pairs.experts.reshape(-1, 1).repeat(1, self.mixture.columns),
            pad(pairs.weights.reshape(-1, 1), (0, self.mixture.columns - 1)),
        )
        found: list[tuple[Tensor, Tensor]] = []
        for part, (first, last) in zip(parts, ranges, strict=True):
            own_expert = alone.experts[:, 0]
            mine = ((own_expert >= first) & (own_expert < last)).nonzero().flatten()
            if len(mine):
                own = alone.rows(mine)
                found.append((mine, self._run(part, own._replace(experts=own.experts - first))))
        at, made = map(torch.cat, zip(*found, strict=True))
        return made[at.argsort()].view(len(pairs.tokens), k, -1).sum(1)

    def _with_gradients(
        self, pairs: Pairs, run: Callable[[Pairs], Tensor], modules: Sequence[nn.Module]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output, and the gradients of tokens, weights and all parameters.

        Those of experts are joined over `modules`, and those of other parameters added.
        """
        tokens = pairs.tokens.clone().requires_grad_()
        weights = pairs.weights.clone().requires_grad_()
        out = run(pairs._replace(tokens=tokens, weights=weights))
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
        named = [dict(module.named_parameters()) for module in modules]
        of_weights = _joined(named, self.mixture.parameters)
        return out.detach(), [_gradient(tokens), _gradient(weights), *of_weights]

    def _close(self, found: Tensor, want: Tensor, terms: int = 1) -> bool:
        """Return whether sums are equal, as far as rounding in another order lets them."""
        if found.shape != want.shape or not bool(want.isfinite().all()):
            return False
        most = max(float(want.detach().abs().max()), 1.0) if want.numel() else 1.0
        return bool(((found - want).abs() <= self.tolerance * most * terms**0.5).all())


def _features(module: nn.Module, mixture: Mixture) -> Iterator[int]:
    """Yield the sizes of all dims but that of the experts."""
    yield mixture.width
    for name, experts in mixture.parameters.items():
        stack = module.get_parameter(name)
        yield from stack.shape[1:]
        if len(stack) > experts:
            yield len(stack) // experts


def _called(module: nn.Module, given: dict[str, Any]) -> Tensor:
    """Return what a module makes of its arguments, which code behind it may name otherwise."""
    first = signature(module.forward).parameters.items()
    leading = takewhile(lambda p: p[0] in given and p[1].kind is p[1].POSITIONAL_OR_KEYWORD, first)
    args = [given.pop(name) for name, _ in leading]
    return module(*args, **given)


def _attributes(module: nn.Module) -> dict[str, list[Any]]:
    """Return the attributes of a module and of those within, and what is in dicts and lists."""
    out: dict[str, list[Any]] = {}
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            within = value.values() if isinstance(value, dict) else value
            more = [*within] if isinstance(value, (dict, list)) else []
            out[f"{path}.{name}".lstrip(".")] = [value, *more]
    return out


def _joined(named: Sequence[Mapping[str, Any]], of_experts: Collection[str]) -> list[Tensor]:
    out = []
    for name in named[0]:
        every = [_gradient(each[name]) for each in named]
        out.append(torch.cat(every) if name in of_experts else torch.stack(every).sum(0))
    return out


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
