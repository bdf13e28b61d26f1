"""Whatever a module's code does with its sizes, the split module equals the whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.planner.dry_run import conflict, dry_run
from shardwright.planner.dry_run.local_run import Mismatch
from shardwright.planner.search import try_plan as expected_keys
from tests.planner import mlps
from tests.planner import modules as m
from tests.planner.equal import assert_equal, features, planned

MODULES = (
    m.LiteralHead, m.DividedByHeads, m.InverseHeads, m.RootOfHeads, m.BranchOnHeads,
    m.LoopOverHeads, m.SlopePerHead, m.LiteralHeadsAndHead, m.LiteralHeads, m.UnflattenedLiteral,
    m.HeadReadOffPart, m.TurnedByComplex, m.CalledInVain, m.NotForExport,
    m.Grouped, m.MultiQuery, mlps.Mlp, mlps.GatedByNumbers, mlps.GatedByHalf,
    mlps.GatedByAttribute, mlps.GatedFromTheEnd, mlps.GatedBySteps, mlps.OneFeature,
    mlps.ChosenFeatures, mlps.InPlace, mlps.Softmax, mlps.MeanBySize, mlps.InverseSize,
    mlps.Lengths, mlps.OwnZeros, mlps.Shuffled, m.Unequal, m.Mixer, m.Vision, m.Language, m.Again,
    m.TorchAttention, m.Experts, m.WidthTakenTwice,
    m.WidthReadOffInput,
    m.WidthGivenToAFunction,
)  # fmt: skip
CASES: dict[str, Callable[[], nn.Module]] = {
    **{cls.__name__: cls for cls in MODULES},
    **{f"Fused-{how}": (lambda how=how: m.Fused(how)) for how in
       ("split", "attribute", "slice", "heads", "groups", "chunk")},
    "Fused-rotated": lambda: m.Fused("chunk", rotated=True),
    "Grouped-interleaved": lambda: m.Grouped(interleave=True),
    "Encoder": m.encoder,
}  # fmt: skip


class Within(nn.Module):
    """A model around a module, so that tensors may be resharded at its boundaries."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


# Four heads over three ranks, and features: where parts are unlike.
UNEVEN = {
    "LiteralHead", "LiteralHeads", "HeadReadOffPart", "SlopePerHead", "Grouped", "TurnedByComplex",
    "MultiQuery",
    "Mlp", "GatedByHalf", "Unequal", "Shuffled", "Vision", "Language", "Again", "Fused-groups",
    "Fused-chunk", "TorchAttention",
}  # fmt: skip
ALL = [(name, tp) for name in CASES for tp in (2, 3) if tp == 2 or name in UNEVEN]


@pytest.mark.parametrize(("name", "tp"), ALL)
def test_equals_the_whole_module(name: str, tp: int) -> None:
    """Outputs and every gradient, on even and uneven parts, for other sizes than the traced."""
    inputs = m.inputs_of(name)
    module = Within(CASES[name]()).double()
    assert_equal(module, inputs, planned(module, inputs, tp))


@pytest.mark.parametrize("make", [mlps.Mlp, lambda: m.Fused("attribute"), m.encoder])
def test_the_root_itself_may_be_the_module(make: Callable[[], nn.Module]) -> None:
    module = make().double()
    assert_equal(module, features(m.WIDTH), planned(module, features(m.WIDTH), 2))


@pytest.mark.parametrize(
    ("make", "forward", "backward"),
    [
        (mlps.Mlp, 1, 1),
        (m.LiteralHead, 1, 1),
        (m.Grouped, 1, 1),
        (mlps.GatedByHalf, 1, 1),
        (mlps.GatedByAttribute, 1, 1),
        (lambda: m.Fused("chunk"), 1, 1),
        (lambda: m.Fused("heads"), 1, 1),
        (lambda: m.Fused("groups"), 1, 1),
        (m.Unequal, 1, 1),
        (m.TorchAttention, 1, 1),
    ],
)
def test_what_can_be_split_costs_one_all_reduce_each_way(
    make: Callable[[], nn.Module], forward: int, backward: int
) -> None:
    """Being careful must not cost splits: these need no gather."""
    plan = planned(Within(make()), lambda b, t: (torch.randn(b, t, m.WIDTH),), 2)
    found = {(c.phase, c.kind): c.count for c in plan.predicted.collectives}
    assert found == {("forward", "all_reduce"): forward, ("backward", "all_reduce"): backward}


