"""Parameters that model code changes in place, once or in each call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import assert_equal, features, planned
from tests.planner.mlps import WIDTH, Mlp
from tests.ranks import run_ranks


class Rescaled(nn.Module):
    """Halves a matrix, for inference say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.done = Mlp(), Mlp(), False

    def rescale(self, weight: Tensor) -> None:
        weight.div_(2).mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            with torch.no_grad():
                for mlp in (self.first, self.second):
                    self.rescale(mlp.down.weight)
            self.done = True
        return self.second(x + self.first(x))


class FewRows(Rescaled):
    """Changes the first rows only."""

    def rescale(self, weight: Tensor) -> None:
        weight[:5].mul_(2)


class ByOther(Rescaled):
    """Changes a matrix by another one."""

    def rescale(self, weight: Tensor) -> None:
        weight.sub_(self.first.up.weight.mean())


class Bias(Rescaled):
    """What is Partial in use may not be written so."""

    def rescale(self, weight: Tensor) -> None:
        super().rescale(weight)
        for mlp in (self.first, self.second):
            mlp.down.bias.mul_(2)


@pytest.mark.parametrize(
    ("make", "split"), [(Rescaled, True), (FewRows, True), (ByOther, True), (Bias, None)]
)
def test_equals_the_whole_model(make: type[Rescaled], split: bool | None) -> None:
    """What is changed element by element is split all the same; else it stays replicated."""
    model = make().double()
    plan = planned(model, features(WIDTH), 2)
    split_found = {
        name
        for name, module in plan.modules.items()
        if "weight" in module.parameters and "@" in module.parameters["weight"].placement
    }
    assert split is None or split == ({"first.down", "second.down"} <= split_found)
    # Predicted are gradients of a gathered weight, of which code without gradients has none.
    assert_equal(model, features(WIDTH), plan, collectives=make is not ByOther)


def test_what_was_changed_is_saved_changed() -> None:
    """The local part is what was written."""
    model = Rescaled().double()
    plan = planned(model, features(WIDTH), 2)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    (x,) = features(WIDTH)(2, 7)

    def rank(mesh: Mesh) -> dict[str, Tensor]:
        local = apply(copy.deepcopy(model), plan, mesh)
        local(x)
        return full_tensors(local, dict(local.named_parameters()))

    for found in run_ranks(2, rank):
        for name, value in before.items():
            times = 1.5 if name.endswith("down.weight") else 1.0
            assert torch.equal(found[name], value * times), name


class Teacher(nn.Module):
    """A teacher that follows its student, in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def follow(self, mine: Tensor, other: Tensor) -> None:
        mine.mul_(0.9).add_(other, alpha=0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for mine, other in pairs:
                self.follow(mine, other)
        return self.student(x), self.teacher(x)


class Copies(Teacher):
    def follow(self, mine: Tensor, other: Tensor) -> None:
        mine.copy_(0.9 * mine + 0.1 * other)


class Replaces(Teacher):
    def follow(self, mine: Tensor, other: Tensor) -> None:
        mine.data = torch.lerp(mine, other, 0.1)


class Transposed(Teacher):
    """Each matrix follows the other one, which is sharded along the other dim."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.teacher.up.weight.lerp_(self.student.down.weight.T, 0.1)
            self.teacher.down.weight.lerp_(self.student.up.weight.T, 0.1)
        return self.student(x), self.teacher(x)


class Learns(Teacher):
    """What is added to the weight comes from the data."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.student.up(x)
        with torch.no_grad():
            self.teacher.up.weight.add_(torch.einsum("bto, bti -> oi", h, x), alpha=0.01)
            self.teacher.down.weight.copy_(self.teacher.up.weight.T)
        return self.student.down(h.relu()), self.teacher(x)


@pytest.mark.parametrize(
    ("make", "most"),
    [(Teacher, 0.52), (Copies, 0.52), (Replaces, 0.52), (Transposed, 0.77), (Learns, 0.77)],
)
def test_a_teacher_that_follows_its_student(make: type[Teacher], most: float) -> None:
    """Outputs of two steps, what was learnt, and what the teacher is then."""
    model = make().double()
    plan = planned(model, features(WIDTH), 2, phase="train")
    assert plan.predicted.parameter_bytes[0] <= most * plan.predicted.unsharded_bytes
    batches = [features(WIDTH)(2, 7)[0] for _ in range(2)]

    def steps(local: nn.Module) -> list[Tensor]:
        outputs: list[Tensor] = []
        optimizer = torch.optim.SGD([p for p in local.parameters() if p.requires_grad], 0.01)
        for x in batches:
            outputs += local(x)
            outputs[-2].square().sum().backward()
            optimizer.step()
        return outputs

    whole = copy.deepcopy(model)
    want, state = steps(whole), dict(whole.named_parameters())

    def rank(mesh: Mesh) -> tuple[list[Tensor], dict[str, Tensor]]:
        local = apply(copy.deepcopy(model), plan, mesh)
        return steps(local), full_tensors(local, dict(local.named_parameters()))

    for outputs, found in run_ranks(2, rank):
        torch.testing.assert_close(outputs, want, rtol=0, atol=1e-9)
        torch.testing.assert_close(found, state, rtol=0, atol=1e-9)


class Held(nn.Module):
    """Writes to a weight, and goes on with the tensor that it had before."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(30, WIDTH, max_norm=0.5), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mlp.up.weight
        with torch.no_grad():
            weight.mul_(0.9)
        h = torch.nn.functional.linear(x, weight).relu()
        return self.mlp.down(h) + self.words(torch.arange(x.shape[1]) % 30)


@pytest.mark.parametrize("tp", [2, 3])
def test_a_weight_is_written_while_code_holds_it(tp: int) -> None:
    model = Held().double()
    plan = planned(model, features(WIDTH), tp, phase="train")
    assert_equal(model, features(WIDTH), plan)
