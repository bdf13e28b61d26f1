"""Phases of a workload: what is asked for, and what a pass of each costs."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.contract.plan_figures import Phase, Workload
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.cost.cost import Costs
from shardwright.planner.cost.phases import Pass, parse_phases, passes
from shardwright.planner.graph.axes import Axes, refine
from shardwright.planner.graph.graph import Graph, Op
from shardwright.planner.graph.kv_cache import find_keys
from shardwright.planner.search.emitted_plan import AS_GIVEN
from shardwright.planner.strategies.op_strategies import Strategy
from shardwright.planner.strategies.state import REPLICATED
from shardwright.planner.strategies.states import States
from tests.planner.mlps import Mlp
from tests.planner.modules import Grouped
from tests.planner.multimodal import MODELS as MADE
from tests.planning import plan, trace

B, S = 2, 100


class ByHand(nn.Module):
    """Attention in single products, as models without scaled dot product attention have it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (4, 16)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return (q @ k.transpose(2, 3)).softmax(-1) @ v


MODULES = {"mlp": Mlp, "grouped": Grouped, "by hand": ByHand}


@cache
def traced(name: str) -> tuple[Graph, Axes]:
    with torch.device("meta"):
        graph = trace(MODULES[name](), (torch.zeros(3, 19, 64),), {})
    return graph, refine(graph)


@cache
def costs(name: str, phases: tuple[tuple[Phase, int], ...], batch: int = B, seq: int = S) -> Costs:
    graph, axes = traced(name)
    load = Workload(batch=batch, seq=seq, dtype="float32", device="cpu-gloo", phases=dict(phases))
    return Costs(graph, axes, States(graph, axes, 2), load)


def of(name: str, phase: Phase, **sizes: int) -> Costs:
    return costs(name, ((phase, 1),), **sizes)


def ops(priced: Costs, *names: str) -> list[Op]:
    return [op for op in priced.graph.ops if op.call.op in names]


def whole(op: Op) -> Strategy:
    return Strategy(tuple(REPLICATED for _ in (*op.inputs, *op.outputs)))


def flops(priced: Costs, op: Op) -> int:
    return priced.ops.flops(op, whole(op), priced.passes[0])


def total(priced: Costs) -> int:
    return sum(priced.ops.compute(op, whole(op)) for op in priced.graph.ops)


# --- what is asked for


def test_phases_as_they_are_written() -> None:
    assert parse_phases("prefill") == {"prefill": 1}
    assert parse_phases(" decode:128, prefill ") == {"prefill": 1, "decode": 128}
    assert parse_phases("train") == {"train": 1}
    assert parse_phases({"decode": 3, "train": 1}) == {"decode": 3, "train": 1}
    with pytest.raises(UsageError):
        parse_phases({"decode": 0})


