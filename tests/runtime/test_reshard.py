"""Every redistribution, forward and backward, against what the placements mean."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportReturnType=false

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import resolve
from shardwright.planner.contract.mesh import with_sub_axes
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.redistribution_steps import side
from shardwright.planner.contract.transitions import TRANSITIONS, Work
from shardwright.runtime.communication.audit import count_collectives, counts
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.lengths import Length, Lengths
from shardwright.runtime.redistribution.reshard import Reshard, gather_whole, take_local
from tests.ranks import run_ranks
from tests.runtime.definition import check, gradient, make
from tests.runtime.kinds import EXAMPLES, sent


def cross(
    source: str,
    target: str,
    mesh: dict[str, int],
    shape=None,
    run_time_axis: int | None = None,
    sub_axes=None,
) -> dict[str, int]:
    """Reshard random data both ways, check the results, return the collectives of one rank.

    `run_time_axis` is the length of the axis of run-time size that is split, if one is.
    """
    a, b = parse(source), parse(target)
    torch.manual_seed(1)
    shape = shape or a.shape
    x, grad = torch.randn(2, *shape, dtype=torch.float64)
    inputs = make(x, a, mesh, sub_axes=sub_axes)
    grads = make(grad, gradient(b), mesh, seed=3, sub_axes=sub_axes)
    ranks = len(inputs)

    def work(m: Mesh):
        rank = 0
        for name, group in m.groups.items():
            rank = rank * mesh[name] + group.rank
        lengths = Lengths()
        if run_time_axis is not None:
            lengths.note("axis", run_time_axis)
        change = Reshard(a, b, m.with_sub_axes(sub_axes or {}), Length(lengths, "axis"))
        local = inputs[rank].clone().requires_grad_()
        with count_collectives() as calls:
            out = change(local)
            (got,) = torch.autograd.grad(out, local, grads[rank], retain_graph=True)
        (again,) = torch.autograd.grad(out, local, grads[rank])
        assert torch.equal(got, again)
        with torch.no_grad():
            assert torch.equal(change(inputs[rank]), out)
        assert out.is_contiguous() and got.is_contiguous()
        return out.detach(), got, counts(calls)

    results = run_ranks(ranks, work, mesh)
    check([r[0] for r in results], x, b, mesh, sub_axes)
    check([r[1] for r in results], grad, gradient(a), mesh, sub_axes)
    return results[0][2]


FLAGS = ["", " | partial tp", " | grad-partial tp"]
LAYOUTS = {
    "even": "3, 12@tp",
    "one each": "3, 4@tp, 5",
    "uneven": "7@tp, 2",
    "heads": "3, 2*5@tp*2",
    "strided": "4@tp*2 + 2*3@tp + 5@tp, 3",
    "uneven strided": "3, 2*(5@tp + 4@tp*2), 2",
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples_are_of_their_kind(kind):
    assert side(parse(EXAMPLES[kind]), "tp", {"tp": (0, 2)}).kind == kind


@pytest.mark.parametrize("pair", TRANSITIONS, ids=" to ".join)
def test_every_transition_does_and_sends_what_the_table_says(pair):
    """Its values and gradients are right, and the bytes are those that the planner prices."""
    source, target = (EXAMPLES[kind] for kind in pair)
    transition = TRANSITIONS[pair]
    actions = transition.forward, transition.backward
    coords = {"tp": (0, 2)}
    (step,) = Reshard(parse(source), parse(target), Mesh.shape_only(coords)).steps
    assert (step.forward, step.backward) == tuple(action.name for action in actions)
    cross(source, target, {"tp": 2})
    sizes = [4 * prod(parse(text).local_shape(coords)) for text in (source, target)]
    whole = 4 * prod(parse(source).shape)
    work = Work(min(sizes), whole, 2)
    for calls, action in zip(sent(source, target, 2), actions, strict=True):
        said = action.collective(work)
        assert [(c.kind, c.bytes) for c in calls] == ([said[:2]] if said else [])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("source", FLAGS)
@pytest.mark.parametrize("target", FLAGS)
def test_flags(ranks, source, target):
    calls = cross(f"3, 4{source}", f"3, 4{target}", {"tp": ranks})
    forward = source == " | partial tp" != target
    backward = target == " | grad-partial tp" != source
    assert sum(calls.values()) == forward + backward


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("flag", FLAGS)
def test_shard_and_back(ranks, layout, flag):
    whole = str(parse(layout).replicated()) + flag
    there = cross(whole, layout, {"tp": ranks})
    back = cross(layout, whole, {"tp": ranks})
    expected = {
        "": ({"all_gather": 1}, {"all_gather": 1}),
        " | partial tp": ({"all_gather": 1, "reduce_scatter": 1}, {}),
        " | grad-partial tp": ({}, {"all_gather": 1, "reduce_scatter": 1}),
    }[flag]
    assert (there, back) == expected


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "mixed", ["5@tp*2 + 3 + 4, 2", "2, 3 + 4@tp + 2 + 3*2@tp", "2, 2*(4@tp + 3)"]
)
def test_mixed(ranks, mixed):
    mesh, flagged, whole = (
        {"tp": ranks},
        mixed + " | grad-partial tp",
        str(parse(mixed).replicated()),
    )
    assert cross(mixed, flagged, mesh) == {"all_reduce": 1}
    assert cross(whole + " | grad-partial tp", flagged, mesh) == {}
    assert cross(whole, flagged, mesh) == {"all_reduce": 1}
    assert cross(whole, mixed, mesh) == {"all_gather": 1}
    assert cross(mixed, whole, mesh) == {"all_gather": 1}
    assert cross(flagged, whole, mesh) == {"all_gather": 1}


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(
    ("layout", "shape", "axis"),
    [
        ("?, 6@tp", (5, 6), None),
        ("2, ?*4@tp", (2, 12), None),
        ("?@tp, 3", (8, 3), 8),
        ("?, ?@tp, 3", (2, 19, 3), 19),
        ("?, ?@tp, 3", (2, 1, 3), 1),
        ("2*?@tp, 3", (14, 3), 7),
        ("2, 4@tp*?, ?", (2, 12, 3), None),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_run_time_sizes(ranks, layout, shape, axis, flag):
    whole = str(parse(layout).replicated()) + flag
    cross(whole, layout, {"tp": ranks}, shape, axis)
    cross(layout, whole, {"tp": ranks}, shape, axis)


def test_a_part_whose_length_nobody_knows():
    mesh = Mesh.shape_only({"tp": (0, 2)})
    with pytest.raises(PlanError, match="does not show how long the whole is"):
        Reshard(parse("?@tp, 3"), parse("?, 3"), mesh)


def test_other_index_set_on_the_same_mesh_dim():
    calls = cross("4@tp*3, 6", "12, 6@tp", {"tp": 2})
    assert calls == {"all_gather": 1, "reduce_scatter": 1}
    assert cross("4@tp*3, 6", "2@tp*2*3, 6", {"tp": 2}) == {}, "written differently, the same parts"


TWO = {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("4@a*6@b, 2", "24, 2"),
        ("24, 2 | partial a", "4@a*6@b, 2"),
        ("2@a*3@b*4, 2", "2@a*12, 2"),
        ("2@a*3@b*4 + 2@a*5 + 7@b, 2", "2@a*12 + 2@a*5 + 7, 2 | grad-partial b"),
        ("5@a, 7@b", "5, 7 | partial a | grad-partial b"),
        ("5@a, 7 | partial b", "5, 7@b"),
        ("5@a, 7@b", "5@b, 7@a"),
        ("6, 4 | grad-partial a b", "3@b*2@a, 4"),
        ("6@b, 4 | partial a", "6@b, 4 | grad-partial a"),
    ],
)
def test_two_mesh_dims(source, target):
    cross(source, target, TWO)


HEADS = {"tp": [2, 2]}


@pytest.mark.parametrize(
    ("source", "target", "collectives"),
    [
        # key heads: two ranks hold the same
        ("2@tp.0*4, 6", "2@tp.0*4, 6 | grad-partial tp.1", {"all_reduce": 1}),
        ("8, 6", "2@tp.0*4, 6", {"all_gather": 1}),
        ("8, 6 | grad-partial tp", "2@tp.0*4, 6 | grad-partial tp.1", {}),
        ("8, 6 | partial tp.0", "8, 6", {"all_reduce": 1}),
        ("8, 6 | partial tp.0 tp.1", "8, 6 | grad-partial tp", {"all_reduce": 2}),
        ("8, 6 | partial tp.0 | grad-partial tp.1", "8, 6 | grad-partial tp", {"all_reduce": 2}),
        (
            "8, 6 | partial tp",
            "2@tp.0*4, 6",
            {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1},
        ),
        # query heads over all ranks, part by part
        ("2@tp.0*4@tp.1*3, 2", "24, 2", {"all_gather": 2}),
        (
            "2@tp.0*4@tp.1*3, 2",
            "2@tp.0*12, 2 | grad-partial tp.1",
            {"all_gather": 1, "reduce_scatter": 1},
        ),
        ("24, 2 | partial tp", "2@tp.0*4@tp.1*3, 2", {"reduce_scatter": 2, "all_gather": 2}),
        ("5@tp.0*3@tp.1, 2", "15, 2", {"all_gather": 2}),
        # fused: the second part is held by two ranks
        ("2@tp.0*(3@tp.1 + 1), 2", "2@tp.0*(3@tp.1 + 1), 2 | grad-partial tp.1", {"all_reduce": 1}),
        ("2, 2@tp.0*(3@tp.1 + 1)", "2, 8", {"all_gather": 2}),
        ("6@tp, 2", "6, 2", {"all_gather": 1}),
    ],
)
def test_sub_axes(source, target, collectives):
    assert cross(source, target, {"tp": 4}, sub_axes=HEADS) == collectives


def test_three_sub_axes():
    layout, whole = "3@tp.0*5@tp.12, 2", "15, 2"
    flagged = "15, 2 | partial tp.01 | grad-partial tp.2"
    heads = "3@tp.0*5, 2 | grad-partial tp.1 tp.2"
    pairs = [(whole, layout), (layout, whole), (layout, heads), (heads, layout), (flagged, whole)]
    for source, target in pairs:
        cross(source, target, {"tp": 8}, sub_axes={"tp": [2, 2, 2]})


def test_sub_axes_beside_another_mesh_dim():
    for source, target in [
        ("2@tp.0*4, 6@dp", "8, 6"),
        ("8, 6 | partial tp dp", "2@tp.0*4@tp.1, 6@dp"),
        ("8, 6 | partial tp.1 | grad-partial dp", "8, 6 | grad-partial dp tp"),
    ]:
        cross(source, target, {"dp": 2, "tp": 4}, sub_axes=HEADS)


def test_groups_of_sub_axes_are_made_once():
    def work(mesh: Mesh):
        finer = mesh.with_sub_axes(HEADS)
        assert finer is mesh.with_sub_axes(HEADS) is finer.with_sub_axes(HEADS)
        assert mesh.with_sub_axes({}) is mesh
        return finer.coords["tp.0"], finer.coords["tp.1"]

    assert run_ranks(4, work) == [((r // 2, 2), (r % 2, 2)) for r in range(4)]


def test_sub_axes_that_part_ways_are_refused():
    mesh = Mesh.shape_only(with_sub_axes({"tp": (0, 4)}, HEADS))
    with pytest.raises(PlanError, match="change otherwise than the rest of their mesh dim"):
        Reshard(parse("6@tp, 2"), parse("6, 2 | grad-partial tp.0"), mesh)
    with pytest.raises(PlanError, match="change otherwise than the rest of their mesh dim"):
        Reshard(parse("6@tp, 2"), parse("3@tp.0*2, 2"), mesh)
    with pytest.raises(PlanError, match="uses mesh dim tp.0 twice"):
        Reshard(parse("6@tp, 2@tp.0"), parse("6, 2"), mesh)
    with pytest.raises(PlanError, match="do not make a mesh dim of 4"):
        with_sub_axes({"tp": (0, 4)}, {"tp": [2, 3]})


@st.composite
def full(draw):
    """A dim that tp splits in every part, at random: products in a sum in a product."""

    def term():
        around = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
        return f"{around[0]}*{draw(st.integers(1, 7))}@tp*{around[1]}"

    terms = " + ".join(term() for _ in range(draw(st.integers(1, 3))))
    return f"{draw(st.integers(1, 2))}*({terms})*{draw(st.integers(1, 2))}"


@settings(max_examples=40)
@given(full(), st.sampled_from(FLAGS), st.integers(2, 4), st.booleans())
def test_random_layouts(dim, flag, ranks, last):
    layout = f"2, {dim}" if last else f"{dim}, 2"
    whole = str(parse(layout).replicated()) + flag
    cross(whole, layout, {"tp": ranks})
    cross(layout, whole, {"tp": ranks})


def test_gather_whole_and_take_local_with_integers():
    placement = parse("3@tp*2 + 3, 2")
    whole = torch.arange(18).view(9, 2)

    def work(mesh):
        local = take_local(whole, placement, mesh.coords)
        assert local.shape == placement.local_shape(mesh.coords)
        return gather_whole(local, placement, mesh)

    assert all(torch.equal(got, whole) for got in run_ranks(2, work))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_are_kept(dtype):
    def work(mesh):
        x = torch.ones(4, 3, dtype=dtype, requires_grad=True)
        out = Reshard(parse("4, 3 | partial tp"), parse("4@tp, 3"), mesh)(x)
        out.sum().backward()
        return out.dtype, x.grad.dtype

    assert run_ranks(2, work) == [(dtype, dtype)] * 2


def test_shape_only_gives_shapes():
    for rank in range(3):
        mesh = Mesh.shape_only({"tp": (rank, 3)})
        for source, target in [
            ("7@tp, 2", "7, 2"),
            ("7, 2 | partial tp", "7@tp, 2"),
            ("7, 2 | partial tp", "7, 2"),
            ("7, 2", "7@tp, 2"),
        ]:
            a, b = parse(source), parse(target)
            x = torch.empty(a.local_shape(mesh.coords), device="meta", requires_grad=True)
            with count_collectives() as calls:
                out = Reshard(a, b, mesh)(x)
                out.sum().backward()
            assert out.shape == b.local_shape(mesh.coords) and x.grad.shape == x.shape
            assert calls


def test_run_time_size_of_a_part():
    (dim,) = parse("?@tp").dims
    assert resolve(dim, 4, {"tp": (0, 2)}) == parse("8@tp").dims[0]
    assert resolve(dim, 8) == parse("8@tp").dims[0]


def test_wrong_shapes_are_named():
    change = Reshard(parse("?, 4@tp"), parse("?, 4"), Mesh.shape_only({"tp": (0, 2)}))
    with pytest.raises(
        PlanError, match=r"'\?, 4@tp' should have shape \[\?, 2\] here, not \[3, 4\]"
    ):
        change(torch.zeros(3, 4))
    with pytest.raises(PlanError, match="whole shapes differ"):
        Reshard(parse("4@tp"), parse("5"), Mesh.shape_only({"tp": (0, 2)}))


def test_what_acts_only_in_backward_is_checked_where_it_may_act() -> None:
    """Dry runs have no gradients; integers and masks never have any."""
    mesh = Mesh.shape_only({"tp": (0, 2)})
    change = Reshard(parse("?, 8"), parse("?, 8 | grad-partial tp"), mesh)
    assert not change.forward
    other = torch.ones(3, 4)
    assert change(other) is other
    with torch.no_grad(), pytest.raises(PlanError, match="should have shape"):
        change(other)
    with pytest.raises(PlanError, match="should have shape"):
        change(other.clone().requires_grad_())
