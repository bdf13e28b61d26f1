"""Parameters that code cuts by the length of its input, as long convolutions do.

What is cut off in the traced call (`table[n:]`) is used in a longer one: no rank may have a part of
it. Where the cut meets the sequence, that is seen anyway. Here it ends in an FFT.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planning import plan
from tests.ranks import run_ranks

LONGEST = 64

CUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slice": lambda w, n: w[:n],
    "narrow": lambda w, n: w.narrow(0, 0, n),
    "split": lambda w, n: w.split(n)[0],
    "from the end": lambda w, n: w[-n:],
    "an element": lambda w, n: w[n - 1].view(1),
    "select": lambda w, n: w.select(0, n - 1).view(1),
    "tensor_split": lambda w, n: w.tensor_split([n])[0],
    "within a function": lambda w, n: torch.fft.rfft(w, n=n).abs(),
    "half": lambda w, n: w[: (n + 1) // 2],
    "next power of two": lambda w, n: w[: 1 << (n - 1).bit_length()],
    "logarithm": lambda w, n: w[: 2 ** math.ceil(math.log2(n))],
}


class Adds(nn.Module):
    def __init__(self, cut: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.cut, self.table = cut, nn.Parameter(torch.randn(LONGEST))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.cut(self.table, x.shape[1]), n=150)
        return self.down(self.up(x).relu() + spectrum.abs().sum())


class Hyena(nn.Module):
    """A long convolution: a filter as long as the input, by FFTs of twice its length."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 16)
        self.filter, self.bias = (
            nn.Parameter(torch.randn(16, LONGEST)),
            nn.Parameter(torch.ones(16)),
        )
        self.decay = nn.Buffer(torch.linspace(0, 1, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = self.up(x).chunk(3, -1)
        taps = self.filter[:, :n] * torch.exp(-self.decay[:n])
        u = (k * v).mT
        found = torch.fft.rfft(u, n=2 * n) * (torch.fft.rfft(taps, n=2 * n) / (2 * n))
        y = torch.fft.irfft(found, n=2 * n, norm="forward")[..., :n] + u * self.bias[:, None]
        return self.down(q * y.mT)


def assert_equal_at_any_length(model: nn.Module) -> None:
    found = plan(model, 2, args=(torch.randn(3, 19, 16).double(),))
    assert "down" in found.modules
    for n in (7, 32, LONGEST, 1):
        x = torch.randn(2, n, 16).double()
        want = model(x)

        def rank(mesh: Mesh, x: Tensor = x) -> Tensor:
            return apply(copy.deepcopy(model), found, mesh)(x)

        for got in run_ranks(2, rank):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("how", CUTS)
def test_what_is_cut_off_stays_whole(how: str) -> None:
    assert_equal_at_any_length(Adds(CUTS[how]).double())


def test_a_long_convolution() -> None:
    assert_equal_at_any_length(Hyena().double())


class Placed(Adds):
    """Beside a table of places, which is as long as the input where it is added to it."""

    def __init__(
        self, cut: Callable[[Tensor, int], Tensor], places: Callable[[Tensor, int], Tensor]
    ) -> None:
        super().__init__(cut)
        self.at, self.places = nn.Parameter(torch.randn(LONGEST, 16)), places

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places(self.at, x.shape[1]))


@pytest.mark.parametrize("places", ["slice", "split", "from the end"])
@pytest.mark.parametrize(
    "cut", [lambda w, n: w[:n], lambda w, n: w[n:], lambda w, n: w[: int(float(n))]]
)
def test_a_length_that_a_table_has_as_well_varies(
    cut: Callable[[Tensor, int], Tensor], places: str
) -> None:
    """The length is a part of a parameter's dim then. It is another part in the next call."""
    assert_equal_at_any_length(Placed(cut, CUTS[places]).double())


def test_padding_by_a_length() -> None:
    """The other way round: a length says how much is added."""
    assert_equal_at_any_length(Adds(lambda w, n: F.pad(w, (n, n))).double())


def test_what_is_cut_by_sizes_of_the_model_is_split() -> None:
    """Such as the halves of a projection: as wide as another tensor is."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.both, self.down = nn.Linear(16, 32), nn.Linear(16, 64), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            h, both = self.up(x), self.both(x)
            return self.down(h * both[..., : h.shape[-1]] + both[..., h.shape[-1] :])

    model = Halves().double()
    found = plan(model, 2, args=(torch.randn(3, 19, 16).double(),))
    assert found.modules["both"].parameters["weight"].placement == "32@tp + 32@tp, 16"


class HeadedPlaces(nn.Module):
    """A table with a row for each head and place, heads first: as many heads as others split."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.heads, self.table = how, 4, nn.Parameter(torch.randn(4 * LONGEST, 8))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if self.how == "slice":
            rows = self.table[: self.heads * n]
        else:
            rows = self.table.split([self.heads * n, self.heads * (LONGEST - n)])[0]
        y = self.up(x).unflatten(-1, (self.heads, 8)).transpose(1, 2)
        y = y * rows.view(self.heads, n, 8)
        return self.down(y.transpose(1, 2).flatten(2).relu())


@pytest.mark.parametrize("how", ["slice", "split"])
def test_rows_of_heads_and_places(how: str) -> None:
    assert_equal_at_any_length(HeadedPlaces(how).double())


class TurnedByInput(nn.Module):
    """A fused projection; queries and keys are turned by an input with their own pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.up = 4, nn.Linear(16, 3 * 32 + 24)
        self.down = nn.Linear(32 + 24, 16)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        qkv, rest = self.up(x).split([96, 24], -1)
        q, k, v = qkv.view(*x.shape[:2], 3, self.heads, 8).permute(2, 0, 3, 1, 4)

        def turned(t: Tensor) -> Tensor:
            pairs = t.reshape(*t.shape[:-1], -1, 1, 2)
            found = turns[..., 0] * pairs[..., 0] + turns[..., 1] * pairs[..., 1]
            return found.reshape(*t.shape)

        y = F.scaled_dot_product_attention(turned(q), turned(k), v).transpose(1, 2).flatten(2)
        return self.down(torch.cat([y, F.gelu(rest)], -1))


@pytest.mark.parametrize("tp", [2, 3])
def test_an_input_as_wide_as_parts_of_a_fused_weight(tp: int) -> None:
    """Its sizes are not taken for those at which the weight is cut."""

    def inputs(batch: int, n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, n, 16).double(), torch.randn(batch, 1, n, 4, 2, 2).double()

    model = TurnedByInput().double()
    found = plan(model, tp, args=inputs(3, 19))
    assert "tp" in found.modules["up"].parameters["weight"].placement
    for n in (7, 32):
        given = inputs(2, n)
        want = model(*given)

        def rank(mesh: Mesh, given: tuple[Tensor, Tensor] = given) -> Tensor:
            return apply(copy.deepcopy(model), found, mesh)(*given)

        for got in run_ranks(tp, rank):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
