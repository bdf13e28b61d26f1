"""What a plan draws of a model: blocks and their counts, edges, and figures that add up."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zoo_case import build
from shardwright.errors import PlanError
from shardwright.planner.contract.plan_figures import DrawnBlock, DrawnItem
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.emit.drawing import _outside_in
from tests import zoo
from tests.planning import plan

PREFILL = {"tp": 2}
TRAIN = {"mesh": {"dp": 2, "tp": 2}, "phase": "train,decode", "batch": 4}


def planned(name: str, kind: str = "causal", **how: Any) -> Plan:
    config, model = build(kind, name, torch.float64)
    return plan(model, kwargs=zoo.example(name, config, kind, torch.float64), **how)


def figures(found: Plan) -> tuple[Counter[Any], Counter[Any]]:
    """Nanoseconds by phase, and collectives with their bytes, of all that is drawn."""
    ns, calls = Counter[Any](), Counter[Any]()
    for block in found.drawing:
        for item in block.items:
            ns.update({phase: n * block.count for phase, n in item.phase_ns.items()})
            for c in item.collectives:
                calls[c.phase, c.kind] += c.count * block.count
                calls[c.phase, c.kind, "bytes"] += c.bytes * block.count
    return ns, calls


@pytest.mark.parametrize(
    "kind, name, workload",
    [("causal", "llama", TRAIN), ("causal", "deepseek_v3", TRAIN), ("seq2seq", "t5", PREFILL)],
)
def test_figures_add_up_to_the_prediction(kind: str, name: str, workload: dict[str, Any]) -> None:
    found = planned(name, kind, **workload)
    ns, calls = figures(found)
    assert ns == found.predicted.phase_ns
    want = Counter[Any]()
    for c in found.predicted.collectives:
        want[c.phase, c.kind] += c.count
        want[c.phase, c.kind, "bytes"] += c.bytes
    assert +calls == +want


class Block(nn.Module):
    """A gated MLP with a residual."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.gate, self.up = nn.Linear(64, wide, bias=False), nn.Linear(64, wide, bias=False)
        self.down = nn.Linear(wide, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.relu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Four blocks, the first of which is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(512), *(Block(256) for _ in range(3))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def net() -> Plan:
    return plan(Net(), tp=2, args=(torch.zeros(3, 19, 64),))


def named(found: Plan, block: int) -> dict[str, DrawnItem]:
    return {item.module: item for item in found.drawing[block].items if item.slot is None}


def test_blocks_that_are_alike_are_drawn_once(net: Plan) -> None:
    assert [(b.modules, b.count) for b in net.drawing] == [
        ([""], 1), (["layers.0"], 1), (["layers.1-3"], 3)
    ]  # fmt: skip
    assert named(net, 0)["layers"].blocks == {"1": 1, "2": 3}


class Stages(nn.Module):
    """Stages of blocks. Only the last stage has enough equal ones to be traced in part."""

    def __init__(self) -> None:
        super().__init__()
        deep = nn.ModuleList(Block(256) for _ in range(6))
        self.stages = nn.ModuleList([nn.ModuleList([Block(512), Block(512)]), deep])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stages: Any = self.stages
        for stage in stages:
            for block in stage:
                x = block(x)
        return x


def test_a_block_of_a_stack_may_be_a_stack() -> None:
    found = plan(Stages(), tp=2, args=(torch.zeros(3, 19, 64),))
    counts = {name: block.count for block in found.drawing for name in block.modules}
    assert counts["stages.1.0-5"] == 6
    ns, _ = figures(found)
    assert ns == found.predicted.phase_ns


def test_edges_say_how_tensors_lie(net: Plan) -> None:
    """The activation is part of what it acts on; the product of both takes parts of each."""
    items = net.drawing[2].items
    gated = next(i for i in items if i.ops == ["mul"])
    assert [items[int(n)].module for n in gated.takes] == ["gate", "up"]
    assert {*gated.takes.values()} == {"?, ?, 256@tp"}
    assert "relu" in named(net, 2)["gate"].ops
    assert [*named(net, 2)["norm"].takes] == ["x"]


def test_a_change_stands_between_what_makes_and_what_takes(net: Plan) -> None:
    items = net.drawing[2].items
    change = next(i for i in items if i.slot == "out" and i.module == "down")
    (source,) = change.takes
    assert items[int(source)].module == "down"
    assert change.takes[source] == "?, ?, ? | partial tp"
    assert [c.kind for c in change.collectives] == ["all_reduce"]
    after = next(i for i in items if i.ops == ["add"])
    assert after.takes[str(items.index(change))] == "?, ?, ?" and "x" in after.takes


@pytest.mark.parametrize("name", ["gpt2", "falcon"])
def test_parts_of_a_fused_projection_are_named(name: str) -> None:
    found = planned(name, tp=2)
    parts = [item.parts for block in found.drawing for item in block.items if item.parts]
    assert parts and all(p == ["query", "key", "value"] for p in parts)


def test_parts_are_in_their_order() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kvq, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            k, v, q = (
                part.unflatten(-1, (4, 16)).transpose(1, 2)
                for part in self.kvq(x).split([64, 64, 64], dim=-1)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).flatten(2))

    found = plan(Reversed(), tp=2, args=(torch.zeros(3, 19, 64),))
    assert named(found, 0)["kvq"].parts == ["key", "value", "query"]


def test_a_plan_is_read_as_it_is_written(net: Plan) -> None:
    again = Plan.from_json(net.to_json())
    assert again == net and again.unedited() is again


@pytest.mark.parametrize(
    "where, edit",
    [
        ("items.1.takes", lambda d: d[2]["items"][1]["takes"].update({"7": "?"})),
        ("is no block after it", lambda d: d[0]["items"][0]["blocks"].update({"0": 1})),
        ("more than", lambda d: d[0]["items"][0]["blocks"].update({"1": 2**30})),
        ("is no item", lambda d: d[2]["gives"].update({"99": "?"})),
        ("modules: there are none", lambda d: d[1].update(modules=[])),
        ("cannot read placement", lambda d: d[2]["gives"].update({"0": "?@"})),
    ],
)  # fmt: skip
def test_a_drawing_that_cannot_be_drawn_is_refused(net: Plan, where: str, edit: Any) -> None:
    data = json.loads(net.to_json())
    edit(data["drawing"])
    with pytest.raises(PlanError, match=where):
        Plan.from_json(json.dumps(data))


def test_check_compares_the_drawing(net: Plan) -> None:
    import shardwright

    data = json.loads(net.to_json())
    data["drawing"][1]["items"][0]["phase_ns"] = {"prefill": 1}
    edited = Plan.from_json(json.dumps(data)).sealed()
    args = (torch.zeros(3, 19, 64),)
    with pytest.raises(PlanError, match="drawing"):
        shardwright.check(edited, Net(), args=args)
    assert shardwright.check(edited, Net(), args=args, accept=True).drawing == net.drawing


def test_a_part_of_several_blocks_is_drawn_behind_all_of_them() -> None:
    """Where these are unlike, too: adapters make them so."""

    def block(*within: str) -> DrawnBlock:
        items = [DrawnItem(blocks={name: 1}) for name in within]
        return DrawnBlock(modules=[], count=0, items=items)

    kinds = {("", "a"): block("p"), ("", "a", "p"): block(), ("", "b"): block("p")}
    assert _outside_in([[place] for place in kinds], kinds) == [
        [("", "a")],
        [("", "b")],
        [("", "a", "p")],
    ]
