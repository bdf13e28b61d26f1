"""Where sizes come from, and a module that is left as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.planner.graph.graph import Graph
from shardwright.planner.trace.sizes.expressions import attributes_of, evaluate, reads_of
from shardwright.planner.trace.sizes.provenance import Provenance, SourcedInt
from tests import planning
from tests.planner import equal
from tests.planner.equal import assert_equal
from tests.planner.mlps import WIDTH, InverseSize
from tests.planner.modules import (
    HEADS,
    Attention,
    DividedByHeads,
    Fused,
    LiteralHeads,
)
from tests.planner.test_trace import features, traced  # noqa
from tests.planning import trace

# --- where sizes come from


def sizes(graph: Graph) -> set[tuple[str, int]]:
    return {a for s in graph.sizes for a in attributes_of(s.expression)}  # type: ignore[misc]


@dataclass
class Config:
    """As transformers writes them: with a dict of itself."""

    heads: int = HEADS
    width: int = WIDTH

    def to_dict(self) -> dict[str, int]:
        return dict(self.__dict__)


class FromConfig(nn.Module):
    """Sizes out of a config, by arithmetic, in views, expands, splits and slices."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.group = Config(), 2
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        head = self.config.width // self.config.heads
        q, k, v = self.qkv(x).split(self.config.width, dim=-1)
        q = q.view(b, t, self.config.heads, head)
        k = k.view(b, t, self.config.heads, 1, head).expand(
            b, t, self.config.heads, self.group, head
        )
        return q + k.sum(3) + v[..., : self.config.width - 0].unflatten(-1, (-1, head))


def test_attributes_are_found() -> None:
    """Of the module and of its config, with the arithmetic between them."""
    graph = traced(FromConfig())
    assert sizes(graph) >= {("", "config.heads"), ("", "config.width"), ("", "group")}
    expressions = {s.expression for s in graph.sizes}
    width, heads = (
        ("attribute", "", f"config.{n}", v) for n, v in (("width", WIDTH), ("heads", HEADS))
    )
    assert ("//", width, heads) in expressions
    assert {s.bound for s in graph.sizes} == {"", "stop"}
    shapes = {
        (s.expression[3], s.dim) for s in graph.sizes if s.expression[:2] == ("attribute", "")
    }
    assert (HEADS, 2) in shapes and (2, 3) in shapes


def test_sizes_are_what_the_tensors_have() -> None:
    """Every expression without a bound gives the length of the dim that it stands for."""
    for module in (FromConfig(), Attention(), Fused("groups"), LiteralHeads()):
        graph = traced(module)
        assert graph.sizes
        for size in graph.sizes:
            if not size.bound:
                found = graph.tensors[size.tensor].shape[size.dim]
                assert evaluate(size.expression, {}) == found


class OfNumpy(nn.Module):
    """Computes a size as numpy does: what that gives is no int."""

    def forward(self, x: Tensor) -> Tensor:
        four, two = (cast(int, np.int64(n)) for n in (4, 2))
        none = torch.zeros(x.shape[0], four - x.shape[1] % 4, x.shape[2], device=x.device)
        return torch.cat([x, none], 1).view(-1, two)


def test_sizes_of_numpy_are_sizes() -> None:
    """Those beside them stand for the dims that they are at, and bare ones are literals."""
    found = {
        (size.dim, size.expression[:2])
        for size in traced(OfNumpy()).sizes
        if evaluate(size.expression, {}) > 1
    }
    assert found == {(0, ("read", 3)), (2, ("read", WIDTH)), (1, ("constant", 2))}


def test_local_values_go_into_expressions() -> None:
    expression = ("*", ("attribute", "m", "h", 4), ("-", ("read", 20, 0, 1), ("constant", 4)))
    assert evaluate(expression, {}) == 64
    assert evaluate(expression, {("m", "h"): 2}) == 32
    assert evaluate(expression, {("m", "h"): 2}, {(0, 1): 12}) == 16
    assert attributes_of(expression) == {("m", "h")}
    assert reads_of(expression) == {(0, 1)}


def test_numbers_are_pinned() -> None:
    """An attribute or a size that is computed with keeps its value."""
    assert traced(DividedByHeads()).pinned == {("", "num_heads")}
    assert traced(Attention()).pinned == set()
    graph = traced(InverseSize())  # y.size(-1) ** -0.5
    assert any(graph.tensors[n].shape[d] == 128 for n, d in graph.marks.fixed)


