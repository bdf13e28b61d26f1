"""A plan that is read is proven again: what holds is accepted, what does not is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import shardwright
from shardwright.errors import PlanError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.prove.prover import Prover
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests.planner.equal import TRACED, assert_equal, features, planned
from tests.planner.mlps import WIDTH, Mlp
from tests.planner.modules import Fused

Edit = Callable[[dict[str, Any]], None]


def edited(plan: Plan, edit: Edit) -> Plan:
    """An edited plan with a fresh digest, as somebody would write it who means it."""
    data = json.loads(plan.to_json())
    edit(data)
    return Plan.from_json(json.dumps(data)).sealed()


def without_sum(data: dict[str, Any]) -> None:
    data["modules"]["down"]["outputs"] = []


def without_gradient(data: dict[str, Any]) -> None:
    data["modules"]["up"]["inputs"] = []


def bias_on_each_rank(data: dict[str, Any]) -> None:
    """It would be added twice."""
    data["modules"]["down"]["parameters"].pop("bias")


def other_columns(data: dict[str, Any]) -> None:
    """Its columns in two halves: those of the other module's rows are in one piece."""
    data["modules"]["down"]["parameters"]["weight"]["placement"] = "64, 2*64@tp"


@pytest.mark.parametrize("edit", [without_sum, without_gradient, bias_on_each_rank, other_columns])
def test_what_would_compute_something_else_is_refused(edit: Edit) -> None:
    """Though shapes are right on each rank."""
    model = Mlp().double()
    plan = planned(model, features(WIDTH), 2)
    wrong = edited(plan, edit)
    assert wrong.unedited() is wrong
    with pytest.raises(AssertionError):
        assert_equal(model, features(WIDTH), wrong, collectives=False)
    with pytest.raises(PlanError, match="the plan does not hold: |which no plan of this model can"):
        Prover(model, features(WIDTH)(*TRACED)).prove(wrong)


def test_what_computes_the_same_in_another_way_is_accepted() -> None:
    """The whole of one module: figures follow."""
    model = Mlp().double()
    plan = planned(model, features(WIDTH), 2)
    other = edited(plan, lambda data: data["modules"].clear())
    prover = Prover(model, features(WIDTH)(*TRACED))
    with pytest.raises(
        PlanError, match=r"predicted\.collectives is .*, and should be \[\]; `shardwright c"
    ):
        prover.prove(other)
    found = prover.prove(other, figures=False).plan
    assert found.modules == {} and found.predicted.collectives == []
    assert found.predicted.parameter_bytes == [found.predicted.unsharded_bytes] * 2
    assert_equal(model, features(WIDTH), found)
    assert prover.prove(found).plan == found


def test_keys_that_follow_from_others() -> None:
    """Each that the runtime acts on is what the planner would write, or the plan is refused."""
    model = Fused("chunk").double()
    plan = planned(model, features(WIDTH), 2)
    prover = Prover(model, features(WIDTH)(*TRACED))
    assert prover.prove(plan).plan == plan
    edits: list[tuple[str, Edit]] = [
        ("modules.qkv.layer", lambda d: d["modules"]["qkv"].update(layer="LocalModule")),
        ("modules.nothing", lambda d: d["modules"].update(nothing={})),
        ("attributes", lambda d: d["modules"]["qkv"].update(attributes={"in_features": "64"})),
    ]
    for key, edit in edits:
        with pytest.raises(PlanError, match=key):
            prover.prove(edited(plan, edit))


GUARDS: dict[str, Edit] = {
    "calls is": lambda d: d["calls"].clear(),
    r"calls\.0\.outputs is": lambda d: d["calls"][0]["outputs"].append("1"),
    r"calls\.0\.inputs is": lambda d: d["calls"][0]["inputs"].append("attention_mask"),
    r"calls\.0\.module is": lambda d: d["calls"][0].update(module="qkv"),
    r"modules\.qkv\.gives is": lambda d: d["modules"]["qkv"]["gives"].clear(),
    r"modules\.qkv\.gives\.0\.placement is": lambda d: d["modules"]["qkv"]["gives"][0].update(
        placement="?, ?, 96"
    ),
    r"modules\.o\.takes\.0\.slot is": lambda d: d["modules"]["o"]["takes"][0].update(slot="x"),
    r"modules\.o\.takes is": lambda d: d["modules"]["o"]["takes"].extend(
        d["modules"]["o"]["takes"]
    ),
}


@pytest.mark.parametrize("key", GUARDS)
def test_what_is_said_of_other_calls_follows_from_the_rest(key: str) -> None:
    """An edit of it is refused; a plan of an older release, which lacks it, is completed."""
    model = Fused("chunk").double()
    plan = planned(model, features(WIDTH), 2)
    wrong = edited(plan, GUARDS[key])
    prover = Prover(model, features(WIDTH)(*TRACED))
    with pytest.raises(PlanError, match=f"{key} .*; `shardwright check --accept` writes what it f"):
        prover.prove(wrong)
    assert prover.prove(wrong, figures=False).plan == plan


def test_a_model_with_other_weights_of_like_shape_is_another() -> None:
    plan = planned(Mlp().double(), features(WIDTH), 2)
    with pytest.raises(PlanError, match="the plan is for a Mlp, not a Fused"):
        Prover(Fused("chunk").double(), features(WIDTH)(*TRACED)).prove(plan)
    with pytest.raises(PlanError, match="the plan is for parameters of 'float64', the model has f"):
        Prover(Mlp(), features(WIDTH)(*TRACED)).prove(plan)


def test_an_edit_is_noticed_where_a_plan_is_applied() -> None:
    plan = planned(Mlp().double(), features(WIDTH), 2)
    data = json.loads(plan.to_json())
    without_sum(data)
    stale = Plan.from_json(json.dumps(data))
    old = plan.model_copy(update={"digest": ""})
    for wrong, why in ((stale, "was edited since it was written"), (old, "carries no digest")):
        model: nn.Module = Mlp().double()
        with pytest.raises(PlanError) as error:
            apply(model, wrong, Mesh.shape_only({"tp": (0, 2)}))
        assert str(error.value) == (
            f"the plan {why}: `shardwright check --accept PLAN.JSON MODEL` proves that it is right "
            "for the model, and writes its digest"
        )


def test_the_digest_is_of_what_a_plan_says() -> None:
    """Spaces and the order of keys are not."""
    plan = planned(Mlp(), features(WIDTH), 2)
    assert len(plan.digest) == 64 and plan.sealed() == plan
    other = dict(reversed(json.loads(plan.to_json()).items()))
    assert Plan.from_json(json.dumps(other)).unedited() == plan
    assert plan.noted("x").digest != plan.digest


def test_check_in_python() -> None:
    model = Mlp().double()
    plan = planned(model, features(WIDTH), 2)
    args = features(WIDTH)(*TRACED)
    assert shardwright.check(plan, model, args=args) == plan
    stale = plan.model_copy(update={"digest": "0"})
    with pytest.raises(PlanError, match="was edited since it was written"):
        shardwright.check(stale, model, args=args)
    assert shardwright.check(stale, model, args=args, accept=True) == plan
