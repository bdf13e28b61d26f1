"""Several ranks in one process: a thread each, over torch's own threaded process group.

This is the one file that touches that private API; `tests/runtime/test_ranks.py` is its canary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _set_thread_isolation_mode,  # pyright: ignore[reportAttributeAccessIssue]
)
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from shardwright.planner.contract.mesh import batch_dims
from shardwright.runtime.communication.mesh import Mesh

T = TypeVar("T")


def copy_number(mesh: Mesh) -> int:
    """Return which copy of the model this rank belongs to: it takes that part of a batch."""
    number = 0
    for name in batch_dims({name: group.size for name, group in mesh.groups.items()}):
        number = number * mesh[name].size + mesh[name].rank
    return number


def run_ranks(ranks: int, fn: Callable[[Mesh], T], mesh: dict[str, int] | None = None) -> list[T]:
    """Run `fn(mesh)` on `ranks` threads; its results by rank. The first error is raised again.

    `mesh` names the mesh dims and their sizes; by default one dim, "tp".
    """
    dims = mesh or {"tp": ranks}
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    _set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            device_mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
            results[rank] = fn(Mesh.from_device_mesh(device_mesh))
        except SystemExit:
            pass  # the threaded group's way to end ranks that wait for one that failed
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(ranks)]
    grad = torch.is_grad_enabled()
    assert grad, "threads start with gradients enabled; so should the test"
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        if errors:
            raise errors[0]
        assert not any(t.is_alive() for t in threads), "a rank hangs in a collective"
        return [results[rank] for rank in range(ranks)]
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
