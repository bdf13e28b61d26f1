"""Copies to a GPU: pinned memory is written again only when what was in it has been copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.checkpoint import memory as staging
from shardwright.runtime.checkpoint.memory import Staging

CPU = torch.device("cpu")


class Later(TorchDispatchMode):
    """A device that copies when it is waited for, in the order in which it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Callable[[], object]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep an asynchronous copy for later."""
        if func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]:
            self.queue.append(lambda: func(args[0], args[1]))
            self.most = max(self.most, len(self.queue))
            return args[0]
        return func(*args, **(kwargs or {}))


class Event:
    """Torch's, of such a device: it waits for what was asked before it was recorded."""

    def __init__(self, device: Later) -> None:
        self.device = device
        self.last: Callable[[], object] | None = None

    def record(self) -> None:
        """Note what was asked last."""
        self.last = self.device.queue[-1]

    def synchronize(self) -> None:
        """Copy all that was asked until then."""
        while self.last in self.device.queue:
            self.device.queue.pop(0)()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Later:
    """What passes for a GPU: its tensors are marked as none of a CPU."""
    made = Later()
    monkeypatch.setattr(staging, "_pinned", lambda n: torch.zeros(n, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(made))
    monkeypatch.setattr(staging, "_on_host", lambda to: False)
    return made


def given(count: int) -> list[Tensor]:
    """Tensors of several dtypes and sizes, one of them too large to be staged."""
    seeded = torch.Generator().manual_seed(1)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    out = [torch.randn(5, 3 + i, generator=seeded).to(dtypes[i % 4]) for i in range(count)]
    return [*out, torch.randn(staging.ROOM // 4 + 1, generator=seeded), torch.arange(7)]


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_all_arrives(device: Later, cast: torch.dtype | None) -> None:
    reads = given(9)
    to = [torch.empty_like(x, dtype=cast if x.is_floating_point() else None) for x in reads]
    staged = Staging(torch.device("cuda"))
    with device:
        for target, read in zip(to, reads, strict=True):
            staged.copy(target, read)
        staged.wait()
    assert not device.queue
    assert device.most == staging.PIECES, "one is read while another is copied"
    for target, read in zip(to, reads, strict=True):
        assert torch.equal(target, read.to(target.dtype))


def test_parts_of_a_tensor_that_are_no_one_piece(device: Later) -> None:
    whole, read = torch.zeros(6, 8), torch.randn(6, 3)
    want = whole.clone()
    want[:, 2:5] = read
    staged = Staging(torch.device("cuda"))
    with device:
        staged.copy(whole[:, 2:5], read)
        staged.wait()
    assert torch.equal(whole, want)


def test_a_system_without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> Tensor:
        raise RuntimeError("no pinned memory")

    monkeypatch.setattr(staging, "_pinned", refuse)
    staged, to = Staging(torch.device("cuda")), torch.zeros(4)
    staged.copy(to, torch.ones(4))
    staged.wait()
    assert to.tolist() == [1, 1, 1, 1]


def test_a_cpu_is_copied_to_at_once() -> None:
    staged, to = Staging(CPU), torch.zeros(4, dtype=torch.float64)
    staged.copy(to, torch.ones(4))
    assert to.tolist() == [1, 1, 1, 1]
