"""Tests by numbers whether a module's tokens may travel to the ranks that hold their experts.

A mixture's module gets tokens [T, H], the numbers [T, k] of each token's experts, and weights
[T, k]. Its tokens may travel if

- the output for a token depends on that token, its experts and their weights alone,
- it is the sum over the token's experts of what the module gives for each of them alone,
- and a module with some of the experts, numbered from 0, gives the same for these.

What code sorts, counts and scatters by data cannot be followed in a graph of calls. But apart from
this, code computes with real functions, which are equal if they are equal at random points. So a
small copy of the module, with the model's own sizes and code but few experts, runs on random
numbers: in eval and in training mode, with tokens that share an expert, and experts without tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.errors import first_line

TOKENS = 5
EXPERTS = 4
LARGE = 1 << 25
"""Elements of the small copy, beyond which it has two experts, and frozen weights."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of sums in another order, relative to the largest element. Another expert makes far more.

Grouped products of torch take no float64.
"""


class Mixture(NamedTuple):
    """A module's arguments and parameters, as a mixture of experts.

    Attributes:
        tokens: The argument with the hidden states.
        experts: The argument with the numbers of each token's experts.
        weights: The argument with their weights.
        count: All experts.
        chosen: Experts of a token.
        width: Elements of a token.
        parameters: Parameters with one row for each expert.
        attributes: Integers of the module that are the number of experts.
    """

    tokens: str
    experts: str
    weights: str
    count: int
    chosen: int
    width: int
    parameters: tuple[str, ...]
    attributes: tuple[str, ...]


def fault(module: nn.Module, mixture: Mixture) -> str | None:
    """Return why the tokens of a module on the meta device may not travel; None if they may."""
    text = "it takes no numbers"
    for dtype, tolerance in TOLERANCE.items():
        try:
            with torch.random.fork_rng(devices=()), torch.enable_grad():
                torch.manual_seed(0)
                return _Probe(module, mixture, dtype, tolerance).fault()
        except Exception as error:  # whatever the model's code raises
            text = f"its code fails on random numbers: {first_line(error)}"
    return text


class _Pairs(NamedTuple):
    """Tokens [T, H], their experts [T, k] and weights [T, k]."""

    tokens: Tensor
    experts: Tensor
    weights: Tensor

    def rows(self, at: Any) -> _Pairs:
        """Return some of the tokens."""
        return _Pairs(*(each[at] for each in self))


class _Probe:
    """The test of one module in one dtype."""

    def __init__(
        self, module: nn.Module, mixture: Mixture, dtype: torch.dtype, tolerance: float
    ) -> None:
        self.module, self.mixture, self.tolerance = module, mixture, tolerance
        size = sum(module.get_parameter(n).numel() for n in mixture.parameters) // mixture.count
        self.large = size * EXPERTS > LARGE
        self.count = min(2 if self.large else EXPERTS, mixture.count)
        self.values = {name: self._values(name, p, dtype) for name, p in module.named_parameters()}
        self.dtype = dtype

    def _values(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return random numbers for a parameter, which do not grow from layer to layer."""
        shape = parameter.shape
        if name in self.mixture.parameters:
            shape = torch.Size((self.count, *shape[1:]))
        some = torch.randn(min(shape.numel(), 999_983), dtype=dtype)  # drawing more takes seconds
        every = some.repeat(-(-shape.numel() // max(len(some), 1)))[: shape.numel()].view(shape)
        return every / max(shape[-1], 1) ** 0.5

    def fault(self) -> str | None:
        """Return what differs, if anything does."""
        if any(True for _ in self.module.buffers()):
            return "it has buffers, whose values are not known"
        for training in (False, True):
            for pairs in self._cases():
                if (found := self._compared(pairs, training)) is not None:
                    return found + (", in training mode" if training else "")
        return None

    def _cases(self) -> Sequence[_Pairs]:
        """Return tokens with random experts, and tokens that share their experts."""
        k, count, width = min(self.mixture.chosen, self.count), self.count, self.mixture.width
        tokens = torch.randn(TOKENS, width, dtype=self.dtype)
        weights = torch.rand(TOKENS, k, dtype=self.dtype) + 0.1
        mixed = torch.stack([torch.randperm(count)[:k] for _ in range(TOKENS)])
        shared = torch.arange(k).expand(TOKENS, k).contiguous()
        return [_Pairs(tokens, mixed, weights), _Pairs(tokens, shared, weights)]

    def _compared(self, pairs: _Pairs, training: bool) -> str | None:
        whole = self._copy(0, self.count, training)
        want, gradients = self._with_gradients(pairs, lambda p: self._run(whole, p), [whole])
        turned = torch.arange(TOKENS).flip(0)[: TOKENS - 1]
        if not self._close(self._run(whole, pairs.rows(turned)), want[turned]):
            return "what it gives for a token depends on the tokens beside it"
        middle = max(self.count // 2, 1)
        ends = sorted({0, 1, middle, self.count})
        parts = [self._copy(a, b, training) for a, b in pairwise(ends)]
        found, others = self._with_gradients(
            pairs, lambda p: self._apart(parts, [*pairwise(ends)], p), parts
        )
        if not self._close(found, want):
            return "what it gives for a token is not the sum of what each of its experts gives"
        if not all(map(self._close, others, gradients)):
            return "its gradients are not the sums of those of each token and expert"
        return None

    def _copy(self, first: int, last: int, training: bool) -> nn.Module:
        """Return the module with some of the experts, with random numbers."""
        small = copy.deepcopy(self.module).train(training)
        for name, values in self.values.items():
            owner, _, last_name = name.rpartition(".")
            mine = name in self.mixture.parameters
            part = nn.Parameter(values[first:last].clone() if mine else values.clone())
            part.requires_grad_(not self.large)
            setattr(small.get_submodule(owner), last_name, part)
        for attribute in self.mixture.attributes:
            owner, _, name = attribute.rpartition(".")
            setattr(small.get_submodule(owner), name, last - first)
        return small

    def _run(self, module: nn.Module, pairs: _Pairs) -> Tensor:
        at = self.mixture
        given = dict(zip((at.tokens, at.experts, at.weights), pairs, strict=True))
        return module(**given).reshape(len(pairs.tokens), -1)

    def _apart(
        self, parts: Sequence[nn.Module], ends: Sequence[tuple[int, int]], pairs: _Pairs
    ) -> Tensor:
        """Return the sum over experts, each pair computed by the module that has its expert."""
        k = pairs.experts.shape[1]
        alone = _Pairs(
            pairs.tokens.repeat_interleave(k, 0),
            pairs.experts.reshape(-1, 1),
            pairs.weights.reshape(-1, 1),
        )
        out = torch.zeros(len(alone.tokens), self.mixture.width, dtype=self.dtype)
        for part, (first, last) in zip(parts, ends, strict=True):
            mine = ((alone.experts >= first) & (alone.experts < last)).flatten().nonzero().flatten()
            if len(mine):
                own = alone.rows(mine)
                own = own._replace(experts=own.experts - first)
                out = out.index_add(0, mine, self._run(part, own))
        return out.view(-1, k, self.mixture.width).sum(1)

    def _with_gradients(
        self, pairs: _Pairs, run: Any, modules: Sequence[nn.Module]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the output, and the gradients of tokens, weights and all parameters.

        Those of experts are joined over `modules`, and those of other parameters added.
        """
        tokens, weights = pairs.tokens.clone(), pairs.weights.clone()
        leaves = [tokens.requires_grad_(), weights.requires_grad_()]
        out = run(pairs._replace(tokens=tokens, weights=weights))
        named = [dict(module.named_parameters()) for module in modules]
        leaves += [p for each in named for p in each.values() if p.requires_grad]
        steps = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        out.backward(steps)
        found = [_gradient(each) for each in leaves[:2]]
        return out.detach(), found + _joined(named, self.mixture.parameters)

    def _close(self, found: Tensor, want: Tensor) -> bool:
        if found.shape != want.shape or not bool(want.isfinite().all()):
            return False
        most = max(float(want.detach().abs().max()), 1.0) if want.numel() else 1.0
        return bool(((found - want).abs() <= self.tolerance * most).all())


def _joined(named: Sequence[Mapping[str, nn.Parameter]], of_experts: Sequence[str]) -> list[Tensor]:
    out = []
    for name, parameter in named[0].items():
        if not parameter.requires_grad:
            continue
        every = [_gradient(each[name]) for each in named]
        out.append(torch.cat(every) if name in of_experts else torch.stack(every).sum(0))
    return out


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
