"""One module called for tensors of different shapes: each call does as its tensor needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ModulePlan, Redistribution
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.modules.layers import apply_module
from tests.planner.equal import assert_equal, features, planned

WIDTH, HEADS = 16, 4


class Feed(nn.Module):
    """A dropout behind each matrix; locally both tensors are equally wide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.norm = nn.Dropout(0.0), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.up(x).relu())
        return self.norm(self.dropout(self.down(y)) + x)


class Attention(nn.Module):
    """A dropout for the weights and for what is added: only there can a sum over ranks be made."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Parameter(nn.init.normal_(nn.Linear(WIDTH, WIDTH).weight).view(WIDTH, HEADS, -1))
            for _ in range(4)
        )
        self.dropout, self.norm = nn.Dropout(0.0), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ w.flatten(1)).view(*x.shape[:2], -1, 4) for w in (self.q, self.k, self.v))
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
        mixed = self.dropout(scores.softmax(-1)) @ v.transpose(1, 2)
        out = mixed.transpose(1, 2).flatten(2) @ self.o.flatten(1).transpose(0, 1)
        return self.norm(self.dropout(out) + x)


class Around(nn.Module):
    """A root, at whose own boundaries nothing changes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("make", [Feed, Attention])
def test_every_matrix_is_split(make: Callable[[], nn.Module]) -> None:
    """And all comes out as without a split."""
    model = Around(make()).double()
    plan = planned(model, features(WIDTH), 2)
    split = {
        f"{name}.{p}"
        for name, module in plan.modules.items()
        for p, at in module.parameters.items()
        if "@" in at.placement
    }
    whole = {n for n, p in model.named_parameters() if p.dim() > 1} - split
    assert not whole, plan.to_json()
    assert_equal(model, features(WIDTH), plan)


def test_tensors_of_one_slot_are_told_apart_by_their_number_of_dims() -> None:
    model = Around(Attention()).double()
    plan = planned(model, features(WIDTH), 2)
    dropout = plan.modules["inner.dropout"]
    changes = dropout.inputs or dropout.outputs
    assert sorted(len(parse(c.source).dims) for c in changes) == [3, 4]
    assert {c.source == c.target for c in changes} == {True, False}


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (("?, 4@tp", "?, ?, 4@tp"), "should have 2 or 3 dims here, not 1"),
        (("?, 4@tp", "?, 8@tp"), "two ways for tensor 'input'"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(sources: tuple[str, str], message: str) -> None:
    spec = ModulePlan(inputs=[Redistribution(slot="input", source=s, target=s) for s in sources])
    module = nn.Dropout()
    with pytest.raises(PlanError, match=message):
        apply_module(module, spec, Mesh.shape_only({"tp": (0, 2)}))
        module(torch.zeros(2))
