"""A head with fewer classes than features gives whole scores, with labels as without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import shardwright
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.marks import long
from tests.planner.equal import Inputs, assert_equal, planned
from tests.planner.mlps import WIDTH, Mlp
from tests.ranks import run_ranks


class Classifier(nn.Module):
    """Scores, and their loss."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = Mlp(), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.body(x).mean(1))
        return F.cross_entropy(scores, labels), scores


def labelled(classes: int) -> Inputs:
    return lambda b, t: (
        torch.randn(b, t, WIDTH, dtype=torch.float64),
        torch.randint(classes, (b,)),
    )


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("classes", [2, 3, WIDTH - 1])
def test_few_classes(classes: int, tp: int) -> None:
    """Evaluation loops read scores beside a loss: what costs so little is not kept from them."""
    model = Classifier(classes).double().eval()
    plan = planned(model, labelled(classes), tp)
    assert not deferred(plan)
    assert_equal(model, labelled(classes), plan)


def test_many_classes() -> None:
    plan = planned(Classifier(3 * WIDTH).double().eval(), labelled(3 * WIDTH), 2)
    assert deferred(plan)


@pytest.mark.parametrize(("labels", "some"), [(3, False), long(100, True)])
def test_a_model_of_transformers(labels: int, some: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes["num_labels"] = labels
    config = BertConfig(vocab_size=211, num_attention_heads=4, **sizes)
    make: Callable[..., nn.Module] = BertForSequenceClassification
    assert deferred(planning.plan(make(config), 2)) == some


def deferred(plan: shardwright.Plan) -> bool:
    """Whether some output is left split for a loss."""
    return any(c.deferred for m in plan.modules.values() for c in m.outputs)


def test_a_classifier_of_images_may_be_given_labels() -> None:
    """Those of what takes no tokens are traced without being given."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_labels": 3,
    }  # fmt: skip
    config = ViTConfig(image_size=8, patch_size=4, num_attention_heads=4, **sizes)
    model: Any = ViTForImageClassification(config).double().eval()
    plan = planning.plan(model, 2, kwargs={"pixel_values": torch.zeros(3, 3, 8, 8).double()})
    given = {"pixel_values": torch.randn(2, 3, 8, 8).double(), "labels": torch.tensor([2, 0])}
    whole = copy.deepcopy(model)  # that notes in its config which loss it computes
    want = whole(**given)
    want.loss.backward()

    def rank(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        got = local(**given)
        got.loss.backward()
        grads = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        for name, found in full_tensors(local, grads).items():
            torch.testing.assert_close(found, whole.get_parameter(name).grad, rtol=0, atol=1e-9)
        torch.testing.assert_close(got.loss, want.loss)

    run_ranks(2, rank)
