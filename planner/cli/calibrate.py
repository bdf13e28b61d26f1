"""`shardwright calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from shardwright.planner.cli.console import say
from shardwright.planner.cli.shared import check_output, write

if TYPE_CHECKING:
    from shardwright.planner.devices.device import Device


@click.command(
    short_help="Measure this machine: collectives, matrix products and memory.",
    epilog="""\b
Examples:
  torchrun --nproc-per-node 2 -m shardwright calibrate -o profile.json
  shardwright plan ./my-model --tp 2 --device profile.json
  shardwright calibrate --nccl-tests all_reduce.txt --device h100-nvlink -o profile.json
""",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), required=True,
              help="File for the profile.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Measure less, for rough figures in a second.")
@click.option("--nccl-tests", "printed", multiple=True,
              type=click.Path(exists=True, dir_okay=False),
              help="Take links from the output of nccl-tests. May be repeated.")  # fmt: skip
@click.option("--device", "base", help="With --nccl-tests: the profile that has all else.")
def calibrate(output: str, quick: bool, printed: tuple[str, ...], base: str | None) -> None:
    """Measure this machine: collectives, matrix products and memory. Under torchrun.

    Or take what nccl-tests measured: --nccl-tests.
    """
    from pathlib import Path

    from shardwright.planner.devices.device import device
    from shardwright.planner.devices.nccl_tests import read, with_links

    if bool(printed) != bool(base):
        raise click.UsageError("--nccl-tests and --device go together")
    check_output(output)
    if base:
        _write(output, with_links(device(base), [read(Path(path)) for path in printed]))
    else:
        _measure(output, quick)


def _measure(output: str, quick: bool) -> None:
    from shardwright.planner.devices import calibrate as measuring

    device = measuring.start()
    rank = measuring.dist.get_rank()
    much = measuring.effort(device, quick)
    try:
        with _progress(measuring.steps(much), rank == 0) as tick:
            profile = measuring.measure(device, much, tick)
        if rank == 0:
            _write(output, profile)
    finally:
        measuring.dist.destroy_process_group()


def _write(output: str, profile: Device) -> None:
    import json

    write(output, json.dumps(profile.model_dump(exclude_none=True), indent=2) + "\n")
    click.echo(output)
    say(f"Wrote {output}: use it with `shardwright plan --device {output}`")


@contextmanager
def _progress(steps: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, on one rank, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("measuring", total=steps)
        yield lambda: bar.advance(task)
