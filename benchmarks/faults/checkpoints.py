"""Mutated checkpoints: `load` refuses one, or has what safetensors itself reads in it.

Configs, generation settings, indices and headers; bytes of tensors are data, and any will do.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file

import shardwright
from benchmarks.faults.models import SMALL
from benchmarks.faults.outcomes import Tally, Wrong
from benchmarks.faults.plan_mutations import places
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.on_ranks.numeric import random_model
from shardwright.runtime.api import _open_checkpoint, _split
from shardwright.runtime.boundary.module_boundary import placements
from shardwright.runtime.checkpoint.conversion import Conversions
from shardwright.runtime.checkpoint.load import load_weights
from shardwright.runtime.checkpoint.source import INDEX
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.hub import Hub
from shardwright.runtime.redistribution.reshard import take_local

SECONDS = 60.0
RANKS = 2

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 3, 2**31, 2**62, 2**70, 10**99, 0.5, "", "x", "../model.safetensors",
    "/etc/passwd", "..", "\ud800", "a" * 5000, [], {}, [[]], {"": {}}, [0, 0], [-1], ["F32"], "F64",
    "load", "float99", "nope", "owner/kernel", {"rope_type": "nope"}, [1, 2, 3], 1e400, -0.0,
)  # fmt: skip


def written(folder: Path) -> None:
    """A tiny checkpoint in several files."""
    from transformers import GenerationConfig, LlamaConfig

    config = LlamaConfig(**{**SMALL, "architectures": ["LlamaForCausalLM"]})  # type: ignore[arg-type]
    model: Any = random_model(config, torch.float32)
    model.generation_config = GenerationConfig(max_new_tokens=4)
    model.save_pretrained(folder, max_shard_size="20KB")


def local_part(
    folder: Path, plan: Plan, mesh: Mesh, trust_remote_code: bool = False, keep: bool = False
) -> torch.nn.Module:
    """What one rank holds after `load`, without the others."""
    hub = Hub(trust_remote_code=trust_remote_code)
    checkpoint, model = _open_checkpoint(folder, plan, True, None, hub, {})
    assert checkpoint is not None
    conversions, mesh = Conversions(model), _split(model, plan, mesh)
    where: Any = {"device": torch.device("cpu"), "conversions": conversions, "keep": keep}
    load_weights(model, checkpoint, placements(model), mesh.coords, **where)
    return model.eval()


def attempt(folder: Path, plan: Plan) -> None:
    """Load each rank's part, and compare it with the whole tensors.

    Raises:
        ShardwrightError: it was refused.
        Wrong: a tensor is not what the files say.
    """
    for rank in range(RANKS):
        mesh = Mesh.shape_only({"tp": (rank, RANKS)})
        model = local_part(folder, plan, mesh)
        want: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            want |= load_file(file)
        found = placements(model)
        for name, parameter in model.named_parameters():
            whole = want[name]
            part = take_local(whole, found[name], mesh.coords) if name in found else whole
            if not torch.equal(part.to(parameter.dtype), parameter):
                raise Wrong(f"{name} is not what the files say")


def campaign(count: int, seed: int) -> Iterator[tuple[str, Tally]]:
    """The tally of each kind of file."""
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        written(whole)
        plan = shardwright.plan(whole, RANKS, objective="memory")
        for n, (kind, mutate) in enumerate(MUTATIONS.items()):
            random, tally = Random(f"{seed} {kind}"), Tally()
            for _ in range(count // len(MUTATIONS) + (n < count % len(MUTATIONS))):
                folder = Path(name) / "mutant"
                shutil.copytree(whole, folder)
                what = mutate(random, folder)
                tally.take(what, SECONDS, lambda f=folder: attempt(f, plan))
                shutil.rmtree(folder)
            yield kind, tally


def in_config(random: Random, folder: Path) -> str:
    """A value of the config is another."""
    return _in_json(random, folder / "config.json")


def in_generation_config(random: Random, folder: Path) -> str:
    """A value of the generation settings is another."""
    return _in_json(random, folder / "generation_config.json")


def in_index(random: Random, folder: Path) -> str:
    """The index says something else, or is none."""
    return _in_json(random, folder / INDEX)


def in_header(random: Random, folder: Path) -> str:
    """A header says something else, or is none."""
    file = random.choice(sorted(folder.glob("*.safetensors")))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    how = random.randrange(6)
    if how == 0:
        text, words = mutated_json(random, header)
    elif how == 1:
        at = random.randrange(length)
        text = header[:at] + bytes([random.randrange(256)]) + header[at + 1 :]
        words = f"byte {at}"
    elif how == 2:
        file.write_bytes(content[: random.randrange(len(content))])
        return f"{file.name} truncated"
    elif how == 3:
        size = random.choice((0, 1, 7, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
        file.write_bytes(size.to_bytes(8, "little") + content[8:])
        return f"{file.name}: a header of {size} bytes"
    elif how == 4:
        deep = random.choice((50, 5000, 200_000))
        text, words = b'{"a":' * deep + b"1" + b"}" * deep, f"{deep} levels"
    else:
        table = json.loads(header)
        a, b = random.choice(sorted(table)), random.choice(sorted(table))
        key = random.choice(("shape", "data_offsets", "dtype"))
        if key in table[a] and key in table[b]:
            table[a][key], table[b][key] = table[b][key], table[a][key]
        text, words = json.dumps(table).encode(), f"{key} of {a} and {b} exchanged"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return f"{file.name}: {words}"


def in_files(random: Random, folder: Path) -> str:
    """A file is gone, empty, a folder, a link to itself, or another's."""
    files = sorted(folder.iterdir())
    file, how = random.choice(files), random.randrange(6)
    if how == 0:
        file.unlink()
    elif how == 1:
        file.write_bytes(b"")
    elif how == 2:
        file.unlink()
        file.mkdir()
    elif how == 3:
        file.unlink()
        file.symlink_to(file.name)
    elif how == 4:
        shutil.copy(random.choice(files), folder / "other")
        file.unlink()
        (folder / "other").rename(file)
    else:
        file.write_bytes(random.randbytes(random.choice((1, 8, 100))))
    return f"{file.name} changed in way {how}"


def _in_json(random: Random, file: Path) -> str:
    text, words = mutated_json(random, file.read_bytes())
    file.write_bytes(text)
    return f"{file.name}: {words}"


def mutated_json(random: Random, content: bytes) -> tuple[bytes, str]:
    """JSON text with something else in it, or no JSON."""
    how = random.randrange(10)
    if how == 0:
        whole = random.choice((b"", b"{", b"[]", b"null", b"1" * 5000, b"\xff", b'"x"', b"{}"))
        return whole, f"{whole[:10]!r}"
    if how == 1:
        deep = random.choice((100, 5000, 100_000))
        return b'{"a":' * deep + b"1" + b"}" * deep, f"{deep} levels"
    value = json.loads(content)
    path = random.choice([*places(value)])
    at: Any = value
    for key in path[:-1]:
        at = at[key]
    if how == 2:
        del at[path[-1]]
        return json.dumps(value).encode(), f"without {path}"
    if how == 3 and isinstance(at, dict):
        at["a" * random.choice((1, 5000))] = at.pop(path[-1])
        return json.dumps(value).encode(), f"{path} renamed"
    at[path[-1]] = copy.deepcopy(random.choice(VALUES))
    return json.dumps(value).encode(), f"{path} = {at[path[-1]]!r:.40}"


MUTATIONS: dict[str, Callable[[Random, Path], str]] = {
    "config": in_config,
    "generation settings": in_generation_config,
    "index": in_index,
    "headers": in_header,
    "files": in_files,
}
