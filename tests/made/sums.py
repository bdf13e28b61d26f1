"""Statements that add up or compare: reductions, and products of two tensors."""

from __future__ import annotations

from tests.made.code import Code, Unfit, Var, number

REDUCED = (
    "{x}.sum({d}) / 4",
    "{x}.mean({d})",
    "torch.mean({x}, dim={d})",
    "{x}.amax({d})",
    "{x}.max({d}).values",
    "{x}.amin({d})",
    "{x}.logsumexp({d})",
    "({x}.var({d}, correction=0) + 0.1).sqrt()",
    "{x}.pow(2).sum({d}).add(0.1).sqrt()",
    "{x}.median({d}).values",
    "{x}.topk(1, dim={d}).values.squeeze({d})",
    "{x}.tanh().prod({d})",
    "{x}.argmax({d}).to({x}.dtype)",
    "({x} > 0).sum({d}).to({x}.dtype)",
    "({x} > 0).any({d}).to({x}.dtype) + {x}.mean({d})",
    "{x}.sum({d}) / {x}.shape[{d}]",
    "torch.linalg.vector_norm({x} + 2, dim={d})",
)
SEVERAL = ("{x}.sum({d}) / 9", "{x}.mean({d})", "{x}.amax({d})", "torch.logsumexp({x}, {d})")


def reduced(code: Code) -> None:
    """One dim reduced, or several."""
    x = code.pick(lambda v: len(v.dims) > 1)
    if code.draw.size(0, 3):
        i = code.dim(x)
        dims = [size for k, size in enumerate(x.dims) if k != i]
        code.let(code.draw.pick(*REDUCED).format(x=x.name, d=code.at(x, i)), dims)
        return
    some = sorted(code.draw.order(len(x.dims))[:2])
    dims = [size for k, size in enumerate(x.dims) if k not in some]
    code.let(code.draw.pick(*SEVERAL).format(x=x.name, d=tuple(some)), dims)


def overall(code: Code) -> None:
    """A number made of a whole tensor, for others to be scaled with."""
    x, y = code.pick(lambda v: v.dims), code.pick(lambda v: v.dims)
    text = code.draw.pick(
        "{y} * {x}.mean()", "{y} / (1 + {x}.abs().sum())", "{y} - {x}.amax()",
        "{y} * torch.tanh({x}.pow(2).mean())", "{y} + {x}.var(correction=0)",
    )  # fmt: skip
    code.let(text.format(x=x.name, y=y.name), y.dims)


def product(code: Code) -> None:
    """Rows of one tensor times those of another, over what they share."""
    x = code.pick(lambda v: len(v.dims) in (3, 4))

    def fits(v: Var) -> bool:
        return (
            len(v.dims) == len(x.dims) and v.dims[:-2] == x.dims[:-2] and v.dims[-1] == x.dims[-1]
        )

    y = code.pick(fits)
    batch = "bhij"[: len(x.dims) - 2]
    text = code.draw.pick(
        f"{x.name} @ {y.name}.transpose(-1, -2) / {code.size((3,))}",
        f"torch.matmul({x.name}, {y.name}.mT) * {x.name}.shape[-1] ** -0.5",
        f"torch.einsum('{batch}xd,{batch}yd->{batch}xy', {x.name}, {y.name}) / 4",
    )
    code.let(text, (*x.dims[:-1], y.dims[-2]))


def weighted(code: Code) -> None:
    """A matrix of weights times rows."""
    x = code.pick(lambda v: len(v.dims) in (3, 4))

    def fits(v: Var) -> bool:
        return (
            len(v.dims) == len(x.dims) and v.dims[:-2] == x.dims[:-2] and v.dims[-2] == x.dims[-1]
        )

    y = code.pick(fits)
    text = code.draw.pick(
        f"{x.name}.softmax(-1) @ {y.name}", f"torch.matmul({x.name}, {y.name}) * 0.2"
    )
    code.let(text, (*x.dims[:-1], y.dims[-1]))


def outer(code: Code) -> None:
    """Each element of one with each of another."""
    x = code.pick(lambda v: len(v.dims) > 1 and number(v.dims[-1]) in (2, 3, 4, 6))
    y = code.pick(lambda v: v.dims[:-1] == x.dims[:-1] and number(v.dims[-1]))
    n, m = number(x.dims[-1]), number(y.dims[-1])
    assert n and m
    if n * m > 96:
        raise Unfit
    code.let(f"{x.name}.unsqueeze(-1) * {y.name}.unsqueeze(-2)", (*x.dims[:-1], (n,), (m,)))


STATEMENTS = (reduced, reduced, overall, product, weighted, outer)
