"""Tests context parallelism on all causal architectures of the zoo, and how much it splits.

    python -m benchmarks.context --json FILE                cp=2, all that FILE has no row for
    python -m benchmarks.context --cp 2 --tp 2 llama gpt2

Ranks are threads of one process, and each architecture has its own process. Logits, without and
with padding, and all gradients are compared with the unsharded model's. Values that models cast to
float32 stay in float64, so that nearly all models are held to 1e-9. SPLIT is the share of what
autograd saves for the backward pass that the ranks divide: 100 % if each saves an equal part.
Exits with 1 if anything differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from benchmarks.compare import badness, compare
from benchmarks.forked import run_forked
from benchmarks.ranks_case import kept_bytes
from benchmarks.zoo_case import case
from tests import planning, zoo
from tests.ranks import run_ranks

BATCH, SEQ, PRICED = 2, 48, 4096
"""What is measured, and the tokens that are priced: splitting a short sequence does not pay."""
FIGURES = ("logits", "padded", "gradients")


def uncast() -> None:
    """Keep values in float64 that models cast to float32: no rounding then hides a mistake."""
    to, softmax = torch.Tensor.to, torch.softmax

    def kept(x: torch.Tensor, dtype: Any) -> Any:
        return torch.float64 if (x.dtype, dtype) == (torch.float64, torch.float32) else dtype

    def cast(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = {k: kept(x, v) if k == "dtype" else v for k, v in kwargs.items()}
        return to(x, *(kept(x, a) if isinstance(a, torch.dtype) else a for a in args), **named)

    def softmax_of(x: torch.Tensor, dim: int, dtype: Any = None, **_: Any) -> torch.Tensor:
        return softmax(x, dim, dtype=kept(x, dtype))

    torch.Tensor.to, torch.Tensor.float = cast, lambda x: cast(x, torch.float32)  # type: ignore[method-assign]
    torch.nn.functional.softmax = softmax_of  # type: ignore[assignment]


def row(name: str, cp: int, tp: int, file: Path) -> None:
    """Plan, split and compare one architecture, and write its row."""
    uncast()
    whole, mesh = case("causal", name), {"cp": cp, "tp": tp}
    load: dict[str, Any] = {"batch": BATCH, "seq": PRICED, "phase": "train"}
    plan = planning.proven(whole.model, mesh=mesh, kwargs=whole.example, **load)
    sizes = {"batch": BATCH, "seq": SEQ, "dtype": whole.dtype}
    long = zoo.inputs(name, whole.model.config, **sizes)
    expected = replace(whole.expected, decode=None)  # no cache is used
    found = run_ranks(
        cp * tp, partial(compare, whole.model, whole.inputs, plan, expected=expected), mesh
    )
    kept = max(run_ranks(cp * tp, partial(kept_bytes, whole.model, plan, long), mesh))
    without = kept_bytes(whole.model, None, long)
    out: dict[str, Any] = {"tolerance": whole.tolerance, "kept": kept, "without": without}
    out["split"] = round((1 - kept / without) / (1 - 1 / (cp * tp)), 3)
    out["worst"] = found[0].worst
    for figure in FIGURES:
        every = [getattr(one, figure) for one in found]
        out[figure] = None if None in every else max(every, key=badness)
    file.write_text(json.dumps(out))


def verdict(row: dict[str, Any]) -> str:
    """Return the verdict on a row."""
    if "error" in row:
        return row["error"]
    # Written so that NaN counts as different.
    equal = all(row[k] is None or row[k] <= row["tolerance"] for k in FIGURES)
    return "equal" if equal else f"DIFFERS ({row['worst']})"


@click.command()
@click.argument("names", nargs=-1)
@click.option("--cp", default=2, help="Ranks that share a sequence.")
@click.option("--tp", default=1, help="Ranks that split weights.")
@click.option("--limit", default=300.0, help="Seconds for one.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Results; what it has stays.")
def main(names: tuple[str, ...], cp: int, tp: int, limit: float, path: Path | None) -> None:
    """Compare models whose sequences are split with whole ones."""
    kept = json.loads(path.read_text())["rows"] if path and path.exists() else []
    rows: dict[Any, dict[str, Any]] = {(r["cp"], r["tp"], r["name"]): r for r in kept}
    wanted = [(cp, tp, name) for name in names or zoo.names()]
    with tempfile.TemporaryDirectory() as folder:
        for at in wanted if names else [at for at in wanted if at not in rows]:
            rows[at] = run(*at, Path(folder), limit)
            print(described(rows[at]), flush=True)
            if path:
                path.write_text(json.dumps({"rows": list(rows.values())}, indent=1))
    found = [rows[at] for at in wanted]
    wrong = [r["name"] for r in found if verdict(r) != "equal"]
    shares = [r["split"] for r in found if "split" in r]
    print(f"{len(found) - len(wrong)} of {len(found)} equal", *wrong)
    print(f"split: median {median(shares or [0]):.0%}, {sum(s <= 0 for s in shares)} whole")
    sys.exit(1 if wrong else 0)


def run(cp: int, tp: int, name: str, folder: Path, limit: float) -> dict[str, Any]:
    """Return the row of one architecture, from a process of its own."""
    file = folder / f"{name}.json"
    (end,) = run_forked(1, row, (name, cp, tp, file), folder, limit=limit)
    last = (end.text or end.log).strip().splitlines()[-1:] or [""]
    made = json.loads(file.read_text()) if file.exists() else {"error": f"{end.how}: {last[0]}"}
    return {"name": name, "cp": cp, "tp": tp, **made}


def described(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    figures = " ".join("      -" if row.get(k) is None else f"{row[k]:7.0e}" for k in FIGURES)
    return f"{row['name']:28} {figures} {row.get('split', 0):4.0%}  {verdict(row)}"


if __name__ == "__main__":
    main()
