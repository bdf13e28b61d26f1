"""What dims are made of, found by tracing modules that are written by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.planner.graph.axes import (
    ATOM,
    CONCAT,
    PRODUCT,
    Axes,
    Dim,
    NoCommonRefinement,
    atoms_of,
    find,
    refine,
    split_concat,
    unify,
)
from shardwright.planner.graph.graph import Graph
from shardwright.planner.strategies.cuts import cuts
from tests import planning
from tests.planner.equal import assert_equal, ids, planned
from tests.planner.mlps import WIDTH, GatedByNumbers, GatedBySteps, Mlp, Shuffled
from tests.planner.modules import HEAD, HEADS, Attention, Fused, Grouped, Language
from tests.planning import trace


def refined(
    make: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32
) -> Refined:
    with torch.device("meta"):
        module = make()
        x = torch.zeros(shape or (3, 19, WIDTH), dtype=dtype)
    graph = trace(module, (x,), {})
    return Refined(graph, refine(graph))


class Refined:
    """A traced module and its axes."""

    def __init__(self, graph: Graph, axes: Axes) -> None:
        self.graph, self.axes = graph, axes

    def __getitem__(self, key: tuple[str, int]) -> Dim:
        """Dim of a parameter."""
        name, dim = key
        return find(self.axes.dims[next(u.stored for u in self.graph.uses if u.fqn == name)][dim])


def form(dim: Dim) -> str:
    """Sizes of a tree, each of its atoms with a letter: the same letter is the same atom."""
    letters: dict[int, str] = {}

    def text(d: Dim) -> str:
        d = find(d)
        if d.size == 1:
            return "1"
        if d.kind == ATOM:
            letters.setdefault(d.id, chr(ord("a") + len(letters)))
            return f"{d.size}{letters[d.id]}"
        inner = [text(c) for c in d.children]
        return (
            "*".join(f"({t})" if "+" in t else t for t in inner)
            if d.kind == PRODUCT
            else (" + ".join(inner))
        )

    return text(dim)


def same(*dims: Dim) -> bool:
    return len({tuple(a.id for a in atoms_of(d)) for d in dims}) == 1


def test_two_linear_layers_share_an_axis() -> None:
    it = refined(Mlp)
    assert form(it["up.weight", 0]) == "128a"
    assert same(it["up.weight", 0], it["up.bias", 0], it["down.weight", 1])
    assert not same(it["up.weight", 0], it["down.weight", 0])


def test_heads_reach_the_weights() -> None:
    """A view into heads splits the rows before it and the columns behind it."""
    it = refined(Attention)
    for name in ("q", "k", "v"):
        assert form(it[f"{name}.weight", 0]) == "4a*16b"
    assert same(it["q.weight", 0], it["k.weight", 0])
    assert find(it["q.weight", 0].children[0]) is find(it["o.weight", 1].children[0])


def test_fused_parts_follow_each_other() -> None:
    """q, k and v are terms of a sum, each of them heads by head."""
    for how in ("chunk", "split", "slice", "attribute"):
        it = refined(lambda how=how: Fused(how))
        rows = it["qkv.weight", 0]
        assert rows.kind == CONCAT and [c.size for c in rows.children] == [WIDTH] * 3
        heads = [find(find(part).children[0]) for part in rows.children]
        assert [h.size for h in heads] == [HEADS] * 3
        assert len({h.id for h in heads}) == 1
        assert heads[0] is find(it["o.weight", 1].children[0])


def test_fused_parts_within_each_head() -> None:
    """Heads are the outermost factor: each has its q, its k and its v."""
    it = refined(lambda: Fused("heads"))
    rows = it["qkv.weight", 0]
    assert form(rows) in ("4a*(16b + 16b + 16c)", "4a*(16b + 16c + 16d)")
    assert find(rows.children[0]) is find(it["o.weight", 1].children[0])


def test_fused_parts_within_each_group() -> None:
    """Key-value heads times (query heads of the group + k + v) times head."""
    it = refined(lambda: Fused("groups"))
    rows = it["qkv.weight", 0]
    assert rows.kind == PRODUCT and rows.size == 2 * HEADS * HEAD
    groups, inner, head = (find(c) for c in rows.children)
    assert (groups.size, head.size) == (2, HEAD)
    assert inner.kind == CONCAT and [find(c).size for c in inner.children] == [2, 1, 1]
    assert list(atoms_of(it["o.weight", 1])) == [groups, find(inner.children[0]), head]


def test_query_heads_are_groups_of_key_heads() -> None:
    """Through expand and reshape: heads = key-value heads times group."""
    it = refined(Grouped)
    assert form(it["q.weight", 0]) == "2a*2b*16c"
    assert form(it["k.weight", 0]) == "2a*16b"
    columns = list(atoms_of(it["o.weight", 1]))
    assert list(atoms_of(it["q.weight", 0]))[:2] == columns[:2]
    assert list(atoms_of(it["v.weight", 0])) == [columns[0], columns[2]]
    assert atoms_of(it["k.weight", 0])[0] is columns[0]


def test_gate_and_up_are_the_same_axis() -> None:
    it = refined(GatedByNumbers)
    assert form(it["up.weight", 0]) == "128a + 128a"
    assert find(it["up.weight", 0].children[0]) is it["down.weight", 1]


def test_every_other_feature() -> None:
    """Steps of two: pairs are the minor factor."""
    it = refined(GatedBySteps)
    assert form(it["up.weight", 0]) == "128a*2b"
    assert find(it["up.weight", 0].children[0]) is it["down.weight", 1]


def test_rotating_halves_a_head() -> None:
    """Both halves are one axis; the heads beside them are free."""
    it = refined(lambda: Fused("chunk", rotated=True))
    heads, head = (find(c) for c in find(it["qkv.weight", 0].children[0]).children)
    assert (heads.size, head.size) == (HEADS, HEAD)
    assert heads.kind == ATOM and not heads.unshardable
    assert it.axes.conflicts == []


def test_batch_and_heads_in_one_dim() -> None:
    """batch*heads keeps the heads apart from the batch."""

    class Merged(Attention):
        def forward(self, x: Tensor) -> Tensor:
            b, t, _ = x.shape
            q, k, v = (
                self.cut(m(x)).transpose(1, 2).reshape(b * self.num_heads, t, self.head)
                for m in (self.q, self.k, self.v)
            )
            y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
            y = y.view(b, self.num_heads, t, self.head).transpose(1, 2)
            return self.o(y.reshape(b, t, self.num_heads * self.head))

    it = refined(Merged)
    assert form(it["q.weight", 0]) == "4a*16b"
    assert find(it["q.weight", 0].children[0]) is find(it["o.weight", 1].children[0])
    assert it.axes.conflicts == []


def test_a_shuffle_of_two_factors() -> None:
    it = refined(Shuffled)
    assert form(it["up.weight", 0]) == "2a*64b"
    assert form(it["down.weight", 1]) == "64a*2b"
    assert find(it["up.weight", 0].children[0]) is find(it["down.weight", 1].children[1])


def test_tied_weights_are_one() -> None:
    it = refined(Language, 3, 19, dtype=torch.int64)
    assert it["words.weight", 0] is it["head.weight", 0]
    assert it["words.weight", 1] is it["head.weight", 1]
    # A module that is called twice has the same axes in both calls.
    assert same(it["mlp.down.weight", 0], it["mlp.up.weight", 1], it["words.weight", 1])


def test_run_time_sizes_are_whole() -> None:
    it = refined(Mlp)
    for dim in it.axes.dims[it.graph.inputs[0]]:
        assert find(dim).unshardable


# --- dims that do not go together


def test_a_conflict_stays_whole_and_is_told() -> None:
    """Parts of 50 cut through heads of 16; the rest of the model is not touched."""

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.up(x)
            heads = y.unflatten(-1, (4, 16)).softmax(-1).flatten(2)
            return y[..., :50].exp(), heads, self.mlp(x)

    it = refined(Cut)
    assert all(a.unshardable for a in atoms_of(it["up.weight", 0]))
    assert [(op.module, op.call.op) for op, _ in it.axes.conflicts] == [("", "slice")]
    assert not find(it["mlp.up.weight", 0]).unshardable


def test_an_axis_within_itself_is_a_conflict() -> None:
    """x = x * 1 and x = (x + nothing) have no end: told, not followed."""
    for kind in (PRODUCT, CONCAT):
        x = Dim(4)
        with pytest.raises(NoCommonRefinement, match="would contain itself"):
            unify(x, Dim(4, kind, [x, Dim(1 if kind == PRODUCT else 0)]))
        assert find(x) is x


def test_a_matrix_used_both_ways() -> None:
    """One square weight applied twice: its rows are its columns."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.w(F.relu(self.w(x)))

    it = refined(Square)
    assert same(it["w.weight", 0], it["w.weight", 1])