def test_bare_numbers_are_named() -> None:
    """In a view they fix a dim; as bounds of a slice they are literals of the op."""
    graph = traced(LiteralHeads())
    assert {(graph.tensors[n].shape[d], d) for n, d in graph.marks.fixed} == {(4, 2)}
    slices = [op for op in traced(Fused("slice")).ops if op.call.op == "slice"]
    assert all(op.literals for op in slices)
    halves = [op for op in traced(Fused("chunk", rotated=True)).ops if op.call.op == "slice"]
    assert halves and all(op.literals <= {"start", "stop"} for op in halves)


# --- the module afterwards


def state(module: nn.Module) -> list[dict[str, object]]:
    return [dict(m.__dict__) for m in module.modules()]


class Fails(Attention):
    def forward(self, x: Tensor) -> Tensor:
        if F.relu(super().forward(x)).sum() > 0:
            return x
        return x + 1


@pytest.mark.parametrize(
    "module", [Attention(), FromConfig(), Fails()], ids=lambda m: type(m).__name__
)
def test_the_module_is_left_as_it_was(module: nn.Module) -> None:
    """Attributes, forward and hooks, whether or not tracing works."""
    module = module.to("meta")
    before = state(module)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()]
    config = module.__dict__.get("config")
    try:
        trace(module, (features(),), {})
    except ModelError as error:
        assert isinstance(module, Fails)
        assert "cannot trace Fails: " in str(error) and "\n" not in str(error)
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in module.modules()]
    assert state(module) == before
    assert module.__dict__.get("config") is config
    assert "forward" not in module.__dict__
    for m in module.modules():
        assert not any(isinstance(v, SourcedInt) for v in m.__dict__.values())


def test_integers_that_remember_are_ints() -> None:
    """They count, index and print as the numbers that they are."""
    n = SourcedInt.make(4, ("attribute", "m", "h", 4), Provenance())
    assert n == 4 and f"{n}" == "4" and list(range(n)) == [0, 1, 2, 3] and [0, 1, 2, 3, 5][n] == 5
    twice, negative = 2 * n, -n
    assert isinstance(twice, SourcedInt) and twice.expression[0] == "*"
    assert isinstance(negative, SourcedInt)
    assert negative.expression == ("-", ("constant", 0), ("attribute", "m", "h", 4))
    assert type(n & 1) is int and n / 8 == 0.5


class Merging(nn.Module):
    """Puts as many rows side by side as `side` says; how many groups there are, a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.up, self.down = 2, nn.Linear(8, 16), nn.Linear(32, 8)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        groups, side = rows[0] // self.side, self.side
        y = self.up(x).reshape(side, groups, 16).transpose(0, 1)
        return self.down(y.reshape(groups, side * 16))


def test_sizes_beside_tensors_are_those_of_their_places() -> None:
    """`side` is the first of three sizes, although `groups` is a tensor, not the first of two."""
    inputs = torch.randn(38, 8, dtype=torch.float64), torch.tensor([38])
    module = Merging().double()
    plan = planning.plan(module, 2, args=inputs)
    assert_equal(module, lambda _b, _t: inputs, plan)


class Shuffled(nn.Module):
    """Splits six groups best, by a softmax within each, but shuffles them by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.groups, self.up, self.down = 6, nn.Linear(8, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).unflatten(-1, (-1, 8)).softmax(-1).flatten(-2)
        return self.down(F.channel_shuffle(h.mT, self.groups).mT.relu())


@pytest.mark.parametrize("tp", [2, 3])
def test_an_op_gets_the_same_number_on_each_rank(tp: int) -> None:
    """So it is right only where the groups of the shuffle are whole."""
    module = Shuffled().double()
    inputs = equal.features(8)
    assert_equal(module, inputs, equal.planned(module, inputs, tp))


class ComparesWithLayer(nn.Module):
    """Scales by one of two vectors, as a hidden state has the size of a layer or not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.one, self.other = nn.Parameter(torch.ones(48)), nn.Parameter(torch.ones(48))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        return self.down(h * (self.one if h.shape[-1] == self.up.out_features else self.other))


@pytest.mark.parametrize("tp", [2, 3])
def test_sizes_of_layers_are_local_where_their_weights_are(tp: int) -> None:
    """So a full tensor cannot be compared with one: both branches call the same functions."""
    model = ComparesWithLayer().double()
    plan = equal.planned(model, equal.features(24), tp)
    assert_equal(model, equal.features(24), plan, collectives=False)
