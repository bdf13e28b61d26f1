"""Statements with parameters: linears, norms, convolutions, tables, attention, blocks."""

from __future__ import annotations

from tests.made.code import Code, Unfit, Var, is_number, number, plain
from tests.made.numbers import a_number

WIDTHS = (12, 12, 24, 24, 48, 18, 10, 7)
"""Most of them divide by 2 and 3."""


def _wide(v: Var) -> bool:
    return len(v.dims) > 1 and (v.last or 0) > 1


def linear(code: Code) -> None:
    """A linear layer, or a weight of the module's own."""
    x = code.pick(_wide)
    n, m = x.last, code.draw.pick(*WIDTHS)
    way = code.draw.size(0, 5)
    if way == 0:
        weight = code.own("w", f"nn.Parameter(torch.zeros({m}, {n}))")
        text = f"F.linear({x.name}, {weight})"
    elif way == 1:
        weight = code.own("w", f"nn.Parameter(torch.zeros({n}, {m}))")
        text = f"{x.name} @ {weight}"
    elif way == 2 and m % 6 == 0:
        h = code.draw.pick(2, 3, 6)
        weight = code.own("w", f"nn.Parameter(torch.zeros({n}, {h}, {m // h}))")
        code.let(
            f"torch.einsum('...i,ihd->...hd', {x.name}, {weight})", (*x.dims[:-1], (h,), (m // h,))
        )
        return
    else:
        bias = code.draw.pick("", "", ", bias=False")
        text = f"{code.own('linear', f'nn.Linear({n}, {m}{bias})')}({x.name})"
    code.let(text, (*x.dims[:-1], (m,)))


def mlp(code: Code) -> None:
    """Up, a function, down; gated maybe, and added to what came in."""
    x = code.pick(_wide)
    n, m = x.last, code.draw.pick(12, 24, 48)
    down = code.own("down", f"nn.Linear({m}, {n})")
    way = code.draw.size(0, 3)
    if way == 0:
        up = code.own("up", f"nn.Linear({n}, {2 * m})")
        h = code.name("h")
        code.lines += [f"{h} = {up}({x.name})", f"gate, up = {h}.chunk(2, -1)"]
        text = f"{down}(F.silu(gate) * up)"
    elif way == 1:
        up = code.own("up", f"nn.Linear({n}, {2 * m}, bias=False)")
        text = f"{down}(F.glu({up}({x.name}), -1))"
    elif way == 2:
        seq = code.own("mlp", f"nn.Sequential(nn.Linear({n}, {m}), nn.GELU(), nn.Linear({m}, {n}))")
        text = f"{seq}({x.name})"
    else:
        up = code.own("up", f"nn.Linear({n}, {m})")
        text = f"{down}(torch.relu({up}({x.name})))"
    code.let(code.draw.pick(text, f"{x.name} + {text}"), x.dims)


def again(code: Code) -> None:
    """A layer that is used already: called again, or its weight the other way round."""
    used = [line for line in code.init if " = nn.Linear(" in line]
    if not used:
        raise Unfit
    line = code.draw.pick(*used)
    name, _, rest = line.partition(" = nn.Linear(")
    n, m = (int(part) for part in rest.split(")")[0].split(",")[:2])
    if code.draw.flag():
        x = code.pick(lambda v: len(v.dims) > 1 and v.last == n)
        code.let(f"{name}({x.name})", (*x.dims[:-1], (m,)))
    else:
        x = code.pick(lambda v: len(v.dims) > 1 and v.last == m)
        code.let(f"{x.name} @ {name}.weight", (*x.dims[:-1], (n,)))


def norm(code: Code) -> None:
    """A norm over the last dim."""
    x = code.pick(_wide)
    n = x.last
    text = code.draw.pick(
        f"nn.LayerNorm({n})", f"nn.LayerNorm({n}, elementwise_affine=False)", f"nn.RMSNorm({n})"
    )
    code.let(f"{code.own('norm', text)}({x.name})", x.dims)


def by_channel(code: Code) -> None:
    """A layer over [batch, channels, sequence]."""
    x = code.pick(plain)
    n = x.last
    assert n is not None
    m = code.draw.pick(12, 24)
    groups = code.draw.pick(*(g for g in (1, 2, 3, 6) if n % g == 0 and m % g == 0))
    text, width = code.draw.pick(
        (f"nn.Conv1d({n}, {m}, 3, padding=1)", m),
        (f"nn.Conv1d({n}, {m}, 1, groups={groups})", m),
        (f"nn.Conv1d({n}, {n}, 3, padding=1, groups={n})", n),
        (f"nn.GroupNorm({groups}, {n})", n),
        (f"nn.BatchNorm1d({n})", n),
        (f"nn.InstanceNorm1d({n}, affine=True)", n),
        (f"nn.PReLU({n})", n),
    )
    layer = code.own("layer", text)
    code.let(f"{layer}({x.name}.transpose(1, 2)).transpose(1, 2)", (*x.dims[:2], (width,)))


def scaled(code: Code) -> None:
    """A parameter that is added or multiplied."""
    x = code.pick(_wide)
    shape = (x.last,)
    if is_number(x.dims[-2]) and code.draw.flag():
        shape = (number(x.dims[-2]), code.draw.pick(1, x.last))
    p = code.own("p", f"nn.Parameter(torch.zeros({', '.join(map(str, shape))}))")
    code.let(code.draw.pick("{x} + {p}", "{x} * (1 + {p})").format(x=x.name, p=p), x.dims)


def placed(code: Code) -> None:
    """A table of positions, or of what is largest; or a token put in front."""
    x = code.pick(plain)
    n = x.last
    way = code.draw.size(0, 2)
    if way == 0:
        table = code.own("pos", f"nn.Embedding(64, {n})")
        code.let(f"{x.name} + {table}(torch.arange(t, device={x.name}.device))", x.dims)
    elif way == 1:
        table = code.own("table", f"nn.Embedding({n}, {code.draw.pick(12, 24)})")
        width = int(code.init[-1].rsplit(", ", 1)[1][:-1])
        code.let(f"{table}({x.name}.argmax(-1))", (*x.dims[:2], (width,)))
    else:
        token = code.own("cls", f"nn.Parameter(torch.zeros(1, 1, {n}))")
        code.let(f"torch.cat([{token}.expand(b, -1, -1), {x.name}], 1)[:, :-1]", x.dims)


def attention(code: Code) -> None:
    """Attention by hand: projections fused or not, sizes as they come, masks."""
    x = code.pick(plain)
    n = x.last
    h, d = code.draw.pick(2, 3, 4, 6), code.draw.pick(2, 4, 6)
    names = [code.name(p) for p in ("q", "k", "v")]
    heads = f"b, t, {code.size((h,))}, {code.draw.pick(code.size((d,)), '-1')}"
    if code.draw.flag():
        qkv, h3 = code.own("qkv", f"nn.Linear({n}, {3 * h * d})"), code.name("qkv")
        code.lines.append(f"{h3} = {qkv}({x.name})")
        if code.draw.flag():
            parts = f"{h3}.chunk(3, dim=-1)"
            code.lines.append(
                f"{', '.join(names)} = (y.view({heads}).transpose(1, 2) for y in {parts})"
            )
        else:
            code.lines.append(
                f"{', '.join(names)} = {h3}.view(b, t, 3, {code.size((h,))}, -1)"
                ".permute(2, 0, 3, 1, 4).unbind(0)"
            )
    else:
        for name in names:
            layer = code.own(name, f"nn.Linear({n}, {h * d}, bias=False)")
            code.lines.append(f"{name} = {layer}({x.name}).view({heads}).transpose(1, 2)")
    q, k, v = names
    y = code.name("y")
    mask = f"torch.ones(t, t, dtype=torch.bool, device={x.name}.device).tril()"
    scores = f"{q} @ {k}.transpose(-1, -2) * {k}.size(-1) ** -0.5"
    slopes = f"torch.arange({code.size((h,))}, device={x.name}.device)"
    code.lines.append(
        code.draw.pick(
            f"{y} = F.scaled_dot_product_attention({q}, {k}, {v}, is_causal=True)",
            f"{y} = F.scaled_dot_product_attention({q}, {k}, {v}, attn_mask={mask})",
            f"{y} = ({scores}).masked_fill(~{mask}, -9).softmax(-1) @ {v}",
            f"{y} = torch.einsum('bhqk,bhkd->bhqd', ({scores}).softmax(dim=-1), {v})",
            f"{y} = ({scores} - {slopes}[:, None, None]).softmax(-1) @ {v}",
        )
    )
    out = code.own("out", f"nn.Linear({h * d}, {n})")
    together = code.draw.pick(
        f"{y}.transpose(1, 2).flatten(2)",
        f"{y}.transpose(1, 2).reshape(b, t, {code.size((h * d,))})",
        f"{y}.permute(0, 2, 1, 3).contiguous().view(b, t, -1)",
        f"torch.einsum('bhtd->bthd', {y}).reshape(*{x.name}.shape[:2], -1)",
    )
    code.let(code.draw.pick(f"{out}({together})", f"{x.name} + {out}({together})"), x.dims)


def block(code: Code) -> None:
    """A block, several of a kind behind each other, or one twice."""
    if not code.blocks:
        raise Unfit
    block = code.draw.pick(*code.blocks)
    n, m, new = block.width, block.out, f"{block.kind}()"
    x = code.pick(lambda v: plain(v) and v.last == n)
    k = code.name("k")
    given = f", {k}" if block.takes else ""
    given_out = f", {k}" if block.gives else ""
    if block.takes:
        code.lines.append(f"{k} = {a_number(code)}")
    if n == m and code.draw.flag():
        layers = code.own("layers", f"nn.ModuleList({new} for _ in range({code.draw.size(2, 3)}))")
        layer = f"{layers}[0]"
        y = code.let(x.name, x.dims)
        code.lines += [
            f"for layer in {layers}:",
            f"    {y.name}{given_out} = layer({y.name}{given})",
        ]
    else:
        layer = code.own("block", new)
        y = Var(code.name("v"), (*x.dims[:2], (m,)))
        code.lines.append(f"{y.name}{given_out} = {layer}({x.name}{given})")
        if n == m and code.draw.flag():
            code.lines.append(f"{y.name}{given_out} = {layer}({y.name} * 0.5{given})")
        code.vars.append(y)
    code.numbers += [f"{layer}.{name}" for name in block.keeps]
    if block.takes or block.gives:
        code.numbers.append(k)


STATEMENTS = (
    linear, linear, linear, mlp, mlp, again, norm, by_channel, scaled, placed, attention, attention,
    block, block,
)  # fmt: skip
