"""`shardwright calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from shardwright.planner.cli.console import say
from shardwright.planner.cli.shared import check_output, write


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
@click.option("--quick", is_flag=True, help="Measure less, for rough figures in a second.")
def calibrate(output: str, quick: bool) -> None:
    """Measure this machine: collectives, matrix products and memory. Under torchrun."""
    import json

    from shardwright.planner.devices import calibrate as measuring

    check_output(output)
    device = measuring.start()
    rank = measuring.dist.get_rank()
    much = measuring.effort(device, quick)
    try:
        with _progress(measuring.steps(much), rank == 0) as tick:
            profile = measuring.measure(device, much, tick)
        if rank == 0:
            write(output, json.dumps(profile.model_dump(exclude_none=True), indent=2) + "\n")
            click.echo(output)
            say(f"Wrote {output}: use it with `shardwright plan --device {output}`")
    finally:
        measuring.dist.destroy_process_group()


@contextmanager
def _progress(steps: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, on one rank, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("measuring", total=steps)
        yield lambda: bar.advance(task)
