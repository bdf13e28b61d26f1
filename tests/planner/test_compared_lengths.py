"""However code compares a length, a call of another length is equal or refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import UsageError
from shardwright.planner.contract.length_comparisons import holds
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planning import plan
from tests.ranks import run_ranks


class Rolls(nn.Module):
    """With short sequences it needs all features of a tensor that else is split."""

    def __init__(self, long: Callable[[Tensor, Any], Any] = lambda x, model: True) -> None:
        super().__init__()
        self.long = long
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.conv = nn.Conv1d(32, 32, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        return self.down(h if self.long(x, self) else h.roll(1, -1))


TESTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "negative": lambda x, model: -x.shape[1] < -15,
    "difference": lambda x, model: 10 - x.shape[1] > -6,
    "half": lambda x, model: x.shape[1] > 15.5,
    "not below": lambda x, model: not x.shape[1] <= 15.5,
    "quotient": lambda x, model: (x.shape[1] / 19).is_integer(),
    "divisor": lambda x, model: math.gcd(x.shape[1], 19) == 19,
    "any": lambda x, model: any(n == 19 for n in x.shape),
    "all": lambda x, model: all(n > 15 or n == 3 or n == 2 for n in x.shape),
    "list": lambda x, model: [x.shape[1]] > [15],
    "elements": lambda x, model: x.numel() > 3 * 15 * 32,
    "bytes": lambda x, model: x.nbytes > 3 * 15 * 32 * 8,
    "sum": lambda x, model: sum(x.shape) > 15 + 3 + 32,
    "least": lambda x, model: min(x.shape[1], 16) == 16,
    "sorted": lambda x, model: sorted([x.shape[1], 15])[0] == 15,
    "convolution": lambda x, model: model.conv(x.mT).shape[-1] > 8,
    "twice": lambda x, model: torch.cat([x, x], 1).shape[1] > 30,
    "repeated": lambda x, model: x.repeat(1, 2, 1).shape[1] > 30,
    "interpolated": lambda x, model: F.interpolate(x.mT, scale_factor=2).shape[-1] > 30,
    "square root": lambda x, model: math.sqrt(x.shape[1]) > 4,
    "windows": lambda x, model: x.unfold(1, 4, 2).shape[1] > 6,
    "padded": lambda x, model: F.pad(x, (0, 0, 2, 3)).shape[1] > 20,
    "cut": lambda x, model: x[:, 2:].shape[1] > 13,
    "every second": lambda x, model: x[:, ::2].shape[1] > 8,
    "pooled": lambda x, model: F.max_pool1d(x.mT, 2).shape[-1] > 7,
    "flattened": lambda x, model: x.flatten(0, 1).shape[0] > 3 * 15,
    "bits": lambda x, model: x.shape[1].bit_length() > 4,
    "power": lambda x, model: 2 ** x.shape[1] > 2**15,
    "table": lambda x, model: {True: True, False: False}[x.shape[1] > 15],
    "text": lambda x, model: str(x.shape[1]) == "19",
    "string": lambda x, model: "19" in f"{tuple(x.shape)}",
    "in a set": lambda x, model: x.shape[1] in {16, 17, 18, 19},
    "ratio": lambda x, model: x.shape[1] / x.shape[0] > 6,
}


def is_equal(split: nn.Module, model: nn.Module, x: Tensor) -> bool:
    """Whether the split model gives what the model gives; False if it refuses the length."""
    try:
        out = split(x)
    except UsageError as error:
        assert "decides by a length" in str(error)
        return False
    torch.testing.assert_close(out, model(x), rtol=0, atol=1e-9)
    return True


@pytest.mark.parametrize("name", TESTS)
def test_equal_or_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Rolls(TESTS[name]).double()
    found = plan(model, 2, args=(torch.randn(3, 19, 32).double(),))

    def rank(mesh: Mesh) -> int:
        split, equal = apply(copy.deepcopy(model), found, mesh), 0
        for shape in ((3, 19), (2, 7), (4, 8)):
            x = torch.randn(*shape, 32, generator=torch.Generator().manual_seed(0)).double()
            equal += is_equal(split, model, x)
        return equal

    assert min(run_ranks(2, rank)) >= 1


class Doubles(Rolls):
    """Both of its paths can be split."""

    def forward(self, x: Tensor) -> Tensor:
        table = torch.ones(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
        h = torch.relu(self.up(x)) * table.sum(1)[:, None, None]
        return self.down(2 * h if self.long(x, (self, table)) else h)


def of_table(x: Tensor, given: Any) -> bool:
    return given[1].shape[1] > 30


def of_convolution(x: Tensor, given: Any) -> bool:
    return TESTS["convolution"](x, given[0])


@pytest.mark.parametrize(("test", "lengths"), [(of_table, [19]), (of_convolution, [19, 7])])
def test_code_is_split_if_both_answers_are_traced(
    test: Callable[[Tensor, Any], Any], lengths: list[int]
) -> None:
    """The trace makes a call of another length by itself where the length is one of arguments."""
    torch.manual_seed(0)
    model = Doubles(test).double()
    calls = [{"x": torch.randn(3, length, 32).double()} for length in lengths]
    found = plan(model, 2, kwargs=calls)
    assert found.modules["up"].layer == "ColumnParallelLinear"

    def rank(mesh: Mesh) -> None:
        split = apply(copy.deepcopy(model), found, mesh)
        for length in (19, 7, 8, 31):
            assert is_equal(split, model, torch.ones(3, length, 32).double())

    run_ranks(2, rank)


class Skips(nn.Module):
    """Its short calls leave a module out, whose input would have a partial gradient."""

    def __init__(self, long: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.long, self.conv = long, nn.Conv1d(32, 32, 3, 2, 1)
        self.first = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.last = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y) if self.long(x, self) else y


@pytest.mark.parametrize(
    "test", [lambda x, model: len(x[0]) > 10, TESTS["text"], TESTS["convolution"]]
)
def test_gradients_of_answers_that_are_not_traced(test: Callable[[Tensor, Any], Any]) -> None:
    torch.manual_seed(0)
    model = Skips(test).double()
    found = plan(model, 2, args=(torch.randn(3, 19, 32).double(),), phase="train")
    given = [torch.randn(2, length, 32).double() for length in (19, 7)]

    def use(local: nn.Module) -> list[dict[str, Tensor]]:
        grads = []
        for x in given:
            local.zero_grad()
            local(x).square().sum().backward()
            held = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
            grads.append(full_tensors(local, held))
        return grads

    want = use(copy.deepcopy(model))
    for got in run_ranks(2, lambda mesh: use(apply(copy.deepcopy(model), found, mesh))):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_code_has_full_tensors_if_one_answer_is_traced() -> None:
    """No argument has the length, so no call of another one is made up."""
    model = Doubles(of_convolution).double()
    found = plan(model, 2, args=(torch.randn(3, 19, 32).double(),))
    assert found.modules["up"].parameters["weight"].use == "64, 32"


class OtherLength(Rolls):
    """What it decides by at first does not matter, since the batch was small."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = torch.relu(self.up(x))
        return self.down(h.roll(1, -1) if length < 10 and batch > 5 else h)


