"""The campaigns as commands."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import click

CAMPAIGNS = ["plans", "checkpoints", "quantized", "commands", "strangers"]


@click.command()
@click.argument(
    "campaign", type=click.Choice(["plans", "checkpoints", "quantized", "commands", "strangers"])
)
@click.option(
    "--count", type=click.IntRange(1), required=True, help="Mutants, or connections, in all."
)
@click.option("--seed", default=0, show_default=True)
@click.option("--kind", "kinds", multiple=True, help="Of models, for plans; by default all.")
@click.option("--cases", type=click.Path(path_type=Path), help="File for what may not have come.")
def main(campaign: str, count: int, seed: int, kinds: tuple[str, ...], cases: Path | None) -> None:
    """Run a campaign and print what came of how many."""
    from importlib import import_module

    made = import_module(f"benchmarks.faults.{campaign}").campaign
    ok, found = True, []
    for name, tally in made(count, seed, *([kinds] if kinds else [])):
        print(f"{name}: {tally}  ({time.process_time():.0f} s)", flush=True)
        ok, found = ok and tally.ok, [*found, *(f"{name}: {c}" for c in tally.cases)]
        if cases is not None:
            cases.write_text("\n".join(found))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
