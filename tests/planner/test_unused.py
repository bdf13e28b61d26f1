"""Runs that are made up for what a plain call leaves unused; plans hold for all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import shardwright
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ
from shardwright.planner.prove.prover import Prover
from shardwright.planner.trace import folded_trace
from shardwright.planner.trace.inputs.argument_options import OTHER_IMAGE_SIZES, SIDE
from shardwright.planner.trace.inputs.example_inputs import example_inputs
from shardwright.planner.trace.model.source import read_source
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.unused_modules import more_runs
from shardwright.runtime.communication.audit import count_collectives
from tests import planning
from tests.planner.test_folding import LAYERS, OLD, planned, whole
from tests.predicted import Tally, predicted
from tests.predicted import counted as tally
from tests.ranks import run_ranks

WIDTH, SIZE, PATCH, TOKENS = 16, 32, 8, 50


class Config:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Tower(nn.Module):
    """Patches of an image, a block, and the sum over all places."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(image_size=SIZE, num_channels=3)
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.mlp = Mlp()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.mlp(self.patches(pixel_values).flatten(2).transpose(1, 2)).mean(1)


class Strange(nn.Module):
    """Nobody knows what it takes, and it has no layer that would say."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config(image_size=SIZE, num_channels=3)
        self.answer = nn.Parameter(torch.randn(SIZE, 64 * WIDTH))

    def forward(self, riddle: dict[str, Tensor]) -> Tensor:
        return riddle["of"] @ self.answer


class Text(nn.Module):
    """Tokens, and maybe an image that is added to all of them."""

    main_input_name = "input_ids"

    def __init__(self, tower: nn.Module | None, tied: bool = False) -> None:
        super().__init__()
        self.config = Config(hidden_size=WIDTH)
        self.embed, self.mlp = nn.Embedding(TOKENS, WIDTH), Mlp()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tower is not None:
            self.tower = tower
            if tied:
                tower.mlp.up.weight = self.mlp.up.weight  # type: ignore[union-attr]

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if pixel_values is not None:
            x = x + self.tower(pixel_values).unsqueeze(1)
        return self.head(self.mlp(x))


class Merger(nn.Module):
    """What makes places of a text of what a tower gives; it has no config."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, image_features: Tensor) -> Tensor:
        return self.mlp(self.norm(image_features))


class Merged(Text):
    """What a tower gives goes through a merger."""

    def __init__(self) -> None:
        super().__init__(Tower())
        self.merger = Merger()

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if pixel_values is not None:
            x = x + self.merger(self.tower(pixel_values)).unsqueeze(1)
        return self.head(self.mlp(x))


