"""Complex parameters get the gradients of the whole model, as real ones do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import assert_equal, close, features, planned, weigh
from tests.ranks import run_ranks

WIDTH, MODES = 12, 4


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.cdouble))


class Spectral(nn.Module):
    """Mixes features of low frequencies. Ranks have parts of the gradient of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.weight = weights(WIDTH, WIDTH, MODES)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.before(x).mT)
        low = torch.einsum("bix,iox->box", found[..., :MODES], self.weight)
        return self.after(torch.fft.irfft(low, n=x.shape[1]).mT)


class Summed(Spectral):
    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.before(x).mT)[..., :MODES]
        return self.after((found * self.weight.sum(0)).abs().mT)


class Recurrent(nn.Module):
    """Each state turns and fades by a complex number."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.given, self.taken = weights(18), weights(18, WIDTH), weights(WIDTH, 18)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        given = x.to(self.given.dtype) @ self.given.mT
        state = torch.zeros_like(given[:, 0]) if state is None else state
        for row in given.unbind(1):
            state = state * self.turn / (1 + self.turn.abs()) + row
        return self.out((state @ self.taken.mT).real), state


@pytest.mark.parametrize("kind", [Spectral, Summed, Recurrent])
@pytest.mark.parametrize("tp", [2, 3])
def test_gradients_of_complex_parameters(kind: type[nn.Module], tp: int) -> None:
    torch.manual_seed(0)
    module = kind().double()
    plan = planned(module, features(WIDTH), tp)
    assert plan.predicted.parameter_bytes[0] < 0.6 * plan.predicted.unsharded_bytes
    assert_equal(module, features(WIDTH), plan, collectives=False)


def test_a_complex_argument_that_no_traced_call_had_is_refused() -> None:
    module = Recurrent().double()
    plan = planned(module, features(WIDTH), 2)
    state = torch.randn(2, 18, dtype=torch.cdouble)

    def work(mesh: Any) -> None:
        with pytest.raises(UsageError, match="'state' of Recurrent was given in no call"):
            apply(copy.deepcopy(module), plan, mesh)(*features(WIDTH)(2, 7), state)

    run_ranks(2, work)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_optimizers_of_complex_parameters(optimizer: Any) -> None:
    """Optimizers take them as real ones, with a dim more: a view, into which they write."""
    torch.manual_seed(0)
    model = Spectral().double()
    plan = planned(model, features(WIDTH), 2)
    batches = [features(WIDTH)(2, 7)[0] for _ in range(3)]

    def trained(net: nn.Module) -> dict[str, Tensor]:
        steps = optimizer(net.parameters(), lr=0.1, foreach=True)
        for x in batches:
            steps.zero_grad()
            weigh(net(x)).backward()
            steps.step()
        return full_tensors(net, dict(net.named_parameters()))

    want = trained(copy.deepcopy(model))
    for found in run_ranks(2, lambda mesh: trained(apply(copy.deepcopy(model), plan, mesh))):
        for name, value in want.items():
            close(found[name], value, name)
