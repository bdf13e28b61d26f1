"""Buffers of one integer, which code computes lengths with as with a number in an attribute."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.errors import ShardwrightError
from shardwright.runtime.api import apply
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.planner.equal import assert_equal, features, planned, weigh
from tests.ranks import run_ranks


def number(value: int) -> nn.Buffer:
    return nn.Buffer(torch.tensor(value), persistent=False)


class Padded(nn.Module):
    """A convolution that pads to full strides by numbers in buffers, as codecs of sound do."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 2 * stride, stride)
        self.kernel, self.stride = number(2 * stride), number(stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = (x.shape[-1] - self.stride) / self.stride + 1
        length = (torch.ceil(frames).to(torch.int64) - 1) * self.stride + self.kernel
        more = length - x.shape[-1]
        if max(self.stride, more) < x.shape[-1]:  # as `pad` with "reflect" wants
            x = F.pad(x, (0, more))  # pyright: ignore[reportArgumentType]
        return F.elu(self.conv(x))


def waves(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 8, length, dtype=torch.float64),)


def test_convolutions_that_pad_by_buffers_are_split_for_any_length() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Padded(8, 2), Padded(8, 3)).double()
    plan = planning.plan(module, 2, args=waves(3, 61), batch=2, seq=61)
    held = plan.predicted.parameter_bytes[0]
    assert held <= 0.55 * plan.predicted.unsharded_bytes
    for length in (12, 13, 31):
        (x,) = waves(2, length)
        want = _step(copy.deepcopy(module), x)
        ranks = run_ranks(2, lambda mesh, x=x: _step(apply(copy.deepcopy(module), plan, mesh), x))
        for got in ranks:
            for name, value in want.items():
                assert torch.allclose(got[name], value, atol=1e-12), name


def _step(local: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    output = local(x)
    weigh(output).backward()
    grads = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **full_tensors(local, grads)}


class Counting(nn.Module):
    """Does something else from the fourth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 32), nn.Linear(32, 8), number(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.down(self.up(x).relu())
        return x.cumsum(-1) if self.calls > 3 else x


class Assigning(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(x).relu())
        self.calls = self.calls + 1
        return x.cumsum(-1) if self.calls > 3 else x


class CountingWithin(nn.Module):
    """Its part counts, and it decides."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(x)
        return x.cumsum(-1) if self.part.calls > 2 else x


@pytest.mark.parametrize("kind", [Counting, Assigning, CountingWithin])
def test_numbers_that_calls_change_are_not_taken_as_known(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(kind(), nn.Linear(8, 8)).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    want = copy.deepcopy(module)
    try:
        plan = planned(module, features(8), 2)
        splits = run_ranks(2, lambda mesh: _called(apply(copy.deepcopy(module), plan, mesh), x))
    except ShardwrightError:
        return  # refused: nothing is wrong
    for call, wanted in enumerate(_called(want, x)):
        assert all(torch.allclose(split[call], wanted, atol=1e-12) for split in splits), call


def _called(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [module(x).detach() for _ in range(6)]


class ByLength(nn.Module):
    """Does something else with sequences that are shorter than its limit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.limit = nn.Linear(8, 32), nn.Linear(32, 8), number(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(h.cumsum(-1) if x.shape[1] - self.limit < 0 else h)


def test_numbers_with_lengths_are_not_taken_as_known() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(ByLength(), nn.Linear(8, 8)).double()
    plan = planned(module, features(8), 2)  # traced with 19
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    want = module(x)
    for got in run_ranks(2, lambda mesh: apply(copy.deepcopy(module), plan, mesh)(x)):
        assert torch.allclose(got, want, atol=1e-12)


class Repeated(nn.Module):
    """A block that runs its layer as often as a buffer says."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.up, self.down, self.times = nn.Linear(8, 32), nn.Linear(32, 8), number(times)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(self.times)):
            x = x + self.down(self.up(x).relu())
        return x


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Repeated(times) for times in (1, 1, 2, 2, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_blocks_with_other_numbers_are_other_kinds() -> None:
    torch.manual_seed(0)
    module = Stacked().double()
    assert_equal(module, features(8), planned(module, features(8), 2))
