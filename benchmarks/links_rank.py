"""A rank of `links.py`: times a step of each plan in a folder, in turn, or measures the machine."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import shardwright
from shardwright.planner.contract.mesh import coords_of
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.devices import calibrate

BATCH, SEQ, VOCABULARY = 8, 32, 2048
"""Sequences of a step, and tokens of each."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "phi3": {"num_hidden_layers": 3},
    "gemma2": {"head_dim": 32, "vocab_size": 8192},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 128},
    "gpt_neox": {"intermediate_size": 2048},
    "starcoder2": {"intermediate_size": 1536},
    "olmo2": {"hidden_size": 384, "intermediate_size": 1024},
    "mistral": {"intermediate_size": 512, "vocab_size": 8192},
    "granite": {"num_hidden_layers": 1, "hidden_size": 512},
}
"""Model type -> what differs from the common sizes."""

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "dtype": "float32",
}


def config(name: str) -> Any:
    """Return the config of a small model."""
    config = AutoConfig.for_model(name, **COMMON | MODELS[name])
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    return config


def split(name: str, plan: Plan) -> Any:
    """Return the model, split by a plan over all ranks."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config(name)).eval()
    mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    return shardwright.apply(model, plan, mesh)


def step(model: Any, plan: Plan, ids: torch.Tensor) -> None:
    """Run a forward pass with the sequences of this copy, and a backward pass in training."""
    trains = "train" in plan.workload.phases
    copy, copies = coords_of(plan.mesh, {}, dist.get_rank()).get("dp", (0, 1))
    own = ids.chunk(copies)[copy]
    model.train(trains)
    with torch.set_grad_enabled(trains):
        out = model(own, labels=own if trains else None, use_cache=False)
    if trains:
        out.loss.backward()
        model.zero_grad()


TOGETHER, KEPT, ENOUGH = 0.1, 16, 1.0
"""Seconds in which a case is repeated, so that barriers do not matter; results that are kept, as in
training, so that each is new memory; and seconds after which a plan is not timed again."""


def together(cases: Sequence[calibrate.Case], much: calibrate.Effort) -> list[float]:
    """Return the seconds of each case while all ranks repeat it: they share cores."""

    def spent(times: int, call: Callable[[], object]) -> float:
        kept: deque[object] = deque(maxlen=KEPT)
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(times):
            kept.append(call())
        return time.perf_counter() - begun

    out = []
    for case in cases:
        call = partial(case.call, case.given())
        spent(1, call)
        times = max(1, min(round(TOGETHER / mean(spent(1, call))), 512))
        out.append(statistics.median(spent(times, call) / times for _ in range(much.turns)))
    return [mean(seconds) for seconds in out]


def mean(seconds: float) -> float:
    """Return the mean over all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def measure_machine(file: Path) -> None:
    """Write a profile as `shardwright calibrate` does, but measured by `together`."""
    setattr(calibrate, "_seconds", lambda cases, _, much, __: together(cases, much))  # noqa: B010
    device = calibrate.start()
    profile = calibrate.measure(device, calibrate.Effort(2**20, 512, 5), lambda: None)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(profile.model_dump(exclude_none=True)))
    dist.destroy_process_group()


def time_plans(folder: Path) -> None:
    """Time all plans; the first rank writes the seconds of each."""
    job = json.loads((folder / "job.json").read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    plans = [Plan.load(folder / f"{i}.json") for i in range(job["plans"])]
    models = [split(job["model"], plan) for plan in plans]
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    seconds: list[list[float]] = [[] for _ in plans]
    for turn in range(job["repeat"] + 1):  # the first warms up, but for slow plans
        for at in random.Random(turn).sample(range(len(models)), len(models)):
            if sum(seconds[at]) > ENOUGH:
                continue
            dist.barrier()
            begun = time.perf_counter()
            step(models[at], plans[at], ids)
            took = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn or took > ENOUGH:
                seconds[at].append(float(took))
    if dist.get_rank() == 0:
        medians = [statistics.median(each) for each in seconds]
        (folder / "seconds.json").write_text(json.dumps(medians))
    dist.destroy_process_group()


if __name__ == "__main__":
    at = Path(sys.argv[1])
    time_plans(at) if at.is_dir() else measure_machine(at)
