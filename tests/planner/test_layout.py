"""Layouts: text and back, who holds what, sizes that are known late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import (
    Atom,
    Concat,
    Dim,
    Product,
    atoms,
    dim_size,
    local_ranges,
    resolve,
    shard_range,
    simplify,
    uncovered_ranges,
)
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement


def numbers(sizes: st.SearchStrategy[int], least: int = 0) -> st.SearchStrategy[Dim]:
    whole = st.builds(Atom, sizes)
    return st.recursive(
        whole,
        lambda inner: st.builds(
            lambda kind, parts: kind(tuple(parts)),
            st.sampled_from([Product, Concat]),
            st.lists(inner, min_size=2, max_size=3),
        ),
        max_leaves=5,
    )


@st.composite
def dims(draw: st.DrawFn, meshes: tuple[str, ...] = ("tp",)) -> Dim:
    """A tree in which no element is split twice over the same mesh dim."""

    def split(dim: Dim, free: tuple[str, ...]) -> Dim:
        if isinstance(dim, Atom):
            mesh = draw(st.sampled_from([None, *free])) if free else None
            return Atom(dim.size, mesh)
        if isinstance(dim, Concat):
            return Concat(tuple(split(t, free) for t in dim.terms))
        out = []
        for factor in dim.factors:
            out.append(split(factor, free))
            free = tuple(m for m in free if m not in {a.mesh for a in atoms(out[-1])})
        return Product(tuple(out))

    return split(draw(numbers(st.integers(1, 4))), meshes)


def canonical(dim: Dim) -> Dim:
    """As the notation writes it: no product directly in a product."""
    if isinstance(dim, Product):
        flat = [canonical(f) for f in dim.factors]
        joined = [g for f in flat for g in (f.factors if isinstance(f, Product) else (f,))]
        return Product(tuple(joined))
    return Concat(tuple(canonical(t) for t in dim.terms)) if isinstance(dim, Concat) else dim


def held(dim: Dim, coords: dict[str, tuple[int, int]]) -> list[int]:
    return [i for a, b in local_ranges(dim, coords) for i in range(a, b)]


def places(ranks: int) -> list[dict[str, tuple[int, int]]]:
    return [{"tp": (r, ranks)} for r in range(ranks)]


@given(st.lists(dims(("tp", "dp")), max_size=3), st.booleans(), st.booleans())
def test_text_and_back(layout: list[Dim], partial: bool, grad: bool) -> None:
    placement = Placement(
        tuple(canonical(d) for d in layout),
        ("tp", "dp") if partial else (),
        ("tp",) if grad else (),
    )
    assert parse(str(placement)) == placement
    assert str(parse(str(placement))) == str(placement)


@pytest.mark.parametrize(
    "text",
    [
        "64, 4@tp*16",
        "2@tp*2*16 + 2@tp*16 + 2@tp*16, 64",
        "?, ?, 50257@tp",
        "?, ?, 64 | partial tp",
        "?, ?, 64 | grad-partial tp",
        "(4 + 2@tp)*16",
        "1 + (2@tp + 3)",
        "",
    ],
)
def test_examples_of_the_notation(text: str) -> None:
    assert str(parse(text)) == text


@given(dims(), st.integers(1, 4))
def test_ranks_share_what_is_split_and_repeat_the_rest(dim: Dim, ranks: int) -> None:
    """Every element that is split lies on one rank, every other one on all of them."""
    size = dim_size(dim)
    assert size is not None
    counts = [0] * size
    for coords in places(ranks):
        for i in held(dim, coords):
            counts[i] += 1
    everywhere = {i for a, b in uncovered_ranges(dim, "tp") for i in range(a, b)}
    assert counts == [ranks if i in everywhere else 1 for i in range(size)]


@given(dims(("tp", "dp")), st.integers(1, 3), st.integers(1, 3))
def test_the_local_size_is_the_number_of_indices(dim: Dim, tp: int, dp: int) -> None:
    for i in range(tp):
        for j in range(dp):
            coords = {"tp": (i, tp), "dp": (j, dp)}
            mine = held(dim, coords)
            assert dim_size(dim, coords) == len(mine)
            assert mine == sorted(set(mine))


@given(dims(("tp", "dp")), st.integers(1, 3), st.integers(1, 3))
def test_simplify_keeps_who_holds_what(dim: Dim, tp: int, dp: int) -> None:
    small = simplify(dim)
    assert dim_size(small) == dim_size(dim)
    assert simplify(small) == small
    for i in range(tp):
        for j in range(dp):
            coords = {"tp": (i, tp), "dp": (j, dp)}
            assert local_ranges(small, coords) == local_ranges(dim, coords)


def test_simplify_joins_what_is_whole() -> None:
    (dim,) = parse("4@tp*2*16 + 8 + 2*4 + 1*3@tp*1").dims
    assert str(simplify(dim)) == "4@tp*32 + 16 + 3@tp"


@given(st.integers(0, 40), st.integers(1, 7))
def test_shards_are_as_even_as_can_be(size: int, ranks: int) -> None:
    """In order, without a gap; the first ranks hold one more."""
    parts = [shard_range(size, r, ranks) for r in range(ranks)]
    assert [i for a, b in parts for i in range(a, b)] == list(range(size))
    lengths = [b - a for a, b in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("text", "size", "found"),
    [
        ("?", 7, "7"),
        ("?@tp", 7, "7@tp"),
        ("4@tp*?", 28, "4@tp*7"),
        ("2 + ?", 9, "2 + 7"),
        ("(1 + ?)*4", 20, "(1 + 4)*4"),
        ("5", 5, "5"),
    ],
)
def test_open_sizes_are_found(text: str, size: int, found: str) -> None:
    (dim,) = parse(text).dims
    assert str(resolve(dim, size)) == found


def test_open_sizes_are_found_from_a_part() -> None:
    """The rest of a local size is the same on every rank."""
    (dim,) = parse("4@tp*?").dims
    assert str(resolve(dim, 14, {"tp": (1, 2)})) == "4@tp*7"
    (dim,) = parse("?@tp").dims
    assert str(resolve(dim, 7, {"tp": (1, 2)})) == "14@tp"


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("4*4", 15, "laid out as '4*4' should have 16 elements here, not 15"),
        ("4@tp*?", 30, r"laid out as '4@tp\*\?' cannot have 30 elements here"),
    ],
)
def test_sizes_that_do_not_fit(text: str, size: int, message: str) -> None:
    (dim,) = parse(text).dims
    with pytest.raises(PlanError, match=message.replace("4*4", r"4\*4")):
        resolve(dim, size)


@pytest.mark.parametrize(
    "text", ["4 4", "4@", "*4", "(4", "4)", "4 +", "x", "4, , 4", "-3", "4@tp@tp", "4.5"]
)
def test_text_that_is_no_layout(text: str) -> None:
    with pytest.raises(PlanError, match="cannot read placement"):
        parse(text)


@pytest.mark.parametrize("text", ["4 | whole tp", "4 | partial", "4 |"])
def test_flags_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        parse(text)


def test_a_placement_knows_its_shapes() -> None:
    placement = parse("5@tp, 2*3, ? | grad-partial tp")
    assert placement.shape == (5, 6, None)
    assert placement.local_shape({"tp": (1, 2)}) == (2, 6, None)
    assert placement.meshes == {"tp"}
    assert str(placement.replicated()) == "5, 2*3, ?"
