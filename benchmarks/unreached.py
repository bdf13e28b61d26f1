"""Lists the statements that no test reaches, by the reason for which they stay.

    pip install coverage; mkdir -p build/coverage
    export CHECKOUT=$PWD COVERAGE_PROCESS_START=$PWD/benchmarks/coverage.ini
    python -m pytest -n 2
    python -m coverage combine --rcfile $COVERAGE_PROCESS_START
    python -m benchmarks.unreached > benchmarks/results/unreached.txt

Processes that tests start in other folders need the full paths. Coverage doubles the time of the
tests. A few tests of signals fail under it, which it handles too.
Statements of a module's own level are left out: its import runs them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.reached import PARTS, ROOT, SILENT

REFUSED = "it raises: bad input, a checkpoint that a stranger made, ranks that failed"
RARE = "the other side of a test that tests reach: rare models and uses"
REASONS = {
    "it runs in processes that end by a signal, and tests see what they print": """
        planner/tune.py planner/on_ranks planner/devices/calibrate.py planner/search/meshes.py
        planner/api.py planner/cli/serve.py runtime/in_transformers.py runtime/loops
        runtime/serving/rank.py runtime/ranks/rendezvous.py
    """,
    "it needs a GPU": """
        runtime/shared_memory runtime/communication/generators.py
        runtime/communication/processes.py runtime/checkpoint/memory.py
    """,
    "models outside text: benchmarks.outside_text runs it": """
        planner/trace/inputs runtime/model/packages.py planner/trace/runs/package_calls.py
        planner/trace/runs/example_calls.py planner/trace/runs/further_runs.py
    """,
    "formats of quantized weights: benchmarks.quantized runs it": """
        runtime/quantized planner/report/quantized_cuts.py
    """,
    "tables for transformers: benchmarks.exports and benchmarks.audit_faults run it": """
        planner/exports planner/hand_written planner/problem/tp_table.py
    """,
    "it runs while the trace watches lines itself, and coverage sees nothing": """
        planner/trace/record/identity.py planner/trace/state/code_state.py
    """,
    "words of reports that need a special plan": """
        planner/report planner/picture planner/wording.py planner/dump
    """,
}
"""Reason -> the files and folders of which it holds."""
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Match, ast.FunctionDef, ast.ClassDef)
"""Statements that count as reached by their first line: what is in them counts itself."""


class Statement(NamedTuple):
    """A statement that nothing reached."""

    file: str
    line: int
    text: str
    raises: bool

    @property
    def reason(self) -> str:
        """Why it stays."""
        if self.raises:
            return REFUSED
        for reason, places in REASONS.items():
            if any(f"{self.file}/".startswith(f"{place}/") for place in places.split()):
                return reason
        return RARE


def unreached(file: Path, lines: set[int]) -> Iterator[Statement]:
    """Yield the statements in functions of a file of which no line is among `lines`."""
    text = file.read_text()
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    inside = {n.lineno: n for f in functions for n in ast.walk(f) if isinstance(n, ast.stmt)}
    own = {f.lineno for f in functions}
    for line, node in sorted(inside.items()):
        silent = isinstance(node, (*SILENT, ast.Try)) or line in own
        if silent or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        end = line if isinstance(node, BLOCKS) else node.end_lineno or line
        if lines.isdisjoint(range(line, end + 1)):
            name, said = str(file.relative_to(ROOT)), text.splitlines()[line - 1].strip()
            yield Statement(name, line, said, isinstance(node, ast.Raise))


def main() -> None:
    """Print the counts by reason, and then each statement."""
    import coverage  # pyright: ignore[reportMissingImports]

    data = coverage.CoverageData(str(ROOT / "build/coverage/data"))
    data.read()
    reached: dict[Path, set[int]] = {
        Path(f).resolve(): {*(data.lines(f) or ())} for f in data.measured_files()
    }
    files = [f for part in PARTS for f in sorted((ROOT / part).rglob("*.py"))]
    every = [s for f in files for s in unreached(f, reached.get(f.resolve(), set[int]()))]
    for reason, count in Counter(s.reason for s in every).most_common():
        print(f"{count:5} {reason}")
    for reason in dict.fromkeys(s.reason for s in every):
        print(f"\n{reason}")
        for s in every:
            if s.reason == reason:
                print(f"    {s.file}:{s.line} {s.text}")


if __name__ == "__main__":
    main()