def test_a_length_beside_another_one() -> None:
    torch.manual_seed(0)
    model = OtherLength().double()
    found = plan(model, 2, args=(torch.randn(3, 19, 32).double(),))
    x = torch.randn(6, 7, 32).double()

    run_ranks(2, lambda mesh: is_equal(apply(copy.deepcopy(model), found, mesh), model, x))


def test_negative_numbers_are_read() -> None:
    assert holds("(0 - x.shape[1]) < -5", {"x.shape[1]": 6})
    assert not holds("x.shape[1] == -1", {"x.shape[1]": 6})


@pytest.mark.parametrize("test", [of_table, TESTS["elements"]])
def test_without_time_for_another_trace_other_lengths_are_refused(
    test: Callable[[Tensor, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.planner.search.traced_model.TIMES_THE_LAST_TRACE", 1e9)
    torch.manual_seed(0)
    model = Doubles(test).double()
    found = plan(model, 2, args=(torch.randn(3, 19, 32).double(),))

    def rank(mesh: Mesh) -> list[bool]:
        split = apply(copy.deepcopy(model), found, mesh)
        lengths = (19, 7, 31)
        return [is_equal(split, model, torch.ones(3, n, 32).double()) for n in lengths]

    assert run_ranks(2, rank)[0] == [True, False, True]
