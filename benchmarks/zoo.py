"""Plans, splits and compares tiny models of every architecture on real gloo ranks.

    make zoo                                       every architecture on 2 and 4 ranks, some on 8
    python -m benchmarks.zoo --kind masked         every masked one
    python -m benchmarks.zoo --tp 4 llama gpt2     some, on 4 ranks (of 2 kv heads)

Logits, all gradients and a decode step of the split model are compared with the unsharded model's.
The counted collectives are compared with the predicted ones, and with those of transformers' own
plan (`results/peer_tp2.json`, measured by `benchmarks/peer.py`). Prints a table; `--json FILE`
writes the results, and the table next to them. Exits with 1 if any differs from the unsharded
model.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.quantize import HOW
from benchmarks.zoo_case import compared, passed
from benchmarks.zoo_ranks import sweep
from benchmarks.zoo_report import report
from shardwright.planner.contract.files import write_atomically
from tests import zoo

FIRST = {
    "causal": "llama mistral qwen2 qwen3 gemma2 phi phi3 gpt2 gpt_neox opt bloom falcon stablelm "
    "starcoder2 olmo2 cohere".split(),
    "masked": ["bert", "roberta"],
    "seq2seq": ["t5"],
}
SAMPLE = {
    "causal": "bamba bart deepseek_v2 deepseek_v3 deepseek_v32 falcon_h1 gemma3n_text gpt_oss gptj "
    "jamba lfm2 llama4_text mamba mamba2 minicpm3 minimax mixtral modernbert-decoder mpt olmoe "
    "qwen3_next recurrent_gemma rwkv zamba2 zaya".split(),
    "masked": ["albert", "deberta-v2", "mobilebert"],
    "seq2seq": ["longt5", "marian", "pegasus_x"],
}
"""Further ones: experts, latents, recurrences, convolutions, shared blocks, masks."""
Row = dict[str, Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@click.command()
@click.argument("names", nargs=-1)
@click.option("--tp", default=2, help="Ranks.")
@click.option("--kind", default=None, type=click.Choice(list(FIRST)), help="Only these.")
@click.option("--first", is_flag=True, help="The architectures of the first milestone only.")
@click.option("--sample", is_flag=True, help="Those of the first milestone, and one of each sort.")
@click.option("--dtype", default="float64", type=click.Choice(list(DTYPES)), help="Of the models.")
@click.option("--saved", is_flag=True, help="Split models read what whole ones have saved.")
@click.option("--quantized", type=click.Choice([*HOW]), help="The same, of quantized weights.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), help="Of the ranks.")
@click.option("--groups", default=1, help="Models compared at once, each by as many processes.")
@click.option("--limit", default=600.0, help="Seconds for a model.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(
    names: tuple[str, ...],
    tp: int,
    kind: str | None,
    first: bool,
    sample: bool,
    dtype: str,
    saved: bool,
    quantized: str | None,
    device: str,
    groups: int,
    limit: float,
    path: Path | None,
) -> None:
    """Plan, split and compare tiny models on real gloo ranks."""
    jobs = [
        (k, n)
        for k in ([kind] if kind else FIRST)
        for n in (FIRST[k] + SAMPLE[k] if sample else FIRST[k] if first else zoo.names(k))
        if not names or n in names
    ]
    if unknown := set(names) - {n for _, n in jobs}:
        raise click.UsageError(f"no such architectures: {', '.join(sorted(unknown))}")
    rows = []
    one = partial(compared, DTYPES[dtype], quantized or saved)
    done = sweep(jobs, tp, one, groups, limit, device)
    console = Console(stderr=True)
    for row in track(
        done, "comparing", len(jobs), console=console, disable=not console.is_terminal
    ):
        rows.append(row)
        if path:
            result = {"tp": tp, "dtype": dtype, "rows": in_order(rows, jobs)}
            write(path, result)
    rows = in_order(rows, jobs)
    text = report(rows, tp)
    print(text)
    if path:
        write_atomically(path.with_suffix(".txt"), text + "\n")
    sys.exit(0 if all(map(passed, rows)) else 1)


def in_order(rows: list[dict[str, Any]], jobs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the rows in the order of their jobs."""
    return sorted(rows, key=lambda r: jobs.index((r["kind"], r["name"])))


def printed(found: Iterable[Row], what: str, total: int, path: Path | None) -> Counter[str]:
    """Print each row as it comes, and write all so far; return how often each verdict came.

    A row without a verdict counts as "failed".
    """
    console, rows = Console(stderr=True), list[Row]()
    for row in track(found, what, total, console=console, disable=not console.is_terminal):
        rows.append(row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        if path:
            write(path, {"rows": sorted(rows, key=lambda row: row["name"])})
    counts = Counter(row.get("verdict", "failed") for row in rows)
    print(json.dumps(counts))
    return counts


def write(path: Path, result: dict[str, Any]) -> None:
    """Write results atomically."""
    write_atomically(path, json.dumps(result, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
