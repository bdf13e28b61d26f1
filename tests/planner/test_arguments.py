"""What is given to the public functions in Python has a type that they take, or is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright
from shardwright.errors import ModelError, ShardwrightError, UsageError
from tests import planning
from tests.planner.mlps import WIDTH, Mlp
from tests.ranks import run_ranks


def example() -> tuple[torch.Tensor]:
    return (torch.zeros(3, 19, WIDTH),)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp": True}, "tp must be an int, not True"),
        ({"tp": "2"}, "tp must be an int, not '2'"),
        ({"tp": 2.0}, "tp must be an int, not 2.0"),
        ({"mesh": {"tp": 2.0}}, "tp must be an int, not 2.0"),
        ({"mesh": {3: 2}}, "3 is no name for a mesh dim"),
        ({"batch": "x"}, "batch must be an int, not 'x'"),
        ({"seq": 512.0}, "seq must be an int, not 512.0"),
        ({"memory": 24e9}, "memory must be an int of bytes, or one for each rank"),
        ({"memory": "24GiB"}, "memory must be an int of bytes, or one for each rank"),
        ({"memory": [24e9, 24e9]}, "memory must be an int of bytes, or one for each rank"),
        ({"speeds": 1}, "speeds must be a list of numbers, one for each rank"),
        ({"time_limit": "60"}, "time_limit must be a number, not '60'"),
        ({"device": 3}, "device must be text, not 3"),
        ({"phase": 3}, "phase must be text or a dict, not 3"),
        ({"pins": ["a"]}, "pins must be a dict"),
        ({"pins": {3: "replicate"}}, "a pin has the name 3, which is no text"),
        ({"sequence_parallel": "no"}, "sequence_parallel must be True or False, not 'no'"),
        ({"dtype": "bfloat16"}, "dtype: the module has torch.float32, not torch.bfloat16"),
        ({"args": 3}, "args must be a tuple of inputs, or a tensor, not 3"),
        ({"kwargs": [1]}, "kwargs must be a dict of inputs by name"),
        ({"dump": 3}, "dump must be a path, not 3"),
        ({"trust_remote_code": "no"}, "trust_remote_code must be True or False, not 'no'"),
    ],
)
def test_types_of_arguments_of_plan(given: dict[str, Any], said: str) -> None:
    ranks = {} if "mesh" in given else {"tp": 2}
    with pytest.raises(UsageError) as raised:
        planning.plan(Mlp(), **{"args": example(), **ranks, **given})
    assert said in str(raised.value)


def test_types_of_a_cluster() -> None:
    three: Any = 3
    with pytest.raises(UsageError, match="cluster must be a shardwright.Cluster, not 3"):
        planning.plan(Mlp(), args=example(), cluster=three)
    for hosts in ("x", 1.5, True, None):
        with pytest.raises(UsageError, match="hosts and GPUs must be ints"):
            shardwright.Cluster(hosts, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 3, b"x", {}])
def test_what_is_no_plan(given: Any) -> None:
    calls = (
        lambda: shardwright.Plan.load(given),
        lambda: shardwright.check(given, "model"),
        lambda: shardwright.explain(given, "name", "model"),
        lambda: shardwright.export(given, "csv"),
        lambda: shardwright.differences(given, given),
        lambda: shardwright.tune(given, "model"),
        lambda: shardwright.compare(given, "model"),
    )
    for call in calls:
        with pytest.raises(UsageError, match="a plan or its file is needed, and not a "):
            call()


def test_files_in_place_of_plans(tmp_path: Path) -> None:
    model = Mlp()
    plan = planning.plan(model, tp=2, args=example())
    plan.save(tmp_path / "plan.json")
    file = str(tmp_path / "plan.json")
    assert shardwright.differences(file, plan) == []
    name = next(iter(dict(model.named_parameters())))
    assert shardwright.explain(file, name, model, args=example()) == shardwright.explain(
        plan, name, model, args=example()
    )
    with pytest.raises(UsageError, match="the name of a parameter or module as text"):
        shardwright.explain(plan, [name], model, args=example())  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 3, []])
def test_what_is_no_model(given: Any) -> None:
    plan = planning.plan(Mlp(), tp=2, args=example())
    for call in (
        lambda: shardwright.save(given, "folder"),
        lambda: shardwright.compare(plan, given),
        lambda: shardwright.check(plan, given),
    ):
        with pytest.raises(ShardwrightError, match=f"a {type(given).__name__}"):
            call()


def test_a_split_model_is_not_planned_again() -> None:
    model = Mlp()
    plan = planning.plan(model, tp=2, args=example())

    def on_rank(mesh: Any) -> list[str]:
        split: nn.Module = copy.deepcopy(model)
        shardwright.apply(split, plan, mesh=mesh)
        said = []
        for call in (planning.plan, lambda m, tp, args: shardwright.check(plan, m, args=args)):
            with pytest.raises(ModelError) as raised:
                call(split, tp=2, args=example())
            said.append(str(raised.value))
        return said

    for said in run_ranks(2, on_rank):
        assert all("is split already, and plans are for whole models" in text for text in said)
