"""Modules that change in place what they are given: whoever gave it sees that, on ranks too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import close, features, planned, randomize, weigh
from tests.ranks import run_ranks


class Centres(nn.Module):
    """It gives nothing: what it was given is changed."""

    def forward(self, h: Tensor) -> None:
        h.sub_(h.mean(-1, keepdim=True))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.centres = nn.Linear(12, 48), nn.Linear(48, 12), Centres()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.centres(h)
        return self.down(h)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> None:
        x.add_(self.down(self.up(x.clone()).relu()))


class Added(nn.Module):
    """Blocks that add to the residual in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adds() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            layer(x)
        return x * 2


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 24), nn.Linear(12, 24)

    def forward(self, x: Tensor, out: Tensor) -> None:
        out[..., :24] = self.a(x)
        out[..., 24:] = self.b(x).relu()


class Filled(nn.Module):
    """A module that writes into parts of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fills = Fills()

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(*x.shape[:2], 48)
        self.fills(x, out)
        return out.sum(-1)


class Given(nn.Module):
    """What the user gave."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        h = self.up(x).relu()
        more[:, 0] = h.mean()
        return self.down(h)


class Activated(nn.Module):
    """What it goes around with is what the activation left."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.act = nn.Linear(12, 12), nn.ReLU(inplace=True)
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        h = self.act(x)
        return self.down(self.up(h).tanh()) + x


class GivesBack(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        h.sub_(h.mean(-1, keepdim=True))
        return h


class GivenBack(Centred):
    """Code goes on with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = GivesBack()


class Scaled(nn.Module):
    """A view that a module gives is changed in place, and then its base is read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.flat = nn.Linear(12, 48), nn.Linear(48, 12), nn.Flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        flat = self.flat(h)
        flat *= flat.mean(-1, keepdim=True)
        return self.down(h)


class Asked(nn.Module):
    """A method that is not forward sets an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Encodes()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.encode(x)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def encode(self, x: Tensor) -> Tensor:
        self.kept = self.up(x).relu()
        return self.down(self.kept)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", [Centred, Added, Filled, Given, Activated, GivenBack, Asked])
def test_it_is_seen_outside(kind: Callable[[], nn.Module], tp: int) -> None:
    module = kind().double()
    inputs = features(12)
    takes = 2 if kind is Given else 1
    plan = planned(copy.deepcopy(module), lambda b, t: inputs(b, t) * takes, tp)
    randomize(module)
    given = [inputs(2, 7)[0] for _ in range(takes)]

    def called(local: nn.Module) -> tuple[list[Any], dict[str, Tensor]]:
        args = [x.clone() for x in given]
        output = local(*args)
        seen = [m.kept for m in local.modules() if isinstance(m, Encodes)]
        found = [output, *args, *seen]
        weigh([x for x in found if x.requires_grad]).backward()
        grads = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        return found, full_tensors(local, grads)

    want, want_grads = called(copy.deepcopy(module))

    def work(mesh: Mesh) -> None:
        found, grads = called(apply(copy.deepcopy(module), plan, mesh))
        for one, other in zip(found, want, strict=True):
            close(one, other, "what was given or seen")
        assert grads.keys() == want_grads.keys()
        for name, grad in want_grads.items():
            close(grads[name], grad, name)

    run_ranks(tp, work)
    assert max(plan.predicted.parameter_bytes) < plan.predicted.unsharded_bytes * 0.6


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.up, self.down = Scaled(), nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.scaled(x)).relu())


def test_views_that_modules_give_are_not_changed_unseen() -> None:
    inputs = features(12)
    with pytest.raises(ModelError, match="Scaled: it changes in place the input or output"):
        planned(Scaled().double(), inputs, 2)
    module = Around().double()
    plan = planned(copy.deepcopy(module), inputs, 2)
    assert "scaled.up" not in plan.modules  # it stays whole; the others are split
    assert plan.modules["up"].parameters["weight"].placement == "48@tp, 12"
    randomize(module)
    (x,) = inputs(2, 7)
    want = module(x)
    run_ranks(2, lambda mesh: close(apply(copy.deepcopy(module), plan, mesh)(x), want, "output"))
