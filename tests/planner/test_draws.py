"""Random numbers that are drawn in eval mode: ranks draw as many as each other."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planner.equal import features, planned

WIDTH, INNER = 12, 24


class Noisy(nn.Module):
    """Dropout at all times, as for estimates of uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(x).relu(), 0.3, training=True))


class Attends(Noisy):
    """The same within attention."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.up(x).view(b, t, -1, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
        return self.down(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kind", "tp", "split"),
    [
        (Noisy, 2, True),
        (Noisy, 4, True),
        (Noisy, 5, False),
        (Attends, 2, True),
        (Attends, 4, False),
    ],
)
def test_no_unequal_parts_are_drawn_for(kind: type[Noisy], tp: int, split: bool) -> None:
    """24 features are no 5 equal parts, 6 heads no 4: where elements drop, they are whole."""
    plan = planned(kind().double(), features(WIDTH), tp)
    taken = {p.slot: p.placement for p in plan.modules["down"].takes} if plan.modules else {}
    changed = {c.slot: c.source for c in plan.modules["down"].inputs} if plan.modules else {}
    assert ("@" in (taken | changed).get("input", "")) == split
    assert all(call.training for call in plan.calls)
