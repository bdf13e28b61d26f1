"""Makes pages of plans of published models for the site: `make docs`.

    python -m benchmarks.gallery FOLDER                all of them
    python -m benchmarks.gallery FOLDER llama-8b       some

Each model is planned at full size, for a prefill and 128 decode steps of 8 sequences of 2048
tokens. It is planned for the fewest H100s of which its parameters take at most three quarters, and
for twice as many. One page shows both, with the costs of other placements. Needs no network, no
weights and no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

LARGEST = 60_000_000_000
"""Most bytes of parameters on a rank."""


def ranks(parameters: int) -> tuple[int, int]:
    """Return the two numbers of ranks for a model with this many two-byte parameters."""
    fewest = 2
    while 2 * parameters > fewest * LARGEST:
        fewest *= 2
    return fewest, 2 * fewest


def page_of(name: str) -> str:
    """Return the page of a model."""
    from benchmarks.planning_models import MODELS
    from shardwright.planner.picture.beside import beside
    from shardwright.planner.picture.page import page
    from shardwright.planner.prepare import prepare
    from shardwright.planner.search.ladder import search

    model, work = MODELS[name], {"phase": "prefill,decode:128", "batch": 8, "seq": 2048}
    made = {tp: search(prepare(model.config(), tp, **work)) for tp in ranks(model.parameters)}
    return page([beside(found.plan, f"{name} on {tp}", found) for tp, found in made.items()])


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.argument("names", nargs=-1)
def main(folder: Path, names: tuple[str, ...]) -> None:
    """Write a page for each model into FOLDER."""
    from benchmarks.planning_models import MODELS
    from shardwright.planner.quiet import quiet

    if unknown := sorted(set(names) - MODELS.keys()):
        raise click.UsageError(f"no model {', '.join(unknown)}; known: {', '.join(MODELS)}")
    folder.mkdir(parents=True, exist_ok=True)
    shown = Console(stderr=True)
    chosen = list(names or MODELS)
    for name in track(chosen, "gallery", console=shown, disable=not sys.stderr.isatty()):
        with quiet():
            text = page_of(name)
        (folder / f"{name}.html").write_text(text)
        click.echo(f"{folder / name}.html  {len(text) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
