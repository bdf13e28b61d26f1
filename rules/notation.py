"""The one-line notation of a rule, parsed once into a frozen object.

    linear      "... i, o i, o -> ... o | sum i | linear 0+2 1+2"
    embedding   "v e, ... -> ... e | lookup v | linear 0"
    sdpa        "b h q d, b h k d, b h k e -> b h q e | whole q k d e | linear 2"
    view        "a (b c) -> a b c | size b=4 c=16 | ints size=a,b,c"
    slice       "(a + b + c) d -> b d | size a=2 b=5 c=1 | ints start=a end=(a+b)"

Left of the arrow the operands, right of it the results. A letter is an axis; the same letter is the
same axis everywhere. `(a b)` is a dim that is a product, major to minor; `(a + b)` one that is a
concatenation; `...` any number of dims, aligned on the right; `1` a dim of size one that belongs to
no axis. An operand dim of size 1 under a letter of `...` is broadcast. Clauses after bars:

    sum     splitting it leaves a sum pending on the results (a contraction)
    lookup  the same after a masked lookup: the op itself must be replaced by one that knows
    whole   may not be split
    linear  operands in which the op is linear: a pending sum flows through them. `0+2` jointly (both
            pend, as in addition), `0 1` one at a time (the others multiply)
    size    sizes of axes that no single dim states
    ints    integer arguments of the op that are sizes, as the axes whose local sizes they become

An axis that stands only in operands is neither summed nor looked up: it must be a dropped part of a
concatenation, or be whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """A dim that is several axes, major to minor."""

    factors: tuple[Expr, ...]

    def __str__(self) -> str:
        return "(" + " ".join(map(str, self.factors)) + ")"


@dataclass(frozen=True)
class Sum:
    """A dim that is several dims, one after the other."""

    terms: tuple[Expr, ...]

    def __str__(self) -> str:
        return "(" + " + ".join(map(str, self.terms)) + ")"


Expr = str | Product | Sum
Dims = tuple[Expr, ...]

ONE = "1"
DOTS = "..."


def letters(expr: Expr) -> Iterator[str]:
    """The axes in `expr`, left to right."""
    if isinstance(expr, str):
        if expr != ONE:
            yield expr
    else:
        for child in expr.factors if isinstance(expr, Product) else expr.terms:
            yield from letters(child)


def expr_size(expr: Expr, sizes: Mapping[str, int]) -> int:
    """Size of `expr` under the given axis sizes."""
    if isinstance(expr, str):
        return 1 if expr == ONE else sizes[expr]
    if isinstance(expr, Product):
        return prod(expr_size(f, sizes) for f in expr.factors)
    return sum(expr_size(t, sizes) for t in expr.terms)


@dataclass(frozen=True)
class Rule:
    """What an op does to its axes. After `bind` it holds no `...` and every axis has a size."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sum: frozenset[str] = frozenset()
    lookup: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    ints: Mapping[str, Dims] = field(default_factory=dict)

    def __str__(self) -> str:
        def side(group: tuple[Dims, ...]) -> str:
            return ", ".join(" ".join(map(str, dims)) for dims in group)

        text = f"{side(self.operands)} -> {side(self.results)}"
        for word in ("sum", "lookup", "whole"):
            if names := getattr(self, word):
                text += f" | {word} {' '.join(sorted(names))}"
        if self.linear:
            text += " | linear " + " ".join("+".join(map(str, sorted(g))) for g in self.linear)
        return text

    def axes(self) -> list[str]:
        """Every axis, in order of appearance."""
        seen = dict.fromkeys(a for dims in self.operands + self.results for e in dims for a in letters(e))
        return list(seen)

    def dropped(self) -> frozenset[str]:
        """Axes that no result has and that are not summed or looked up."""
        kept = {a for dims in self.results for e in dims for a in letters(e)}
        return frozenset(self.axes()) - kept - self.sum - self.lookup

    def immovable(self) -> frozenset[str]:
        """Axes that may not be split: the whole ones, and those lost other than by concatenation."""
        parts = {a for dims in self.operands for e in dims if isinstance(e, Sum) for a in letters(e)}
        return self.whole | (self.dropped() - parts)


