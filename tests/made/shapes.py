"""Statements that only move elements, or take some of them."""

from __future__ import annotations

from tests.made.code import LARGEST, Code, Size, Unfit, Var, is_number, number


def _put(dims: tuple[Size, ...], at: int, *new: Size) -> tuple[Size, ...]:
    return (*dims[:at], *new, *dims[at + 1 :])


def transposed(code: Code) -> None:
    """Two dims swapped, or all in another order."""
    x = code.pick(lambda v: len(v.dims) > 1)
    order = code.draw.order(len(x.dims))
    if code.draw.flag():
        i, j = order[:2]
        order = [*range(len(x.dims))]
        order[i], order[j] = order[j], order[i]
        text = f"{x.name}.transpose({code.at(x, i)}, {code.at(x, j)})"
    else:
        text = f"{x.name}.permute({', '.join(map(str, order))})"
    if code.draw.flag():
        text += ".contiguous()"
    code.let(text, [x.dims[i] for i in order])


def merged(code: Code) -> None:
    """Neighbouring dims as one."""
    x = code.pick(lambda v: len(v.dims) > 1)
    i = code.draw.size(0, len(x.dims) - 2)
    j = code.draw.size(i + 1, min(i + 2, len(x.dims) - 1))
    dims = (*x.dims[:i], tuple(f for size in x.dims[i : j + 1] for f in size), *x.dims[j + 1 :])
    if code.draw.flag():
        code.let(f"{x.name}.flatten({i}, {j})", dims)
    else:
        code.let(f"{x.name}.reshape({sizes(code, dims)})", dims)


def sizes(code: Code, dims: tuple[Size, ...]) -> str:
    """Code for sizes of a view, one of which may be left to torch."""
    texts = [code.size(size) for size in dims]
    if texts and code.draw.flag():
        texts[code.draw.size(0, len(texts) - 1)] = "-1"
    return ", ".join(texts)


def unmerged(code: Code) -> None:
    """One dim as two: what it was made of, or a number of the model cut in two."""
    x = code.pick(lambda v: any(_parts(size) for size in v.dims))
    i = code.dim(x, _parts)
    parts = code.draw.pick(*_parts(x.dims[i]))
    dims = _put(x.dims, i, *parts)
    way = code.draw.size(0, 2)
    if way == 0:
        code.let(f"{x.name}.unflatten({code.at(x, i)}, ({sizes(code, parts)}))", dims)
    else:
        code.let(f"{x.name}.{('view', 'reshape')[way - 1]}({sizes(code, dims)})", dims)


