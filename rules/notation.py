"""The one-line notation of a rule: parser, `Rule` objects, and binding to shapes.

    linear      "... i, o i, o -> ... o | sum i | linear 0+2 1+2"
    embedding   "v e, ... -> ... e | lookup v | linear 0"
    sdpa        "b h q d, b h k d, b h k e -> b h q e | whole q k d e | linear 2"
    view        "a (b c) -> a b c | size b=4 c=16"
    slice       "(p0 + k + p2) d -> k d | size p0=2 k=5 p2=1"

The operands are left of the arrow, the results right of it. A letter is an axis; the same letter is
the same axis everywhere. `(a b)` is a dim that is a product, major to minor; `(a + b)` is a dim
that is a concatenation; `...` is any number of dims, aligned on the right; `1` is a dim of size one
that belongs to no axis. An operand dim of size 1 under a letter is broadcast; a result dim never
is. An empty left side means no operand, or one scalar if the call has one. Clauses follow bars:

    sum     sharding this axis makes the results Partial (a contraction)
    lookup  sharding makes the results Partial after a masked lookup: the op must be replaced by one
    whole   the axis may not be sharded
    free    axes of an operand that no result depends on: sharded or not, the results are the same
    linear  operands in which the op is linear: Partial passes through them. `0+2` is jointly (both
            are Partial, as in addition), `0 1` is one at a time (the others multiply); `zero` is
            for no operand: results that are zeros are Partial as they are
    size    sizes of axes that no single dim states

An axis that is only in operands and in no clause may not be sharded, unless it is part of a
concatenation: then it is dropped, and the results are the same however it is sharded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

Shape = tuple[int, ...]


class DoesNotFit(ValueError):
    """A rule does not fit the shapes of a call."""


@dataclass(frozen=True)
class Product:
    """A dim that is a product of axes, major to minor."""

    factors: tuple[Expr, ...]

    def __str__(self) -> str:
        return "(" + " ".join(map(str, self.factors)) + ")"


@dataclass(frozen=True)
class Concat:
    """A dim that is a concatenation of dims."""

    terms: tuple[Expr, ...]

    def __str__(self) -> str:
        return "(" + " + ".join(map(str, self.terms)) + ")"


Expr = str | Product | Concat
Dims = tuple[Expr, ...]

ONE = "1"
DOTS = "..."
ZERO = "zero"
AXIS_CLAUSES = ("sum", "lookup", "whole", "free")


def letters(expr: Expr) -> list[str]:
    """Return the axes in `expr`, left to right."""
    if isinstance(expr, str):
        return [expr] if expr != ONE else []
    out: list[str] = []
    for child in expr.factors if isinstance(expr, Product) else expr.terms:
        out += letters(child)
    return out


def expr_size(expr: Expr, sizes: Mapping[str, int]) -> int:
    """Return the size of `expr` for the given axis sizes."""
    if isinstance(expr, str):
        return 1 if expr == ONE else sizes[expr]
    if isinstance(expr, Product):
        return prod(expr_size(f, sizes) for f in expr.factors)
    return sum(expr_size(t, sizes) for t in expr.terms)


@dataclass(frozen=True)
class Rule:
    """What an op does to its axes. After `bind` it has no `...`, and every axis has a size."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sum: frozenset[str] = frozenset()
    lookup: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        def side(group: tuple[Dims, ...]) -> str:
            return ", ".join(" ".join(map(str, dims)) for dims in group)

        text = f"{side(self.operands)} -> {side(self.results)}"
        for word in AXIS_CLAUSES:
            if names := getattr(self, word):
                text += f" | {word} {' '.join(sorted(names))}"
        if self.linear:
            groups = ("+".join(map(str, sorted(g))) or ZERO for g in self.linear)
            text += " | linear " + " ".join(groups)
        return text

    def axes(self) -> list[str]:
        """Return every axis, in order of appearance."""
        return list(dict.fromkeys((*_letters_of(self.operands), *_letters_of(self.results))))

    def dropped(self) -> frozenset[str]:
        """Return the axes that are in no result and are not summed or looked up."""
        kept = frozenset(_letters_of(self.results))
        return frozenset(self.axes()) - kept - self.sum - self.lookup

    def immovable(self) -> frozenset[str]:
        """Return the axes that may not be sharded: by `whole`, or because they are dropped.

        Dropped axes may be sharded if they are part of a concatenation or in `free`.
        """
        sums = [e for dims in self.operands for e in dims if isinstance(e, Concat)]
        parts = {a for e in sums for a in letters(e)}
        return self.whole | (self.dropped() - parts - self.free)


def _letters_of(tensors: Sequence[Dims]) -> list[str]:
    return [a for dims in tensors for e in dims for a in letters(e)]


@cache
def parse(text: str) -> Rule:
    """Parse a rule.

    Raises:
        ValueError: the text is not in the notation.
    """
    body, *clauses = text.split("|")
    left, arrow, right = body.partition("->")
    if not arrow:
        raise ValueError(f"no '->' in rule '{text}'")
    words: dict[str, list[str]] = {k: [] for k in (*AXIS_CLAUSES, "linear", "size")}
    for clause in clauses:
        word, *rest = clause.split() or [""]
        if word not in words:
            raise ValueError(f"unknown clause '{word}' in rule '{text}'")
        words[word] += rest
    rule = Rule(
        operands=tuple(_dims(part) for part in left.split(",")) if left.strip() else (),
        results=tuple(_dims(part) for part in right.split(",")),
        **{word: frozenset(words[word]) for word in AXIS_CLAUSES},  # type: ignore[arg-type]
        linear=tuple(
            frozenset(map(int, group.split("+"))) if group != ZERO else frozenset()
            for group in words["linear"]
        ),
        sizes={name: int(n) for name, _, n in (item.partition("=") for item in words["size"])},
    )
    _check(rule, text)
    return rule


