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

from tests.made import numbers, parts, same, shapes, sums
from tests.made.code import Block, Code, Unfit, Var, plain
from tests.rules.draw import Draw

HEAD = """\
import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Output:
    first: torch.Tensor
    rest: tuple
"""
ROOMS = {
    "parts": parts.STATEMENTS,
    "same": same.STATEMENTS,
    "shapes": shapes.STATEMENTS,
    "sums": sums.STATEMENTS,
    "numbers": numbers.STATEMENTS,
}
"""Statements by what they are about."""

WIDTH, WORDS = 24, 50


@st.composite
def sources(draw: Any, longest: int = 9, often: str = "parts") -> str:
    """The source of a module `Made`, of features [batch, sequence, WIDTH] or of ids.

    One of three statements is of the room `often`.
    """
    d = Draw(draw)
    made, blocks = [HEAD], list[Block]()
    for i in range(d.size(0, 2)):
        n, m = d.pick((WIDTH, WIDTH), (12, 12), (WIDTH, 12))
        block = Block(f"Block{i}", n, m, d.size(0, 3) == 0, d.size(0, 3) == 0, ())
        source, keeps = _block(block, d, longest // 2 + 1, blocks, often)
        made.append(source)
        blocks.append(block._replace(keeps=keeps))
    made.append(_model(d, longest, blocks, often))
    return "\n\n".join(made)


def _statements(code: Code, most: int, often: str) -> None:
    every = [maker for makers in ROOMS.values() for maker in makers]
    for _ in range(code.draw.size(most // 3 + 1, most)):
        makers = ROOMS[often] if code.draw.size(0, 2) == 0 else every
        before = len(code.init), len(code.lines), len(code.vars), len(code.numbers)
        try:
            code.draw.pick(*makers)(code)
        except Unfit:
            made = code.init, code.lines, code.vars, code.numbers
            for those, count in zip(made, before, strict=True):
                del those[count:]


def _block(
    block: Block, d: Draw, longest: int, blocks: Sequence[Block], often: str
) -> tuple[str, tuple[str, ...]]:
    """The source of a block, and its attributes with numbers."""
    n, m = block.width, block.out
    x = Var("x", (("b",), ("t",), (n,)))
    code = Code(d, [x], blocks, ["n"] if block.takes else [])
    _statements(code, longest, often)
    last = code.pick(plain)
    if last.last != m:
        last = code.let(f"{code.own('last', f'nn.Linear({last.last}, {m})')}({last.name})", ())
    text = last.name
    if n == m and d.flag():
        text = f"x + {text}"
    if block.gives:
        text = f"{text}, {numbers.a_number(code)}"
    keeps = tuple(n.removeprefix("self.") for n in code.numbers if n.startswith("self.seen"))
    given = "x, n" if block.takes else "x"
    return _class(block.kind, code, given, [f"return {text}"]), keeps


def _model(d: Draw, longest: int, blocks: Sequence[Block], often: str) -> str:
    given = d.pick("x", "x", "ids")
    code = Code(d, [Var("x", (("b",), ("t",), (WIDTH,)))], blocks)
    if given == "ids":
        code.lines.append(f"x = {code.own('embed', f'nn.Embedding({WORDS}, {WIDTH})')}(ids)")
    _statements(code, longest, often)
    outputs = [code.vars[-1], *(d.pick(*code.vars) for _ in range(d.size(0, 2)))]
    names = ", ".join(v.name for v in outputs)
    if d.size(0, 3) == 0:
        names += f", ({numbers.seen(code)})"
    if given == "ids" and (last := code.vars[-1]).last == WIDTH and d.flag():
        names = f"{last.name} @ self.embed1.weight.T"  # tied
    form = d.pick(
        "return {n}", "return ({n},)", 'return {{"out": ({n},)}}', "return [{f}, ({n},)]",
        "return Output({f}, ({n},))",
    )  # fmt: skip
    return _class("Made", code, given, [form.format(n=names, f=outputs[0].name)])


def _class(kind: str, code: Code, given: str, end: Sequence[str]) -> str:
    body = ["super().__init__()", *code.init]
    forward = [f"b, t = {given.split(',')[0]}.shape[:2]", *code.lines, *end]
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