class Single(Tower):
    """Its code runs in float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.gain(super().forward(pixel_values).float())


def text(tower: nn.Module | None = None, tied: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return Text(tower, tied).double().eval()


def plans(model: nn.Module) -> Plan:
    return planning.plan(model, tp=2)


def is_split(plan: Plan, parameter: str) -> bool:
    owner, _, name = parameter.rpartition(".")
    spec = plan.module(owner)
    return spec is not None and name in spec.parameters and "@" in spec.parameters[name].placement


@pytest.mark.parametrize("tied", [False, True])
def test_a_tower_is_split_and_right(tied: bool) -> None:
    """By itself and in its model, with its gradients; also where it has a parameter of others."""
    model = text(Tower(), tied)
    plan = plans(model)
    assert is_split(plan, "tower.mlp.up.weight") and is_split(plan, "tower.mlp.down.weight")
    right_with_images(model, plan)


def test_a_merger_without_a_config_is_split_and_right() -> None:
    """It is called by itself, with sequences and with their places in a row."""
    torch.manual_seed(3)
    model = Merged().double().eval()
    runs = [run for run in read_source(model).more if run.module == "merger"]
    assert [tuple(run.kwargs["image_features"].shape) for run in runs] == [
        (TRACE_BATCH, TRACE_SEQ, WIDTH),
        (TRACE_BATCH * TRACE_SEQ, WIDTH),
    ]
    plan = plans(model)
    assert is_split(plan, "merger.mlp.up.weight") and is_split(plan, "merger.mlp.down.weight")
    right_with_images(model, plan)


def test_a_merger_of_layers_alone_is_split_and_right() -> None:
    """No code of the model is around its ops in a call by itself, and they are compared."""
    torch.manual_seed(3)
    model: Any = Merged()
    model.merger = nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH))
    plan = plans(model.double().eval())
    assert is_split(plan, "merger.0.weight") and is_split(plan, "merger.1.weight")
    right_with_images(model, plan)


def test_modules_beside_a_call_with_more_than_text_stay_whole() -> None:
    """The code of the model may put what they give together with shards."""
    model = Merged().double().eval()
    image = torch.empty(TRACE_BATCH, 3, SIZE, SIZE, dtype=torch.double, device="meta")
    ids = torch.empty(TRACE_BATCH, TRACE_SEQ, dtype=torch.int64, device="meta")
    model.spare = Merger().double()
    plain = Run("", (), {"input_ids": ids, "pixel_values": image})
    assert more_runs(model.to("meta"), plain) == ()


def right_with_images(model: nn.Module, plan: Plan) -> None:
    """Check a plan with text, with an image too, and the tower by itself; gradients too."""
    assert Prover(model).prove(plan).plan == plan
    ids = torch.randint(0, TOKENS, (2, 5), generator=torch.Generator().manual_seed(1))
    image = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2)).double()
    want = [model(ids), model(ids, image), model.get_submodule("tower")(image)]
    gradients = torch.autograd.grad(want[1].square().sum(), [*model.parameters()])

    def run(mesh: Any) -> None:
        local = shardwright.apply(copy.deepcopy(model), plan, mesh)
        found = [local(ids), local(ids, image), local.get_submodule("tower")(image)]
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)
        found[1].square().sum().backward()
        grads = {n: p.grad for n, p in local.named_parameters()}
        every = shardwright.full_tensors(local, grads)
        for (name, _), g in zip(model.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(every[name], g, atol=1e-9, rtol=1e-9)

    run_ranks(2, run)


def test_a_tower_that_does_not_run_in_its_dtype() -> None:
    """It is planned in float32, as bytes of its own dtype, and right where it runs."""
    model = text(Single())
    plan = plans(model)
    assert is_split(plan, "tower.mlp.up.weight")
    assert plan.predicted.unsharded_bytes == 8 * sum(p.numel() for p in model.parameters())
    assert plan.modules == plans(copy.deepcopy(model).float()).modules
    assert Prover(model).prove(plan).plan == plan
    model = model.float()
    image = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2))
    want = model.get_submodule("tower")(image)

    def run(mesh: Any) -> None:
        local = shardwright.apply(copy.deepcopy(model), plan, mesh)
        got = local.get_submodule("tower")(image)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)

    run_ranks(2, run)


def test_what_is_predicted_is_the_plain_call() -> None:
    """Collectives are those of a run of it; what a rank holds are all parameters."""
    model = text(Tower())
    plan = plans(model)
    ids = torch.zeros(1, 512, dtype=torch.int64)

    def run(mesh: Any) -> list[Tally]:
        local = shardwright.apply(copy.deepcopy(model), plan, mesh)
        with count_collectives() as ahead:
            output = local(ids)
        with count_collectives() as back:
            output.sum().backward()
        return [tally(ahead), tally(back)]

    for found in run_ranks(2, run):
        assert found == [predicted(plan, "forward"), predicted(plan, "backward")]
    assert plan.predicted.memory is not None
    held = plan.predicted.memory.parameters
    assert held == max(plan.predicted.parameter_bytes) < plan.predicted.unsharded_bytes
    assert plan.predicted.time_ns == plan.predicted.phase_ns["prefill"]


def test_a_tower_that_nobody_can_run_stays_whole() -> None:
    """And the plan says why."""
    plan = plans(text(Strange()))
    assert not [name for name in plan.modules if name.startswith("tower")]
    assert {w.reason for w in plan.replicated if w.parameter.startswith("tower")} == {
        "the traced forward does not use it"
    }


def test_inputs_that_are_given_are_all() -> None:
    """Nothing is made up beside them."""
    ids = torch.zeros(3, 19, dtype=torch.int64)
    assert read_source(text(Tower()), kwargs={"input_ids": ids}).more == ()
    assert [run.module for run in read_source(text(Tower())).more] == ["tower"]


def test_shapes_come_from_the_config() -> None:
    """Images first as pixels; a list of equal sizes is one."""
    tower = Tower()
    tower.config = Config(image_size=[SIZE, SIZE], num_channels=1, patch_size=4)
    shapes = [
        tuple(g["pixel_values"].shape)
        for g in example_inputs(tower, torch.float64)
        if g["pixel_values"] is not None
    ]
    others = [
        (3, 2, 1, SIZE, SIZE),
        (3, 2, 1, SIDE, SIDE),
        *((3, 1, *size) for size in OTHER_IMAGE_SIZES),
    ]
    assert shapes == [(3, 1, SIZE, SIZE), (3, 1, SIDE, SIDE), (3, 19, 16), *others]
    assert [*example_inputs(Strange(), torch.float64)] == []


BART: dict[str, Any] = {
    **OLD, "decoder_layers": LAYERS, "encoder_layers": LAYERS, "d_model": 32, "decoder_ffn_dim": 64,
    "decoder_attention_heads": 4, "is_decoder": True, "is_encoder_decoder": False,
}  # fmt: skip


@pytest.mark.long
def test_folded_with_and_without_an_encoder_equals_unfolded() -> None:
    """A block runs in both calls; it is traced once in each."""
    config = transformers.AutoConfig.for_model("bart", architectures=["BartForCausalLM"], **BART)
    source = read_source(config, dtype=torch.bfloat16)
    assert [run.module for run in source.more] == [""]
    source, unfolded, _ = folded_trace.trace_all(source)
    folding = unfolded.folding
    assert [len(s.picks) < LAYERS for s in folding.stacks] == [True]
    reference = whole(source)
    assert [op.call.op for op in unfolded.graph.ops if not op.traced_call] == [
        op.call.op for op in reference.graph.priced_runs().ops if not op.traced_call
    ]
    assert len(unfolded.graph.ops) == len(reference.graph.priced_runs().ops)
    one, other = planned(source, folding), planned(source, reference)
    assert one.solver.objective[1:] == other.solver.objective[1:]
    assert one.predicted == other.predicted
    placed = [{n: m.parameters for n, m in p.modules.items() if m.parameters} for p in (one, other)]
    assert placed[0] == placed[1]
    assert is_split(one, "model.decoder.layers.3.encoder_attn.q_proj.weight")


def test_no_encoder_for_a_model_without_cross_attention() -> None:
    """gpt2 takes `encoder_hidden_states`, and refuses them."""
    config = transformers.AutoConfig.for_model(
        "gpt2",
        architectures=["GPT2LMHeadModel"],
        **{**OLD, "n_layer": 2, "n_embd": 32, "n_head": 4},
    )
    source = read_source(config)
    assert source.more == ()
    assert more_runs(source.module, Run("", (), source.kwargs)) == ()