@pytest.mark.parametrize(
    ("make", "kept"),
    [(m.LiteralHeads, "view"), (mlps.InverseSize, "mul"), (m.LoopOverHeads, "add")],
)
def test_what_code_takes_for_granted_stays_whole(make: Callable[[], nn.Module], kept: str) -> None:
    """Where a part would compute other numbers, the activations are gathered before."""
    plan = planned(Within(make()), lambda b, t: (torch.randn(b, t, m.WIDTH),), 2)
    gathers = [c for c in plan.predicted.collectives if c.kind == "all_gather"]
    assert any(c.phase == "forward" for c in gathers), f"{kept} works on a part"


def test_a_size_read_off_a_whole_tensor_keeps_only_what_it_is_for(monkeypatch) -> None:
    """Heads are gathered before; no dry run has to fail for that, and all weights are split."""
    for place in (conflict, expected_keys):
        monkeypatch.delattr(place, "of_module")
    plan = planned(Within(m.WidthGivenToAFunction()), features(m.WIDTH), 2)
    assert max(plan.predicted.parameter_bytes) < 0.52 * plan.predicted.unsharded_bytes


# --- what happens when a dry run fails


class Numbered(m.WidthGivenToAFunction):
    """With an attribute that no like block has, so that none can be folded."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number**2  # numbers in a row would be seen to count the blocks


class Entered(nn.Module):
    """Asks for one width of what enters, which may be split, and of what may not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, inner: Tensor, x: Tensor) -> Tensor:
        if inner.shape[-1] != self.width or x.shape[-1] != self.width:
            raise ValueError
        return inner.relu()


class OfEntered(nn.Module):
    """A block with a width that is asked for where a tensor enters a module."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number**2
        self.up, self.down = nn.Linear(m.WIDTH, m.WIDTH), nn.Linear(m.WIDTH, m.WIDTH)
        self.asks = Entered(m.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.asks(self.up(x), x))


class Unlike(nn.Module):
    """Blocks that fail alike, though they are made otherwise."""

    def __init__(self, kind: type[nn.Module], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(n) for n in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)[:, : x.shape[1]]
        return x


@pytest.mark.parametrize("kind", [Numbered, OfEntered])
def test_blocks_that_are_not_folded_fail_together(kind: type[nn.Module], monkeypatch) -> None:
    """What no block can have is forbidden in all at once: dry runs do not grow with the blocks."""
    failed: list[str] = []
    of_size = expected_keys.of_size

    def noted(unsolvable, *others):
        failed.append(str(unsolvable))
        return of_size(unsolvable, *others)

    monkeypatch.setattr(expected_keys, "of_size", noted)
    planned(Unlike(kind, 2), features(m.WIDTH), 2)
    two = len(failed)
    plan = planned(Unlike(kind, 4), features(m.WIDTH), 2)
    assert len(failed) == 2 * two > 0
    assert max(plan.predicted.parameter_bytes) < 0.52 * plan.predicted.unsharded_bytes


def test_a_module_that_fails_its_dry_run_keeps_to_other_splits(monkeypatch) -> None:
    """Once: not that split. Twice: none in that module. Then the module around it."""
    failed = []

    def run_local(_root, _runs, plan, *_) -> Mismatch | None:
        split = sorted(k for k, v in plan.modules.items() if v.parameters)
        if split:
            failed.append(split)
            return Mismatch("inner.up", "its shape is another")
        return None

    monkeypatch.setattr(dry_run, "run_local", run_local)
    plan = planned(Within(mlps.Mlp()), lambda b, t: (torch.randn(b, t, m.WIDTH),), 2)
    assert len(failed) >= 3
    assert plan.modules == {}
    assert plan.predicted.parameter_bytes == [plan.predicted.unsharded_bytes] * 2


def test_one_attribute_for_what_is_whole_and_what_is_split() -> None:
    """What is split is then gathered; nothing else has to stay replicated for it."""
    plan = planned(m.WidthTakenTwice(), features(m.WIDTH), 2)
    assert max(plan.predicted.parameter_bytes) < 0.52 * plan.predicted.unsharded_bytes


def test_a_wrong_prediction_is_a_mismatch(monkeypatch) -> None:
    """The shapes of every module's outputs are compared with what the plan says."""
    seen = []
    run_local = dry_run.run_local

    def lying(root, runs, plan, coords, predicted, *others) -> Mismatch | None:
        (key, shapes), *rest = predicted.items()
        longer = {key: [(*s, s[-1]) for s in shapes], **dict(rest)}
        seen.append(run_local(root, runs, plan, coords, longer, *others))
        return None

    monkeypatch.setattr(dry_run, "run_local", lying)
    planned(Within(mlps.Mlp()), lambda b, t: (torch.randn(b, t, m.WIDTH),), 2)
    assert all(s is not None and s.text.startswith("output '' has shape") for s in seen)
    assert seen[0].module == "inner.up"


