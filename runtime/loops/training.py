"""`SplitTrainer`: transformers' Trainer for a split model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils._pytree import tree_map_only
from transformers import Trainer

from shardwright.errors import UsageError
from shardwright.runtime.boundary.module_boundary import mesh_of
from shardwright.runtime.logits.split_logits import SplitLogits
from shardwright.runtime.loops.accelerating import SplitAccelerator
from shardwright.runtime.scopes import replaced
from shardwright.runtime.state import whole_optimizer


class SplitTrainer(Trainer):
    """transformers' `Trainer` for a split model, with the same interface.

    The ranks that share the model get the same batches; each copy of the model gets its own.
    Checkpoints have the full model and the full optimizer state, so a run can resume with any other
    plan, or with an unsplit `Trainer`.

    Args:
        model: A model to which a plan was applied.
        *args: As for `Trainer`.
        **kwargs: As for `Trainer`.

    Raises:
        UsageError: no plan was applied to `model`.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        mesh = mesh_of(model) if model is not None else None
        if mesh is None:
            raise UsageError(f"this {type(model).__name__} is not split: use transformers' Trainer")
        super().__init__(model, *args, **kwargs)
        # With this, Trainer does not wrap the model, and all ranks take part in saving it.
        self.is_distributed_loading_by_transformers = True

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that counts copies of the model."""
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.__class__ = SplitAccelerator
        accelerator.count_copies(self.model)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Loss, logits and labels of a batch, the logits in full for metrics."""
        found = super().prediction_step(*args, **kwargs)
        return tree_map_only(SplitLogits, SplitLogits.whole, found)

    def get_total_train_batch_size(self, args: Any) -> int:
        """The number of sequences in one step: each copy of the model has its own."""
        ranks = args.world_size // self.accelerator.num_processes
        return super().get_total_train_batch_size(args) // ranks

    def _defer_fsdp_gradient_reduction(self) -> Any:
        return nullcontext()  # each backward pass averages gradients, so no copy may skip it

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = whole_optimizer.full_optimizer_state(self._own_optimizer())
        with self._in_its_place(state):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._in_its_place({}):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _own_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # without accelerate's wrapper

    def _in_its_place(self, state: dict[str, Any]) -> AbstractContextManager[None]:
        """Inside, `self.optimizer` returns `state` as its state dict, and loads full state."""
        return replaced(self, optimizer=_FullStateOptimizer(self._own_optimizer(), state))


class _FullStateOptimizer:
    """Stands for an optimizer while Trainer saves or loads it: its state is full."""

    def __init__(self, optimizer: Any, state: dict[str, Any]) -> None:
        self.optimizer, self.state = optimizer, state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        whole_optimizer.load_full_optimizer_state(self.optimizer, state)
