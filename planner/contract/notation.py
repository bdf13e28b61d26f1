"""Placements as text: the notation of plan files.

A *dim* is a small tree: an atom (one axis), a product of dims (major to minor) or a sum
(concatenation) of dims. An atom may be split over one mesh dim. A *layout* is a dim per tensor
dimension; a *placement* adds the sums that are pending over mesh dims:

    64, 4@tp*16                            row-parallel weight: 4 heads of 16 columns, heads split
    2@tp*2*16 + 2@tp*16 + 2@tp*16, 64      fused q|k|v, each part split by kv head
    ?, ?, 50257@tp                         logits; ? is a size known only at run time
    ?, ?, 64 | partial tp                  each rank holds one term of a sum
    ?, ?, 64 | grad-partial tp             the same value on each rank, its gradient a term of a sum

In a placement with both shards and `grad-partial`, the flag refers to the parts of the tensor
that no shard covers (for example the k and v of a multi-query projection).
An atom of size n over p ranks is split as evenly as whole numbers allow: the first n mod p ranks
hold one more than the others. `8@tp:4:2:2` says what each rank holds instead.

A mesh dim may be a product of sub-axes, `tp.0` being the major one; `tp` means all of them:

    2@tp.0*4@tp.1*16, 64                   query rows: 2 kv heads x 4 queries each, over 4 ranks
    2@tp.0*16, 64 | grad-partial tp.1      key rows: two ranks hold the same kv head
"""

from __future__ import annotations

import re
from functools import lru_cache

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import Atom, Concat, Dim, Product
from shardwright.planner.contract.placement import Placement

LONGEST, DEEPEST, DIGITS = 100_000, 16, 18
"""Limits: characters of a placement, nested brackets, digits of a size."""


@lru_cache(maxsize=1 << 12)
def parse(text: str) -> Placement:
    """Parse `text` to a placement; `str` of the result gives the text back.

    Raises:
        PlanError: the text is not in the notation.
    """
    if len(text) > LONGEST:
        raise PlanError(f"a placement of {len(text):,} characters: '{text[:40]}...'")
    layout, *flags = text.split("|")
    pending: dict[str, tuple[str, ...]] = {"partial": (), "grad-partial": ()}
    for flag in flags:
        word, *names = flag.split() or [""]
        if word not in pending or not names:
            raise PlanError(f"cannot read '{flag.strip():.80}' in placement '{text:.200}'")
        pending[word] = tuple(names)
    dims = tuple(_Parser(part, text).dim() for part in layout.split(",")) if layout.strip() else ()
    return Placement(dims, pending["partial"], pending["grad-partial"])


class _Parser:
    """Recursive descent over `sum := product (+ product)*`, `product := factor (* factor)*`."""

    def __init__(self, part: str, text: str) -> None:
        self.tokens = re.findall(r"[0-9]+|\?|@[A-Za-z0-9_.]+|[()*+]|(?::[0-9]{1,18})+|\S", part)
        self.at, self.depth, self.text = 0, 0, text

    def fail(self) -> PlanError:
        return PlanError(f"cannot read placement '{self.text:.200}'")

    @property
    def next(self) -> str:
        """Return the next token; empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        """Consume the next token and return it."""
        token = self.next
        self.at += 1
        return token

    def dim(self) -> Dim:
        out = self.sum()
        if self.next:
            raise self.fail()
        return out

    def sum(self) -> Dim:
        terms = [self.product()]
        while self.next == "+":
            self.take()
            terms.append(self.product())
        return terms[0] if len(terms) == 1 else Concat(tuple(terms))

    def product(self) -> Dim:
        factors = [self.factor()]
        while self.next == "*":
            self.take()
            factors.append(self.factor())
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def factor(self) -> Dim:
        token = self.take()
        if token == "(":
            self.depth += 1
            if self.depth > DEEPEST:
                raise self.fail()
            inner = self.sum()
            self.depth -= 1
            if self.take() != ")":
                raise self.fail()
            return inner
        if token != "?" and not (token.isdigit() and token.isascii() and len(token) <= DIGITS):
            raise self.fail()
        mesh = self.take()[1:] if self.next.startswith("@") else None
        if mesh == "":
            raise self.fail()
        listed = self.take()[1:].split(":") if self.next[:1] == ":" != self.next else ()
        shares = tuple(map(int, listed))
        if shares and (mesh is None or token == "?" or sum(shares) != int(token)):
            raise self.fail()
        return Atom(None if token == "?" else int(token), mesh, shares)