def test_a_module_that_cannot_run_on_meta() -> None:
    class Computes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * int(x.sum())

    with pytest.raises(
        ModelError, match="cannot trace Computes: .*move the code that depends on data"
    ) as error:
        planned(Computes(), lambda b, t: (torch.randn(b, t, 8, device="meta"),), 2)
    assert "\n" not in str(error.value) and "(test_search.py:" in str(error.value)


def test_a_failed_dry_run_says_where(monkeypatch) -> None:
    seen, run_local = [], dry_run.run_local

    def watched(*run: Any) -> Mismatch | None:
        seen.append(run_local(*run))
        return seen[-1]

    monkeypatch.setattr(dry_run, "run_local", watched)

    class Exact(mlps.Mlp):
        def between(self, y: Tensor) -> Tensor:
            if y.stride(-2) != 128:
                raise ValueError("not as wide")
            return y.relu()

    planned(Exact(), features(m.WIDTH), 2)
    assert seen[0].text.startswith("ValueError: not as wide (test_search.py:")


def test_the_reason_is_what_went_wrong_in_the_dry_run(monkeypatch) -> None:
    """What had to stay replicated since the model's own code fails otherwise says so."""

    def fails_if_split(*run: Any) -> Mismatch | None:
        return Mismatch("inner.up", "RuntimeError: no") if run[2].module("inner.up") else None

    monkeypatch.setattr(dry_run, "run_local", fails_if_split)
    plan = planned(Within(mlps.Mlp()), features(m.WIDTH), 2)
    reasons = {w.parameter: w.reason for w in plan.replicated}
    why = "the model's own code fails if it is sharded: RuntimeError: no"
    assert reasons["inner.up.weight"] == why


def test_a_module_whose_dry_run_always_fails(monkeypatch) -> None:
    """With nothing split any more, it is the model that fails, not the plan."""
    monkeypatch.setattr(dry_run, "run_local", lambda *_: Mismatch("inner.up", "RuntimeError: no"))
    with pytest.raises(ModelError, match="Within itself fails on meta.*RuntimeError: no"):
        planned(Within(mlps.Mlp()), lambda b, t: (torch.randn(b, t, m.WIDTH),), 2)


def test_the_reason_of_a_large_buffer() -> None:
    """Modules take their part of it when they read it, so a rank holds it all."""

    class Scaled(mlps.Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(9, 128))

        def between(self, y: Tensor) -> Tensor:
            return y.relu() * self.scale[:3].sum(0)  # type: ignore[index]

    plan = planned(Scaled(), features(m.WIDTH), 2)
    reasons = {w.parameter: w.reason for w in plan.replicated}
    assert reasons == {"scale": "it is a buffer, and those stay replicated"}


def test_the_reason_of_a_weight_whose_dims_are_all_those_of_inputs() -> None:
    """One is contracted with an input, and the other is multiplied with another."""
    plan = planned(nn.Bilinear(8, 8, 1), lambda b, t: (torch.randn(b, 8), torch.randn(b, 8)), 2)
    tied = "its size is tied to one that is known only at run time"
    reasons = {w.parameter: w.reason for w in plan.replicated}
    assert reasons["weight"].startswith("2 ranks could share none of its dims: its size is 1")
    assert reasons["weight"].endswith(tied)
