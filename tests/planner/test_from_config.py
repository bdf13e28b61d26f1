"""Models that take more than text, planned from their configs alone, are split and equal."""
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.errors import ModelError
from shardwright.planner.trace.inputs.documented_shapes import as_documented, documented
from shardwright.planner.trace.inputs.example_inputs import example_inputs
from shardwright.planner.trace.inputs.subject import Subject
from shardwright.planner.trace.model.source import from_config, read_source
from shardwright.planner.trace.runs.example_calls import example_call
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import randomize, weigh
from tests.planner.multimodal import random, tokens
from tests.planning import plan
from tests.ranks import run_ranks

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
VISION = {**SMALL, "image_size": 20, "patch_size": 4}
SPEECH = {
    **SMALL, "vocab_size": 24, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip


def pair() -> Any:
    """Two towers, whose sizes are in configs of their own."""
    return transformers.CLIPConfig(
        text_config={**SMALL, "vocab_size": 96, "max_position_embeddings": 40, "eos_token_id": 95},
        vision_config=VISION,
        projection_dim=16,
    )


def grids(b: int) -> dict[str, Any]:
    sides = torch.tensor([(4, 6), (6, 2)])[:b]
    mask = torch.tensor([[1] * 24, [1] * 12 + [0] * 12])[:b]
    return {"pixel_values": random(b, 24, 48), "spatial_shapes": sides,
            "pixel_attention_mask": mask}  # fmt: skip


def dia() -> Any:
    """A decoder with three tokens in each place."""
    text = {**SMALL, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 96,
            "max_position_embeddings": 40}  # fmt: skip
    cross = {"cross_num_attention_heads": 4, "cross_head_dim": 8, "cross_num_key_value_heads": 4,
             "cross_hidden_size": 32, "num_channels": 3}  # fmt: skip
    return transformers.DiaConfig(
        encoder_config=text, decoder_config={**text, **cross}, delay_pattern=[0, 1, 2],
        pad_token_id=93, eos_token_id=94, bos_token_id=95,
    )  # fmt: skip


CASES: dict[str, tuple[str, Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "two towers": (
        "CLIPModel", pair,
        lambda b: {"input_ids": tokens(b, 7), "pixel_values": random(b, 3, 20, 20)},
    ),
    "padded patches": (
        "Siglip2VisionModel",
        lambda: transformers.Siglip2VisionConfig(**SMALL, patch_size=4, num_patches=16),
        grids,
    ),
    "frames": (
        "VideoMAEForVideoClassification",
        lambda: transformers.VideoMAEConfig(**VISION, num_frames=4, tubelet_size=2, num_labels=5),
        lambda b: {"pixel_values": random(b, 4, 3, 20, 20)},
    ),
    "waves": (
        "HubertForCTC", lambda: transformers.HubertConfig(**SPEECH),
        lambda b: {"input_values": random(b, 400)},
    ),
    "no size": (
        "SegformerForSemanticSegmentation",
        lambda: transformers.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32],
            patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
            decoder_hidden_size=32, num_labels=5, classifier_dropout_prob=0.0,
            hidden_dropout_prob=0.0, drop_path_rate=0.0,
        ),
        lambda b: {"pixel_values": random(b, 3, 32, 48)},
    ),
    "as docs say": (
        "DecisionTransformerModel",
        lambda: transformers.DecisionTransformerConfig(
            hidden_size=32, n_layer=2, n_head=4, state_dim=5, act_dim=6, max_ep_len=40,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        lambda b: {
            "states": random(b, 7, 5), "actions": random(b, 7, 6), "rewards": random(b, 7, 1),
            "returns_to_go": random(b, 7, 1), "timesteps": torch.arange(7).expand(b, -1),
            "use_cache": False,
        },
    ),
    "tokens of several kinds": (
        "DiaForConditionalGeneration", dia,
        lambda b: {
            "input_ids": tokens(b, 7), "use_cache": False,
            "decoder_input_ids": tokens(b, 5)[..., None].expand(-1, -1, 3),
        },
    ),
    "a row for each codebook": (
        "MusicgenMelodyForCausalLM",
        lambda: transformers.MusicgenMelodyDecoderConfig(
            hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            num_codebooks=2, vocab_size=96, max_position_embeddings=40, pad_token_id=95,
            bos_token_id=95,
        ),
        lambda b: {"input_ids": tokens(2 * b, 7), "use_cache": False},
    ),
}  # fmt: skip


def step(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """All floating outputs, and all gradients of a weighting of them."""
    output = dict(model(**copy.deepcopy(inputs)))
    weigh(output).backward()
    leaves = (t for t in tree_leaves(output) if isinstance(t, Tensor))
    found = [t.detach() for t in leaves if t.is_floating_point()]
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found, grads


@pytest.mark.parametrize("name", CASES)
def test_planned_from_a_config_and_equal(name: str) -> None:
    cls, config, inputs = CASES[name]
    config = config()
    config.architectures = [cls]
    found = plan(config, 2, dtype="float64")
    share = found.predicted.parameter_bytes[0] / found.predicted.unsharded_bytes
    assert share < 0.62
    torch.manual_seed(0)
    model = getattr(transformers, cls)(copy.deepcopy(config)).double().eval()
    randomize(model)
    given = inputs(2)
    want, gradients = step(copy.deepcopy(model), given)

    def rank(mesh: Mesh) -> tuple[list[Tensor], dict[str, Tensor]]:
        local = apply(copy.deepcopy(model), found, mesh)
        outputs, mine = step(local, given)
        return outputs, full_tensors(local, mine)

    for outputs, mine in run_ranks(2, rank):
        torch.testing.assert_close(outputs, want, rtol=1e-9, atol=1e-9)
        assert mine.keys() == gradients.keys()
        for key, gradient in gradients.items():
            scale = max(float(gradient.abs().max()), 1.0)
            torch.testing.assert_close(mine[key], gradient, rtol=0, atol=1e-9 * scale)


def test_parameters_of_legacy_constructors() -> None:
    """`torch.FloatTensor(n)` makes them on the CPU, whatever the default device is."""
    sizes: dict[str, Any] = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    config = transformers.XLNetConfig(**sizes, vocab_size=96, architectures=["XLNetLMHeadModel"])
    found = plan(config, 2)
    assert found.predicted.parameter_bytes[0] / found.predicted.unsharded_bytes < 0.62
    torch.manual_seed(0)
    model = transformers.XLNetLMHeadModel(config).eval()
    given = {"input_ids": tokens(2, 7), "use_mems": False}
    want = model(**given).logits
    for got in run_ranks(2, lambda m: apply(copy.deepcopy(model), found, m)(**given).logits):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Reads(nn.Module):
    """Scales images by numbers that it reads off them."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.ViTConfig(image_size=20, patch_size=4)
        self.gain = nn.Linear(20, 20)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.gain(pixel_values) * max(pixel_values.flatten().tolist())


def test_inputs_that_are_read_are_taken_if_no_others_run() -> None:
    assert example_call(Reads().to("meta"))["pixel_values"].shape == (3, 3, 20, 20)


class Reader(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.new_tensor(max(values.flatten()[:2].tolist()))


class ReadsPatches(Reads):
    """Takes patches. It has read data before it sees how many dims its input has."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.gain = Reader(), nn.Linear(48, 48)

    def forward(self, pixel_values: Tensor) -> Tensor:
        most = self.read(pixel_values)
        _, _, width = pixel_values.shape
        return self.gain(pixel_values) * most / width


def test_of_inputs_that_are_read_those_are_taken_that_the_code_goes_on_with() -> None:
    """Not images, with which it fails behind what it reads."""
    assert example_call(ReadsPatches().to("meta"))["pixel_values"].shape == (3, 19, 48)


def test_calls_that_the_code_refuses_are_not_traced() -> None:
    """Two towers are not called with text alone."""
    config = pair()
    config.architectures = ["CLIPModel"]
    source = read_source(config)
    assert all("pixel_values" in run.kwargs for wish in source.wishes for run in wish)


def test_shapes_are_read_from_docs() -> None:
    class Documented(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = transformers.ViTConfig(image_size=20, hidden_size=32, act_dim=6)

        def forward(self, *, states: Any, image: Any, mask: Any, steps: Any, rest: Any) -> None:
            """
            states (`torch.FloatTensor` of shape `(batch_size, length + 2, 2 * config.act_dim)`):
                Of each step.
            image (`torch.Tensor` of shape `(batch_size, 3, height, width)`, *optional*):
                What is seen.
            mask (`torch.BoolTensor` of shape `(batch_size, dim)`): Any.
            steps (`torch.LongTensor` of shape `(batch_size,)`):
                Which step it is.
            rest (`torch.Tensor` of shape `(one of many words)`):
                Anything.
            """

    at = Subject(Documented(), torch.float64)
    found = {name: as_documented(at, name) for name in at.names}
    assert {n: t if t is None else (tuple(t.shape), t.dtype) for n, t in found.items()} == {
        "states": ((3, 21, 12), torch.float64),
        "image": ((3, 3, 20, 20), torch.float64),
        "mask": ((3, 32), torch.bool),
        "steps": ((3,), torch.int64),
        "rest": None,
    }
    assert documented(at)["image"].optional and not documented(at)["states"].optional


def choices(name: str) -> list[dict[str, Any]]:
    """Inputs that a model with the default config of a type may get."""
    config = transformers.CONFIG_MAPPING[name]()
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    return [*example_inputs(model, torch.float32)]


def test_patches_have_positions() -> None:
    """The columns and rows of a square image, in its order."""
    inputs = choices("gemma4_vision")[0]
    places = inputs["pixel_position_ids"][0].tolist()
    side = max(column for column, _ in places) + 1
    assert places == [[n % side, n // side] for n in range(side * side)]
    assert inputs["pixel_values"].shape[1] == side * side


def test_padding_is_left_to_further_calls() -> None:
    """What a model may take beside its main input comes first without a padding mask."""
    found = [inputs.keys() for inputs in choices("wav2vec2")]
    assert found[0] == {"input_values"}
    assert any("attention_mask" in names for names in found)


def test_masks_are_as_long_as_what_they_mask() -> None:
    """Not as docs say: a length there is any, but this one is that of the frames."""
    for inputs in choices("fun_asr_nano_encoder"):
        if (mask := inputs["input_features_mask"]) is not None:
            assert mask.shape[1] in inputs["input_features"].shape[1:]


def test_prompts_are_above_images() -> None:
    """Both together are as high as the config says."""
    found = choices("seggpt")[0]
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        name: (3, 3, 448, 448) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
    }


def test_what_is_called_inputs_may_be_images() -> None:
    """Where a config has their size; else they are waves."""
    assert (3, 3, 56, 56) in [tuple(found["inputs"].shape) for found in choices("perceiver")]


def test_a_switch_that_the_code_sets_itself_is_left_out() -> None:
    """A module that passes `use_cache` on must not get it once more."""
    config = transformers.CONFIG_MAPPING["mimi_encoder"](**SMALL, num_key_value_heads=4, head_dim=8)
    config.architectures = ["MimiEncoderModel"]
    inputs = example_call(from_config(config))
    assert "use_cache" not in inputs and inputs["input_values"].shape[:2] == (3, 1)


def test_views_of_cameras_and_a_state() -> None:
    """Each sequence has an image token for each patch of its two views; the state is so wide."""
    config = transformers.CONFIG_MAPPING["pi0"]()
    config.architectures, vision = ["PI0ForConditionalGeneration"], config.vlm_config.vision_config
    for part in (vision, config.vlm_config.text_config, config.dit_config):
        part.num_hidden_layers = 1
    inputs = example_call(from_config(config))
    assert inputs["state"].shape == (3, config.max_state_dim)
    assert inputs["pixel_values"].shape[:3] == (3, 2, 3)
    assert inputs["pixel_attention_mask"].shape == (3, 2)
    tokens = inputs["input_ids"] == config.vlm_config.image_token_id
    assert tokens.sum(1).tolist() == [2 * (vision.image_size // vision.patch_size) ** 2] * 3


def test_images_are_looked_at_with_what_else_the_model_needs() -> None:
    """An image becomes as many vectors as there are queries, which see a question as well."""
    config = transformers.CONFIG_MAPPING["instructblip"](image_token_index=50265)
    config.architectures = ["InstructBlipForConditionalGeneration"]
    for part in (config.vision_config, config.qformer_config, config.text_config):
        part.num_hidden_layers = 2
    inputs = example_call(from_config(config))
    tokens = inputs["input_ids"] == config.image_token_index
    assert tokens.sum(1).tolist() == [config.num_query_tokens] * 3
    assert inputs["qformer_input_ids"].shape == (3, 19)


class Sights(nn.Module):
    """Sounds and frames of video, whose size a layer knows and no config."""

    main_input_name = "input_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.PreTrainedConfig()
        self.hear = nn.Conv1d(1, 8, 7)
        self.see = nn.Conv2d(3, 8, 8)
        self.see.img_size = (40, 56)

    def forward(self, input_values: Any = None, pixel_values_videos: Any = None) -> Any:
        assert tuple(pixel_values_videos.shape[-2:]) == self.see.img_size
        frames = self.see(pixel_values_videos.flatten(0, 1)).flatten(1).mean()
        return self.hear(input_values).mean(-1) + frames


def test_videos_beside_sounds_are_as_large_as_a_layer_says() -> None:
    inputs = example_call(Sights().to("meta").eval())
    assert inputs["input_values"].shape[:2] == (3, 1)
    assert inputs["pixel_values_videos"].shape == (3, 2, 3, 40, 56)


def test_a_model_without_a_forward_names_its_parts() -> None:
    """The largest first. Those that cannot be called either are left out."""

    class Talks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = transformers.PreTrainedConfig()
            self.small, self.large = nn.Linear(2, 2), nn.Conv1d(9, 9, 1)
            self.listed = nn.ModuleList([nn.Linear(90, 90)])

    named = r"Talks has no forward of its own.*: large \(Conv1d\), small \(Linear\)$"
    with pytest.raises(ModelError, match=named):
        example_call(Talks().to("meta"))


def test_masks_that_must_be_given_may_have_values() -> None:
    """Code reads off them how long sounds are: after a mask of which nothing is known, all ones."""
    unknown, ones = (c["input_features_mask"] for c in choices("fun_asr_nano_encoder")[:2])
    assert unknown.is_meta and unknown.shape == ones.shape
    assert not ones.is_meta and ones.all()
    assert all(c.get("attention_mask") is None or c["attention_mask"].is_meta
               for c in choices("wav2vec2"))  # fmt: skip