def _check(rule: Rule, text: str) -> None:
    """Refuse clauses that contradict the dims: the rule would be silently wrong."""
    named = [a for word in AXIS_CLAUSES for a in sorted(getattr(rule, word))]
    if unknown := set(named) - set(rule.axes()):
        raise ValueError(f"axes {sorted(unknown)} are only in the clauses of rule '{text}'")
    if twice := {a for a in named if named.count(a) > 1}:
        raise ValueError(f"two clauses name {sorted(twice)} in rule '{text}'")
    lost = rule.sum | rule.lookup | rule.free
    if kept := lost & set(_letters_of(rule.results)):
        raise ValueError(f"axes {sorted(kept)} are lost and in a result of rule '{text}'")
    # At least one operand counts: an empty left side may be a scalar.
    if any(i >= max(len(rule.operands), 1) for group in rule.linear for i in group):
        raise ValueError(f"'linear' names an operand that is not there in rule '{text}'")


def _dims(text: str) -> Dims:
    tokens = re.findall(r"\.\.\.|[A-Za-z_]\w*|1|[()+]|\S", text)
    out: list[Expr] = []
    while tokens:
        out.append(_expr(tokens, text))
    if out.count(DOTS) > 1:
        raise ValueError(f"'...' twice in '{text.strip()}'")
    return tuple(out)


def _expr(tokens: list[str], text: str) -> Expr:
    token = tokens.pop(0)
    if token != "(":
        if not re.fullmatch(r"\.\.\.|[A-Za-z_]\w*|1", token):
            raise ValueError(f"cannot read '{token}' in '{text.strip()}'")
        return token
    terms: list[list[Expr]] = [[]]
    while tokens and tokens[0] != ")":
        if tokens[0] == "+":
            tokens.pop(0)
            terms.append([])
        else:
            terms[-1].append(_expr(tokens, text))
    if not tokens:
        raise ValueError(f"'(' is not closed in '{text.strip()}'")
    tokens.pop(0)
    if any(not term or DOTS in term for term in terms):
        raise ValueError(f"a part of a dim is empty or '...' in '{text.strip()}'")
    products = [t[0] if len(t) == 1 else Product(tuple(t)) for t in terms]
    return products[0] if len(products) == 1 else Concat(tuple(products))


def bind(rule: Rule, operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """Bind `rule` to these shapes: `...` spelt out, broadcast dims as `1`, all sizes known.

    Raises:
        DoesNotFit: the shapes do not fit the rule.
    """
    patterns = rule.operands or ((),) * (list(operands) == [()])
    if len(operands) != len(patterns) or len(results) != len(rule.results):
        raise DoesNotFit(f"rule '{rule}' has other operands than {operands} -> {results}")
    taken = [_spell(d, s) for d, s in zip(patterns, operands, strict=True)]
    made = [_spell(d, s) for d, s in zip(rule.results, results, strict=True)]
    # Results first: they are never broadcast.
    sides = [*zip(made, results, strict=True), *zip(taken, operands, strict=True)]
    sizes = _solve([pair for dims, shape in sides for pair in zip(dims, shape, strict=True)], rule)

    def fit(expr: Expr, size: int, broadcast: bool) -> Expr:
        want = expr_size(expr, sizes)
        if want != size and not (broadcast and size == 1 and isinstance(expr, str)):
            raise DoesNotFit(f"'{expr}' has size {want} in rule '{rule}', not {size}")
        return expr if want == size else ONE

    def side(tensors: Sequence[Dims], shapes: Sequence[Shape], broadcast: bool) -> tuple[Dims, ...]:
        pairs = zip(tensors, shapes, strict=True)
        return tuple(
            tuple(fit(e, s, broadcast) for e, s in zip(d, n, strict=True)) for d, n in pairs
        )

    return replace(
        rule,
        operands=side(taken, operands, broadcast=True),
        results=side(made, results, broadcast=False),
        sizes=sizes,
    )


def _spell(dims: Dims, shape: Shape) -> Dims:
    """Replace `...` by axes .1, .2, … numbered from the right."""
    n = len(shape) - len(dims) + (DOTS in dims)
    if n < 0 or (n and DOTS not in dims):
        raise DoesNotFit(f"dims '{' '.join(map(str, dims))}' do not fit shape {shape}")
    if DOTS not in dims:
        return dims
    at = dims.index(DOTS)
    return dims[:at] + tuple(f".{k}" for k in range(n, 0, -1)) + dims[at + 1 :]


def _solve(pairs: Sequence[tuple[Expr, int]], rule: Rule) -> dict[str, int]:
    """Return the sizes of all axes: stated, read from a dim, or the only unknown in a dim."""
    sizes = dict(rule.sizes)
    for expr, size in pairs:
        broadcast = isinstance(expr, str) and sizes.get(expr, 1) == 1
        if broadcast and expr != ONE and expr not in rule.sizes:
            sizes[expr] = size  # type: ignore[index]
    composed = [pair for pair in pairs if not isinstance(pair[0], str)]  # other dims are known
    for expr, size in composed:
        unknown = [a for a in dict.fromkeys(letters(expr)) if a not in sizes]
        if len(unknown) == 1:
            least = expr_size(expr, {**sizes, unknown[0]: 0})
            step = expr_size(expr, {**sizes, unknown[0]: 1}) - least
            sizes[unknown[0]] = (size - least) // step if step else 0
    if unknown := {a for expr, _ in composed for a in letters(expr) if a not in sizes}:
        raise DoesNotFit(f"rule '{rule}' does not say the sizes of {sorted(unknown)}")
    return sizes
