"""Blocks traced once a kind give the plan, and the costs, of the model traced whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright.planner.blocks.fold import Folding
from shardwright.planner.blocks.stacks import condensed, find_stacks, shortened
from shardwright.planner.blocks.unfold import unfold
from shardwright.planner.contract.plan_figures import Workload
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.cost.memory import peak
from shardwright.planner.emit.drawing import drawing
from shardwright.planner.graph.axes import refine
from shardwright.planner.graph.graph import Graph
from shardwright.planner.prepare import prepare
from shardwright.planner.problem.pins import as_pins
from shardwright.planner.search.ladder import SOLVING, climb, search
from shardwright.planner.search.search_state import start
from shardwright.planner.search.task import Task
from shardwright.planner.trace import folded_trace
from shardwright.planner.trace.folded_trace import traced
from shardwright.planner.trace.model.source import Source, read_source
from tests import zoo
from tests.marks import long, sampled
from tests.planner.equal import assert_equal, features
from tests.planner.equal import planned as planned_for
from tests.planner.mlps import Mlp
from tests.planning import ASKED, plan

LAYERS = 6
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
OLD: dict[str, Any] = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "gpt2": ("GPT2LMHeadModel", {**OLD, "n_layer": LAYERS, "n_embd": 32, "n_head": 4}),
    # two kinds in turn, and five of one to one of another
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "head_dim": 8}),
    "gpt_oss": ("GptOssForCausalLM", {**SIZES, "head_dim": 8, "num_local_experts": 4}),
    # the first blocks differ
    "deepseek_v3": ("DeepseekV3ForCausalLM", {
        **SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 2,
        "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {
        **SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 2, "mlp_only_layers": [],
    }),
    # blocks of two layers each, which have numbers
    "longcat_flash": ("LongcatFlashForCausalLM", {
        **SIZES, "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 4,
        "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 64,
        "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_hidden_layers": 2 * LAYERS,
    }),
    # two stacks; a bias that the first block makes for all others
    "t5": ("T5ForConditionalGeneration", {
        **OLD, "num_layers": 4, "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64,
    }),
    "bert": ("BertForMaskedLM", {
        **OLD, "num_hidden_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4,
        "intermediate_size": 64,
    }),
    "bloom": ("BloomForCausalLM", {**OLD, "n_layer": LAYERS, "hidden_size": 32, "n_head": 4}),
    # the lengths in a stack of convolutions differ: it is traced in full
    "hubert": ("HubertModel", {
        **OLD, "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4,
        "intermediate_size": 64, "conv_dim": [8] * 5, "conv_kernel": [10, 3, 3, 3, 3],
        "conv_stride": [5, 2, 2, 2, 2], "num_feat_extract_layers": 5, "layerdrop": 0.0,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    }),
}  # fmt: skip

STEPS = ("gemma2", "t5")
"""Those for which steps with a cache are traced as well."""


def source_of(name: str) -> Source:
    architecture, fields = MODELS[name]
    config = transformers.AutoConfig.for_model(name, architectures=[architecture], **fields)
    return read_source(config, dtype=torch.bfloat16)  # grouped products on meta take no other


def briefly(source: Source) -> Source:
    """Its plain call and that with all else that it is asked for: the longest calls of it."""
    return replace(source, further=source.further[:1])


def whole(source: Source) -> Folding:
    return Folding(traced(source))


def planned(source: Source, folding: Folding, tp: int = 2) -> Plan:
    workload = Workload(batch=1, seq=64, dtype="bfloat16", device="h100-nvlink")
    axes = refine(folding.graph)
    return search(Task(source, unfold(folding), axes, workload, {"tp": tp}), ASKED).plan


@pytest.mark.parametrize("name", sampled(MODELS, ("bloom", "bert", "gpt_oss", "qwen3_moe")))
def test_folded_equals_unfolded(name: str) -> None:
    """The same modules, bytes, times and collectives; fewer blocks are traced."""
    source = source_of(name) if name in STEPS else briefly(source_of(name))
    traced = folded_trace.trace_folded(source)
    folding, unfolded = traced.folding, traced.unfolded
    assert folding.stacks
    assert all(len(s.picks) < LAYERS for s in folding.stacks)
    reference = whole(source)
    assert len(unfolded.graph.ops) == len(reference.graph.priced_runs().ops)
    assert [op.call.op for op in unfolded.graph.ops] == [
        o.call.op for o in reference.graph.priced_runs().ops
    ]
    one, other = planned(source, folding), planned(source, reference)
    assert one.solver.status == other.solver.status == "optimal"
    assert one.solver.objective[1:] == other.solver.objective[1:]
    assert one.predicted == other.predicted
    assert one.modules == other.modules
    assert one.replicated == other.replicated


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", long("t5")])
def test_three_blocks_in_a_row_hold_as_much_as_all(name: str) -> None:
    """Activations at their most, in a graph with fewer copies, are those of the whole."""
    architecture, fields = MODELS[name]
    more = {k: 9 if "layer" in k else v for k, v in fields.items()}
    config = transformers.AutoConfig.for_model(name, architectures=[architecture], **more)
    task = prepare(config, 2, dtype=torch.bfloat16, phase="prefill,decode", seq=64)
    assert len(task.short[0].graph.ops) < len(task.unfolded.graph.ops)
    found = climb(start(task, ASKED), SOLVING).solution.unfolded
    bill = found.bill.first_run
    wanted = max(peak(bill.costs, bill.assignment, run) for run in bill.costs.passes)
    assert found.memory.activations == wanted
    assert drawing(found.layouts, found.bill, found.short) == drawing(found.layouts, found.bill)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 4), st.integers(1, 6))
def test_condensed_places_keep_all_windows(start: str, period: int, repeats: int) -> None:
    places = [ord(c) for c in [*start, *(start[:period] * repeats)]]
    found = condensed(places, 3)
    assert sorted(n for _, numbers in found for n in numbers) == [*range(len(places))]
    assert all(places[n] == place for place, numbers in found for n in numbers)
    left = [place for place, _ in found]
    kept, whole = ({(*row[i : i + 3],) for i in range(len(row) - 2)} for row in (left, places))
    assert kept == whole
    assert condensed(places, None) == [(place, [n]) for n, place in enumerate(places)]


class Block(nn.Module):
    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) * self.scale


class Tower(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(w) for w in widths)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def kinds(tower: nn.Module) -> tuple[int, ...]:
    (stack,) = find_stacks(tower)
    return stack.kinds


def test_every_junction_is_traced() -> None:
    with torch.device("meta"):
        tower = Tower(16, 16, 24, 16, 16, 24, 16, 16, 24)
    (stack,) = find_stacks(tower)
    assert stack.kinds == (0, 0, 1) * 3
    assert len(stack.picks) == 5
    picked = [stack.kinds[i] for i in stack.picks]
    assert set(zip(picked, picked[1:], strict=False)) == {(0, 0), (0, 1), (1, 0)}
    assert [stack.kinds[stack.picks[t]] for t in stack.traced] == list(stack.kinds)


def test_the_module_is_as_before() -> None:
    with torch.device("meta"):
        tower = Tower(*[16] * 5)
    names = [n for n, _ in tower.named_parameters()]
    with shortened(tower, find_stacks(tower)):
        assert len(tower.blocks) == 2
        assert tower.blocks[1] is dict(tower.blocks.named_children())["4"]
    assert [n for n, _ in tower.named_parameters()] == names
    assert tower.blocks[1] is dict(tower.blocks.named_children())["1"]


def test_shared_and_pinned_blocks_are_kinds_of_their_own() -> None:
    with torch.device("meta"):
        tower = Tower(*[16] * 9)
    third, fifth = tower.blocks[2], tower.blocks[4]
    assert isinstance(third, Block) and isinstance(fifth, Block)
    third.up.weight = fifth.up.weight
    assert kinds(tower) == (0, 0, 1, 0, 1, 0, 0, 0, 0)
    pins = as_pins({"blocks.3.up": "replicate"})
    (stack,) = find_stacks(tower, label=lambda n: n.startswith(pins[0].name))
    assert stack.kinds == (0, 0, 1, 2, 1, 0, 0, 0, 0)


class Aside(Block):
    """Two streams: the first one takes the second."""

    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return x + self.down(self.up(x + y).relu()), y + self.down(self.up(y).relu())


class Streams(nn.Module):
    """Blocks with two streams. Nothing reads the second one after the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Aside(16) for _ in range(5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x, y = block(x, y)
        return x


def test_a_last_block_whose_output_nobody_reads_is_a_kind_of_its_own() -> None:
    """Backward, less of it is computed than of the blocks that are like it."""
    with torch.device("meta"):
        source = read_source(Streams(), (torch.zeros(3, 19, 8), torch.zeros(3, 19, 8)))
    found = folded_trace.trace_all(source)
    folding, unfolded = found.folding, found.unfolded
    assert [stack.kinds for stack in folding.stacks] == [(-1, 0, 0, 0, -2)]
    graphs = unfolded.graph, whole(source).graph
    one, other = (sum(t.differentiable for t in g.tensors.values()) for g in graphs)
    assert one == other


def test_a_block_read_from_afar_is_not_folded() -> None:
    """The sum of all blocks' outputs: no copy of a traced edge stands for those."""

    class Sum(Tower):
        def forward(self, x: Tensor) -> Tensor:
            found = []
            for block in self.blocks:
                x = block(x)
                found.append(x)
            return torch.stack(found).sum(0)

    with torch.device("meta"):
        tower = Sum(*[16] * 6)
    x = torch.empty(3, 19, 8, device="meta")
    source = Source(tower, (x,), {}, "Sum", "", torch.float32)
    traced = folded_trace.trace_folded(source)
    folding, unfolded = traced.folding, traced.unfolded
    assert not folding.stacks
    assert unfolded.graph is folding.graph


class Between(nn.Module):
    """Blocks, and a module that is called between them with features of two lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList(Mlp() for _ in range(6)), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(x)
        for block in self.blocks:
            x = block(x)
            x = x + self.between(x) + self.between(x[:, :1])
        return x


def test_a_module_between_blocks_is_seen_in_the_order_of_its_calls() -> None:
    model = Between().double()
    source = read_source(model, features(64)(3, 19))
    traced = folded_trace.trace_folded(source)
    folding, unfolded = traced.folding, traced.unfolded
    assert [stack.path for stack in folding.stacks] == ["blocks"]

    def lengths(graph: Graph) -> list[int]:
        found = (graph.tensors[n].shape for m, _, n in graph.watched if m == "between")
        return [shape[1] for shape in found]

    assert lengths(unfolded.graph) == lengths(whole(source).graph) == [19, *([19, 1] * 6)]
    assert_equal(model, features(64), planned_for(model, features(64), 2))


class Guarded(Mlp):
    """Scales by numbers of its own; in training mode it tests its output, as every block does."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * torch.tensor([[0.5], [2.0]], device=x.device).repeat(32, 1).mT
        if self.training and not torch.isfinite(x).all():
            x = torch.clamp(x, min=-9.0, max=9.0)
        return x


def test_blocks_that_make_constants_and_branch_on_data_in_training_mode() -> None:
    """All blocks ask the same, so no two answers are tried for each."""
    model = Tower()
    model.blocks.extend(Guarded() for _ in range(6))
    model = model.double()
    source = replace(read_source(model, features(64)(3, 19)), trains=True)
    folding = folded_trace.trace_all(source).folding
    assert [stack.kinds for stack in folding.stacks] == [(-1, 0, 0, 0, 0, -2)]
    assert folding.graph.skips
    assert_equal(model, features(64), planned_for(model, features(64), 2))


class States(nn.Module):
    """Blocks, each of whose outputs is returned in a list, which may be in a dict."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.blocks, self.named = nn.ModuleList(Mlp() for _ in range(7)), named

    def forward(self, x: Tensor) -> dict[str, list[Tensor]] | list[Tensor]:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {"states": states} if self.named else states


class OfState(Mlp):
    """Goes on with one of the states, which has another number if there are fewer blocks."""

    def __init__(self, number: int, named: bool) -> None:
        super().__init__()
        self.tower, self.number = States(named), number

    def forward(self, x: Tensor) -> Tensor:
        states = self.tower(x)
        states = states["states"] if isinstance(states, dict) else states
        return super().forward(states[self.number])


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    "number, kinds", [(-1, (0,) * 7), (-2, (-1, 0, 0, 0, 0, -3, -2)), (-4, ())]
)
def test_a_tower_whose_last_blocks_are_not_used(
    number: int, kinds: tuple[int, ...], named: bool
) -> None:
    model = OfState(number, named).double()
    folding = folded_trace.trace_folded(read_source(model, features(64)(3, 19))).folding
    assert [stack.kinds for stack in folding.stacks] == [kinds] * bool(kinds)
    assert_equal(model, features(64), planned_for(model, features(64), 2))


LAYERS_OF_BOTH: dict[str, Any] = {"encoder_layers": 3, "decoder_layers": 3}


@pytest.mark.parametrize(
    ("kind", "name", "sizes"),
    [
        # one feature is taken apart, and the others are as many as the tokens of the trace
        ("masked", "bart", {"d_model": 20, "encoder_attention_heads": 2}),
        (
            "seq2seq",
            "pegasus_x",
            {},
        ),  # only later runs are given what the encoder cut to its length
    ],
)
def test_folded_and_unfolded_graphs_have_the_same_lengths(
    kind: str, name: str, sizes: dict[str, Any]
) -> None:
    sizes |= {"decoder_attention_heads": sizes["encoder_attention_heads"]} if sizes else {}
    model = zoo.build(name, kind=kind, **LAYERS_OF_BOTH, **sizes)[1]
    found = plan(model.train(), tp=3)  # the checker prices the unfolded graph, and must agree
    assert max(found.predicted.parameter_bytes) < 0.5 * found.predicted.unsharded_bytes
