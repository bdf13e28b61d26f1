"""Split the transformer of a diffusion pipeline over two ranks, and compare images with the whole.

    torchrun --nproc-per-node 2 examples/pipeline.py [DIRECTORY]

It makes a small pipeline of random weights, so it needs no network and no GPU, but diffusers. With
DIRECTORY, the pipeline and the plan stay there.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import diffusers
import diffusers.utils.logging
import numpy as np
import torch
import torch.distributed as dist

import shardwright

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
WITHOUT: Any = dict.fromkeys((*ENCODERS, *TOKENIZERS))  # prompts are given as embeddings


def prepare(directory: Path) -> None:
    """Write a pipeline of random weights and a plan for its transformer into `directory`.

    With a pipeline of your own: `shardwright plan DIRECTORY --tp 2 -o plan.json`.
    """
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=20,
        pos_embed_max_size=16,
    )
    made: Any = diffusers.AutoencoderKL  # its annotations are of one block
    vae = made(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        latent_channels=4,
        norm_num_groups=4,
        shift_factor=0.0,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.StableDiffusion3Pipeline(transformer, scheduler, vae, **WITHOUT)
    pipeline.save_pretrained(directory / "pipeline")
    plan = shardwright.plan(directory / "pipeline", tp=2, objective="memory")
    plan.save(directory / "plan.json")
    print(f"planned {plan.model.architecture} by {plan.solver.name}, {plan.solver.status}")


def draw(pipeline: Any) -> np.ndarray:
    """An image of two steps, from a prompt of random numbers: the same on all ranks."""
    pipeline.set_progress_bar_config(disable=True)
    numbers = torch.Generator().manual_seed(1)
    prompt = torch.randn(2, 7, 24, generator=numbers), torch.randn(2, 20, generator=numbers)
    out = pipeline(
        prompt_embeds=prompt[0][:1],
        negative_prompt_embeds=prompt[0][1:],
        pooled_prompt_embeds=prompt[1][:1],
        negative_pooled_prompt_embeds=prompt[1][1:],
        num_inference_steps=2,
        height=16,
        width=16,
        generator=numbers,
        output_type="np",
    )
    return out.images


def main(directory: Path) -> None:
    """What each rank does."""
    pipeline = directory / "pipeline"
    transformer = shardwright.load(pipeline, directory / "plan.json", device="cpu")
    load = diffusers.DiffusionPipeline.from_pretrained
    images = draw(load(pipeline, **WITHOUT, transformer=transformer))
    wanted = draw(load(pipeline, **WITHOUT))
    print(f"rank {dist.get_rank()}: images differ by {np.abs(images - wanted).max():.1e}")
    assert np.abs(images - wanted).max() < 1e-5, "the split pipeline draws another image"
    if dist.get_rank() == 0:
        print("the same image as the unsplit pipeline")


if __name__ == "__main__":
    diffusers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as temporary:
        place = [sys.argv[1] if len(sys.argv) > 1 else temporary]
        dist.broadcast_object_list(place)  # that of rank 0, for all
        if dist.get_rank() == 0:
            prepare(Path(place[0]))
        dist.barrier()
        main(Path(place[0]))
        dist.barrier()  # nobody leaves, and removes the files, while others read
    dist.destroy_process_group()
