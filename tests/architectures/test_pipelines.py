"""Models of diffusers and timm by their directories: planned, loaded in part, saved; pipelines."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import shardwright
from benchmarks.uses.models import FOREIGN
from shardwright.errors import ModelError
from shardwright.planner.cli.main import main
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.checkpoint.source import Checkpoint
from tests.planning import plan
from tests.ranks import run_ranks

from .pipelines import PIPELINES

EQUAL = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore:::diffusers", "ignore:::timm")


@pytest.mark.parametrize("name", PIPELINES)
def test_images_of_a_split_denoiser(name: str, tmp_path: Path) -> None:
    """From the directory of the pipeline alone; the second images are of another size."""
    tiny = PIPELINES[name]
    whole = tiny.make()
    whole.save_pretrained(tmp_path)
    sizes: list[dict[str, int]] = [{}, {"height": 32}]
    wanted = [tiny.images(whole, **size) for size in sizes]
    made = plan(tmp_path, 2)
    assert max(made.predicted.parameter_bytes) < 0.7 * made.predicted.unsharded_bytes

    def rank(_: Any) -> list[np.ndarray]:
        split = shardwright.load(tmp_path, made, device="cpu")
        return [tiny.images(tiny.around(whole, split), **size) for size in sizes]

    for images in run_ranks(2, rank):
        for got, want in zip(images, wanted, strict=True):
            assert np.abs(got - want).max() < EQUAL


def test_a_component_is_read_in_part_and_saved(tmp_path: Path) -> None:
    """From an index of several files; diffusers reads what is written, in one file or several."""
    whole = PIPELINES["sd3"].denoiser().bfloat16()
    whole.save_pretrained(tmp_path / "start", max_shard_size="20KB")
    made = plan(tmp_path / "start", 2)
    assert made.workload.dtype == "bfloat16"

    def rank(_: Any) -> int:
        split: Any = shardwright.load(tmp_path / "start", made, device="cpu")
        shardwright.save(split, tmp_path / "saved", max_shard_size="40KB")
        shardwright.save(split, tmp_path / "saved", max_shard_size="5GB")
        return split.shardwright_report.read

    read = run_ranks(2, rank)
    assert max(read) < 0.7 * Checkpoint.open(tmp_path / "start").nbytes
    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert names == {"config.json", "diffusion_pytorch_model.safetensors"}
    again = type(whole).from_pretrained(tmp_path / "saved", torch_dtype=torch.bfloat16)
    for got, want in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want)
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("start", "saved")]
    assert configs[0] == configs[1]


def test_the_model_that_is_meant(tmp_path: Path) -> None:
    PIPELINES["sd3"].make().save_pretrained(tmp_path)
    assert plan(tmp_path, 2, subfolder="vae").model.architecture == "AutoencoderKL"
    with pytest.raises(ModelError, match="no model in 'nix': it has transformer, vae"):
        plan(tmp_path, 2, subfolder="nix")
    with pytest.raises(ModelError, match="no model in"):
        plan(tmp_path / "vae", 2, subfolder="../transformer")
    shutil.rmtree(tmp_path / "transformer")
    with pytest.raises(ModelError, match="is a pipeline without a transformer or unet"):
        plan(tmp_path, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"_class_name": "NoSuchModel"}, "which is not in it"),
        ({"_class_name": "DDIMScheduler"}, "which is no model"),
        ({"_class_name": "os"}, "which is not in it"),
        ({"_class_name": "AutoencoderKL", "norm_num_groups": 0}, "cannot build a AutoencoderKL"),
        ({"_class_name": "AutoencoderKL", "quantization_config": {}}, "is quantized"),
    ],
)
def test_configs_that_name_no_model(tmp_path: Path, fields: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        plan(tmp_path, 2)


def test_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("diffusers", "timm"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(ModelError, match="cannot be imported .*: pip install diffusers"):
        plan(tmp_path, 2)
    with pytest.raises(ModelError, match="cannot be imported .*: pip install timm torchvision"):
        plan("timm/vit_base_patch16_224", 2)


def test_inputs_that_are_not_found(tmp_path: Path) -> None:
    """The error says what was tried, and how to give them."""
    config = {"_class_name": "T5FilmDecoder", "d_model": 32, "num_layers": 1, "d_kv": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="forward takes encodings_and_masks, .*--inputs FILE.py"):
        plan(tmp_path, 2)


def test_timm_by_name_and_by_directory(tmp_path: Path) -> None:
    """By name from the config alone; from its directory with weights, which timm reads again."""
    whole: Any = FOREIGN["timm/vit"].make().eval()
    import timm  # pyright: ignore[reportMissingImports]
    from timm.models import save_for_hf  # pyright: ignore[reportMissingImports]

    assert plan("timm/vit_tiny_patch16_224", 2).model.architecture == "VisionTransformer"
    save_for_hf(whole, str(tmp_path / "start"), safe_serialization=True)
    made = plan(tmp_path / "start", 2)
    pictures = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        want = whole(pictures)

    def rank(_: Any) -> torch.Tensor:
        split: Any = shardwright.load(tmp_path / "start", made, device="cpu")
        shardwright.save(split, tmp_path / "saved", max_shard_size="100KB")
        with torch.no_grad():
            return split(pictures)

    again = [*run_ranks(2, rank)]
    saved = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    with torch.no_grad():
        again.append(saved(pictures))
    for got in again:
        torch.testing.assert_close(got, want, rtol=0, atol=EQUAL)


def test_a_plan_is_for_one_config(tmp_path: Path) -> None:
    """Two models of the same shapes, with another number in the config."""
    one = PIPELINES["flux"].denoiser()
    made: Plan = plan(one, 2)
    other: Any = diffusers.FluxTransformer2DModel.from_config(
        {**one.config, "axes_dims_rope": (8, 4, 4)}
    )
    with pytest.raises(shardwright.errors.PlanError, match="with another config"):
        run_ranks(2, lambda mesh: shardwright.apply(copy.deepcopy(other), made, mesh))


def test_what_a_split_autoencoder_encodes_and_decodes() -> None:
    """By methods of its own, which pipelines call in place of its forward."""
    whole = PIPELINES["sd3"].vae().eval()
    made = plan(copy.deepcopy(whole), 2)
    latents, pictures = torch.randn(1, 4, 8, 8), torch.randn(1, 3, 16, 16)

    @torch.no_grad()
    def both(vae: Any) -> list[torch.Tensor]:
        coded = vae.encode(pictures).latent_dist.mode()
        return [coded, vae.decode(latents).sample, vae(pictures).sample]

    wanted = both(whole)
    for found in run_ranks(
        2, lambda mesh: both(shardwright.apply(copy.deepcopy(whole), made, mesh))
    ):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=EQUAL)


def test_the_command_says_which_model_it_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PIPELINES["wan"].make().save_pretrained(tmp_path)
    command = ["plan", str(tmp_path), "--tp", "2", "-q", "-o", str(tmp_path / "plan.json")]
    main(command, standalone_mode=False)
    said = "the plan is for its transformer (--subfolder plans another: vae)"
    assert said in " ".join(capsys.readouterr().err.split())
