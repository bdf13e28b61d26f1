"""Prices our plans and transformers' own at full size, if their counts cannot be compared.

    python -m benchmarks.peer_price                if its plan replicates large weights
    python -m benchmarks.peer_price minicpm3 voxtral       some, whatever their counts

A plan that replicates weights takes fewer collectives. Its cost shows at full size, which is that
of each architecture's default config: predicted time of a forward, and bytes of weights per rank.
If ours is slower, for fewer bytes, a third price makes the two comparable: that of our plan with
everything pinned to replicated that theirs replicates. Models are on meta: no weights, no network,
no GPU. With names, the other rows of the --json FILE stay. Exits with 1 if ours is slower even
then.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.zoo_peer import RESULTS, Row, against, peers

TP, SEQ, DEVICE = 2, 2048, "h100-nvlink"
ABOUT = {"tp": TP, "seq": SEQ, "device": DEVICE, "transformers": version("transformers")}
LIMIT = 600  # seconds for one model

MISSING: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "rope_theta": 500000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 2048, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
}
"""Values that default configs lack, or that no model can be made from, taken from published models
of the family; that of deepseek_v2 has experts of an odd size."""


def chosen(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return kinds and names: the given ones, or those that the sweep cannot compare by counts."""
    found = peers(TP)
    if names:
        unknown = set(names) - {name for _, name in found}
        if unknown:
            raise click.UsageError(f"transformers was not measured on {', '.join(sorted(unknown))}")
        return [(kind, name) for kind, name in found if name in names]
    rows = json.loads((RESULTS / f"zoo_tp{TP}.json").read_text())["rows"]
    pairs = [(key(row), against(row, found)) for row in rows]
    return [k for k, a in pairs if a and a.collectives > 0 and not a.comparable]


def key(row: Row) -> tuple[str, str]:
    """Return the key of a row."""
    return row["kind"], row["name"]


def priced(kind: str, name: str) -> Row:
    """Price both plans of one model in a process, or say why they have no price."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from shardwright.planner.hand_written.price import price
    from shardwright.planner.prepare import prepare
    from shardwright.planner.problem.tp_plan import table_of
    from shardwright.planner.search.ladder import search
    from shardwright.planner.search.solution import SolverOptions
    from tests import zoo

    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT)
    asked = SolverOptions(objective="memory")
    row: Row = {"kind": kind, "name": name, "given": MISSING.get(name, {})}
    try:
        config = CONFIG_MAPPING[name](**row["given"])
        with torch.device("meta"):
            model = zoo.KINDS[kind][1].from_config(config, dtype=torch.bfloat16)
        row["parameters"] = model.num_parameters()
        task = prepare(model, TP, seq=SEQ, device=DEVICE)
        hand = price(task, table_of("auto", task.source.module))
        row |= {"theirs": _figures(hand.predicted)} if hand.predicted else {"error": hand.problem}
        row["ours"] = _figures(search(task, asked).plan.predicted)
        if hand.predicted and slower(row, "ours"):
            pins = dict.fromkeys(hand.replicated, "replicate")
            alike = prepare(model, TP, seq=SEQ, device=DEVICE, pins=pins)
            row["alike"] = _figures(search(alike, asked).plan.predicted)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".replace("\n", " ")
    return row


def slower(row: Row, which: str) -> bool:
    """Return whether our plan, or the one with `alike` parts replicated, is slower than theirs."""
    return row[which]["time_ns"] > row["theirs"]["time_ns"]


def _late(*_: object) -> None:
    raise TimeoutError(f"more than {LIMIT} s")


def _figures(predicted: Any) -> dict[str, Any]:
    out = {"time_ns": predicted.time_ns, "bytes": max(predicted.parameter_bytes)}
    forward = [c for c in predicted.collectives if c.phase == "forward"]
    return out | {"collectives": {c.kind: c.count for c in forward}}


def table(rows: Sequence[Row]) -> Table:
    """Format the rows that have both prices, for people."""
    out = Table(title=f"a forward of {SEQ} tokens, tp={TP}, {DEVICE}: ours, and transformers' plan")
    for title in ("MODEL", "PARAMETERS", "MS", "THEIRS", "GB", "THEIRS", "COLLECTIVES", "THEIRS"):
        out.add_column(title, justify="left" if title == "MODEL" else "right")
    for row in (r for r in rows if "error" not in r):
        sides = row["ours"], row["theirs"]
        times = (f"{side['time_ns'] / 1e6:.1f}" for side in sides)
        held = (f"{side['bytes'] / 1e9:.1f}" for side in sides)
        counts = (f"{sum(side['collectives'].values())}" for side in sides)
        out.add_row(row["name"], f"{row['parameters'] / 1e9:.1f} B", *times, *held, *counts)
    return out


def summary(rows: Sequence[Row]) -> str:
    """Say how often ours is faster and smaller, and what has no price."""
    both = [(r["ours"], r["theirs"]) for r in rows if "error" not in r]
    lines = [f"{len(both)} of {len(rows)} priced"]
    for what, of in (("time", "time_ns"), ("bytes a rank", "bytes")):
        less, more = sum(o[of] < t[of] for o, t in both), sum(o[of] > t[of] for o, t in both)
        lines.append(f"  {what}: {less} below, {len(both) - less - more} equal, {more} above")
    lines += [_likened(r) for r in rows if "alike" in r]
    return "\n".join([*lines, *(f"{r['name']}: {r['error']}" for r in rows if "error" in r)])


def _likened(row: Row) -> str:
    """Say how much slower ours is, for how many bytes, and the result with the same replicated."""
    more, less = (row["ours"][of] / row["theirs"][of] - 1 for of in ("time_ns", "bytes"))
    alike = row["alike"]["time_ns"] / row["theirs"]["time_ns"] - 1
    counts = (sum(row[side]["collectives"].values()) for side in ("alike", "theirs"))
    return (
        f"{row['name']}: time {more:+.2%}, bytes {less:+.0%}; with what theirs leaves whole whole, "
        f"time {alike:+.2%}, collectives {' for '.join(map(str, counts))}"
    )


@click.command()
@click.argument("names", nargs=-1)
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Models at the same time.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(names: tuple[str, ...], jobs: int, path: Path | None) -> None:
    """Price both plans of each architecture."""
    from shardwright.planner.contract.files import write_atomically

    wanted = chosen(names)
    rows = json.loads(path.read_text())["rows"] if names and path and path.exists() else []
    context, shown = mp.get_context("spawn"), Console(stderr=True)
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
        found = as_completed([pool.submit(priced, *pair) for pair in wanted])
        total, quiet = len(wanted), not shown.is_terminal
        for done in track(found, "pricing", total, console=shown, disable=quiet):
            row = done.result()
            rows = sorted([r for r in rows if key(r) != key(row)] + [row], key=key)
            if path:
                write_atomically(path, json.dumps({"about": ABOUT, "rows": rows}, indent=1) + "\n")
    Console(width=120).print(table(rows))
    print(summary(rows))
    sys.exit(any(slower(r, "alike" if "alike" in r else "ours") for r in rows if "error" not in r))


if __name__ == "__main__":
    main()