def test_halves_of_halves_without_end() -> None:
    """An output fed back as one half of its own input must not recurse."""

    class Fed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(WIDTH, WIDTH // 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                y = self.w(x)
                x = torch.cat((y, y), -1)
            return x

    it = refined(Fed)
    assert it["w.weight", 1].size == WIDTH


def test_growing_concatenation() -> None:
    """Every layer sees all before it: sums are cut where they must be."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH + 16 * i, 16) for i in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.cat((x, layer(x)), -1)
            return x

    it = refined(Dense)
    assert it.axes.conflicts == []
    assert [find(c).size for c in it["layers.3.weight", 1].children] == [WIDTH, 16, 16, 16] or (
        [a.size for a in atoms_of(it["layers.3.weight", 1])] == [WIDTH, 16, 16, 16]
    )


def test_a_concatenation_of_many_parts() -> None:
    """As of hashed embeddings. Of many parts all that may be are sharded, of few any."""

    class Hashed(nn.Module):
        def __init__(self, parts: int) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(40 + i, 8) for i in range(parts))
            self.up, self.down = nn.Linear(8 * parts, 64), nn.Linear(64, 8 * parts)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.cat([table(x) for table in self.tables], -1)
            return y + self.down(self.up(y).relu())

    for parts, ways in ((3, 7), (9, 1)):
        it = refined(lambda n=parts: Hashed(n), 3, 19, dtype=torch.int64)
        dim = it["up.weight", 1]
        axes = [a.id for a in atoms_of(dim)]
        assert len(axes) == parts
        assert len(cuts(dim, frozenset(axes))) == ways
        assert cuts(dim, frozenset(axes[1:]))[-1] == frozenset(axes[1:])
        model = Hashed(parts).double()
        assert_equal(model, ids(40), planned(model, ids(40), 2))


def test_unify_refines_both() -> None:
    """6 = 2 * 3 and 6 = 4 + 2 meet in (2 + 1) * 2 only if the factors allow it."""
    a = Dim(6, PRODUCT, [Dim(3), Dim(2)])
    b = Dim(6)
    parts = split_concat(b, [4, 2])
    unify(a, b)
    assert form(a) == "(2a + 1)*2b"
    assert [p.size for p in parts] == [4, 2]
    assert sum(1 for _ in atoms_of(b)) == 2


class FusedWithGate(nn.Module):
    """One parameter: rows are 6 heads of 8 in one use, in the other the residual, cut at 12.

    12 of 48 are no whole heads: the rows contradict each other, and the columns of `out` have the
    same heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(2, 48, 48))
        self.gate, self.out = nn.Linear(12, 6, bias=False), nn.Linear(48, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = F.linear(x, self.fused[0]).view(*x.shape[:2], 6, 8).softmax(-1)
        heads = heads * torch.sigmoid(self.gate(x[..., :12])).unsqueeze(-1)
        return x + self.out(heads.flatten(2)) + F.linear(x, self.fused[1])


def test_heads_that_another_use_contradicts_are_not_split() -> None:
    with torch.device("meta"):
        model = FusedWithGate()
    plan = planning.plan(model, 4, args=(torch.zeros(3, 19, 48),), objective="memory")
    assert plan.sub_axes == {}


def test_sizes_beyond_a_plan() -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 2**40 + 2)
    with pytest.raises(ModelError, match="^parameter 'weight' has shape .* sizes up to 1,099,511"):
        planning.plan(model, 2, args=(torch.zeros(3, 19, 8),))


@pytest.mark.parametrize("by, fits", [(1, False), (500, True)])
def test_a_long_sequence_may_be_shifted(by: int, fits: bool) -> None:
    """By few places it is refused: it would be cut into thousands of terms that are the same."""
    whole, padding = Dim(3000), Dim(by)
    kept, _ = split_concat(whole, [3000 - by, by])
    shifted = Dim(3000, CONCAT, [padding, kept])
    if fits:
        unify(whole, shifted)
        assert len({id(atom) for atom in atoms_of(whole)}) == 1
    else:
        with pytest.raises(NoCommonRefinement):
            unify(whole, shifted)
