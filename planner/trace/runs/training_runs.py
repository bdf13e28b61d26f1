"""Training mode: runs in it are traced only if code does something else there than in eval mode.

Dropout does not count: all ranks drop the same elements of replicated tensors, and of a shard what
is dropped at that place of the full tensor (see `Functional` in `recording_modes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardwright.planner.trace.runs.run import Run, in_mode
from shardwright.runtime.scopes import replaced


def in_training(runs: Sequence[Run]) -> list[Run]:
    """Return the same runs in training mode."""
    return [run._replace(training=True) for run in runs]


@contextmanager
def batches_counted(root: nn.Module) -> Iterator[None]:
    """Context manager in which batch norms with `momentum=None` have a momentum.

    They read it off their number of batches, which a trace lacks. Placements are the same for any.
    """
    norms = [m for m in root.modules() if isinstance(m, _BatchNorm) and m.momentum is None]
    with ExitStack() as undo:
        for norm in norms:
            undo.enter_context(replaced(norm, momentum=0.1))
        yield


def changes_more(root: nn.Module) -> bool:
    """Return whether `train()` may change more of the modules than their mode.

    Modules whose class defines `training` itself count as well.
    """
    kinds = {type(m) for m in root.modules()}
    if any(hasattr(kind, "training") for kind in kinds):
        return True
    if all(kind.train is nn.Module.train for kind in kinds):
        return False
    before = _state(root)
    try:
        with in_mode(root, True):
            return _state(root) != before
    except Exception:  # any exception of model code; tracing will raise it again
        return True


def _state(root: nn.Module) -> list[Any]:
    """Return the ids of all attributes but `training`, and of entries of private dicts."""
    found = [(key, value) for m in root.modules() for key, value in vars(m).items()]
    tables = [(id(v), *v.items()) for k, v in found if k[:1] == "_" and isinstance(v, dict)]
    every = [*found, *((k, v) for _, *items in tables for k, v in items)]
    return [(key, id(value)) for key, value in every if key != "training"]
