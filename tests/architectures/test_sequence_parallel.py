"""Sequence-parallel plans: equal to the whole model, what they promise, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.compare import compare, reference, weighing_loss
from benchmarks.ranks_case import kept_bytes
from benchmarks.zoo_case import build
from shardwright.errors import InfeasibleError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.problem.memory_budget import OverMemory
from shardwright.runtime.api import apply
from shardwright.runtime.communication.audit import count_collectives, counts, total_bytes
from shardwright.runtime.communication.mesh import Mesh
from tests import planning, zoo
from tests.marks import long
from tests.ranks import run_ranks

BATCH, SEQ = 2, 19


@cache
def planned(name: str, tp: int, sequence_parallel: bool = True) -> tuple[nn.Module, Plan]:
    """A model in float64, and its plan for what the tests run."""
    _, model = build("causal", name, torch.float64)
    options = {"batch": BATCH, "seq": SEQ, "sequence_parallel": sequence_parallel}
    return model, planning.plan(model, tp=tp, **options)


def inputs(model: nn.Module, name: str, seq: int = SEQ) -> dict[str, Any]:
    return zoo.inputs(name, model.config, batch=BATCH, seq=seq)


@pytest.fixture
def all_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that compute in float32 would round each rank's part of a sum over the sequence."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def least(model: nn.Module, **options: Any) -> int:
    """Bytes of the smallest plan that is found."""
    with pytest.raises(InfeasibleError) as error:
        planning.plan(model, tp=4, memory=1, **options)
    assert isinstance(error.value, OverMemory)
    return error.value.least


@pytest.mark.usefixtures("all_double")
def test_memory_asks_for_it() -> None:
    """With a budget between what is needed without and with it; and what is planned is right."""
    _, model = build("causal", "llama", torch.float64)
    load: dict[str, Any] = {"batch": BATCH, "seq": 64, "phase": "train"}
    without = least(model, **load, sequence_parallel=False)
    along = least(model, **load, sequence_parallel=True)
    assert along < without
    budget = (along + without) // 2
    plan = planning.plan(model, tp=4, memory=budget, **load)
    assert plan.workload.sequence_parallel
    why = f"no plan fits {budget:,} bytes a rank without it"
    assert plan.solver.note == f"sequence parallelism is on, because {why}"
    assert plan.predicted.memory is not None and plan.predicted.memory.total <= budget
    with pytest.raises(InfeasibleError, match=f"would fit is {without:,} bytes: "):
        planning.plan(model, tp=4, memory=budget, **load, sequence_parallel=False)
    with pytest.raises(InfeasibleError, match=f"is {along:,} bytes, with sequence parallelism: "):
        planning.plan(model, tp=4, memory=1, **load)
    given = inputs(model, "llama")
    expected = reference(model, given)
    for found in run_ranks(4, partial(compare, model, given, plan, expected=expected)):
        assert found.logits <= 1e-9
        assert found.gradients is not None and found.gradients <= 1e-9, found.worst
        assert found.decode is not None and found.decode <= 1e-9
        assert found.forward["reduce_scatter"] >= 4


def test_memory_asks_for_what_cannot_be() -> None:
    """The figure of the plan that there is; decoding single tokens needs no sequence."""
    blocks = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    given = (torch.zeros(3, 19, 8),)
    assert least(blocks, args=given) == least(blocks, args=given, sequence_parallel=False)
    _, model = build("causal", "llama", torch.float64)
    options: dict[str, Any] = {"phase": "decode", "seq": 8}
    assert least(model, **options) == least(model, **options, sequence_parallel=False)


@pytest.mark.usefixtures("all_double")
@pytest.mark.parametrize(("name", "tp"), [("llama", 4), ("gpt2", 4), ("gemma2", 2)])
def test_equals_the_whole_model(name: str, tp: int) -> None:
    """Logits, gradients and a decode step, also where the sequence does not divide."""
    model, plan = planned(name, tp)
    allowed = 1e-6 if name == "gemma2" else 1e-9  # its softmax is in float32
    for seq in (16, SEQ, 3):  # 3: a part of nothing on the last of 4 ranks
        given = inputs(model, name, seq)
        expected = reference(model, given)
        work = partial(compare, model, given, plan, expected=expected)
        for found in run_ranks(tp, work):
            assert found.logits <= 1e-9
            assert found.gradients is not None and found.gradients <= allowed, found.worst
            assert found.decode is not None and found.decode <= 1e-9


@pytest.mark.parametrize(
    ("name", "tp"),
    # The last calls some norms several times in each block.
    [("llama", 4), ("gpt2", 4), ("gemma2", 2), long("gemma3n_text", 2)],
)
def test_collectives(name: str, tp: int) -> None:
    """As predicted, to the byte; a reduce-scatter for each all-reduce of a plan without."""
    model, plan = planned(name, tp)
    given = inputs(model, name)

    def work(mesh: Mesh) -> dict[str, dict[str, tuple[int, int]]]:
        local = apply(copy.deepcopy(model), plan, mesh)
        with count_collectives() as ahead:
            output = local(**given)
        with count_collectives() as back:
            weighing_loss(output).backward()
        return {
            phase: {kind: (n, total_bytes(calls)[kind]) for kind, n in counts(calls).items()}
            for phase, calls in (("forward", ahead), ("backward", back))
        }

    predicted: dict[str, dict[str, tuple[int, int]]] = {"forward": {}, "backward": {}}
    for c in plan.predicted.collectives:
        predicted[c.phase][c.kind] = (c.count, c.bytes)
    for found in run_ranks(tp, work):
        assert found == predicted
    assert predicted["forward"]["reduce_scatter"][0] >= 2
    assert plan.workload.sequence_parallel


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_norms_and_residuals_are_split_and_qkv_share_a_gather(name: str) -> None:
    """The same for all blocks but the entry of the first; gathers stand behind norms."""
    _, plan = planned(name, 2)
    for key, spec in plan.modules.items():
        leaf = key.rpartition(".")[2]
        if "*" in key and ("norm" in leaf or leaf.startswith("ln_")):
            assert not spec.inputs
            assert all("?@tp" in c.source or "?@tp" in c.target for c in spec.outputs)
            assert all(p.use and "grad-partial" in p.use for p in spec.parameters.values())
        if leaf in ("q_proj", "k_proj", "v_proj", "c_attn", "gate_proj", "up_proj", "c_fc"):
            assert not spec.inputs


@pytest.mark.parametrize("name", ["llama", "gpt2", long("gemma2")])
def test_fewer_bytes_are_kept_for_the_backward_pass(name: str) -> None:
    """Counted by hooks on what autograd saves, parameters aside."""
    kept = {}
    for sequence_parallel in (False, True):
        model, plan = planned(name, 4, sequence_parallel)
        given = inputs(model, name, 64)
        kept[sequence_parallel] = run_ranks(4, partial(kept_bytes, model, plan, given))
    assert max(kept[True]) < 0.85 * min(kept[False])


def test_generate() -> None:
    """Prompts and single tokens, of which most ranks hold none."""
    model, plan = planned("llama", 4)
    ids = inputs(model, "llama")["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    want = generate(ids, **options)

    def work(mesh: Mesh) -> torch.Tensor:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        return local.generate(ids, **options)

    for got in run_ranks(4, work):
        assert torch.equal(got, want)


def test_gradient_checkpointing() -> None:
    """Blocks that run again in the backward pass still know how long the sequence is."""
    model, plan = planned("llama", 4)
    given = inputs(model, "llama")
    weighing_loss(model(**given)).backward()
    want = model.get_parameter("model.norm.weight").grad
    assert want is not None

    def work(mesh: Mesh) -> torch.Tensor:
        local: Any = apply(copy.deepcopy(model), plan, mesh).train()
        local.zero_grad()
        local.gradient_checkpointing_enable()
        weighing_loss(local(**given)).backward()
        return dict(local.named_parameters())["model.norm.weight"].grad.to_local()

    for got in run_ranks(4, work):
        torch.testing.assert_close(got, want)
    model.zero_grad()


def test_hidden_states_are_refused() -> None:
    """A rank has a part of them; without sequence parallelism they are whole."""
    model, plan = planned("llama", 2)

    def work(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        with pytest.raises(UsageError, match="plan without sequence_parallel"):
            local(**inputs(model, "llama"), output_hidden_states=True)

    run_ranks(2, work)


def test_a_model_without_blocks() -> None:
    """There is nothing between blocks to split."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    with pytest.raises(InfeasibleError, match="no stack of blocks"):
        planning.plan(model, tp=2, args=(torch.zeros(3, 19, 8),), sequence_parallel=True)


class GroupedNorm(nn.Module):
    """Norms groups of 64, whose number torch infers: it cannot for no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 64, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.reshape(*x.shape[:-1], -1, 64)
        groups = groups / (groups.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        return groups.flatten(-2) * self.weight


@pytest.mark.usefixtures("all_double")
def test_sizes_that_torch_infers() -> None:
    """Of a decode step, all ranks but the first have no token: such a norm takes all of them."""
    _, model = build("causal", "llama", torch.float64)
    for layer in model.model.layers:
        layer.input_layernorm = GroupedNorm()
    plan = planning.plan(model, tp=4, sequence_parallel=True)
    given = inputs(model, "llama", 3)
    expected = reference(model, given)
    for found in run_ranks(4, partial(compare, model, given, plan, expected=expected)):
        assert found.logits <= 1e-9
        assert found.gradients is not None and found.gradients <= 1e-9, found.worst
        assert found.decode is not None and found.decode <= 1e-9
