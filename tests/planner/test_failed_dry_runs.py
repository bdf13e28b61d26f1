"""What fails in a dry run forbids the splits near it, and no others."""

import torch
from torch import Tensor, nn

from tests.planning import plan


class Pool(nn.Module):
    """Attention of a learned query. Torch splits its fused weight with sizes in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, 64))
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.probe.expand(x.shape[0], -1, -1), x, x)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.pool = nn.Linear(64, 256), nn.Linear(256, 64), Pool()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.down(self.up(x).relu()))


def test_a_module_that_fails_does_not_change_the_others() -> None:
    modules = plan(Net(), 2, args=(torch.randn(3, 19, 64),)).modules
    assert modules["up"].parameters["weight"].placement == "256@tp, 64"
    assert modules["down"].parameters["weight"].placement == "64, 256@tp"
