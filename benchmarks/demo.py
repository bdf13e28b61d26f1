"""Plan three models, run each on two ranks, and compare with the unsplit model.

    python -m benchmarks.demo [--keep DIR]

Two checkpoints of 30 M random parameters (one llama-like, one with fused projections like phi3)
generate text; all-MiniLM-L6-v2, a published encoder, embeds sentences. Any difference beyond what
the order of float32 sums explains ends the demo with exit code 1. `--keep` leaves checkpoints,
plans and results in DIR. A page that draws the plans is written there, else where temporary files
are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.demo_outcome import Check, Outcome

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything needed is local
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

RANKS = 2
SOLVER_SECONDS = 15
"""Limit per plan, so that the demo takes less than two minutes on two cores."""
SENTENCES = (
    "A kitten sleeps on the sofa.",
    "The young cat is taking a nap.",
    "Interest rates rose again in March.",
)
MODELS = {
    "llama": "Llama-style",
    "phi3": "Phi3-style, fused projections",
    "minilm": "all-MiniLM-L6-v2, published",
}


def main() -> int:
    """Run the demo; 0 if every check passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave all files in DIR")
    options = parser.parse_args()
    # Imported late, so that --help is fast.
    import torch

    from benchmarks import demo_show
    from benchmarks.demo_launch import RanksFailed
    from shardwright import ShardwrightError

    start = time.perf_counter()
    place = nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory()
    demo_show.opening(RANKS)
    torch.set_num_threads(1)  # like the ranks
    outcomes: list[Outcome] = []
    try:
        with place as name:
            for key, title in MODELS.items():
                with _progress(title):
                    outcome = run_model(key, Path(name) / key)
                demo_show.outcome(title, outcome)
                outcomes.append(outcome)
    except (ShardwrightError, RanksFailed) as error:
        print(f"demo: {str(error).strip()}", file=sys.stderr)
        return 1
    drawn = (options.keep or Path(tempfile.gettempdir())) / "shardwright-demo.html"
    draw(outcomes, drawn)
    failed = [c for outcome in outcomes for c in outcome.checks if not c.passed]
    demo_show.closing(sum(len(o.checks) for o in outcomes), len(failed), start, options.keep, drawn)
    return 1 if failed else 0


def draw(outcomes: list[Outcome], path: Path) -> None:
    """Write a page that draws the plans."""
    from shardwright.planner.contract.files import write_atomically
    from shardwright.planner.picture.page import page
    from shardwright.planner.picture.view import Shown

    shown = [Shown(o.plan, title) for o, title in zip(outcomes, MODELS.values(), strict=True)]
    write_atomically(path, page(shown))


def run_model(key: str, directory: Path) -> Outcome:
    """Make or find the checkpoint, plan, run the ranks in `directory`, compare."""
    import torch
    from safetensors.torch import load_file, save_file

    import shardwright
    from benchmarks import demo_models
    from benchmarks.demo_launch import torchrun

    directory.mkdir(parents=True, exist_ok=True)
    if key == "minilm":
        checkpoint = demo_models.published_encoder()
    else:
        checkpoint = directory / "checkpoint"
        config = {"llama": demo_models.llama_config, "phi3": demo_models.phi3_config}[key]()
        demo_models.write_checkpoint(config, checkpoint)

    start = time.perf_counter()
    plan = shardwright.plan(
        checkpoint, tp=RANKS, objective="memory", time_limit=SOLVER_SECONDS
    )  # for least time, models as small as these would not be split
    plan_seconds = time.perf_counter() - start
    plan.save(directory / "plan.json")

    torch.manual_seed(1)
    inputs, want, parameters = (encoder if key == "minilm" else decoder)(checkpoint)
    save_file(inputs, directory / "inputs.safetensors")
    torchrun(
        "benchmarks.demo_rank",
        [checkpoint, directory / "plan.json", directory / "inputs.safetensors", directory],
        ranks=RANKS,
    )
    got = [load_file(directory / f"rank{rank}.safetensors") for rank in range(RANKS)]
    figures = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return Outcome(
        plan=plan,
        plan_seconds=plan_seconds,
        files=len(list(checkpoint.glob("*.safetensors"))),
        parameters=parameters,
        ranks=figures,
        checks=[*compare(want, got), *as_planned(plan, figures)],
        remark=similarities(got[0]["embeddings"]) if key == "minilm" else "",
    )


def decoder(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return inputs, the unsharded model's results for them, and its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.demo_compute import generate

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    prompt = torch.randint(1, model.config.vocab_size, (2, 16))
    tokens = generate(model, prompt)
    sequence = torch.cat([prompt, tokens], 1)
    with torch.no_grad():
        logits = model(sequence, use_cache=False).logits
    want = {"tokens": tokens, "logits": logits, "last": logits[:, -1:]}
    return {"prompt": prompt, "sequence": sequence}, want, model.num_parameters()


def encoder(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the same for the encoder and some sentences."""
    from transformers import AutoModel, AutoTokenizer

    from benchmarks.demo_compute import embed

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    inputs = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    model: Any = AutoModel.from_pretrained(checkpoint).eval()
    return inputs, {"embeddings": embed(model, inputs)}, model.num_parameters()


WORDS = {
    "tokens": "greedy tokens with the KV cache, 2 x 32: number that differ",
    "logits": "logits of a forward over 2 x 48 tokens: largest difference",
    "last": "logits of one decode step: largest difference",
    "embeddings": f"embeddings of {len(SENTENCES)} sentences: largest difference",
}
ALLOWED = {"tokens": 0.0, "logits": 1e-4, "last": 1e-4, "embeddings": 1e-5}


def compare(want: dict[str, Any], got: list[dict[str, Any]]) -> list[Check]:
    """Compare every rank's results with those of the unsharded model."""
    import torch

    def difference(name: str, mine: Any) -> float:
        if mine.shape != want[name].shape:
            return float("inf")
        if name == "tokens":
            return float((mine != want[name]).sum())
        return float((mine - want[name]).abs().max())

    return [
        # torch's max, since Python's drops a NaN.
        Check(WORDS[name], float(torch.tensor([difference(name, g[name]) for g in got]).max()), a)
        for name, a in ALLOWED.items()
        if name in want
    ]


def as_planned(plan: Any, figures: list[dict[str, Any]]) -> list[Check]:
    """Compare the plan's predictions with what was counted."""
    promised: Counter[str] = Counter()
    for collective in plan.predicted.collectives:
        if collective.phase == "forward":
            promised[collective.kind] += collective.count
    surprises = 0
    for rank in figures:
        counted = Counter(rank["forward"]["kinds"])
        surprises += ((counted - promised) + (promised - counted)).total()
    held = sum(
        abs(f["held"] - b) for f, b in zip(figures, plan.predicted.parameter_bytes, strict=True)
    )
    return [
        Check("bytes held that the plan did not foresee", held, 0),
        Check("collectives of a forward that the plan did not foresee", surprises, 0),
    ]


def similarities(embeddings: Any) -> str:
    """List the sentences by similarity to the first, which shows that the encoder works."""
    near = (embeddings[1:] @ embeddings[0]).tolist()
    lines = [f'cosine with "{SENTENCES[0]}", by the split model:']
    lines += [f'  {x:5.2f}  "{text}"' for text, x in zip(SENTENCES[1:], near, strict=True)]
    return "\n".join(lines)


@contextmanager
def _progress(title: str) -> Iterator[None]:
    """Show on stderr what is running, if stderr is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"{title}: planning and running"):
        yield


if __name__ == "__main__":
    sys.exit(main())
