"""The vocabulary-parallel cross entropy against torch's, values and gradients."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportReturnType=false

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from shardwright.planner.contract.dims import local_ranges, shard_range
from shardwright.planner.contract.notation import parse
from shardwright.runtime.communication.audit import count_collectives, counts
from shardwright.runtime.logits.loss import vocab_parallel_cross_entropy
from tests.ranks import run_ranks


def compare(logits, labels, layout, ranks, dtype=torch.float64, **options):
    """Split and whole losses and gradients; returns the worst difference of each."""
    (dim,) = parse(layout).dims
    logits = logits.to(dtype)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, labels, **options)
    seed = torch.randn_like(expected)
    expected.backward(seed)

    def work(mesh):
        ranges = local_ranges(dim, mesh.coords)
        part = lambda x: torch.cat([x[..., a:b] for a, b in ranges] or [x[..., :0]], -1)  # noqa: E731
        mine = part(logits).clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(
            mine, labels, ranges, mesh["tp"], classes=logits.shape[-1], **options
        )
        assert loss.dtype == expected.dtype and loss.shape == expected.shape
        loss.backward(seed, retain_graph=True)
        first = mine.grad.clone()
        loss.backward(seed)
        assert torch.equal(mine.grad, 2 * first), "saved tensors stay as they are"
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(loss, expected, equal_nan=True, **tolerance)
        torch.testing.assert_close(first, part(whole.grad), **tolerance)

    run_ranks(ranks, work)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("layout", "ranks"), [("12@tp", 3), ("13@tp", 4), ("8@tp + 2@tp*2 + 1@tp", 2)]
)
def test_equals_torch(reduction, smoothing, weighted, layout, ranks):
    classes = parse(layout).shape[0]
    torch.manual_seed(0)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = torch.rand(classes, dtype=torch.float64)
    labels = torch.tensor([0, classes - 1, -100, 5, -100, 7])
    compare(torch.randn(6, classes) * 3, labels, layout, ranks, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored(reduction, smoothing):
    options = {"reduction": reduction, "label_smoothing": smoothing}
    compare(torch.randn(3, 8), torch.full((3,), -100), "8@tp", 2, **options)


def test_other_ignore_index_and_single_token():
    compare(torch.randn(4, 8), torch.tensor([3, 0, 3, 7]), "8@tp", 2, ignore_index=3)
    compare(torch.randn(8), torch.tensor(5), "8@tp", 2)
    compare(torch.randn(2, 3), torch.tensor([0, 2]), "3@tp", 4, label_smoothing=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits_are_stable(dtype):
    torch.manual_seed(0)
    logits = torch.randn(6, 10) * 40 + 1000 * torch.tensor([1, -1, 1, -1, 0, 0]).view(6, 1)
    compare(logits, torch.tensor([0, 9, 3, -100, 4, 5]), "10@tp", 2, dtype)


def test_minus_infinity():
    logits = torch.randn(3, 6)
    logits[:, 2:4] = float("-inf")
    compare(logits, torch.tensor([0, 5, 1]), "6@tp", 3)


@settings(max_examples=20)
@given(st.integers(2, 20), st.integers(1, 5), st.integers(2, 4), st.data())
def test_random_sizes(classes, tokens, ranks, data):
    labels = data.draw(st.lists(st.integers(-1, classes - 1), min_size=tokens, max_size=tokens))
    labels = torch.tensor([-100 if n < 0 else n for n in labels])
    compare(torch.randn(tokens, classes), labels, f"{classes}@tp", ranks)


def loss(logits, labels, mesh):
    """Of 10 classes over two ranks."""
    group = mesh["tp"]
    ranges = [shard_range(10, group.rank, group.size)]
    return vocab_parallel_cross_entropy(logits, labels, ranges, group, classes=10)


def test_two_small_collectives_and_none_backward():
    def work(mesh):
        logits = torch.randn(7, 5, requires_grad=True)
        with count_collectives() as calls:
            loss(logits, torch.arange(7), mesh).backward()
        return counts(calls), sum(c.bytes for c in calls)

    assert run_ranks(2, work) == [({"all_reduce": 2}, 3 * 7 * 4)] * 2


def test_wrong_labels():
    def work(mesh):
        with pytest.raises(IndexError, match="Target 10 is out of bounds"):
            loss(torch.randn(1, 5), torch.tensor([10]), mesh)

    run_ranks(2, work)
