"""Models of all sorts, each in float64 with seeded weights, and with inputs to plan and to call.

Those of transformers are the zoo's; modules as people write them are those of the tests; timm,
diffusers and x-transformers add theirs where they are installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.uses.towers import TOWERS
from benchmarks.zoo import FIRST, SAMPLE
from benchmarks.zoo_case import CASTS, EXACT, case
from tests.planner import modules, multimodal, off_inputs
from tests.planner.equal import Inputs, ids

HAND = (
    "Grouped TurnedByComplex MultiQuery Unequal Mixer Vision Language TorchAttention Experts"
).split()


@dataclass(frozen=True)
class Made:
    """A whole model, how it is planned and called, and what its split one may differ by."""

    model: Any
    inputs: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    plan: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = EXACT


def names() -> list[str]:
    """All models that can be made here: `group/name`."""
    zoo = [f"{kind}/{n}" for kind, first in FIRST.items() for n in (*first, *SAMPLE[kind])]
    hand = [f"hand/{n}" for n in (*HAND, *off_inputs.MODELS)]
    more = [n for n, made in FOREIGN.items() if _is_there(made.package)]
    return [*zoo, *TOWERS, *hand, *more]


def make(name: str) -> Made:
    """The model of that name."""
    group, _, leaf = name.partition("/")
    if group in FIRST:
        found = case(group, leaf)
        if found.model.config.is_encoder_decoder and found.model.can_generate():
            found.model.generation_config.decoder_start_token_id = 0
        return Made(found.model, found.inputs, (), {"kwargs": found.example}, found.tolerance)
    if name in TOWERS:
        return _by_name(TOWERS[name])
    if leaf in off_inputs.MODELS and group == "hand":
        cls, _, inputs = off_inputs.MODELS[leaf]
        return _by_position(cls, inputs)
    if group == "hand":
        cls = getattr(modules, leaf)
        return _by_position(lambda: cls(), modules.inputs_of(leaf))
    foreign = FOREIGN[name]
    return _by_position(foreign.make, foreign.inputs)


def _by_position(build: Callable[[], nn.Module], inputs: Inputs) -> Made:
    """A module that takes its inputs by position."""
    torch.manual_seed(0)
    model = _drawn(build())
    return Made(model, args=inputs(3, 16), plan={"args": inputs(5, 16)})


def _by_name(make: Callable[[], multimodal.Made]) -> Made:
    """A model of transformers that takes more than text; several compute in float32 inside."""
    torch.manual_seed(0)
    model, inputs = make()
    return Made(_drawn(model), inputs(2, 7), plan={"kwargs": inputs(3, 19)}, tolerance=CASTS)


def _drawn(model: nn.Module) -> nn.Module:
    """In float64, with biases and norms that no rank could guess; then the next seed."""
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    torch.manual_seed(1)
    return model


APART = Path(sys.prefix) / "apart"
"""Where the Makefile puts timm: of what lies on the path transformers imports what it can use."""


def _is_there(package: str) -> bool:
    return (APART / package).is_dir() or importlib.util.find_spec(package) is not None


@dataclass(frozen=True)
class Foreign:
    """A model of another package."""

    package: str
    make: Callable[[], nn.Module]
    inputs: Inputs


def _pictures(size: int, channels: int = 3) -> Inputs:
    return lambda b, _: (torch.randn(b, channels, size, size, dtype=torch.float64),)


def _timm(name: str, **options: Any) -> Foreign:
    def build() -> nn.Module:
        with with_torchvision():
            import timm  # pyright: ignore[reportMissingImports]
        return timm.create_model(name, num_classes=12, **options)

    return Foreign("timm", build, _pictures(options.get("img_size", 64)))


class _Empty(ModuleType):
    """A module with any class that is asked for, each an empty one."""

    __path__: list[str] = []  # noqa: RUF012  # pyright: ignore

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "InterpolationMode":  # timm can do without that
            raise AttributeError(name)
        return type(name, (nn.BatchNorm2d,), {})


class _Torchvision(MetaPathFinder, Loader):
    """Stands in for torchvision, which timm wants for pictures only, and whose wheels want CUDA."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        own = fullname.partition(".")[0] == "torchvision"
        return ModuleSpec(fullname, self, is_package=True) if own else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def with_torchvision() -> Iterator[None]:
    """While timm is imported: with an empty torchvision where there is none."""
    if importlib.util.find_spec("torchvision"):
        yield
        return
    finder = _Torchvision()
    sys.meta_path.append(finder)
    sys.path.append(str(APART))
    try:
        yield
    finally:
        sys.path.remove(str(APART))
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel  # pyright: ignore[reportMissingImports]

    return DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel  # pyright: ignore[reportMissingImports]

    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(16, 32), cross_attention_dim=12, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def _x_transformer() -> nn.Module:
    from x_transformers import (  # pyright: ignore[reportMissingImports]
        Decoder,
        TransformerWrapper,
    )

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True)
    return TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=layers)


def _denoised(b: int, _: int) -> tuple[Any, ...]:
    classes = torch.arange(b) % 10
    return torch.randn(b, 4, 8, 8, dtype=torch.float64), torch.arange(b), classes


def _prompted(b: int, t: int) -> tuple[Any, ...]:
    noisy, prompt = torch.randn(b, 4, 8, 8), torch.randn(b, t, 12)
    return noisy.double(), torch.arange(b), prompt.double()


FOREIGN: dict[str, Foreign] = {
    "timm/vit": _timm("vit_tiny_patch16_224", img_size=32, depth=2),
    "timm/deit": _timm("deit_tiny_distilled_patch16_224", img_size=32, depth=2),
    "timm/swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=32,
        depths=(2, 2), num_heads=(2, 4),
    ),
    "timm/mixer": _timm("mixer_s32_224", img_size=64),
    "timm/convnext": _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)),
    "timm/resnet": _timm("resnet10t"),
    "diffusers/dit": Foreign("diffusers", _dit, _denoised),
    "diffusers/unet": Foreign("diffusers", _unet, _prompted),
    "x_transformers/decoder": Foreign("x_transformers", _x_transformer, ids(100)),
}  # fmt: skip
