"""Statements that give a tensor of the shape of another: of elements, along a dim, in place."""

from __future__ import annotations

from tests.made.code import Code, Unfit, Var, is_number, number

POINTWISE = (
    "torch.relu({x})",
    "F.gelu({x})",
    "F.silu({x})",
    "torch.tanh({x})",
    "torch.sigmoid({x})",
    "F.softplus({x})",
    "F.leaky_relu({x}, 0.2)",
    "{x} * 0.5",
    "1 - {x}",
    "{x} / 3 + 1",
    "{x}.abs()",
    "{x}.sin()",
    "{x}.square() * 0.1",
    "{x}.clamp(-1, 2)",
    "{x} / (1 + {x}.abs())",
    "{x}.masked_fill({x} > 1, 0.25)",
    "torch.where({x} > 0, {x}, {x} * 0.1)",
    "{x}.detach() * 0.5 + {x}",
    "{x}.contiguous()",
    "torch.zeros_like({x}) + 0.5 * {x}",
    "{x} * {x}.new_ones({x}.shape[-1])",
    "{x} + torch.arange({x}.shape[-1], device={x}.device) / 10",
    "{x}.float().to({x}.dtype) * 0.0 + {x}",
    "torch.lerp({x}, -{x}, 0.3)",
    "torch.addcmul({x}, {x}, {x}, value=0.1)",
)
ALONG = (
    "{x}.softmax({d})",
    "F.softmax({x}, dim={d})",
    "{x}.log_softmax({d})",
    "{x}.cumsum({d}) / 4",
    "{x}.flip({d})",
    "{x}.roll(1, {d})",
    "torch.roll({x}, shifts=(-1,), dims=({d},))",
    "{x}.sort({d}).values",
    "F.normalize({x}, dim={d}, eps=1e-2)",
    "{x} / (1 + {x}.norm(dim={d}, keepdim=True))",
    "{x} - {x}.mean({d}, keepdim=True)",
    "{x} * torch.rsqrt({x}.pow(2).mean({d}, keepdim=True) + 0.1)",
    "{x} / (0.1 + {x}.var({d}, keepdim=True, correction=0))",
    "{x} - {x}.amax({d}, keepdim=True)",
    "{x} / {x}.shape[{d}]",
    "{x} * {x}.size({d}) ** -0.5",
    "torch.cat([{x}.narrow({d}, 1, {x}.shape[{d}] - 1), {x}.narrow({d}, 0, 1)], {d})",
    "{x}.gather({d}, {x}.argsort({d}))",
    "{x} * ({x}.argmax({d}, keepdim=True) + 1) * 0.1",
    "{x}.cumsum({d}).diff(dim={d}, prepend=torch.zeros_like({x}.narrow({d}, 0, 1)))",
)
IN_PLACE = (
    "{y}.mul_(0.5)",
    "{y}.add_({x}, alpha=2)",
    "{y} += 1",
    "{y}[:, 0] *= 2",
    "{y}[..., 0] = 0.5",
    "{y}[..., 1:] = {x}[..., 1:].tanh()",
    "{y}[..., ::2] += {x}[..., ::2]",
    "{y}.masked_fill_({x} > 0.5, 0.1)",
    "{y}.view(-1)[:1].add_(1)",
    "{y}.transpose(0, -1).mul_(0.7)",
    "{y}.relu_()",
    "{y}.clamp_(min=-1)",
    "{y}.copy_({x} * 0.3)",
    "{y}.zero_().add_({x}.tanh())",
)


def pointwise(code: Code) -> None:
    """A function of each element."""
    x = code.pick()
    code.let(code.draw.pick(*POINTWISE).format(x=x.name), _with_last(x))


def _with_last(x: Var) -> tuple[tuple[int | str, ...], ...]:
    if not x.dims:
        raise Unfit
    return x.dims


def along(code: Code) -> None:
    """A function along one dim."""
    x = code.pick(lambda v: v.dims)
    d = code.dim(x, lambda size: number(size) != 1)
    code.let(code.draw.pick(*ALONG).format(x=x.name, d=code.at(x, d)), x.dims)


def joined(code: Code) -> None:
    """Two tensors of which one broadcasts to the other."""
    x = code.pick(lambda v: v.dims)
    y = code.pick(lambda v: v is not x and _broadcasts(v, x))
    text = code.draw.pick(
        "{x} + {y}", "{x} * {y}", "{x} - {y}", "torch.maximum({x}, {y})", "{x} + 0.1 * {y}",
        "torch.where({x} > 0, {x}, {y})", "{x} / (1 + {y}.abs())", "torch.atan2({x}, {y} + 3)",
        "{x}.add({y}, alpha=2)", "{y} * torch.sigmoid({x})",
    )  # fmt: skip
    code.let(text.format(x=x.name, y=y.name), x.dims)


def _broadcasts(y: Var, x: Var) -> bool:
    if len(y.dims) > len(x.dims):
        return False
    pairs = zip(y.dims[::-1], x.dims[::-1], strict=False)
    return all(a == b or number(a) == 1 or (number(a) or 0) == number(b) for a, b in pairs)


def in_place(code: Code) -> None:
    """A copy that is changed, maybe through a view."""
    x = code.pick(lambda v: len(v.dims) > 1 and all(number(s) != 1 for s in v.dims))
    y = code.let(code.draw.pick("{x}.clone()", "{x} * 1.5").format(x=x.name), x.dims)
    for _ in range(code.draw.size(1, 2)):
        text = code.draw.pick(*IN_PLACE)
        code.lines.append(text.format(x=x.name, y=y.name))


def by_mode(code: Code) -> None:
    """Another computation in training mode."""
    x = code.pick(lambda v: v.dims)
    ways = [
        code.draw.pick(
            *(p for p in POINTWISE if p.count("{x}") < 3), "{x} / (1 + {x}.pow(2).mean(-1, True))"
        ).format(x=x.name)
        for _ in range(2)
    ]
    code.let(f"{ways[0]} if self.training else {ways[1]}", x.dims)


def dropped(code: Code) -> None:
    """Dropout; who compares in training mode turns it off."""
    x = code.pick(lambda v: v.dims)
    if code.draw.flag():
        text = f"{code.own('drop', 'nn.Dropout(0.25)')}({x.name})"
    else:
        text = f"F.dropout({x.name}, {code.own('p', '0.25')}, self.training)"
    code.let(text, x.dims)


def with_buffer(code: Code) -> None:
    """A buffer of the last dim, which training may change."""
    x = code.pick(lambda v: len(v.dims) > 1 and is_number(v.dims[-1]))
    width = number(x.dims[-1])
    buffer = code.buffer(f"torch.linspace(0.5, 1.5, {width}, dtype=torch.float64)")
    if code.draw.flag():
        dims = tuple(range(len(x.dims) - 1))
        change = code.draw.pick(
            "{b}.mul_(0.9).add_({x}.detach().mean({d}), alpha=0.1)",
            "{b} = 0.9 * {b} + 0.1 * {x}.detach().mean({d})",
            "{b}.copy_({x}.detach().amax({d}).tanh())",
        ).format(b=buffer, x=x.name, d=dims)
        code.lines += ["if self.training:", f"    {change}"]
    code.let(code.draw.pick("{x} * {b}", "{x} - {b}").format(x=x.name, b=buffer), x.dims)


STATEMENTS = (pointwise, along, joined, joined, in_place, by_mode, dropped, with_buffer)
