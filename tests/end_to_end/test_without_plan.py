"""`load` and `apply` without a plan: the first rank plans, and all ranks use that plan."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright
from benchmarks.faults.models import checkpoint
from benchmarks.forked import run_forked
from shardwright.errors import UsageError
from shardwright.runtime.model.build import as_dtype
from tests import planning
from tests.faults.conftest import all_well, errors

IDS = torch.arange(10).view(1, 10)


def same_plan_on_all_ranks(folder: Path, out: Path, how: dict[str, Any]) -> None:
    """Only the first rank may plan."""
    if os.environ["RANK"] != "0":
        shardwright.plan = None  # type: ignore[assignment]
    if "dims" in how:
        torch.distributed.init_process_group("gloo")
        sizes = how.pop("dims")
        how["mesh"] = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = shardwright.load(folder, **how)
    assert model.generate(IDS, max_new_tokens=1, pad_token_id=0).shape == (1, 11)
    assert model.dtype == torch.bfloat16 if "dtype" in how else torch.float32
    logits = model(IDS).logits
    held: dict[str, Any] = dict(model.named_parameters())
    placements = {name: str(p._spec.placements) for name, p in held.items()}
    torch.save((logits, placements), out / os.environ["RANK"])


def applies(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    want = model(IDS).logits
    shardwright.apply(model, tp=2)
    torch.testing.assert_close(model(IDS).logits, want)


def cannot_plan() -> None:
    shardwright.apply(nn.Linear(4, 4), tp=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "ranks, how",
    [
        (2, {"tp": 2}),
        (2, {"tp": 2, "dtype": "bfloat16"}),
        (4, {"dims": {"dp": 2, "tp": 2}}),
    ],
)
def test_load_plans(folder: Path, tmp_path: Path, ranks: int, how: dict[str, Any]) -> None:
    all_well(run_forked(ranks, same_plan_on_all_ranks, (folder, tmp_path, how), tmp_path))
    found = [torch.load(tmp_path / str(rank)) for rank in range(ranks)]
    assert all(placements == found[0][1] for _, placements in found)
    if "dtype" not in how:
        from transformers import AutoModelForCausalLM

        want = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
        for logits, _ in found:
            torch.testing.assert_close(logits, want)


def test_apply_plans(folder: Path, tmp_path: Path) -> None:
    all_well(run_forked(2, applies, (folder,), tmp_path))


def test_all_ranks_hear_why_there_is_no_plan(tmp_path: Path) -> None:
    first, second = errors(run_forked(2, cannot_plan, (), tmp_path))
    assert first.startswith("ModelError: do not know the inputs of Linear")
    assert second.startswith("DistributedError: planning failed on rank 0: do not know the inputs")


def test_neither_or_both() -> None:
    with pytest.raises(UsageError, match="give a plan, its file, or the number of ranks"):
        shardwright.load("nowhere")
    with pytest.raises(UsageError, match="give either a plan or its file, or tp=2"):
        shardwright.load("nowhere", "plan.json", tp=2)
    with pytest.raises(UsageError, match="give either a plan or its file, or tp=2"):
        shardwright.load("nowhere", 2)  # type: ignore[arg-type]


GIVEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a module to load": (lambda _: shardwright.load(nn.Linear(2, 2), tp=2), "shardwright.apply"),  # type: ignore[arg-type]
    "a name to apply to": (lambda folder: shardwright.apply(folder, tp=2), "shardwright.load"),
    "a dict as a plan": (
        lambda folder: shardwright.load(folder, {"tp": 2}),  # type: ignore[arg-type]
        "a plan or its file is needed, and not a dict",
    ),
    "an old name": (lambda folder: shardwright.load(folder, tp=2, torch_dtype="bfloat16"), "dtype"),
    "device_map": (lambda folder: shardwright.load(folder, tp=2, device_map="auto"), "device"),
    "no device": (lambda folder: shardwright.load(folder, tp=2, device="gpu"), "'cpu' or 'cuda'"),
    "a type of Python": (
        lambda folder: shardwright.load(folder, tp=2, dtype=float),  # type: ignore[arg-type]
        "torch has no floating dtype '<class 'float'>'",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_in_place_of_something_else(folder: Path, name: str) -> None:
    """Said before ranks meet."""
    call, words = GIVEN[name]
    with pytest.raises(UsageError, match=words):
        call(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(folder: Path) -> None:
    with pytest.raises(UsageError, match="finds no GPU, and device is 'cuda:1': give 'cpu'"):
        shardwright.load(folder, tp=2, device="cuda:1")


def test_one_process_for_two_ranks(folder: Path) -> None:
    with pytest.raises(shardwright.DistributedError, match="torchrun --nproc-per-node 2"):
        shardwright.load(folder, tp=2)


# --- dtypes by name


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "torch.float64"])
def test_dtype_by_name(folder: Path, name: str) -> None:
    plan = planning.plan(folder, tp=2, dtype=name)
    assert plan.workload.dtype == name.removeprefix("torch.")


def test_the_models_own_dtype() -> None:
    assert as_dtype(None) is as_dtype("auto") is None


def test_no_dtype(folder: Path) -> None:
    for name in ("bf16", "nn", "", "int8"):
        with pytest.raises(
            UsageError, match=f"torch has no floating dtype '{name}': give 'bfloat16'"
        ):
            shardwright.load(folder, tp=2, dtype=name)
    with pytest.raises(UsageError, match="torch has no floating dtype 'half precision'"):
        planning.plan(folder, tp=2, dtype="half precision")
