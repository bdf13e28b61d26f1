"""Models that take more than text, planned with inputs that are given, are split and equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.output_capturing import capture_outputs

from shardwright.errors import ModelError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.graph.trace_sizes import TRACE_BATCH, TRACE_SEQ
from shardwright.planner.prepare import prepare
from shardwright.planner.trace.runs.example_calls import example_call
from shardwright.planner.trace.runs.run import Run
from shardwright.planner.trace.runs.unused_modules import MAX_OPS, more_runs, told_apart
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.marks import long
from tests.planner.equal import randomize
from tests.planner.mlps import WIDTH, Mlp
from tests.planner.multimodal import IMAGE, MODELS
from tests.planning import plan
from tests.ranks import run_ranks

TOLERANCE = 1e-5
"""Several compute positions or norms in float32 inside."""

LONG = {"musicgen", "qwen2_vl"}
"""They take half a minute each to trace."""

WRITES = {"llava", "qwen2_vl", "qwen2_5_vl", "whisper"}
"""What `generate` gives is compared, too: it calls towers and encoders by themselves."""

EMBEDS = {"llava", "qwen2_vl", "qwen2_5_vl", "musicgen"}
"""Embeddings are given in place of tokens, too: where images go is then asked of them."""

BY_VALUE = {"qwen2_vl", "qwen2_5_vl", "idefics3"}
"""They compute sizes from values of their inputs."""


@cache
def planned(name: str) -> tuple[Any, Callable[[int, int], dict[str, Any]], Plan]:
    """The model with random weights, its inputs, and its plan."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.double().eval()
    found = plan(model, 2, kwargs=inputs(3, 19))
    randomize(model)
    return model, inputs, found


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores, and all gradients of a weighting of what comes out."""
    output = model(**inputs)
    found = getattr(output, "logits", None)
    found = output.logits_per_image if found is None else found
    (found * torch.cos(torch.arange(found.numel())).view(found.shape)).sum().backward()
    return found.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def written(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Some tokens by `generate`; of whisper without the cache of each sample: that is refused."""
    given = {n: v for n, v in inputs.items() if n not in ("use_cache", "decoder_input_ids")}
    kept = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    if not model.config.is_encoder_decoder or not hasattr(model, "generate_with_fallback"):
        return model.generate(**given, **kept, return_dict_in_generate=True).sequences
    if hasattr(model, "_shardwright"):
        with pytest.raises(UsageError, match="without return_dict_in_generate"):
            model.generate(**given, **kept, return_dict_in_generate=True)
    return model.generate(**given, **kept)


