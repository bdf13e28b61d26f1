"""Splits modules that hypothesis generates, and compares each with the unsharded one.

    python -m benchmarks.made --seed 1 --count 500         on 2 and on 3 ranks: threads of a process
    python -m benchmarks.made --one FILE.py --tp 2         one module that an earlier run wrote

Outputs and gradients are compared. Prints the number of each outcome. The source of each module
that is wrong, or raises an error that is not ours, is written to `--folder`; the exit code is then
1.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import click
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.made.modules import ROOMS, sources
from tests.made.outcome import BUGS, Outcome, outcome


@click.command()
@click.option("--seed", "number", default=0, help="Of hypothesis.")
@click.option("--count", default=200, help="Modules.")
@click.option("--longest", default=9, help="Statements in the model's own code.")
@click.option("--often", default="parts", type=click.Choice([*ROOMS]), help="What is drawn often.")
@click.option("--tp", "ranks", multiple=True, type=int, help="Ranks; by default 2, and 3.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where sources are written.")
@click.option("--one", type=click.Path(path_type=Path), help="A source, in place of others.")
def main(
    number: int,
    count: int,
    longest: int,
    often: str,
    ranks: tuple[int, ...],
    folder: Path | None,
    one: Path,
) -> None:
    """Run made modules, split and whole."""
    tps = ranks or (2, 3)
    if one is not None:
        for tp in tps:
            print(tp, *outcome(one.read_text(), tp))
        return
    folder = folder or Path(tempfile.mkdtemp(prefix="made-"))
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    shares: list[float] = []

    @seed(number)
    @settings(
        max_examples=count, database=None, phases=[Phase.generate], deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(sources(longest, often))
    def each(source: str) -> None:
        tp = tps[sum(counts.values()) % len(tps)]
        with tempfile.TemporaryDirectory() as place:
            found: Outcome = outcome(source, tp, Path(place))
        counts[found.word] += 1
        if found.word in ("equal", *BUGS):
            shares.append(found.share)
        else:
            texts[f"{found.word}: {found.text[:150]}"] += 1
        if sum(counts.values()) % 20 == 0:
            print(dict(counts), flush=True)
        if found.word in BUGS:
            path = folder / f"{found.word}_{number}_{sum(counts.values())}_tp{tp}.py"
            path.write_text(source)
            print(f"{path}: {found.text}", flush=True)

    each()
    for text, times in texts.most_common(12):
        print(f"{times:6} {text}")
    split = sum(share < 0.9 for share in shares)
    print(f"seed {number}: {dict(counts)}; {split} of them split", flush=True)
    sys.exit(any(counts[word] for word in BUGS))


if __name__ == "__main__":
    main()
