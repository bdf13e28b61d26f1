"""Quantizes a saved checkpoint in place, and saves a dense one of the same numbers beside it.

This does not use the product's code, so that what the product reads can be compared with it.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DENSE = "dense"
"""The folder, inside the checkpoint's, of the dense copy."""
LEAST = 8
"""Least length of the two last dims of a quantized weight."""

COUNTS = (3, 5, 7, 11)
"""How many blocks the longest dim of a model's weights may have."""

EMBEDDING = re.compile("emb|wte|wpe|shared.weight|lm_head")
"""Names of weights that are seldom quantized."""

Tensors = dict[str, Tensor]


def counts_for(name: str) -> tuple[int, int]:
    """Return how many blocks the weights of a model get; the same each time for a name."""
    at = zlib.crc32(name.encode())
    return COUNTS[at % 4], COUNTS[at // 4 % 4]


def quantize(
    directory: str | Path,
    how: str,
    counts: tuple[int, int] = (5, 3),
    block: tuple[int, int] | None = None,
) -> Path:
    """Quantize weights of a checkpoint; return the folder of the dense copy.

    Args:
        directory: as `save_pretrained` writes it.
        how: "fp8" or "int4".
        counts: about how many blocks the rows and the columns of the longest weight have.
        block: rows and columns of a block, in place of `counts`.
    """
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    shutil.copytree(directory, directory / DENSE)
    files = {path: load_file(path) for path in sorted(directory.glob("*.safetensors"))}
    found = [t for tensors in files.values() for n, t in tensors.items() if _is_weight(n, t)]
    rows = max((t.shape[-2] for t in found), default=1)
    columns = max((t.shape[-1] for t in found), default=1)
    block = block or (-(-rows // counts[0]), -(-columns // counts[1]))
    for path, tensors in files.items():
        dense: Tensors = {}
        stored: Tensors = {}
        for name, tensor in tensors.items():
            if _is_weight(name, tensor):
                parts, dense[name] = HOW[how](tensor.float(), block)
                stored |= {name + suffix: part for suffix, part in parts.items()}
                dense[name] = dense[name].to(tensor.dtype)
            else:
                stored[name] = dense[name] = tensor
        save_file(stored, path, metadata={"format": "pt"})
        save_file(dense, directory / DENSE / path.name, metadata={"format": "pt"})
    _index(directory)
    config["quantization_config"] = CONFIGS[how](block)
    (directory / "config.json").write_text(json.dumps(config))
    return directory / DENSE


def _is_weight(name: str, tensor: Tensor) -> bool:
    last = tensor.shape[-2:]
    kind = tensor.dim() == 2 and name.endswith("weight") and not EMBEDDING.search(name)
    stacked = tensor.dim() == 3 and not name.endswith(("weight", "bias"))
    return tensor.is_floating_point() and (kind or stacked) and min(last) >= LEAST


def _index(directory: Path) -> None:
    """Write the index anew if there is one."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return
    files = sorted(directory.glob("*.safetensors"))
    named = {name: path.name for path in files for name in load_file(path)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": named}))


def spread(scale: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """Repeat the scale of each block for all of its elements; `shape` is the weight's."""
    out = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return out[..., : shape[-2], : shape[-1]]


def _greatest(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the greatest absolute value of each block; blocks at the end may be smaller."""
    rows = [part.abs().amax(-2, keepdim=True) for part in weight.split(block[0], -2)]
    columns = [part.amax(-1, keepdim=True) for part in torch.cat(rows, -2).split(block[1], -1)]
    return torch.cat(columns, -1).clamp(min=1e-6)


def _fp8(weight: Tensor, block: tuple[int, int]) -> tuple[Tensors, Tensor]:
    scale = _greatest(weight, block) / 448
    codes = (weight / spread(scale, block, weight.shape)).to(torch.float8_e4m3fn)
    return {"": codes, "_scale_inv": scale}, codes.float() * spread(scale, block, weight.shape)


def _int4(weight: Tensor, block: tuple[int, int]) -> tuple[Tensors, Tensor]:
    group = (1, _group(block))
    scale = _greatest(weight, group) / 7.5
    wide = spread(scale, group, weight.shape)
    codes = (weight / wide).round().clamp(-8, 7).int()
    words = -(-weight.shape[-1] // 8)
    padded = torch.nn.functional.pad(codes + 8, (0, words * 8 - weight.shape[-1]))
    packed = torch.zeros(*weight.shape[:-1], words, dtype=torch.int64)
    for place in range(8):
        packed += padded[..., place::8].long() << (4 * place)
    packed = (packed - ((packed >> 31) << 32)).int()
    shape = torch.tensor(weight.shape)
    return {"_packed": packed, "_scale": scale, "_shape": shape}, codes * wide


def _group(block: tuple[int, int]) -> int:
    return max(block[1] // 2, 4)


HOW: dict[str, Callable[[Tensor, tuple[int, int]], tuple[Tensors, Tensor]]] = {
    "fp8": _fp8,
    "int4": _int4,
}

CONFIGS: dict[str, Callable[[tuple[int, int]], dict[str, Any]]] = {
    "fp8": lambda block: {
        "quant_method": "fp8",
        "weight_block_size": [*block],
        "activation_scheme": "dynamic",
    },
    "int4": lambda block: {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": _group(block),
                },
            }
        },
    },
}
