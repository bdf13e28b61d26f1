"""Functions that a model is given: run on the parts of a rank, so no others than were traced."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.errors import UsageError
from shardwright.planner.contract.plain_values import code_name
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor, then: Any = None) -> Tensor:
        h = self.up(x)
        for each in then if isinstance(then, list) else [then]:
            h = h if each is None else each(h)
        return self.down(h)


class Scaled:
    """An object to call."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, h: Tensor) -> Tensor:
        return h.sin() * self.scale


def centred(h: Tensor) -> Tensor:
    return h - h.mean(-1, keepdim=True)


def squared(power: int) -> Callable[[Tensor], Tensor]:
    return lambda h: h**power


OTHERS = [centred, partial(torch.softmax, dim=-1), Scaled(3.0), nn.Softmax(-1), squared(3)]


@pytest.mark.parametrize(
    "given",
    [
        lambda: torch.relu,
        lambda: squared(2),
        lambda: Scaled(2.0),
        lambda: partial(torch.softmax, dim=1),
        lambda: [nn.ReLU()],
        lambda: None,
    ],
    ids=["function", "lambda", "object", "partial", "module in a list", "none"],
)
def test_those_that_were_traced_are_right_and_others_refused(given: Any) -> None:
    torch.manual_seed(0)
    base = Calling().double().eval()
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    plan = planning.plan(copy.deepcopy(base), 2, kwargs={"x": x, "then": given()})

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        torch.testing.assert_close(split(x, given()), base(x, given()), rtol=0, atol=1e-9)
        for other in OTHERS:
            with pytest.raises(UsageError, match="plan with example inputs"):
                split(x, [other] if isinstance(given(), list) else other)

    run_ranks(2, work)


def test_a_function_that_calls_itself_has_a_name() -> None:
    def nested(scale: float) -> Callable[[Any], Any]:
        def one(n: Any, *, by: float = scale) -> Any:
            return other(n) * by

        def other(n: Any) -> Any:
            return one(n)

        return one

    assert code_name(nested(1)) == code_name(nested(1)) != code_name(nested(2))
