"""Small modules that hypothesis makes: Python source with a class for the model and for its blocks.

They are drawn as source, and imported from a file, since that is what the planner reads: models
whose sizes it changes are compiled from theirs anew.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from torch import nn

from tests.made import parts, same, shapes, sums
from tests.made.code import Code, Unfit, Var, plain
from tests.rules.draw import Draw

HEAD = """\
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Output:
    first: torch.Tensor
    rest: tuple
"""
STATEMENTS = (*parts.STATEMENTS, *same.STATEMENTS, *shapes.STATEMENTS, *sums.STATEMENTS)
WIDTH, WORDS = 24, 50


@st.composite
def sources(draw: Any, longest: int = 9) -> str:
    """The source of a module `Made`, of features [batch, sequence, WIDTH] or of ids."""
    d = Draw(draw)
    made, blocks = [HEAD], []
    for i in range(d.size(0, 2)):
        n, m = d.pick((WIDTH, WIDTH), (12, 12), (WIDTH, 12))
        made.append(_block(f"Block{i}", d, n, m, longest // 2 + 1, blocks))
        blocks.append((f"Block{i}", n, m))
    made.append(_model(d, longest, blocks))
    return "\n\n".join(made)


def _statements(code: Code, most: int) -> None:
    for _ in range(code.draw.size(most // 3 + 1, most)):
        makers = parts.STATEMENTS if code.draw.size(0, 2) == 0 else STATEMENTS
        before = len(code.init)
        try:
            code.draw.pick(*makers)(code)
        except Unfit:
            del code.init[before:]


def _block(
    kind: str, d: Draw, n: int, m: int, longest: int, blocks: Sequence[tuple[str, int, int]]
) -> str:
    """A block that gives features of width `m`."""
    code = Code(d, [Var("x", (("b",), ("t",), (n,)))], blocks)
    _statements(code, longest)
    last = code.pick(plain)
    if last.last != m:
        last = code.let(f"{code.own('last', f'nn.Linear({last.last}, {m})')}({last.name})", ())
    text = last.name
    if n == m and d.flag():
        text = f"x + {text}"
    return _class(kind, code, "x", [f"return {text}"])


def _model(d: Draw, longest: int, blocks: Sequence[tuple[str, int, int]]) -> str:
    given = d.pick("x", "x", "ids")
    code = Code(d, [Var("x", (("b",), ("t",), (WIDTH,)))], blocks)
    if given == "ids":
        code.lines.append(f"x = {code.own('embed', f'nn.Embedding({WORDS}, {WIDTH})')}(ids)")
    _statements(code, longest)
    outputs = [code.vars[-1], *(d.pick(*code.vars) for _ in range(d.size(0, 2)))]
    names = ", ".join(v.name for v in outputs)
    if given == "ids" and (last := code.vars[-1]).last == WIDTH and d.flag():
        names = f"{last.name} @ self.embed1.weight.T"  # tied
    form = d.pick(
        "return {n}", "return ({n},)", 'return {{"out": ({n},)}}', "return [{f}, ({n},)]",
        "return Output({f}, ({n},))",
    )  # fmt: skip
    return _class("Made", code, given, [form.format(n=names, f=outputs[0].name)])


def _class(kind: str, code: Code, given: str, end: Sequence[str]) -> str:
    body = ["super().__init__()", *code.init]
    forward = [f"b, t = {given}.shape[:2]", *code.lines, *end]
    indented = "\n        ".join
    return (
        f"class {kind}(nn.Module):\n    def __init__(self):\n        {indented(body)}\n\n"
        f"    def forward(self, {given}):\n        {indented(forward)}\n"
    )


def imported(source: str, folder: Path | None = None) -> type[nn.Module]:
    """The class `Made` of a source, from a file of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=folder, delete=False) as file:
        file.write(source)
    path = Path(file.name)
    spec = importlib.util.spec_from_file_location(f"made_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Made
