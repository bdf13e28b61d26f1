"""How a tensor lies over a mesh, as one printable line.

A *dim* is a small tree: an atom (one axis), a product of dims (major to minor) or a sum
(concatenation) of dims. An atom may be split over one mesh dim. A *layout* is a dim per tensor
dimension; a *placement* adds the sums that are pending over mesh dims:

    64, 4@tp*16                            row-parallel weight: 4 heads of 16 columns, heads split
    2@tp*2*16 + 2@tp*16 + 2@tp*16, 64      fused q|k|v, each part split by kv head
    ?, ?, 50257@tp                         logits; ? is a size known only at run time
    ?, ?, 64 | partial tp                  each rank holds one term of a sum
    ?, ?, 64 | grad-partial tp             the same value on each rank, its gradient a term of a sum

In a placement with both shards and `grad-partial`, the flag speaks of the parts of the tensor
that no shard covers (the k and v of a multi-query projection, say).
An atom of size n over p ranks is split as evenly as whole numbers allow: the first n mod p ranks
hold one more than the others.

A mesh dim may be a product of sub-axes, `tp.0` the major one; `tp` means all of them together:

    2@tp.0*4@tp.1*16, 64                   query rows: 2 kv heads x 4 queries each, over 4 ranks
    2@tp.0*16, 64 | grad-partial tp.1      key rows: two ranks hold the same kv head
"""

from __future__ import annotations

import re

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import Atom, Concat, Dim, Product
from shardwright.planner.contract.placement import Placement


def parse(text: str) -> Placement:
    """The placement that `text` writes down; `str` of it gives the text back.

    Raises:
        PlanError: the text is not in the notation.
    """
    layout, *flags = text.split("|")
    pending: dict[str, tuple[str, ...]] = {"partial": (), "grad-partial": ()}
    for flag in flags:
        word, *names = flag.split() or [""]
        if word not in pending or not names:
            raise PlanError(f"cannot read '{flag.strip()}' in placement '{text}'")
        pending[word] = tuple(names)
    dims = tuple(_Parser(part, text).dim() for part in layout.split(",")) if layout.strip() else ()
    return Placement(dims, pending["partial"], pending["grad-partial"])


class _Parser:
    """Recursive descent over `sum := product (+ product)*`, `product := factor (* factor)*`."""

    def __init__(self, part: str, text: str) -> None:
        self.tokens = re.findall(r"\d+|\?|@[\w.]+|[()*+]|\S", part)
        self.text = text

    def fail(self) -> PlanError:
        return PlanError(f"cannot read placement '{self.text}'")

    def dim(self) -> Dim:
        out = self.sum()
        if self.tokens:
            raise self.fail()
        return out

    def sum(self) -> Dim:
        terms = [self.product()]
        while self.tokens and self.tokens[0] == "+":
            self.tokens.pop(0)
            terms.append(self.product())
        return terms[0] if len(terms) == 1 else Concat(tuple(terms))

    def product(self) -> Dim:
        factors = [self.factor()]
        while self.tokens and self.tokens[0] == "*":
            self.tokens.pop(0)
            factors.append(self.factor())
        return factors[0] if len(factors) == 1 else Product(tuple(factors))

    def factor(self) -> Dim:
        token = self.tokens.pop(0) if self.tokens else ""
        if token == "(":
            inner = self.sum()
            if not self.tokens or self.tokens.pop(0) != ")":
                raise self.fail()
            return inner
        if token != "?" and not token.isdigit():
            raise self.fail()
        mesh = self.tokens.pop(0)[1:] if self.tokens and self.tokens[0].startswith("@") else None
        if mesh == "":
            raise self.fail()
        return Atom(None if token == "?" else int(token), mesh)