@lru_cache(maxsize=None)
def parse(text: str) -> Rule:
    """Parse a rule.

    Raises:
        ValueError: the text is not in the notation (a mistake in a table, not a user's).
    """
    body, *clauses = text.split("|")
    left, arrow, right = body.partition("->")
    if not arrow:
        raise ValueError(f"no '->' in rule '{text}'")
    words: dict[str, list[str]] = {k: [] for k in ("sum", "lookup", "whole", "linear", "size", "ints")}
    for clause in clauses:
        word, *rest = clause.split()
        if word not in words:
            raise ValueError(f"unknown clause '{word}' in rule '{text}'")
        words[word] += rest
    rule = Rule(
        operands=tuple(_dims(part) for part in left.split(",")) if left.strip() or "," in left else (),
        results=tuple(_dims(part) for part in right.split(",")),
        sum=frozenset(words["sum"]),
        lookup=frozenset(words["lookup"]),
        whole=frozenset(words["whole"]),
        linear=tuple(frozenset(map(int, group.split("+"))) for group in words["linear"]),
        sizes={name: int(n) for name, n in (item.split("=") for item in words["size"])},
        ints={name: tuple(_dims(e)[0] for e in value.split(","))
              for name, value in (item.split("=") for item in words["ints"])},
    )
    unknown = (rule.sum | rule.lookup | rule.whole) - set(rule.axes())
    if unknown:
        raise ValueError(f"axes {sorted(unknown)} are only in the clauses of rule '{text}'")
    return rule


def _dims(text: str) -> Dims:
    tokens = re.findall(r"\.\.\.|[A-Za-z_]\w*|1|[()+]|\S", text)
    out: list[Expr] = []
    while tokens:
        out.append(_expr(tokens, text))
    return tuple(out)


def _expr(tokens: list[str], text: str) -> Expr:
    token = tokens.pop(0)
    if token != "(":
        if not re.fullmatch(r"\.\.\.|[A-Za-z_]\w*|1", token):
            raise ValueError(f"cannot read '{token}' in '{text}'")
        return token
    terms: list[list[Expr]] = [[]]
    while tokens and tokens[0] != ")":
        if tokens[0] == "+":
            tokens.pop(0)
            terms.append([])
        else:
            terms[-1].append(_expr(tokens, text))
    if not tokens:
        raise ValueError(f"'(' is not closed in '{text}'")
    tokens.pop(0)
    products = [t[0] if len(t) == 1 else Product(tuple(t)) for t in terms]
    return products[0] if len(products) == 1 else Sum(tuple(products))


def bind(rule: Rule, operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """`rule` for tensors of these shapes: `...` spelt out, broadcast dims as `1`, all sizes known.

    Raises:
        ValueError: the shapes do not fit the rule.
    """
    if len(operands) != len(rule.operands) or len(results) != len(rule.results):
        raise ValueError(f"rule '{rule}' has other operands than {operands} -> {results}")
    sizes = dict(rule.sizes)
    spelt_results = tuple(_spell(d, s) for d, s in zip(rule.results, results, strict=True))
    spelt_operands = tuple(_spell(d, s) for d, s in zip(rule.operands, operands, strict=True))
    for dims, shape in zip(spelt_results + spelt_operands, [*results, *operands], strict=True):
        for expr, size in zip(dims, shape, strict=True):
            if isinstance(expr, str) and expr != ONE and sizes.get(expr, 1) == 1:
                sizes[expr] = size
    # A product or sum with one axis of unknown size.
    for dims, shape in zip(spelt_results + spelt_operands, [*results, *operands], strict=True):
        for expr, size in zip(dims, shape, strict=True):
            open_axes = [a for a in letters(expr) if a not in sizes]
            if len(open_axes) == 1:
                known = expr_size(expr, {**sizes, open_axes[0]: 1})
                one_more = expr_size(expr, {**sizes, open_axes[0]: 2}) - known
                sizes[open_axes[0]] = 1 + (size - known) // one_more
    bound_operands = tuple(
        tuple(_broadcast(e, s, sizes, rule) for e, s in zip(dims, shape, strict=True))
        for dims, shape in zip(spelt_operands, operands, strict=True)
    )
    bound_results = tuple(
        tuple(_broadcast(e, s, sizes, rule) for e, s in zip(dims, shape, strict=True))
        for dims, shape in zip(spelt_results, results, strict=True)
    )
    return Rule(bound_operands, bound_results, rule.sum, rule.lookup, rule.whole, rule.linear, sizes, rule.ints)


def _spell(dims: Dims, shape: Shape) -> Dims:
    """Replace `...` by axes .1, .2, … numbered from the right."""
    if DOTS not in dims:
        if len(dims) != len(shape):
            raise ValueError(f"dims {' '.join(map(str, dims))} do not fit shape {shape}")
        return dims
    at, n = dims.index(DOTS), len(shape) - len(dims) + 1
    if n < 0:
        raise ValueError(f"dims {' '.join(map(str, dims))} do not fit shape {shape}")
    return dims[:at] + tuple(f".{k}" for k in range(n, 0, -1)) + dims[at + 1 :]


def _broadcast(expr: Expr, size: int, sizes: Mapping[str, int], rule: Rule) -> Expr:
    want = expr_size(expr, sizes)
    if want == size:
        return expr
    if size == 1 and isinstance(expr, str):
        return ONE
    raise ValueError(f"'{expr}' has size {want} in rule '{rule}', not {size}")