def _parts(size: Size) -> list[tuple[Size, Size]]:
    found: list[tuple[Size, Size]] = [(size[:k], size[k:]) for k in range(1, len(size))]
    n = number(size)
    if n is not None:
        found += [((k,), (n // k,)) for k in (2, 3, 4, 6, 12) if n % k == 0 and n > k]
    return found


def widened(code: Code) -> None:
    """A dim of one more, expanded maybe."""
    x = code.pick(lambda v: len(v.dims) < 5)
    at = code.draw.size(0, len(x.dims))
    dims: list[Size] = [*x.dims]
    text = f"{x.name}.unsqueeze({at})"
    dims.insert(at, (1,))
    if code.draw.flag():
        n = code.draw.pick(2, 3)
        dims[at] = (n,)
        shape = ", ".join(code.size((n,)) if i == at else "-1" for i in range(len(dims)))
        text += f".expand({shape})"
    code.let(text, dims)


def narrowed(code: Code) -> None:
    """Some elements of a dim: a part, one, every other."""
    x = code.pick(lambda v: v.dims)
    i = code.dim(x, lambda size: size in (("t",), ("b",)) or (number(size) or 0) > 3)
    size, before = x.dims[i], ":, " * i
    n = number(size)
    ways: list[tuple[str, Size | None]] = [("0", None), ("-1", None), (":1", (1,))]
    if n is not None:
        half = n // 2
        ways += [(f":{half}", (half,)), (f"{half}:", (n - half,)), ("::2", ((n + 1) // 2,))]
        ways += [("1:", (n - 1,)), ("[0, 2, 1]", (3,)), (":-1", (n - 1,))]
    elif size == ("t",):
        ways += [("1:", ("(t - 1)",)), (":-1", ("(t - 1)",)), ("::2", ("((t + 1) // 2)",))]
        ways += [("-2:", (2,))]
    text, new = code.draw.pick(*ways)
    code.let(f"{x.name}[{before}{text}]", _put(x.dims, i, *([] if new is None else [new])))


def split(code: Code) -> None:
    """A dim in parts, all of them used on."""
    x = code.pick(lambda v: any((number(size) or 0) % 6 == 0 for size in v.dims if is_number(size)))
    i = code.dim(x, lambda size: is_number(size) and (number(size) or 1) % 6 == 0)
    n, k = number(x.dims[i]), code.draw.pick(2, 3)
    assert n is not None
    part, at = n // k, code.at(x, i)
    uneven = (part + part // 2, n - part - part // 2)
    text, new = code.draw.pick(
        (f"{x.name}.chunk({k}, {at})", [part] * k),
        (f"{x.name}.split({code.size((part,))}, {at})", [part] * k),
        (f"{x.name}.split([{uneven[0]}, {uneven[1]}], dim={at})", [*uneven]),
        (f"torch.tensor_split({x.name}, {k}, {at})", [part] * k),
    )
    vars = [Var(code.name("v"), _put(x.dims, i, (m,))) for m in new]
    code.lines.append(f"{', '.join(v.name for v in vars)} = {text}")
    code.vars += vars


def unbound(code: Code) -> None:
    """A short dim in its elements."""
    x = code.pick(lambda v: any(number(size) in (2, 3, 4) for size in v.dims))
    i = code.dim(x, lambda size: number(size) in (2, 3, 4))
    vars = [Var(code.name("v"), _put(x.dims, i)) for _ in range(number(x.dims[i]) or 0)]
    code.lines.append(f"{', '.join(v.name for v in vars)} = {x.name}.unbind({code.at(x, i)})")
    code.vars += vars


def concatenated(code: Code) -> None:
    """Two tensors behind each other, or on a dim of their own."""
    x = code.pick(lambda v: v.dims)
    if code.draw.flag():
        y = code.pick(lambda v: v.dims == x.dims)
        at = code.draw.size(0, len(x.dims))
        dims: list[Size] = [*x.dims]
        dims.insert(at, (2,))
        code.let(f"torch.stack([{x.name}, {y.name}], {at})", dims)
        return
    i = code.dim(x, lambda size: is_number(size) or size == ("t",))

    def fits(v: Var) -> bool:
        return len(v.dims) == len(x.dims) and all(
            a == b or (k == i and is_number(a) and is_number(b))
            for k, (a, b) in enumerate(zip(v.dims, x.dims, strict=True))
        )

    y = code.pick(fits)
    n, m = number(x.dims[i]), number(y.dims[i])
    size: Size = ("(2 * t)",) if n is None or m is None else (n + m,)
    if n and m and n + m > LARGEST:
        raise Unfit
    code.let(f"torch.cat([{x.name}, {y.name}], {code.at(x, i)})", _put(x.dims, i, size))


def padded(code: Code) -> None:
    """Zeros in front of, or behind, the last dim or the one before."""
    x = code.pick(lambda v: len(v.dims) > 1 and is_number(v.dims[-1]))
    n = number(x.dims[-1])
    assert n is not None
    left, right = code.draw.pick((1, 0), (0, 1), (0, 2), (1, 1))
    if code.draw.flag():
        code.let(
            f"F.pad({x.name}, ({left}, {right}))",
            _put(x.dims, len(x.dims) - 1, (n + left + right,)),
        )
    elif x.dims[-2] == ("t",):  # shifted in time
        code.let(f"F.pad({x.name}, (0, 0, 1, -1))", x.dims)
    else:
        raise Unfit


def repeated(code: Code) -> None:
    """Each element, or all, several times."""
    x = code.pick(lambda v: v.dims)
    i = code.dim(x, lambda size: is_number(size) and (number(size) or 0) <= LARGEST // 2)
    n = number(x.dims[i])
    assert n is not None
    times = ", ".join("2" if k == i else "1" for k in range(len(x.dims)))
    text = code.draw.pick(
        f"{x.name}.repeat_interleave(2, dim={code.at(x, i)})", f"{x.name}.repeat({times})"
    )
    code.let(text, _put(x.dims, i, (2 * n,)))


STATEMENTS = (
    transposed, transposed, merged, merged, unmerged, unmerged, unmerged, widened, narrowed, split,
    split, unbound, concatenated, padded, repeated,
)  # fmt: skip
