"""The plan file: the same bytes for the same plan, refusals, names with wildcards, safe writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwright.errors import PlanError
from shardwright.planner.contract import plan_file
from shardwright.planner.contract.files import write_atomically
from shardwright.planner.contract.names import fold, lookup, pattern
from shardwright.planner.contract.plan_figures import Objective
from shardwright.planner.contract.plan_file import Plan, digest_of
from tests.planner.equal import planned
from tests.planner.mlps import WIDTH, Mlp
from tests.planner.modules import Fused, VisionBlock


class Stack(nn.Module):
    """Blocks in a row, the last of them of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(), Mlp(), Fused("chunk")])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def features(b: int, t: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(b, t, WIDTH),)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(Stack(), features, 2)


def test_the_same_bytes_again(plan: Plan, tmp_path: Path) -> None:
    """Planned twice, and written and read: not a byte differs."""
    assert planned(Stack(), features, 2).to_json() == plan.to_json()
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == plan.to_json()
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(tmp_path / "plan.json").to_json() == plan.to_json()


def test_keys_are_sorted(plan: Plan) -> None:
    text = plan.to_json()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"


def test_like_blocks_share_an_entry(plan: Plan) -> None:
    """Two blocks are alike, the third is not: each is found by its full name."""
    first, second = plan.module("blocks.0.up"), plan.module("blocks.1.up")
    assert first is not None and first == second
    assert plan.module("blocks.2.qkv") is not None
    assert plan.module("blocks.2.nothing") is None


def test_equal_blocks_are_one_entry() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([VisionBlock() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    plan = planned(Blocks(), features, 2)
    inside = {n for n in plan.modules if n.startswith("blocks.")}
    assert inside and all(n.startswith("blocks.*") for n in inside)
    assert plan.model.parameters["blocks.*.mlp.up.weight"] == [128, WIDTH]


# --- what is refused


def changed(plan: Plan, *path: str, to: Any) -> str:
    data = json.loads(plan.to_json())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("surprise",), 1, "surprise: Extra inputs are not permitted"),
        (("workload", "gpus"), 1, "workload.gpus: Extra inputs are not permitted"),
        (("workload", "batch"), "many", "workload.batch: Input should be a valid integer"),
        (
            ("format",),
            "other.plan",
            'not a Shardwright plan: "format" should be "shardwright.plan"',
        ),
        (("version",), 5, "has plan version 5; this Shardwright reads versions 1 to 4: make the"),
        (("version",), None, "has plan version None"),
        (("solver", "status"), "guessed", "solver.status: Input should be 'optimal' or 'feasible'"),
        (("modules",), [], "modules: Input should be a valid dictionary"),
    ],
)
def test_what_a_plan_may_not_say(
    plan: Plan, path: tuple[str, ...], value: object, message: str
) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_json(changed(plan, *path, to=value), where="p.json")
    assert str(error.value).startswith("p.json ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_that_is_missing(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    del data["mesh"]
    with pytest.raises(PlanError, match="mesh: Field required"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[1, 2", "not json"])
def test_not_json(text: str) -> None:
    with pytest.raises(PlanError, match="the plan is not JSON"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '"shardwright.plan"'])
def test_json_of_another_kind(text: str) -> None:
    with pytest.raises(PlanError, match="is not a Shardwright plan"):
        Plan.from_json(text)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read plan .*none.json: No such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot read plan"):
        Plan.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="it is not text"):
        Plan.load(tmp_path / "binary")


# --- wildcards


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.layers.3.mlp.up", "model.layers.*.mlp.up"),
        ("layers.0", "layers.*"),
        ("0.1.weight", "*.*.weight"),
        ("conv1.block2.x", "conv1.block2.x"),
        ("h.12a.x", "h.12a.x"),
        ("", ""),
    ],
)
def test_only_numbers_that_stand_alone_are_wild(name: str, wanted: str) -> None:
    assert pattern(name) == wanted


NAMES = st.lists(st.sampled_from(["a", "b", "0", "1", "2"]), min_size=1, max_size=3).map(".".join)


@given(st.dictionaries(NAMES, st.integers(0, 1)), st.sets(NAMES))
def test_folding_loses_nothing_and_adds_nothing(entries: dict[str, int], more: set[str]) -> None:
    """Every name finds its own value again; a name without an entry finds none."""
    names = sorted(entries.keys() | more)
    table = fold(entries, names)
    for name in names:
        assert lookup(table, name) == entries.get(name)
    assert len(table) <= len(entries)


def test_folding_an_odd_layer() -> None:
    """One that differs, and one that has no entry, keep the others from sharing theirs."""
    names = [f"l.{i}.x" for i in range(3)]
    assert fold(dict.fromkeys(names, 1), names) == {"l.*.x": 1}
    odd = {"l.0.x": 1, "l.1.x": 2, "l.2.x": 1}
    assert fold(odd, names) == odd
    some = {"l.0.x": 1, "l.1.x": 1}
    assert fold(some, names) == some


# --- writing


def test_nothing_half_written(tmp_path: Path, monkeypatch) -> None:
    """If the rename fails the old file is as it was, and nothing else lies about."""
    path = tmp_path / "plan.json"
    write_atomically(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(plan_file.Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_folders_are_made_and_files_are_readable(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "plan.json"
    write_atomically(path, "text")
    assert path.read_text() == "text"
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_schema(plan: Plan) -> None:
    """It names every key of a plan, and allows no other."""
    schema = Plan.model_json_schema()
    written = set(json.loads(plan.to_json()))
    assert written | Plan.optional == set(schema["properties"]) and not written & Plan.optional
    assert schema["additionalProperties"] is False
    assert all(d.get("additionalProperties") is False for d in schema["$defs"].values())


@pytest.mark.parametrize("edited", [False, True])
def test_a_plan_of_version_3_may_be_applied_unless_it_was_edited(plan: Plan, edited: bool) -> None:
    old = {**json.loads(plan.to_json()), "version": 3}
    old["modules"] = {name: {**spec, "each": []} for name, spec in old["modules"].items()}
    old["digest"] = "0" * 64 if edited else digest_of(old)
    found = Plan.from_json(json.dumps(old))
    assert found.modules == plan.modules
    if edited:
        with pytest.raises(PlanError, match="was edited since it was written"):
            found.unedited()
    else:
        assert found.unedited() == found


def test_a_plan_of_version_2_is_not_applied_though_its_digest_holds(plan: Plan) -> None:
    old = {**json.loads(plan.to_json()), "version": 2}
    del old["objective"]
    old["digest"] = digest_of(old)
    with pytest.raises(PlanError, match="check --accept"):
        Plan.from_json(json.dumps(old)).unedited()


def test_a_plan_of_version_1_is_read_as_one_of_today(plan: Plan) -> None:
    """Its keys had other names; what they say is the same. What was to be least was memory."""
    today = json.loads(plan.to_json())
    old = {**today, "version": 1}
    del old["objective"], old["digest"]
    old["sub_dims"], old["whole"] = old.pop("sub_axes"), old.pop("replicated")
    old["predicted"] = {**today["predicted"]}
    old["predicted"]["whole_bytes"] = old["predicted"].pop("unsharded_bytes")
    expected = {"objective": Objective(name="memory"), "digest": ""}
    assert Plan.from_json(json.dumps(old)) == plan.model_copy(update=expected)
    with pytest.raises(PlanError, match=r"sub_dims: Extra inputs"):
        Plan.from_json(json.dumps({**today, "sub_dims": {}}))