@pytest.mark.parametrize(
    "text, says",
    [
        ("sleep", "unknown phase 'sleep'; known: prefill, decode, train"),
        ("", "unknown phase ''"),
        ("train,train", "phase 'train' is named twice"),
        ("decode:0", "how often 'decode' is run is a number from 1 on"),
        ("decode:", "how often 'decode' is run"),
        ("decode:-1", "how often 'decode' is run"),
        ("decode:x", "how often 'decode' is run"),
    ],
)
def test_what_is_no_phase(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_phases(text)
    assert says in str(error.value)


def test_passes_of_a_mix() -> None:
    load = Workload(
        batch=2, seq=9, dtype="float32", device="cpu-gloo", phases={"decode": 5, "prefill": 1}
    )
    assert passes(load) == [Pass("prefill", 1, 2, 9, 9), Pass("decode", 5, 2, 1, 9)]


# --- what a pass costs


@pytest.mark.parametrize("phase, tokens", [("prefill", B * S), ("decode", B), ("train", B * S)])
def test_flops_of_a_linear_layer_by_hand(phase: Phase, tokens: int) -> None:
    priced = of("mlp", phase)
    for op in ops(priced, "linear"):
        rows, columns = op.call.shape("weight")
        assert flops(priced, op) == 2 * tokens * rows * columns


@pytest.mark.parametrize("phase, queries", [("prefill", S), ("decode", 1)])
def test_flops_of_attention_by_hand(phase: Phase, queries: int) -> None:
    priced = of("grouped", phase)
    (op,) = ops(priced, "scaled_dot_product_attention")
    _, heads, _, head = op.call.shape("query")
    assert flops(priced, op) == 2 * B * heads * queries * S * (head + head)


@pytest.mark.parametrize("phase, queries", [("prefill", S), ("decode", 1)])
def test_flops_of_attention_in_single_products(phase: Phase, queries: int) -> None:
    priced = of("by hand", phase)
    products = ops(priced, "bmm", "matmul")
    assert [flops(priced, op) for op in products] == [2 * B * 4 * queries * S * 16] * 2


@pytest.mark.parametrize("name", ["grouped", "by hand"])
def test_a_cache_holds_keys_and_values_as_they_were_before_they_are_repeated(name: str) -> None:
    priced = of(name, "decode")
    width = {"grouped": 2 * 16, "by hand": 4 * 16}[name]
    tensors = [priced.graph.tensors[cached] for cached in priced.sizes.keys.cached]
    assert [prod(t.shape) for t in tensors] == [3 * 19 * width] * 2


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_time_grows_with_batch_and_sequence(name: str, phase: Phase) -> None:
    by_batch = [total(of(name, phase, batch=b)) for b in (1, 8, 64)]
    assert by_batch == sorted(set(by_batch))
    by_seq = [total(of(name, phase, seq=s)) for s in (64, 512, 4096)]
    if (name, phase) == ("mlp", "decode"):  # no token of the past matters
        assert len(set(by_seq)) == 1
    else:
        assert by_seq == sorted(set(by_seq))


def test_training_is_three_forwards() -> None:
    forward, train = total(of("mlp", "prefill")), total(of("mlp", "train"))
    assert 2.9 < train / forward <= 3


def test_a_mix_is_the_sum_of_its_phases() -> None:
    mix = total(costs("grouped", (("prefill", 1), ("decode", 7))))
    assert mix == total(of("grouped", "prefill")) + 7 * total(of("grouped", "decode"))


def test_decoding_waits_for_weights() -> None:
    """One token of one sequence: the time is that of reading the weights, and of starting ops."""
    priced = of("mlp", "decode", batch=1)
    weights = sum(priced.sizes.bytes(u.stored, REPLICATED) for u in priced.graph.uses)
    started = sum(priced.ops.compute(op, whole(op)) > 0 for op in priced.graph.ops)
    reading = priced.ops.device.compute(0, weights, "float32", 0)
    assert reading <= total(priced) - started * priced.ops.device.kernel_ns < 1.2 * reading


def test_what_a_view_takes_is_nothing_and_a_lookup_reads_only_what_it_gives() -> None:
    priced = of("grouped", "prefill")
    for op in ops(priced, "view", "transpose", "permute", "expand", "unsqueeze", "_unsafe_view"):
        assert priced.ops.compute(op, whole(op)) == 0


# --- the lengths of example inputs


class Tokens(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.words(x))


@pytest.mark.parametrize("kind", [Mlp, Tokens])
def test_prices_do_not_depend_on_the_lengths_of_example_inputs(kind: type[nn.Module]) -> None:
    def priced(*shape: int) -> Plan:
        given = torch.zeros(*shape, 64) if kind is Mlp else torch.zeros(shape, dtype=torch.int64)
        return plan(kind(), 2, args=(given,), batch=4, seq=2048)

    usual = priced(3, 19)
    for shape in ((2, 130), (8, 5)):
        assert priced(*shape).predicted == usual.predicted
    assert AS_GIVEN not in usual.solver.note
    for shape in ((1, 130), (4, 4)):
        found = priced(*shape)
        assert found.predicted != usual.predicted
        assert AS_GIVEN in found.solver.note


def test_sequences_with_images_have_the_length_of_the_workload() -> None:
    """Tokens of the image are among those of the sequence."""
    config: Any = MADE["llava"]()[0].config
    config.architectures = ["LlavaForConditionalGeneration"]
    text = config.get_text_config()
    found = [plan(config, 2, batch=4, seq=seq).predicted.memory for seq in (512, 1024)]
    for memory, seq in zip(found, (512, 1024), strict=True):
        assert memory is not None
        elements = 2 * text.num_hidden_layers * 4 * seq * text.hidden_size // 2
        assert memory.cache == elements * 4, "float32"


class LastFeature(nn.Module):
    """Takes a feature of each token apart; the others are as many as a sequence has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(20, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) + x[:, :, -1].unsqueeze(-1)


def test_a_part_of_the_features_is_no_sequence() -> None:
    with torch.device("meta"):
        graph = trace(LastFeature(), (torch.zeros(3, 19, 20),), {})
    assert sorted(find_keys(graph, refine(graph)).run_time.values()) == ["batch", "seq"]
