"""Statements with sizes of tensors as plain numbers: to compute with, to decide by, to give out.

On a rank a tensor may be a part, and all of these are to be what they are of the whole.
"""

from __future__ import annotations

from tests.made.code import Code, Var, number, plain

GOT = (
    "{x}.shape[{d}]",
    "{x}.shape[{d}]",
    "{x}.shape[{d}]",
    "{x}.size({d})",
    "{x}.size()[{d}]",
    "{x}.numel()",
    "{x}[0].nelement()",
    "{x}.shape.numel()",
    "{x}.stride(0)",
    "len({x})",
    "len({x}.mT[0]) if {x}.dim() > 1 else len({x})",
    "math.prod({x}.shape[1:])",
    "sum({x}.shape)",
    "min({x}.shape)",
    "max({x}.shape)",
    "[*{x}.shape][{d}]",
    "{x}.tensor_split(2, {d})[0].shape[{d}]",
    "{x}.flatten().size(0)",
    "{x}.unsqueeze(0).shape[-1]",
    "{x}.sum({d}, keepdim=True).numel()",
    "torch.cat([{x}, {x}], {d}).shape[{d}]",
    "{x}.abs().contiguous().size({d})",
)
"""A number off a tensor `x`, of which `d` is a dim."""

MADE = (
    "({n})",
    "({n})",
    "(({n}) // 2)",
    "(({n}) % 5)",
    "(2 * ({n}) + 1)",
    "min(({n}), 10)",
    "max(({n}), 13)",
    "round(({n}) / 3)",
    "math.isqrt({n})",
    "int(({n}) ** 0.5)",
    "divmod(({n}), 7)[1]",
    "(({n}) & 14)",
    "int(({n}) > 13)",
    "len(range(0, ({n}), 3))",
    "len(str({n}))",
    "-(-({n}) // 4)",
    "abs(({n}) - 12)",
    "[*range(({n}) + 1)][-1]",
    "int(f'{{({n})}}')",
)
"""Another number, never negative, of a number `n`."""

FACTORS = (
    "{n} / 20",
    "{n} % 5 + 1",
    "(1 + {n}) ** -0.5",
    "1 / math.sqrt(1 + {n})",
    "float({n} % 9)",
    "(1 + {n} % 2)",
    "torch.tensor({n} / 10)",
    "torch.tensor([1.0, {n}])[1] / 9",
    "torch.full((1,), {n} % 9)",
    "{y}.new_full((), fill_value={n} % 9)",
    "torch.full_like({y}, {n} % 9)",
    "torch.ones({n} % 50 + 1).sum() / 30",
    "torch.arange({n} % 50 + 1).sum() / 300",
    "torch.arange(1.0, {n} + 2)[-1] / 20",
    "torch.linspace(0, 1, {n} % 20 + 3)[1]",
    "torch.eye({n} % 9 + 1).sum() / 9",
    "{table}[{n} % 64]",
    "{table}[:{n} % 64 + 1].sum()",
    "{table}[-1 - {n} % 64]",
    "{table}[torch.tensor({n} % 64)]",
    "{table}.select(0, {n} % 64)",
    "{table}.narrow(0, {n} % 32, 3).sum()",
    "{table}.topk({n} % 60 + 1)[0].mean()",
    "{table}.chunk({n} % 5 + 1)[0].mean()",
    "{table}.split({n} % 60 + 1)[0].mean()",
    "{table}.kthvalue({n} % 60 + 1)[0]",
    "{table}[:2].repeat({n} % 4 + 1).sum()",
    "{table}[:2].tile({n} % 4 + 1).sum()",
    "{table}[:3].repeat_interleave({n} % 4 + 1).sum()",
    "{table}[:1].expand({n} % 9 + 1).sum()",
    "F.pad({table}[:4], (0, {n} % 9), value=1.0).sum() / 9",
    "F.pad({table}[:4], (1, 1), value={n} % 9).mean()",
    "{table}[:16].view(4, 4).triu({n} % 4 - 1).mean()",
    "torch.tril({table}[:16].view(4, 4), {n} % 4 - 1).mean()",
    "{table}.roll({n} % 9)[0]",
    "{table}.clamp(max=({n} % 9) / 9).sum() / 9",
    "{table}.unfold(0, {n} % 9 + 1, 2).mean()",
    "{table}.cumsum(0)[{n} % 64] / 20",
    "F.one_hot(torch.tensor({n} % 4), 4).argmax()",
    "(torch.arange(64) < {n}).sum() / 30",
    "{table}.index_select(0, torch.tensor([{n} % 64]))",
    "torch.scalar_tensor({n} % 9)",
    "[0.5, 1.5, 2.5][{n} % 3]",
    "dict(zip(range(5), (1, 2, 3, 4, 5)))[{n} % 5]",
    "(0.5 if {n} > 13 else 2)",
    "({n} > 13)",
    "len([i for i in range({n} % 99) if i % 3 == 1]) / 9",
)
"""What a tensor `y` is scaled with, of a number `n`, and a table of 64 numbers."""

