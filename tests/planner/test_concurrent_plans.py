"""Plans made at the same time are those that are made alone; model code makes none."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from queue import SimpleQueue
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.solvers import cpsat
from tests import planning, zoo
from tests.planner.mlps import WIDTH, Gated, InverseSize
from tests.planner.modules import Attention, DividedByHeads
from tests.planner.test_data_numbers import Branches
from tests.planner.test_opaque import Block, Model

MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: zoo.build("llama", num_hidden_layers=1)[1],
    "experts": lambda: zoo.build("mixtral")[1],
    "sizes of attributes": Attention,
    "numbers of attributes": DividedByHeads,
    "numbers of sizes": InverseSize,
    "both ways": Branches,
    "untraced": lambda: Model(Block, 2),
}


def features(device: str = "cpu") -> tuple[Tensor]:
    """What a module takes that is no text model."""
    return (torch.zeros(3, 19, WIDTH, device=device),)


def plan(model: nn.Module, solver: str | None = None) -> str:
    """Its plan for two ranks, as text."""
    args = () if hasattr(model, "config") else features()
    return planning.plan(model, tp=2, args=args, solver=solver).to_json()


@cache
def made(kind: str) -> nn.Module:
    """A model; `alone` makes it first: no thread, and no code of another model."""
    return MODELS[kind]()


@cache
def alone(kind: str) -> str:
    """Its plan when nothing else is planned."""
    return plan(made(kind))


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads take turns much more often than they do; all that is shared is left as it was."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
    assert gc.isenabled()
    assert "training" not in vars(nn.Module)
    assert not torch.compiler.is_exporting() and not torch.compiler.is_compiling()


def at_once(jobs: list[Callable[[], str]]) -> list[str]:
    """What each of `jobs` gives in a thread of its own, all begun at the same time."""
    barrier = Barrier(len(jobs))

    def run(job: Callable[[], str]) -> str:
        barrier.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))


# --- at the same time


@pytest.mark.parametrize("kinds", [list(MODELS)[:2], list(MODELS)[2:]], ids=["text", "modules"])
def test_plans_of_several_models_in_threads(kinds: list[str]) -> None:
    want = [alone(kind) for kind in kinds]
    assert at_once([lambda kind=kind: plan(made(kind)) for kind in kinds]) == want


def test_plans_of_the_same_module_in_threads() -> None:
    """It is on meta, so nothing had to be copied from it."""
    model = zoo.build("llama")[1].to("meta")
    want = plan(model)
    assert at_once([lambda: plan(model)] * 3) == [want] * 3


# --- inside of each other


class Planning(Gated):
    """Its code, or that of a module within, may plan another model as it runs."""

    def __init__(self, inner: Callable[[], str] | None) -> None:
        super().__init__()
        self.inner = inner

    def between(self, y: Tensor) -> Tensor:
        if self.inner is not None:
            FOUND.put(self.inner())
        half = y.shape[-1] // 2
        return nn.functional.silu(y[..., :half]) * y[..., half:]


FOUND: SimpleQueue[str] = SimpleQueue()
"""No list: what model code puts into one is taken out again behind each trace."""


def found() -> set[str]:
    """What was put there since the last look."""
    return {FOUND.get_nowait() for _ in range(FOUND.qsize())}


def test_a_plan_in_model_code_is_refused() -> None:
    with pytest.raises(UsageError, match="plans a model itself"):
        plan(Planning(lambda: plan(Planning(None))))


@pytest.mark.parametrize("kind", ["dense", "untraced"])
def test_a_plan_in_a_solver(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(*args: Any, original: Any = cpsat.solve, **kwargs: Any) -> Any:
        FOUND.put(plan(made("sizes of attributes"), "backtracking"))
        return original(*args, **kwargs)

    inner = plan(made("sizes of attributes"), "backtracking")
    want = alone(kind)
    monkeypatch.setattr(cpsat, "solve", solve)
    assert plan(made(kind)) == want
    assert found() == {inner}
