"""The trace: boundaries, tied weights, where sizes come from, and a module left as it was."""

from __future__ import annotations

import copy
import resource
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutput

from shardwright.errors import ModelError
from shardwright.planner.graph.graph import Graph
from shardwright.planner.trace.model.source import from_config
from shardwright.planner.trace.record import boundaries as boundaries
from shardwright.planner.trace.sizes.expressions import attributes_of
from tests import planning
from tests.planner.mlps import WIDTH, InverseSize, Mlp
from tests.planner.modules import (
    Again,
    CalledInVain,
    Fused,
    Language,
)
from tests.planning import trace


def traced(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Graph:
    module = module.to("meta")
    inputs = [a.to("meta") for a in args] if args or kwargs else [features()]
    return trace(module, tuple(inputs), {k: v.to("meta") for k, v in kwargs.items()})


def features() -> Tensor:
    return torch.zeros(3, 19, WIDTH, device="meta")


def crossed(graph: Graph) -> set[tuple[str, str, str]]:
    return {(b.module, b.side, b.slot) for b in graph.boundaries}


class Pair(NamedTuple):
    """What a module may return."""

    left: Tensor
    right: Tensor


class Takes(nn.Module):
    """Arguments and results of every kind."""

    def forward(self, x: Tensor, *more: Tensor, named: Tensor, nested: Any) -> Any:
        total = x.relu() + more[0].relu() + named.relu() + nested["a"][0].relu()
        return {
            "dict": total * 2,
            "tuple": (total * 3, total * 4),
            "named": Pair(total * 5, total * 6),
            "output": BaseModelOutput(last_hidden_state=total * 7),
            "number": 8,
        }


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Takes()

    def forward(self, x: Tensor) -> Tensor:
        y = [x.exp() * i for i in range(1, 5)]
        out = self.inner(y[0], y[1], named=y[2], nested={"a": [y[3]]})
        parts = [out["dict"], *out["tuple"], *out["named"], out["output"].last_hidden_state]
        return torch.stack([p.sin() for p in parts])


def test_boundaries_in_every_slot() -> None:
    """Positional, starred, by name, nested: and dicts, tuples, named tuples, model outputs."""
    found = {(side, slot) for m, side, slot in crossed(traced(Gives())) if m == "inner"}
    assert found == {
        ("in", "x"), ("in", "*0"), ("in", "named"), ("in", "nested.a.0"),
        ("out", "dict"), ("out", "tuple.0"), ("out", "tuple.1"), ("out", "named.left"),
        ("out", "named.right"), ("out", "output.last_hidden_state"),
    }  # fmt: skip


def test_tags_come_back() -> None:
    assert boundaries.read_tag("a.b|in|x.0") == ("a.b", "in", "x.0")
    assert boundaries.read_tag("|out|") == ("", "out", "")


def test_of_boundaries_in_a_row_the_first_stays() -> None:
    """A linear's output that is its parent's output, then another's input: one boundary."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Mlp(), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.exp()))

    found = crossed(traced(Outer()))
    assert ("a", "in", "x") in found and ("a.up", "in", "input") not in found
    assert ("a.down", "out", "") in found
    assert not found & {("a", "out", ""), ("b", "in", "x"), ("b.up", "in", "input")}


def test_a_module_called_again_keeps_a_boundary_in_each_call() -> None:
    """Its calls come from different places: what happens at its entrance happens in each."""
    graph = traced(Again())
    calls = [b for b in graph.boundaries if (b.module, b.side, b.slot) == ("mlp", "in", "x")]
    assert len(calls) == 3


def test_what_modules_give_is_watched_in_order() -> None:
    graph = traced(Mlp())
    assert [(m, s) for m, s, _ in graph.watched] == [("up", ""), ("down", ""), ("", "")]
    assert all(name in graph.tensors for _, _, name in graph.watched)


def test_calls_in_vain_are_in_the_graph() -> None:
    """They are run, so they have a price; but nothing flows back through them."""
    graph = traced(CalledInVain())
    first, second = (b for b in graph.boundaries if (b.module, b.side) == ("mlp.down", "out"))
    assert not graph.tensors[first.target].differentiable
    assert graph.tensors[second.target].differentiable


def test_every_name_is_a_tensor() -> None:
    """After pruning nothing speaks of a tensor that is gone."""
    for module in (Gives(), Again(), Fused("groups"), InverseSize()):
        graph = traced(module)
        names = {n for op in graph.ops for n in (*op.inputs, *op.outputs)}
        names |= {n for b in graph.boundaries for n in (b.source, b.target)}
        names |= {*graph.outputs, *graph.inputs, *(s.tensor for s in graph.sizes)}
        names |= {*graph.reads.values(), *graph.marks.names()}
        assert names <= graph.tensors.keys()


def test_tied_weights() -> None:
    """Both names share what is stored, and each module reads its own."""
    with torch.device("meta"):
        module = Language()
    graph = traced(module, torch.zeros(3, 19, dtype=torch.int64))
    uses = {u.fqn: u for u in graph.uses}
    assert uses["words.weight"].stored == uses["head.weight"].stored
    readers = {op.module: op.inputs for op in graph.ops if op.call.op in ("embedding", "linear")}
    assert uses["words.weight"].used in readers["words"]
    assert uses["head.weight"].used in readers["head"]


def test_gradients() -> None:
    """Inputs of floating point may want one, token ids and constants do not."""
    with torch.device("meta"):
        module = Language()
    words = traced(module, torch.zeros(3, 19, dtype=torch.int64))
    assert not words.tensors[words.inputs[0]].differentiable
    dense = traced(Mlp())
    assert dense.tensors[dense.inputs[0]].differentiable


class Writes(nn.Module):
    """Fills a tensor part by part, with bounds from an attribute, and changes a view in place."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.width = WIDTH // 2, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_empty(*x.shape[:-1], self.width)
        y[..., : self.part] = x[..., : self.part].sin()
        y[..., self.part :].copy_(x[..., : self.part].cos())
        y.view(3, 19, self.width).mul_(2)
        return y


def test_what_is_written_in_place_is_in_the_graph() -> None:
    """Also into a part whose bound comes from an attribute."""
    graph = traced(Writes())
    producers = graph.producers()
    names, seen = [b.source for b in graph.boundaries if b.side == "out"], set[str]()
    while names:
        op = producers.get(names.pop())
        if op is not None:
            seen.add(op.call.op)
            names += op.inputs
    assert {"sin", "cos", "mul", "empty"} <= seen
    assert {a for s in graph.sizes for a in attributes_of(s.expression)} == {
        ("", "part"), ("", "width"),
    }  # fmt: skip


class Remembers(nn.Module):
    """Keeps tensors between calls, makes constants, counts its calls, computes what nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x * 2
        self.register_buffer("added", x.exp(), persistent=False)
        scale = torch.tensor([2.0], device=x.device)
        x.tanh()
        return x * scale + torch.arange(WIDTH, device=x.device)


def test_a_traced_module_is_left_as_it_was() -> None:
    module = Remembers().to("meta")
    before = dict(module.__dict__), dict(module._buffers), module.calls
    graph = traced(module)
    assert (dict(module.__dict__), dict(module._buffers), module.calls) == before
    assert type(module.calls) is Tensor
    ((stored, *_),) = graph.marks.written  # the count of calls
    assert stored == "b_calls.stored"
    assert len(graph.inputs) == 2 and not graph.tensors[graph.inputs[1]].differentiable
    made = [op.call.op for op in graph.ops]
    # One is for `last` and one for `added`, which users may read.
    assert made == ["add", "mul", "exp", "mul", "arange", "add"]


def test_ops_know_their_module_and_line() -> None:
    graph = traced(Mlp())
    linears = [op for op in graph.ops if op.call.op == "linear"]
    assert [op.module for op in linears] == ["up", "down"]
    assert all(op.source.startswith("mlps.py:") for op in graph.ops)


def test_computing_with_data_is_an_error() -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    with pytest.raises(ModelError, match=r"cannot trace Scales: .*data-dependent"):
        traced(Scales())
    assert not torch.compiler.is_exporting()


def llama(**sizes: int) -> nn.Module:
    return from_config(
        LlamaConfig(**{"num_hidden_layers": 2, **sizes}, architectures=["LlamaForCausalLM"])  # type: ignore[arg-type]
    )


def ids() -> dict[str, object]:
    return {
        "input_ids": torch.zeros(3, 19, dtype=torch.int64, device="meta"),
        "use_cache": False,
    }


def test_hidden_states_and_scores() -> None:
    """What blocks hand on is known, from the first one's input to the last one's output."""
    graph = trace(llama(), (), ids())
    assert len(graph.marks.carried) == 3
    assert all(graph.tensors[n].shape == (3, 19, 4096) for n in graph.marks.carried)
    assert all(graph.tensors[n].shape == (3, 19, 32000) for n in graph.marks.logits)
    assert set(graph.outputs) <= graph.marks.logits


def test_nothing_is_allocated() -> None:
    """A layer of a 70 billion parameter model takes no memory to speak of."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    graph = trace(llama(num_hidden_layers=1, num_key_value_heads=8, **sizes), (), ids())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(torch.Size(t.shape).numel() for t in graph.tensors.values()) > 1e9
    assert grown < 200 * 1024  # KiB; the weights alone would be 4 GiB


def test_loops_over_sets_go_in_the_same_order_in_copies() -> None:
    """The copy of a set of numbers that collide is iterated the other way round."""
    widths = {7, 15}
    assert list(widths) != list(copy.deepcopy(widths))

    class Widths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.widths, self.cut = {7, 15}, Cut()
            self.layers = nn.ModuleDict({str(n): nn.Linear(n, 4) for n in self.widths})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(self.layers[str(n)](self.cut(x, n)) for n in self.widths)  # type: ignore[return-value]

    class Cut(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x[..., :n]

    plan = planning.plan(Widths(), tp=2, args=(torch.randn(3, 19, 16),))
    assert plan.module("layers.7") is not None


class Adapted(nn.Module):
    """Adds to a weight while it runs, by torch's own function, imported before any planning."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.more = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        register_parametrization(self.inner, "weight", self.more)
        try:
            return self.inner(x)
        finally:
            remove_parametrizations(self.inner, "weight", leave_parametrized=False)


def test_modules_that_are_parametrized_while_they_run_are_refused() -> None:
    model, x = nn.Sequential(Adapted(), nn.Tanh()), torch.randn(3, 8)
    assert model(x).shape == (3, 8)
    with pytest.raises(ModelError, match=r"'0\.inner', a .*Linear, is parametrized while"):
        planning.plan(model, tp=2, args=(x,))