DONE = (
    "{y} if {n} > 13 else -{y}",
    "{y}.tanh() if {n} % 2 else {y}",
    "({y}, -{y}, {y} * 2)[{n} % 3]",
    "{y}.clamp(max={n} / 20)",
    "{y}.masked_fill({y} > {n} / 50, {n} % 3)",
    "torch.add({y}, {y}.sin(), alpha={n} % 5)",
    "F.leaky_relu({y}, 1 / (1 + {n}))",
    "F.threshold({y}, 0.1, {n} % 5)",
    "F.layer_norm({y}, {y}.shape[-1:], eps=({n} + 1) / 9)",
    "{y}.roll({n} % 5, -1)",
    "{y}.tanh().pow({n} % 3 + 1)",
    "torch.where({y} > 0, {y}, {n} % 3)",
    "F.pad({y}, (0, 1), value={n} % 3)[..., 1:]",
    "torch.nan_to_num({y}, nan={n})",
    "{y} * (torch.arange({y}.shape[-1]) < {n})",
    "{y} + (torch.arange({y}.shape[-1]) == {n} % 7)",
    "{y}.sum(-1, keepdim=True) / {n} if {n} else {y}",
    "functools.reduce(lambda a, i: a + i / 9, range({n} % 5), {y})",
)
"""A tensor like `y`."""

CHANGED = (
    "{y}[..., 0] = {n} % 5",
    "{y}[:, :1] += {n} % 5",
    "{y}.mul_({n} / 20)",
    "{y}.fill_({n} % 5)",
    "{y}[..., 0].add_({n} % 5)",
    "if {n} > 13:\n            {y} = {y}.sin()",
    "if {n} % 3 == 1:\n            {y} = {norm}({y})",
    "for i in range({n} // 6 % 4):\n            {y} = {y} * 0.5 + i",
    "for i in range({n} % 3):\n            {y} = {norm}({y}) + i",
    "while {y}.dim() < 0 * {n}:\n            {y} = {y}[None]",
    "try:\n            {y} = {y} * 1.5 / ({n} // 13)\n"
    "        except ZeroDivisionError:\n            {y} = {y} * 0.5",
)
"""What changes `y`; there is a norm of its last dim."""

SEEN = (
    "{n}",
    "{n}",
    "{n} > 13",
    "{n} / 7",
    "math.sqrt({n})",
    "f'{{{n}}} features'",
    "str({n})",
    "({n}, {m})",
    "[{n}, ('all', {m} % 7)]",
    "{{'n': {n}, 'of': {{'m': {m}}}}}",
    "{{{n}: 'n'}}",
    "slice(0, {n})",
    "['n'] * ({n} % 9)",
    "None if {n} > 13 else {m}",
    "torch.arange({n} % 50)",
    "torch.tensor({n})",
    "torch.tensor([{n}, {m}]) > 13",
    "torch.full((2,), {n})",
    "torch.arange({n} % 50)[1:].sum()",
    "float('nan'), {n}",
    "complex({n}, 1)",
)
"""What users see of numbers `n` and `m`."""

