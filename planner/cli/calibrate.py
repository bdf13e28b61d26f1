"""`shardwright calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from shardwright.planner.cli.console import say
from shardwright.planner.cli.shared import check_folder


@click.command(
    short_help="Measure this machine: collectives, matrix products and memory.",
    epilog="""\b
Examples:
  torchrun --nproc-per-node 2 -m shardwright calibrate -o profile.json
  shardwright plan ./my-model --tp 2 --device profile.json
""",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), required=True,
              help="File for the profile.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Less of everything: a second, and rough figures.")
def calibrate(output: str, quick: bool) -> None:
    """Measure this machine: collectives, matrix products and memory. Under torchrun."""
    import json

    from shardwright.planner.contract.files import write_atomically
    from shardwright.planner.devices import calibrate as measuring

    check_folder(Path(output))
    device = measuring.start()
    rank = measuring.dist.get_rank()
    much = measuring.effort(device, quick)
    try:
        with _progress(measuring.steps(much), rank == 0) as tick:
            profile = measuring.measure(device, much, tick)
        if rank == 0:
            text = json.dumps(profile.model_dump(), indent=2) + "\n"
            write_atomically(Path(output), text)
            click.echo(output)
            say(f"Wrote {output}: give it to `shardwright plan` as --device {output}")
    finally:
        measuring.dist.destroy_process_group()


@contextmanager
def _progress(steps: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr, on one rank and if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda: None
        return
    with Progress(console=console) as bar:
        task = bar.add_task("measuring", total=steps)
        yield lambda: bar.advance(task)
