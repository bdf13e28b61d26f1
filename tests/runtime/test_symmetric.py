"""Sums in symmetric memory, by kernels of the threaded backend: when they are used and trusted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.shared_memory import symmetric
from shardwright.runtime.shared_memory.symmetric import ALIGNED, SHORT, Symmetric, trusted
from tests.ranks import run_ranks

ROOM = 4 * SHORT


def one_shot(group: dist.ProcessGroup) -> symmetric.Sum:
    def work(message: Tensor) -> Tensor:
        out = message.clone()
        dist.all_reduce(out, group=group)
        return out

    return work


def two_shot(group: dist.ProcessGroup) -> symmetric.Sum:
    def work(message: Tensor) -> Tensor:
        dist.all_reduce(message, group=group)
        return message

    return work


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("spent", [False, True])
@pytest.mark.parametrize("ways", ["one", "two", "both"])
def test_a_sum_is_right_or_there_is_none(dtype: torch.dtype, spent: bool, ways: str) -> None:
    numbers = [0, 1, 4, 8, 60, 64, SHORT // 4, SHORT // 2, SHORT, ROOM // 4, ROOM]

    def work(mesh: Any) -> list[bool]:
        group, rank = mesh["tp"].pg, mesh["tp"].rank
        memory = torch.zeros(ROOM, dtype=torch.uint8)
        one = one_shot(group) if ways != "two" else None
        two = two_shot(group) if ways != "one" else None
        sums, done = Symmetric(memory, 2, one, two), []
        for n in numbers:
            given = (torch.arange(n) % 50 + rank).to(dtype).view(1, -1)
            x = given.clone()
            found = sums.all_reduce(x, "sum", spent)
            done.append(found is not None)
            if found is None:
                assert torch.equal(x, given)
                continue
            want = (2 * (torch.arange(n) % 50) + 1).to(dtype).view(1, -1)
            assert torch.equal(found, want)
            assert found.data_ptr() not in (memory.data_ptr(),), "the memory is written again"
            assert spent or torch.equal(x, given)
            kept = found.clone()
            sums.all_reduce(torch.ones_like(x), "sum", spent)
            assert torch.equal(found, kept)
        return done

    first, second = run_ranks(2, work)
    assert first == second, "ranks use the same way"
    size = [n * dtype.itemsize for n in numbers]
    if dtype not in symmetric.DTYPES:
        assert not any(first)
    else:
        short = [ways != "two" and 0 < n <= SHORT and n % ALIGNED == 0 for n in size]
        long = [ways != "one" and 0 < n <= ROOM and n % (2 * ALIGNED) == 0 for n in size]
        assert first == [a or b for a, b in zip(short, long, strict=True)]


@pytest.mark.parametrize("op", ["max", "min"])
def test_what_is_no_sum(op: str) -> None:
    memory = torch.zeros(ROOM, dtype=torch.uint8)
    assert (
        Symmetric(memory, 2, torch.clone, torch.clone).all_reduce(torch.ones(4), op, False) is None
    )


def wrong_on_one(group: dist.ProcessGroup) -> symmetric.Sum:
    """Sums that differ in their last bits."""
    return lambda message: one_shot(group)(message) * (1 + 1e-7 * (1 + dist.get_rank(group)))


def its_own(group: dist.ProcessGroup) -> symmetric.Sum:
    return lambda message: message


def old(group: dist.ProcessGroup) -> symmetric.Sum:
    """Memory that is written again while others read: from the second time on another sum."""
    before: list[Tensor] = []

    def work(message: Tensor) -> Tensor:
        before.append(one_shot(group)(message))
        return before[-2] if len(before) == 5 else before[-1]

    return work


def fails_on_one(group: dist.ProcessGroup) -> symmetric.Sum:
    def work(message: Tensor) -> Tensor:
        out = one_shot(group)(message)
        if dist.get_rank(group) == 1:
            raise RuntimeError("no such kernel")
        return out

    return work


@pytest.mark.parametrize(
    "kernel, good",
    [
        (one_shot, True),
        (two_shot, True),
        (wrong_on_one, False),
        (its_own, False),
        (old, False),
        (fails_on_one, False),
    ],
)
def test_what_is_not_right_here_is_not_used(kernel: Callable[..., Any], good: bool) -> None:
    def work(mesh: Any) -> list[str]:
        group = mesh["tp"].pg
        memory = torch.zeros(ROOM, dtype=torch.uint8)
        sums = {"tried": kernel(group), "right": one_shot(group)}
        return [*trusted(group, memory, sums)]

    assert run_ranks(3, work) == [["tried", "right"] if good else ["right"]] * 3


@pytest.mark.parametrize(
    "lacks, used", [((), True), (("why_not",), False), (("memory",), False), (("right",), False)]
)
def test_all_ranks_have_it_or_none(
    monkeypatch: pytest.MonkeyPatch, lacks: tuple[str, ...], used: bool
) -> None:
    """`lacks`: what rank 1 has not."""
    own = threading.local()

    def shared(*_: Any) -> Tensor:
        if "memory" in lacks and own.rank == 1:
            raise RuntimeError("peers cannot be read")
        return torch.zeros(ROOM, dtype=torch.uint8)

    def why_not(*_: Any) -> str | None:
        return "not asked for" if "why_not" in lacks and own.rank == 1 else None

    monkeypatch.setattr(symmetric, "_shared", shared)
    monkeypatch.setattr(symmetric, "_why_not", why_not)
    kernel = fails_on_one if "right" in lacks else one_shot
    monkeypatch.setattr(symmetric, "_kernels", lambda group: {"one shot": kernel(group)})

    def work(mesh: Any) -> bool:
        own.rank = mesh["tp"].rank
        found = symmetric._connected(mesh["tp"].pg, torch.device("cpu"))
        if found is None:
            return False
        out = found.all_reduce(torch.ones(4), "sum", False)
        return out is not None and out.tolist() == [2, 2, 2, 2]

    assert run_ranks(2, work) == [used, used]


def test_it_is_not_used_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWRIGHT_SYMMETRIC_MEMORY", raising=False)

    def work(mesh: Any) -> Any:
        return symmetric._connected(mesh["tp"].pg, torch.device("cpu"))

    assert run_ranks(2, work) == [None, None]
    monkeypatch.setenv("SHARDWRIGHT_SYMMETRIC_MEMORY", "1")
    assert run_ranks(2, work) == [None, None], "the backend is not NCCL"
