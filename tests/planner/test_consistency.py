"""Plans that contradict themselves, or have no end: refused in one line before torch sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract.mesh import with_sub_axes
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.modules.apply_modules import apply_modules
from tests.planner.equal import features, planned
from tests.planner.mlps import WIDTH, Mlp


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(Mlp(), features(WIDTH), 2)


def refused(plan: Plan, **keys: Any) -> str:
    """What is said of a plan with other keys."""
    with pytest.raises(PlanError) as error:
        Plan.from_json(json.dumps(json.loads(plan.to_json()) | keys), where="p.json")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    return str(error.value).removeprefix("p.json is not valid: ")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"mesh": {"tp": 0}}, "mesh: tp must be at least 1, not 0"),
        ({"mesh": {"tp": 10**9}}, "mesh: tp=1000000000 is too large: 65,536 ranks are the most"),
        ({"mesh": {".1": 2}}, "mesh: '.1' is no name for a mesh dim: letters, digits and _"),
        ({"mesh": {"a": 2}}, "mesh: it has no dim 'tp', whose ranks split the weights"),
        ({"mesh": {"tp": 2**16, "dp": 2}}, "mesh: 131,072 ranks, and 65,536 are the most"),
        ({"batch_dims": ["tp"]}, "batch_dims: ['tp'], but the mesh dims beside tp and cp are []"),
        ({"sub_axes": {"tp": [1] * 25 + [2]}}, "sub_axes: 26 sub-axes: a mesh dim has none, or 2"),
        ({"sub_axes": {"tp": [1, 2]}}, "sub_axes: sub-axes of [1, 2] do not make a mesh dim of 2"),
        ({"sub_axes": {"dp": [2, 2]}}, "sub_axes: 'dp' splits no weights"),
        ({"mesh": {"tp": 4}}, "predicted.parameter_bytes: of 2 ranks, and there are 4"),
        ({"mesh": {"tp": "2"}}, "mesh.tp: Input should be a valid integer"),
    ],
)
def test_meshes(plan: Plan, keys: dict[str, Any], text: str) -> None:
    assert refused(plan, **keys).startswith(text)


def test_sub_axes_of_any_number_take_no_time() -> None:
    with pytest.raises(PlanError, match="26 sub-axes"):
        with_sub_axes({"tp": (0, 2)}, {"tp": [1] * 25 + [2]})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": 0}, "workload.batch: Input should be greater than or equal to 1"),
        ({"batch": 10**30}, "workload.batch: Input should be less than or equal to 1099511627776"),
        ({"phases": {}}, "workload.phases: there are none"),
        ({"replicas": 3}, "workload.replicas: 3, the mesh has 1"),
    ],
)
def test_workloads(plan: Plan, change: dict[str, Any], text: str) -> None:
    load = json.loads(plan.to_json())["workload"] | change
    assert refused(plan, workload=load).startswith(text)


def of_module(plan: Plan, **keys: Any) -> str:
    """What is said of a plan with other keys in the entry of `up`."""
    modules = json.loads(plan.to_json())["modules"]
    return refused(plan, modules={**modules, "up": modules["up"] | keys})


def test_what_stays_as_it_is_changes_nothing(plan: Plan) -> None:
    text = of_module(plan, layer="Unchanged")
    assert text.startswith("modules.up.layer: an Unchanged module changes nothing")


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ("²", "cannot read placement '²'"),
        ("(" * 3000 + "1" + ")" * 3000, "cannot read placement '(((("),
        ("9" * 5000 + ", 64", "cannot read placement '9999"),
        ("1 + " * 30_000 + "1", "a placement of 120,001 characters"),
        ("?, 64", "'?, 64' leaves a size open"),
        ("128, 64 | partial tp", "'128, 64 | partial tp' is a Partial parameter"),
        ("64@tp, 64", "'64@tp, 64' has shape [64, 64], and the parameter [128, 64]"),
        ("128@tp, 64@tp", "placement '128@tp, 64@tp' uses mesh dim tp twice"),
        ("2@tp*64@tp, 64", "'2@tp*64@tp, 64' splits a dim over tp twice"),
        ("128@dp, 64", "'128@dp, 64': there is no mesh dim 'dp' that splits weights"),
        ("128@tp.0, 64", "'128@tp.0, 64': there is no mesh dim 'tp.0' that splits weights"),
        ("1099511627776*2@tp, 64", "'1099511627776*2@tp, 64': too finely split"),
    ],
)
def test_placements_of_parameters(plan: Plan, placement: str, text: str) -> None:
    found = of_module(plan, parameters={"weight": {"placement": placement}})
    assert found.startswith(f"modules.up.parameters.weight: {text}")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"target": "?, 64"}, "from '?, ?, 64' to '?, 64': not the same number of dims"),
        ({"target": "?, ?, 63"}, "from '?, ?, 64' to '?, ?, 63': 64 elements become 63"),
        ({"slot": ""}, "slot '' names no tensor"),
        ({"slot": "*²"}, "slot '*²' names no tensor"),
        ({"before": "x"}, "before: 'x' names no tensor of a module around"),
    ],
)
def test_changes_of_placement(plan: Plan, change: dict[str, Any], text: str) -> None:
    entry = {"slot": "input", "source": "?, ?, 64", "target": "?, ?, 64 | grad-partial tp"}
    assert of_module(plan, inputs=[entry | change]) == f"modules.up.inputs.0: {text}"


def test_two_for_one_tensor(plan: Plan) -> None:
    entry = {"slot": "input", "source": "?, ?, 64", "target": "?, ?, 64 | grad-partial tp"}
    assert of_module(plan, inputs=[entry] * 2) == (
        "modules.up.inputs: two for tensor 'input' of 3 dims"
    )


@pytest.mark.parametrize("name", ["__class__", "config.__class__.x", "__dict__.x", "", "a..b"])
def test_attributes_of_python_itself(plan: Plan, name: str) -> None:
    assert of_module(plan, attributes={name: "128@tp"}) == (
        f"modules.up.attributes.{name}: a plan may replace plain sizes only, and this names none"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("forward", "attribute 'forward' is a method: a plan may replace plain sizes only"),
        ("_modules", "attribute '_modules' is a dict: a plan may replace plain sizes only"),
        ("training", "attribute 'training' is a bool: a plan may replace plain sizes only"),
        ("in_features", "attribute 'in_features' is 64; the plan is for 128"),
        ("forward.x", "there is no attribute 'forward.x' of method that can be set"),
        ("nothing", "there is no attribute 'nothing' of Linear that can be set"),
    ],
)
def test_attributes_that_are_no_plain_sizes(plan: Plan, name: str, text: str) -> None:
    data = json.loads(plan.to_json())
    data["modules"]["up"]["attributes"] = {name: "128@tp"}
    data["modules"] = {"up": data["modules"]["up"] | {"parameters": {}, "layer": "LocalModule"}}
    changed = Plan.from_json(json.dumps(data))
    model: nn.Module = Mlp()
    with pytest.raises(PlanError) as error:
        apply_modules(model, changed, Mesh.shape_only({"tp": (0, 2)}))
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "it is nested deeper than 64 levels"),
        ('{"a": ' * 80 + "1" + "}" * 80, "it is nested deeper than 64 levels"),
        ('{"mesh": {"tp": ' + "1" * 5000 + "}}", "it has a number of 5,000 digits"),
        ('{"' + "a" * 5000 + '": 1}', "it has a name of 5,000 characters: 'aaaa"),
        ('{"format": "\\ud800"}', "it has text that cannot be printed: '\\ud800'"),
        ('{"format": "\\u001b[31m"}', "it has text that cannot be printed: '\\x1b[31m'"),
        ('{"gap": NaN}', "NaN is no number in JSON"),
    ],
)
def test_json_without_end(text: str, why: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_json(text, where="p.json")
    assert str(error.value).startswith(f"p.json is not JSON: {why}")


def test_a_file_without_end() -> None:
    with pytest.raises(PlanError, match="/dev/zero is no plan: it has more than 67,108,864 bytes"):
        Plan.load("/dev/zero")


def test_the_notation_of_a_plan_of_today_is_read_as_before() -> None:
    text = "2@tp*2*16 + 2@tp*(8 + 8) + 2@tp*16, 64, ? | grad-partial tp.0 tp.1"
    assert str(parse(text)) == text
