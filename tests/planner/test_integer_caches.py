"""Integers and tensors that model code keeps in caches: right on each rank, and gone afterwards."""

from __future__ import annotations

import functools
import gc
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from einops import rearrange
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.trace.sizes.provenance import SourcedInt
from shardwright.planner.trace.state import code_state
from tests.marks import long
from tests.planner.einops_models import SIDE, Attention, CaiT, CrossViT, UsualCrossViT, ViT
from tests.planner.equal import assert_equal, features, planned

DIM, HEADS, EACH = 48, 6, 8


def images(batch: int, _: int) -> tuple[Tensor]:
    return (torch.randn(batch, 3, SIDE, SIDE, dtype=torch.float64),)


def share(plan: Plan) -> float:
    return plan.predicted.parameter_bytes[0] / plan.predicted.unsharded_bytes


def attributes(plan: Plan) -> dict[str, set[str]]:
    return {name: {*part.attributes} for name, part in plan.modules.items() if part.attributes}


class TwoAttentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Attention(DIM, HEADS), Attention(DIM, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


# --- einops


@pytest.mark.parametrize("tp", [2, 3])
def test_like_layers_of_two_models_have_local_heads_each(tp: int) -> None:
    for _ in range(2):
        model = TwoAttentions().double()
        plan = planned(model, features(DIM), tp)
        assert attributes(plan) == {"one": {"heads"}, "two": {"heads"}}
        assert_equal(model, features(DIM), plan)


def test_what_a_user_ran_before_is_not_taken_for_the_trace() -> None:
    model = TwoAttentions().double()
    model(*features(DIM)(3, 19))
    plan = planned(model, features(DIM), 2)
    assert attributes(plan) == {"one": {"heads"}, "two": {"heads"}}
    assert_equal(model, features(DIM), plan)


@pytest.mark.parametrize("tp", [long(2), 3])
@pytest.mark.parametrize(
    "make",
    [
        *(ViT, functools.partial(ViT, pool="mean"), functools.partial(CaiT, 96, 12)),
        functools.partial(CrossViT, 96, 144),
    ],
)
def test_vision_transformers(make: Callable[[], nn.Module], tp: int) -> None:
    model = make().double().eval()
    plan = planned(model, images, tp)
    assert share(plan) <= {2: 0.53, 3: 0.36}[tp]
    assert_equal(model, images, plan, collectives=False, spread=0.2)


@pytest.mark.parametrize("tp", [2, long(3)])
def test_a_cross_vit_of_usual_sizes(tp: int) -> None:
    def pictures(batch: int, _: int) -> tuple[Tensor]:
        return (torch.randn(batch, 3, 256, 256, dtype=torch.float64),)

    model = UsualCrossViT().double().eval()
    plan = planned(model, pictures, tp)
    assert share(plan) <= {2: 0.53, 3: 0.36}[tp]
    assert_equal(model, pictures, plan, collectives=False, spread=0.05)


# --- caches of all kinds


class Cache(NamedTuple):
    """How sizes are kept: a function that computes something of some numbers, at most once each."""

    get: Callable[..., Any]
    held: Callable[[], Any]
    """What is in it."""


def by_lru_cache(compute: Callable[..., Any]) -> Cache:
    cached = functools.lru_cache(maxsize=8)(compute)
    return Cache(cached, lambda: cached.cache_info().currsize)


def by_hidden_lru_cache(compute: Callable[..., Any]) -> Cache:
    cached = [functools.lru_cache(compute)]
    return Cache(lambda *numbers: cached[0](*numbers), lambda: None)


def by_dict(compute: Callable[..., Any]) -> Cache:
    table: dict[Any, Any] = {}

    def get(*numbers: int) -> Any:
        if numbers not in table:
            table[numbers] = compute(*numbers)
        return table[numbers]

    return Cache(get, lambda: dict(table))


def by_text(compute: Callable[..., Any]) -> Cache:
    table: dict[str, Any] = {}

    def get(*numbers: int) -> Any:
        key = "x".join(f"{n}" for n in numbers)
        if key not in table:
            table[key] = compute(*numbers)
        return table[key]

    return Cache(get, lambda: dict(table))


def by_default_argument(compute: Callable[..., Any]) -> Cache:
    def get(*numbers: int, table: dict[Any, Any] = {}) -> Any:  # noqa: B006 that is the point
        if numbers not in table:
            table[numbers] = compute(*numbers)
        return table[numbers]

    return Cache(get, lambda: dict((get.__kwdefaults__ or {})["table"]))


def by_class_attribute(compute: Callable[..., Any]) -> Cache:
    class Last:
        numbers: Any = None

    def get(*numbers: int) -> Any:
        if Last.numbers != numbers:
            Last.numbers = numbers
            Last.value = compute(*numbers)  # type: ignore[attr-defined]
        return Last.value  # type: ignore[attr-defined]

    return Cache(get, lambda: {k: v for k, v in vars(Last).items() if k[:2] != "__"})


def by_function_attribute(compute: Callable[..., Any]) -> Cache:
    def get(*numbers: int) -> Any:
        found = vars(get).setdefault("found", [])
        for known, value in found:
            if known == numbers:
                return value
        found.append((numbers, compute(*numbers)))
        return found[-1][1]

    return Cache(get, lambda: dict(vars(get)))


CACHES = (
    by_lru_cache,
    by_hidden_lru_cache,
    by_dict,
    by_text,
    by_default_argument,
    by_class_attribute,
    by_function_attribute,
)


def head_shape(width: int, heads: int) -> tuple[int, int]:
    return heads, width // heads


def slopes(heads: int) -> Tensor:
    return torch.arange(1, heads + 1, dtype=torch.float64).view(1, heads, 1, 1) / 8


def positions(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float64).sin()


class Layer(nn.Module):
    """Attention whose shapes, and maybe tables, come out of caches."""

    def __init__(self, shapes: Cache, tables: Cache | None, each: Cache | None, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, heads * EACH
        self.qkv = nn.Linear(DIM, 3 * self.width)
        self.out = nn.Linear(self.width, DIM)
        self.shape, self.table, self.each = shapes.get, tables and tables.get, each and each.get

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        heads, width = self.shape(q.shape[-1], self.heads)
        q, k, v = (t.view(*t.shape[:2], heads, width).transpose(1, 2) for t in (q, k, v))
        if self.each is not None:
            q = q * self.each(width)
        scores = q @ k.transpose(-1, -2) * EACH**-0.5
        if self.table is not None:
            scores = scores * self.table(scores.shape[1])
        return self.out(rearrange(scores.softmax(-1) @ v, "b h n d -> b n (h d)"))


class Stack(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.heads = 1  # of nothing: it is equal to none of the layers'

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_layers_that_share_a_cache_are_split_alike(tmp_path: Any) -> None:
    """Two and three like layers, two models one after the other, tables of sizes and of tensors."""
    shares: list[float] = []

    @settings(
        max_examples=24,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        st.sampled_from(CACHES),
        st.sampled_from((None, *CACHES)),
        st.sampled_from((None, *CACHES)),
        st.lists(st.sampled_from((HEADS, HEADS, 12)), min_size=2, max_size=3),
        st.sampled_from((2, 3)),
    )
    def each(shapes: Any, tables: Any, widths: Any, heads: list[int], tp: int) -> None:
        torch.manual_seed(0)
        of_shapes = shapes(head_shape)
        of_heads, of_widths = tables and tables(slopes), widths and widths(positions)
        caches = [c for c in (of_shapes, of_heads, of_widths) if c]
        for _ in range(2):
            model = Stack([Layer(of_shapes, of_heads, of_widths, n) for n in heads]).double()
            before = [cache.held() for cache in caches]
            plan = planned(model, features(DIM), tp)
            assert [cache.held() for cache in caches] == before
            shares.append(share(plan))
            assert_equal(model, features(DIM), plan, collectives=False)

    each()
    assert sum(s < 0.6 for s in shares) > len(shares) / 3


# --- what is left


COUNTS: dict[str, Any] = {}
LATEST: Any = None


class Indexed(Layer):
    """Keeps the width of a head in a list, at the width of all heads."""

    table: Any = [None] * 200  # noqa: RUF012
    nested: Any = {"tables": [[None] * 200]}  # noqa: RUF012
    fixed: Any = (0, ([None] * 200,))

    def __init__(self, tables: Callable[[], list[Any]]) -> None:
        def get(width: int, heads: int) -> tuple[int, int]:
            if tables()[width] is None:
                tables()[width] = width // heads
            return -1, tables()[width]

        super().__init__(Cache(get, lambda: None), None, None, HEADS)


def by_default(table: Any = [None] * 200) -> Any:  # noqa: B006
    return table


@pytest.mark.parametrize(
    "tables",
    [
        lambda: Indexed.table,
        lambda: Indexed.nested["tables"][0],
        lambda: Indexed.fixed[1][0],
        by_default,
    ],
)
def test_like_layers_that_keep_sizes_in_a_list(tables: Callable[[], list[Any]]) -> None:
    """Of a class, within other containers and tuples, and as a default argument."""
    model = Stack([Indexed(tables) for _ in range(3)]).double()
    plan = planned(model, features(DIM), 3)
    assert_equal(model, features(DIM), plan, spread=0.1)
    assert type(tables()) is list


class Keeper(nn.Module):
    """Keeps sizes wherever code can."""

    seen: dict[int, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.width = 24
        self.inner = nn.Linear(DIM, 24)
        self.outer = nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        global LATEST
        y = self.inner(x)
        LATEST, COUNTS["width"] = y.shape, self.width
        Keeper.seen[self.width], Keeper.last = y, y.shape[-1]  # type: ignore[attr-defined]
        factor(self.width)
        return self.outer(y.relu())


@functools.lru_cache
def factor(width: int) -> float:
    return math.sqrt(width)


def sourced() -> list[SourcedInt]:
    """The integers with a history that are alive."""
    gc.collect()
    return [x for x in gc.get_objects() if type(x) is SourcedInt]


def test_nothing_of_a_trace_is_left() -> None:
    before = sourced()  # of other tests: a traceback that is kept holds a trace
    planned(Keeper(), features(DIM), 2)
    assert LATEST is None and not COUNTS and not Keeper.seen and not hasattr(Keeper, "last")
    assert isinstance(factor, type(functools.lru_cache(len)))
    assert factor.cache_info().currsize == 0
    planned(TwoAttentions(), features(DIM), 2)
    left = {*map(id, sourced())} - {*map(id, before)}
    assert not left


def test_what_users_keep_stays() -> None:
    model = Keeper()
    x = torch.zeros(1, 1, DIM)
    try:
        model(x)
        kept, entries = Keeper.seen[24], factor.cache_info().currsize
        planned(Keeper(), features(DIM), 2)
        assert Keeper.seen[24] is kept and Keeper.last == 24  # type: ignore[attr-defined]
        assert factor.cache_info().currsize == entries == 1
        assert type(COUNTS["width"]) is int
    finally:
        for kept in (COUNTS, Keeper.seen):
            kept.clear()
        del Keeper.last  # type: ignore[attr-defined]
        globals()["LATEST"] = None
        factor.cache_clear()


def test_equal_integers_must_be_equal_on_ranks() -> None:
    """A list of its own searched by comparison: what one layer found the next is given."""
    known: list[tuple[int, int]] = []

    def shape(heads: int, width: int) -> tuple[int, int]:
        for found in known:
            if found == (heads, width):
                return found
        known.append((heads, width))
        return known[-1]

    cache = Cache(lambda width, heads: shape(heads, width // heads), lambda: None)
    model = Stack([Layer(cache, None, None, HEADS) for _ in range(3)]).double()
    plan = planned(model, features(DIM), 2, pins={"layers.1.qkv": "replicate"})
    assert_equal(model, features(DIM), plan, collectives=False)


class OfClass(nn.Module):
    """It keeps tables in dicts of the standard library, as attributes of its class."""

    ordered: OrderedDict[int, Tensor] = OrderedDict()
    default: defaultdict[int, list[Tensor]] = defaultdict(list)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in OfClass.ordered:
            OfClass.ordered[length] = torch.arange(length)
            OfClass.default[length].append(OfClass.ordered[length])
        return self.up(x) * OfClass.ordered[length][:, None]


def test_dicts_of_the_standard_library_are_put_back() -> None:
    planned(OfClass(), features(DIM), 2)
    assert (len(OfClass.ordered), len(OfClass.default)) == (0, 0)


@functools.lru_cache
def scale(width: int) -> float:
    return 1 / width


SCALES: dict[int, float] = {}


def other_scale(width: int) -> float:
    SCALES.setdefault(width, factor(width))
    return SCALES[width]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) * scale(x.shape[-1])


class Lazy(OrderedDict[str, Any]):
    """As long as what it could make, and iterates over that: auto mappings of transformers do."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter("abcde")


LAZY = Lazy(made=1)


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) * len(LAZY)


def test_what_code_holds_is_looked_at_again_only_when_it_changed() -> None:
    model, taken = Looks(), list[Any]()

    def isolated(change: Callable[[], object] = lambda: None) -> None:
        with code_state.isolated(model):
            change()
        code = frozenset(map(type, model.modules()))
        taken.append(code_state._reached(code, len(code_state.sys.modules))._last)

    code_state.look_anew()
    isolated()
    isolated(lambda: OrderedDict.__setitem__(LAZY, "made", 2))
    isolated()
    assert OrderedDict.__getitem__(LAZY, "made") == 1 and taken[0] is taken[1] is taken[2]
    OrderedDict.__setitem__(LAZY, "made", 3)
    isolated(lambda: OrderedDict.__setitem__(LAZY, "made", 2))
    assert OrderedDict.__getitem__(LAZY, "made") == 3 and taken[3] is not taken[0]


def test_code_is_looked_at_once_for_each_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all runs of the model and of its parts; the next plan sees new code."""
    looked: list[Any] = []
    look = code_state._Reached.__init__
    monkeypatch.setattr(
        code_state._Reached,
        "__init__",
        lambda self, code: (looked.append(code), look(self, code))[1],
    )
    planned(Scaled(), features(DIM), 2)
    del looked[:]  # torch may have imported more meanwhile
    planned(Scaled(), features(DIM), 2)
    assert len(looked) == 1
    monkeypatch.setitem(globals(), "scale", other_scale)
    planned(Scaled(), features(DIM), 2)
    assert len(looked) == 2 and not SCALES and factor.cache_info().currsize == 0
