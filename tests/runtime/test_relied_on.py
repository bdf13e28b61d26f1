"""What is computed of parameters of a split model, and its gradient: torch's rules, or whole."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import shardwright
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks

X = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)).double()


class Model(nn.Module):
    """Rows, columns, and rows of two halves are split; of 32 three ranks have uneven shares."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(12, 48), nn.Linear(24, 12)
        self.up, self.back = nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, dim=-1)
        x = x + self.down(a.tanh() * b)
        return x + self.back(self.up(x).relu())


torch.manual_seed(0)
BASE = Model().double()


planned = planning.Once(lambda tp: planning.plan(copy.deepcopy(BASE), tp, args=(X,)), 2, 3)


COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "huber": lambda p: F.huber_loss(p, p * 3),
    "smooth l1": lambda p: F.smooth_l1_loss(p, p * 3),
    "cross entropy": lambda p: F.binary_cross_entropy(p.sigmoid(), (p > 0).double()),
    "squares": lambda p: F.mse_loss(p, p + 1),
    "divergence": lambda p: F.kl_div(p.log_softmax(1), p.softmax(1), reduction="batchmean"),
    "least": lambda p: p.amin(),
    "greatest": lambda p: (p.amax(), p.max(0), p.norm(float("inf"))),
    "places": lambda p: (p.argmax(), p.argmax(0), p.argmin(1)),
    "norms": lambda p: (p.norm(), p.norm(1), p.norm(dim=0), p.norm(dim=1)),
    "spread": lambda p: (p.std(), p.var(0), p.var(1), p.mean(), p.mean(0)),
    "orders": lambda p: (p.sort(0), p.topk(3, 0), p.median(0), p.cumsum(0), p.cumsum(1)),
    "products": lambda p: (p @ p.T, p.T @ p, torch.einsum("ij,ij->", p, p)),
    "shapes": lambda p: (p.view(-1), p.reshape(-1, 4), p.T, p.flip(0), p.roll(1, 0), p.tril()),
    "rows": lambda p: (p[3], p[-1], p[2:7], p[::3], p[:, 2], p.chunk(2), p.unbind(0)),
    "vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "filter": lambda p: F.conv1d(p[None], p[:1, None, :3].expand(4, p.shape[0], 3)),
    "singular values": lambda p: torch.linalg.svdvals(p),
    "normalized": lambda p: (F.normalize(p, dim=0), p.softmax(0), F.cosine_similarity(p, p + 1)),
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_of_parts_is_that_of_the_whole(name: str, tp: int) -> None:
    compute = COMPUTED[name]

    def computed(p: Any) -> list[Tensor]:
        p = p.detach().requires_grad_()
        given = [t for t in tree_leaves(compute(p)) if isinstance(t, Tensor)]
        loss: Any = sum((t * t + t).sum() for t in given if t.is_floating_point())
        if isinstance(loss, Tensor):
            given += torch.autograd.grad(loss, p)
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in given]

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(BASE), planned(tp), mesh)
        for path in ("both.weight", "down.weight", "up.weight", "back.weight"):
            want = computed(BASE.get_parameter(path))
            torch.testing.assert_close(computed(split.get_parameter(path)), want, msg=path)

    run_ranks(tp, work)