OF_TENSORS = (
    "{x}.shape",
    "tuple({x}.shape)",
    "[*{x}.size()]",
    "{x}.detach() > 0",
    "{x}.argmax(-1)",
)
"""What users see of a tensor."""


def a_number(code: Code) -> str:
    """Code for one: of those with names, or off a tensor, and maybe computed with."""
    if code.numbers and code.draw.flag():
        text = code.draw.pick(*code.numbers, *code.numbers[2:] * 2)
    else:
        x = code.pick(lambda v: v.dims)
        text = code.draw.pick(*GOT).format(x=x.name, d=code.at(x, code.dim(x)))
    return code.draw.pick(*MADE).format(n=text)


def seen(code: Code) -> str:
    """Code for something that users see."""
    if code.draw.size(0, 4) == 0:
        return code.draw.pick(*OF_TENSORS).format(x=code.pick(lambda v: v.dims).name)
    return code.draw.pick(*SEEN).format(n=a_number(code), m=a_number(code))


def named(code: Code) -> None:
    """A number for later."""
    name = code.name("k")
    code.lines.append(f"{name} = {a_number(code)}")
    code.numbers.append(name)


def kept(code: Code) -> None:
    """A number in an attribute, which later code may compute with, or the next call."""
    number = a_number(code)
    name = code.own("seen", "3")
    if code.draw.size(0, 2) == 0:
        y = code.pick(lambda v: v.dims)
        code.let(f"{y.name} * ({name} % 7)", y.dims)
    code.lines.append(f"{name} = {number}")
    code.numbers.append(name)


def left(code: Code) -> None:
    """Something in an attribute, or in a table in one."""
    text = seen(code)
    if code.draw.flag():
        code.lines.append(f"{code.own('seen', 'None')} = {text}")
    else:
        code.lines.append(f"{code.own('seen', '{}')}['of'] = {text}")


def scaled(code: Code) -> None:
    """A tensor times what is made of a number."""
    y, n = code.pick(lambda v: v.dims), a_number(code)
    factor = code.draw.pick(*FACTORS)
    table = ""
    if "{table}" in factor:
        table = code.buffer("torch.linspace(0.5, 1.5, 64, dtype=torch.float64)")
    code.let(f"{y.name} * {factor.format(y=y.name, n=n, table=table)}", y.dims)


def done(code: Code) -> None:
    """A function with a number."""
    y, n = code.pick(_wide), a_number(code)
    code.let(code.draw.pick(*DONE).format(y=y.name, n=n), y.dims)


def changed(code: Code) -> None:
    """A copy that is changed, in place, under a condition, or in a loop."""
    x, n = code.pick(_wide), a_number(code)
    change = code.draw.pick(*CHANGED)
    norm = code.own("norm", f"nn.LayerNorm({number(x.dims[-1])})") if "{norm}" in change else ""
    y = code.let(f"{x.name} * 1.0", x.dims)
    code.lines.append(change.format(y=y.name, n=n, norm=norm))


def _wide(v: Var) -> bool:
    return len(v.dims) > 1 and (number(v.dims[-1]) or 0) > 1


def widened_then_counted(code: Code) -> None:
    """What is likely to be split between two layers, a number of it, and a use."""
    x = code.pick(plain)
    m = code.draw.pick(12, 24, 48)
    up = code.own("up", f"nn.Linear({x.last}, {m})")
    h = code.let(f"{up}({x.name})", (*x.dims[:2], (m,)))
    name = code.name("k")
    got = code.draw.pick(*GOT).format(x=h.name, d=code.at(h, code.dim(h)))
    code.lines.append(f"{name} = {got}")
    code.numbers.append(name)
    code.draw.pick(scaled, done, changed, left, kept)(code)
    y = code.pick(lambda v: v.dims == h.dims)
    code.let(f"{code.own('down', f'nn.Linear({m}, {x.last})')}({y.name})", x.dims)


STATEMENTS = (
    named, kept, left, scaled, done, changed, widened_then_counted, widened_then_counted,
)  # fmt: skip
