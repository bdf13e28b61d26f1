"""Tiny pipelines of diffusers: random weights, prompts as embeddings, no tokenizers."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import torch

SEQ, PROMPT, POOLED = 7, 24, 20
"""Tokens of a prompt, and the widths of what encoders make of it."""


@dataclass(frozen=True)
class Tiny:
    """A pipeline, and how it is called."""

    pipeline: str
    denoiser: Callable[[], Any]
    scheduler: Callable[[], Any]
    prompt: dict[str, tuple[int, ...]]
    size: dict[str, int]
    name: str = "transformer"
    more: dict[str, Any] | None = None
    call: dict[str, Any] | None = None

    def make(self) -> Any:
        """The whole pipeline."""
        torch.manual_seed(0)
        cls = getattr(diffusers, self.pipeline)
        made = {self.name: self.denoiser().eval(), "scheduler": self.scheduler(), "vae": self.vae()}
        names = inspect.signature(cls.__init__).parameters
        left = {name: None for name in names if re.match("text_enc|token|feature", name)}
        return self.quiet(cls(**{**left, **made, **(self.more or {})}))

    def vae(self) -> Any:
        if "frames" in "".join(self.size):
            return diffusers.AutoencoderKLWan(
                base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                temperal_downsample=[False, True, True],
            )  # fmt: skip
        make: Any = diffusers.AutoencoderKL
        return make(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16), latent_channels=4, norm_num_groups=4, sample_size=16,
            shift_factor=0.1, scaling_factor=0.5, use_quant_conv=False, use_post_quant_conv=False,
        )  # fmt: skip

    def around(self, whole: Any, denoiser: Any) -> Any:
        """The same pipeline with another denoiser; of each rank its own."""
        parts = {n: copy.deepcopy(p) for n, p in whole.components.items() if n != self.name}
        return self.quiet(type(whole)(**parts, **{self.name: denoiser}))

    def quiet(self, pipeline: Any) -> Any:
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def images(self, pipeline: Any, **size: int) -> np.ndarray:
        """Two steps of denoising a prompt of random numbers."""
        drawn = torch.Generator().manual_seed(1)
        given: dict[str, Any] = {n: torch.randn(s, generator=drawn) for n, s in self.prompt.items()}
        for name in given:
            if name.endswith("mask"):
                given[name] = (torch.arange(SEQ) < 5)[None].long()
        out = pipeline(
            **given, **{**self.size, **size}, num_inference_steps=2, output_type="np",
            generator=drawn, **(self.call or {}),
        )  # fmt: skip
        return out.frames if hasattr(out, "frames") else out.images


def _prompt(*names: str, negative: bool = True) -> dict[str, tuple[int, ...]]:
    shapes = {
        "prompt_embeds": (1, SEQ, PROMPT),
        "pooled_prompt_embeds": (1, POOLED),
        "prompt_attention_mask": (1, SEQ),
    }
    found = {name: shapes[name] for name in ("prompt_embeds", *names)}
    return found | ({f"negative_{n}": s for n, s in found.items()} if negative else {})


def _sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
        attention_head_dim=8, num_attention_heads=4, joint_attention_dim=PROMPT,
        caption_projection_dim=32, pooled_projection_dim=POOLED, pos_embed_max_size=16,
    )  # fmt: skip


def _flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=PROMPT, pooled_projection_dim=POOLED,
        guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def _pixart() -> Any:
    return diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, attention_head_dim=8, num_attention_heads=4, in_channels=4,
        cross_attention_dim=32, caption_channels=PROMPT,
    )  # fmt: skip


def _wan() -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=PROMPT, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip


def _unet(**more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, layers_per_block=1, norm_num_groups=4, block_out_channels=(16, 32),
        cross_attention_dim=PROMPT, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), **{"attention_head_dim": 4, **more},
    )  # fmt: skip


def _unet_xl() -> Any:
    return _unet(
        addition_embed_type="text_time", addition_time_embed_dim=8, use_linear_projection=True,
        attention_head_dim=(2, 4), projection_class_embeddings_input_dim=6 * 8 + POOLED,
    )  # fmt: skip


def _flow() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler()


SQUARE = {"height": 16, "width": 16}
POOL = "pooled_prompt_embeds"

PIPELINES = {
    "sd3": Tiny("StableDiffusion3Pipeline", _sd3, _flow, _prompt(POOL), SQUARE),
    "flux": Tiny("FluxPipeline", _flux, _flow, _prompt(POOL, negative=False), SQUARE),
    "pixart": Tiny(
        "PixArtAlphaPipeline", _pixart, lambda: diffusers.DPMSolverMultistepScheduler(),
        _prompt("prompt_attention_mask"), SQUARE,
        call={"negative_prompt": None, "use_resolution_binning": False},
    ),
    "wan": Tiny("WanPipeline", _wan, _flow, _prompt(), {**SQUARE, "num_frames": 9}),
    "sd": Tiny(
        "StableDiffusionPipeline", _unet,
        lambda: diffusers.DDIMScheduler(steps_offset=1, clip_sample=False), _prompt(), SQUARE,
        "unet", {"requires_safety_checker": False, "safety_checker": None},
    ),
    "sdxl": Tiny(
        "StableDiffusionXLPipeline", _unet_xl, lambda: diffusers.EulerDiscreteScheduler(),
        _prompt(POOL), SQUARE, "unet", {"add_watermarker": False},
    ),
}  # fmt: skip
"""Pipelines of all sorts: two kinds of denoisers, packed latents, masks, video."""