def embedded(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs with embeddings in place of tokens."""
    table = model.get_input_embeddings().weight.detach()
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    return {**rest, "inputs_embeds": table[inputs["input_ids"]]}


@pytest.mark.parametrize("name", [long(n) if n in LONG else n for n in MODELS])
def test_split_and_equal(name: str) -> None:
    """With another batch and length than was traced, and images of other sizes."""
    model, inputs, found = planned(name)
    note = "like those that it was given"
    assert (note in found.solver.note) == (name in BY_VALUE)
    share = found.predicted.parameter_bytes[0] / found.predicted.unsharded_bytes
    assert share < (0.85 if name == "musicgen" else 0.56), "of musicgen the codec is not run"
    given = inputs(2, 7)
    want, gradients = step(copy.deepcopy(model), copy.deepcopy(given))
    tokens = written(copy.deepcopy(model), given) if name in WRITES else None
    embeds = embedded(model, given) if name in EMBEDS else {}
    scores = model(**embeds).logits.detach() if embeds else torch.empty(0)

    def rank(mesh: Mesh) -> tuple[Tensor, dict[str, Tensor]]:
        local = apply(copy.deepcopy(model), found, mesh)
        if embeds:  # first, since some models remember lengths of what they wrote
            logits = local(**copy.deepcopy(embeds)).logits.detach()
            torch.testing.assert_close(logits, scores, rtol=TOLERANCE, atol=1e-9)
        if tokens is not None:
            assert torch.equal(written(local, copy.deepcopy(given)), tokens)
        logits, mine = step(local, copy.deepcopy(given))
        return logits, full_tensors(local, mine)

    for logits, mine in run_ranks(2, rank):
        torch.testing.assert_close(logits, want, rtol=TOLERANCE, atol=1e-9)
        assert mine.keys() == gradients.keys()
        for key, gradient in gradients.items():
            scale = max(float(gradient.abs().max()), 1.0)
            torch.testing.assert_close(mine[key], gradient, rtol=0, atol=TOLERANCE * scale)


def write_16(model: Any, inputs: dict[str, Any], cache: str | None) -> Tensor:
    """16 tokens by `generate`, with a cache of this kind."""
    given = {n: v for n, v in inputs.items() if n != "use_cache"}
    how = {"cache_implementation": cache} if cache else {}
    return model.generate(**given, **how, min_new_tokens=16, max_new_tokens=16, do_sample=False)


@pytest.mark.parametrize(
    "name, given",
    [
        *(("qwen2_5_vl", True), ("llava", False), long("qwen2_vl", False), ("paligemma", False)),
        *(
            ("idefics3", True),
            long("idefics3", False),
            long("llava", True),
            long("paligemma", True),
        ),
    ],
)
def test_generate_with_a_cache(name: str, given: bool) -> None:
    """Prompts with an image and without, caches of both kinds, one plan; inputs given or made."""
    model, inputs, found = planned(name)
    if not given:
        model.config.architectures = [type(model).__name__]
        found = plan(model.config, 2, dtype="float64")
    ids = torch.randint(10, 94, (2, 9))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cases = [(given, cache) for given in (inputs(2, 7), text) for cache in (None, "static")]
    want = [write_16(copy.deepcopy(model), copy.deepcopy(given), cache) for given, cache in cases]

    def rank(mesh: Mesh) -> list[Tensor]:
        local = apply(copy.deepcopy(model), found, mesh)
        return [write_16(local, copy.deepcopy(given), cache) for given, cache in cases]

    for got in run_ranks(2, rank):
        assert all(map(torch.equal, got, want))


class Layer(Mlp):
    """A layer whose outputs transformers collects."""


class Tower(transformers.PreTrainedModel):
    """A model that collects hidden states, maybe with another one within."""

    config_class = transformers.PreTrainedConfig
    _can_record_outputs: Any = {"hidden_states": Layer}  # noqa: RUF012

    def __init__(self, config: Any, inner: nn.Module | None = None) -> None:
        super().__init__(config)
        self.first, self.inner, self.last = Layer(), inner, Layer()
        self.post_init()

    @capture_outputs
    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutput:
        x = inputs_embeds
        if self.inner is not None:
            x = x + self.inner(x).last_hidden_state
        return BaseModelOutput(last_hidden_state=self.last(self.first(x)))


def test_hidden_states_around_a_tower_that_collects_its_own() -> None:
    config = transformers.PreTrainedConfig()
    model = Tower(config, Tower(config)).double().eval()
    x = torch.randn(3, 19, WIDTH, dtype=torch.float64)
    found = plan(model, 2, kwargs={"inputs_embeds": x})
    assert {"first.up", "inner.last.down", "last.up"} <= {*found.modules}
    want = model(x, output_hidden_states=True).hidden_states
    assert len(want) == 3

    def rank(mesh: Mesh) -> tuple[Tensor, ...]:
        return apply(copy.deepcopy(model), found, mesh)(x, output_hidden_states=True).hidden_states

    for got in run_ranks(2, rank):
        torch.testing.assert_close(got, want)


def test_images_of_zeros_are_padding() -> None:
    """The plan is for one image in each sequence; here they have two, one and none."""
    model, inputs, found = planned("idefics3")
    given = inputs(3, 19)
    images = torch.randn(3, 2, 3, 24, 24, dtype=torch.float64)
    images[1, 1] = images[2] = 0
    given["input_ids"][0, 11:20], given["input_ids"][2, 2:11] = IMAGE, 20
    given["pixel_values"] = images
    want = model(**given).logits
    for got in run_ranks(2, lambda m: apply(copy.deepcopy(model), found, m)(**given).logits):
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=1e-9)


def test_inputs_with_an_image_are_made_from_the_config() -> None:
    for name, tokens, marks in (("llava", 25, 0), ("qwen2_vl", 16, 2), ("paligemma", 25, 0)):
        model, _ = MODELS[name]()
        found = example_call(model.to("meta"))
        assert found["input_ids"].shape == (TRACE_BATCH, TRACE_SEQ + tokens + marks)
        assert (found["input_ids"] == IMAGE).sum() == TRACE_BATCH * tokens
        assert found["pixel_values"].is_meta
    assert found.keys() == {"input_ids", "attention_mask", "pixel_values", "use_cache"}


def test_inputs_other_than_text_are_made_from_the_config() -> None:
    for name, shape in (("clip", (3, 3, 20, 20)), ("whisper", (3, 8, 40))):
        model, _ = MODELS[name]()
        found = example_call(model.to("meta"))
        assert shape in {tuple(v.shape) for v in found.values() if isinstance(v, Tensor)}


@pytest.mark.parametrize("name", [long("musicgen")])
def test_a_row_of_tokens_for_each_codebook_is_made(name: str) -> None:
    model, _ = MODELS[name]()
    assert example_call(model.to("meta"))["decoder_input_ids"].shape == (2 * TRACE_BATCH, TRACE_SEQ)


class Recurrent(nn.Module):
    """A tower with a config of its own, whose layer calls ops for each of many places."""

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.ViTConfig(image_size=20, patch_size=4)
        self.up = nn.Linear(20, 20)

    def forward(self, pixel_values: Tensor) -> Tensor:
        for _ in range(MAX_OPS):
            pixel_values = self.up(pixel_values)
        return pixel_values


def test_a_tower_that_calls_too_many_ops_is_left_out() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.down = Recurrent(), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(x)

    model = Beside().to("meta")
    assert not more_runs(model, Run("", (torch.empty(3, 19, 16, device="meta"),), {}))


class Numbered(nn.Module):
    """A tower that reads the sizes of its images. Behind one of its blocks it may call more."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.config = transformers.ViTConfig(image_size=20, patch_size=4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.ReLU()) for _ in range(5))
        self.beside, self.more = nn.Linear(48, 48), more

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Tensor:
        assert len(hidden_states) == sum(t * h * w for t, h, w in grid_thw.tolist())
        for number, block in enumerate(self.blocks):
            hidden_states = block(hidden_states)
            if number == 2 and self.more:
                hidden_states = self.beside(hidden_states)
        return hidden_states


@pytest.mark.parametrize("more", [False, True])
def test_a_tower_that_reads_the_sizes_of_images_is_traced(more: bool) -> None:
    """All its blocks are if its code tells them apart: else the plan would fail its dry run."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.down = Numbered(more), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(x)

    model = Beside().to("meta")
    runs = more_runs(model, Run("", (torch.empty(3, 19, 16, device="meta"),), {}))
    assert [run.module for run in runs] == ["tower"]
    assert all(value.is_meta for value in runs[0].kwargs.values())
    assert told_apart(model, runs) == ({"tower.blocks"} if more else set())


def test_images_that_the_code_filters_are_left_out() -> None:
    """The text is then split at least."""
    model, _ = MODELS["idefics3"]()
    assert example_call(model.to("meta")).keys() == {"input_ids", "use_cache"}


def test_unknown_inputs_are_named() -> None:
    class Odd(nn.Module):
        config, main_input_name = (
            transformers.ViTConfig(image_size=20, patch_size=4),
            "pixel_values",
        )

        def forward(self, pixel_values: Tensor, depth: Tensor) -> Tensor:
            return pixel_values + depth

    text = (
        r"whose forward needs pixel_values, depth "
        r"\(not \[3, 3, 20, 20\] or \[3, 3, 224, 224\] or \[3, 19, 48\]\): give"
    )
    with pytest.raises(ModelError, match=text):
        example_call(Odd())


def test_a_model_with_several_main_inputs() -> None:
    """As OneFormer names them."""

    class Two(nn.Module):
        config, main_input_name = transformers.ViTConfig(), ["pixel_values", "task_inputs"]

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, pixel_values: Tensor, task_inputs: Tensor) -> Tensor:
            return self.down(self.up(pixel_values + task_inputs).relu())

    given = {"pixel_values": torch.randn(3, 19, 16), "task_inputs": torch.randn(3, 1, 16)}
    assert {*plan(Two(), 2, kwargs=given).modules} == {"up", "down"}


def test_what_to_do_without_values_is_said() -> None:
    model, inputs = MODELS["qwen2_vl"]()
    given = inputs(3, 19)
    on_meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given.items()}
    with pytest.raises(ModelError, match="give example inputs with integers .*, not on meta"):
        prepare(model, 2, kwargs=on_meta)


class Read(nn.Module):
    """The root itself reads lengths; what is to be attended to is an own mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = [x[i, : int(n)] for i, n in enumerate(lengths.tolist())]
        return self.down(self.up(torch.cat(parts)).relu())


def test_a_root_that_reads_numbers() -> None:
    given = torch.randn(3, 19, 16), torch.tensor([19, 5, 7])
    found = plan(Read(), 2, args=given)
    assert set(found.modules) == {"up", "down"}
    model = Read()
    x, lengths = torch.randn(2, 11, 16), torch.tensor([4, 11])
    want = model(x, lengths)
    for got in run_ranks(2, lambda m: apply(copy.deepcopy(model), found, m)(x, lengths)):
        torch.testing.assert_close(got, want)


def test_hooks_that_a_model_puts_on_itself_are_not_put_on_twice() -> None:
    """As transformers does for hidden states, in its first forward."""
    model, inputs = MODELS["llava"]()
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    task = prepare(model, 2, kwargs=inputs(3, 19))
    modules = task.source.module.modules()
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules] == before
    assert not task.graph.untraced
