"""The rows on ranks that are threads of this process, in half of the time that processes take.

What draws from torch's generator or compiles needs processes, since threads share these.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.zoo_ranks import Case, Job
from tests.ranks import run_ranks


def by_threads(jobs: Sequence[Job], tp: int, case: Case) -> Iterator[dict[str, Any]]:
    """A row for each job, in order, as `sweep` makes them with processes.

    Args:
        jobs: What to run.
        tp: Threads, one a rank.
        case: Called on each of them for each job.
    """
    torch.set_num_threads(1)
    for kind, name in jobs:
        try:
            yield run_ranks(tp, lambda mesh: case(kind, name, mesh["tp"].rank, tp, mesh))[0]  # noqa: B023
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            yield {"kind": kind, "name": name, "error": text, "raised": traceback.format_exc()}
