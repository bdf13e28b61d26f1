"""Command lines with words that cannot be meant, and files that do not hold: one line each."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.faults.checkpoints import mutated_json, written
from benchmarks.faults.outcomes import Tally
from shardwright.errors import ShardwrightError

SECONDS = 120.0

WORDS = (
    *(
        "",
        " ",
        "-",
        "--",
        "-1",
        "0",
        "1",
        "2",
        "3",
        "4",
        "8",
        "1e9",
        "nan",
        "inf",
        "-inf",
        "²",
        "٣",
    ),
    *("9" * 20, "9" * 400, "9" * 5000, "a" * 5000, "../..", "/", "/dev/null", "/dev/full", "x=y"),
    *("1000000000", "tp=2", "tp=0", ".1=2", "dp=2,tp=2", "tp=2,tp=2", "dp=,tp", "tp=99999999999"),
    *("prefill", "decode:0", "train:99999", "decode:²", "prefill,prefill", "shard:0", "=", "²=²"),
    *("lm_head=shard:0", "lm_head=shard:9", "*=replicate", "[=replicate", "lm_head=shard:²"),
    *("lm_head=shard:" + "9" * 5000, "24GiB", "1KB", "1.5.5GB", "1" * 400 + "GB", "lp", "nope"),
    *("backtracking", "cpsat", "h100-nvlink", "csv", "markdown", "float64", "int8", "\x1b[31m"),
    *("\udcff", "no/such", "a/b/c", "owner/model"),
)


def lines(folder: Path) -> list[list[str]]:
    """Command lines that can be meant, for files in `folder`."""
    model, plan = str(folder / "model"), str(folder / "plan.json")
    made = ["plan", model, "--tp", "2", "--objective", "memory"]
    return [
        made,
        [*made, "-o", str(folder / "out" / "p.json"), "--quiet"],
        [*made, "--memory", "24GiB", "--json"],
        [*made, "--pin", "lm_head=replicate", "--phase", "prefill,decode:8"],
        [*made, "--pins", str(folder / "pins.json"), "--batch", "2", "--seq", "16"],
        [*made, "--compare-tp-plan", "--tp-plan", str(folder / "tp.json")],
        [*made, "--device", str(folder / "device.json"), "--solver", "backtracking"],
        [*made, "--time-limit", "5", "--optimizer-bytes", "8", "--dtype", "float32"],
        [*made, "--sequence-parallel", "--dump", str(folder / "dump")],
        ["plan", model, "--mesh", "dp=2,tp=2", "--phase", "train"],
        ["show", plan], ["show", plan, "--json"], ["schema"], ["diff", plan, plan, "--json"],
        ["explain", plan, "lm_head"], ["explain", plan, "lm_head", model],
        ["export", plan, "--to", "csv"],
        ["export", plan, "--to", "csv", "-o", str(folder / "x.csv")],
        ["check", plan, model, "--json"], ["check", "--accept", plan, model],
    ]  # fmt: skip


def prepare(folder: Path) -> None:
    """A model, its plan, and the other files that commands take."""
    import shardwright
    from shardwright.planner.devices.device import FOLDER

    written(folder / "model")
    shardwright.plan(folder / "model", 2, objective="memory").save(folder / "plan.json")
    (folder / "pins.json").write_text(json.dumps({"lm_head": "replicate"}))
    (folder / "tp.json").write_text(json.dumps({"model.layers.*.mlp.up_proj": "colwise"}))
    (folder / "device.json").write_text((FOLDER / "h100-nvlink.json").read_text())


def campaign(count: int, seed: int) -> Iterator[tuple[str, Tally]]:
    """The tallies of lines with other words, and of lines as they are with other files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        os.chdir(folder)
        whole = {f: f.read_bytes() for f in folder.rglob("*.json")}
        for kind in ("words", "files"):
            random, tally = Random(f"{seed} {kind}"), Tally()
            for _ in range(count // 2 + (kind == "words" and count % 2)):
                line = list(random.choice(lines(folder)))
                what = _other_words(random, line) if kind == "words" else ""
                if kind == "files":
                    named = [f for f in whole if str(f) in line] or [folder / "plan.json"]
                    if str(folder / "model") in line:
                        named.append(folder / "model" / "config.json")
                    file = random.choice(named)
                    text, what = mutated_json(random, whole[file])
                    file.write_bytes(text)
                    what = f"{file.name}: {what}"
                said = " ".join(w[:60] for w in line)
                tally.take(f"{said!r} {what}", SECONDS, lambda words=line: call(words))
                for file, content in whole.items():
                    if not file.is_file() or file.read_bytes() != content:
                        file.write_bytes(content)
            yield kind, tally


def _other_words(random: Random, line: list[str]) -> str:
    """One or two words of a line are others, gone or added."""
    for _ in range(random.choice((1, 1, 2))):
        at, how = random.randrange(len(line)), random.randrange(4)
        if how == 0 and len(line) > 1:
            del line[at]
        elif how == 1:
            line.insert(at + 1, random.choice(WORDS))
        else:
            line[at] = random.choice(WORDS)
    return ""


def call(words: list[str]) -> None:
    """Run a command line in this process.

    Raises:
        ShardwrightError: it ends in an error of one line.
        Exception: whatever it raised.
    """
    from click.testing import CliRunner

    from shardwright.planner.cli.main import main

    result: Any = CliRunner().invoke(main, words, prog_name="shardwright", catch_exceptions=False)
    if result.exit_code == 0 or (words[:1] == ["diff"] and result.exit_code == 1):
        return
    said = result.stderr.strip().splitlines()
    if result.exit_code not in (1, 2) or not said or "Traceback" in result.stderr:
        raise RuntimeError(f"exit code {result.exit_code}: {result.stderr}")
    if len([line for line in said if line.startswith("Error: ")]) != 1:
        raise RuntimeError(f"not one line of an error: {result.stderr}")
    raise ShardwrightError(said[-1])
