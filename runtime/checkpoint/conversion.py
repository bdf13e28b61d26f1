"""Expresses the conversions that transformers applies while loading, in terms of stored tensors.

Transformers decides which keys are converted together, under which name and by which operations.
The operations run on meta tensors (`expressions.py`); any operation that only moves elements works.
Parameters that a checkpoint may lack are computed by the model's own initialisation.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import CheckpointError, first_line
from shardwright.runtime.checkpoint.expressions import Recorder, Shape, Unexpressed
from shardwright.runtime.checkpoint.header import Entry
from shardwright.runtime.checkpoint.names import Source
from shardwright.runtime.model.build import initializing

KNOWN = "5.23"
"""The transformers version whose conversion code this module was written for."""


class Conversions:
    """How a model's checkpoint keys are renamed, and how converted tensors are made.

    Create it before the model's layers are replaced by local ones: it needs their classes and full
    shapes. `computed` gives the values of parameters that a checkpoint may lack, and `dtypes` the
    dtypes of tensors that stay in one of their own, whatever the model is loaded in.

    Args:
        model: as it was built, whole.
        built: the dtype that it was built in, if that is known; `dtypes` is empty otherwise.

    Raises:
        CheckpointError: this version of transformers has no conversion code where it is expected.
    """

    def __init__(self, model: nn.Module, built: torch.dtype | None = None) -> None:
        self.title = type(model).__name__
        self.config: Any = getattr(model, "config", None)
        self.shapes: dict[str, Shape] = {
            name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)
        }
        self.computed = Computed(model)
        self.dtypes: dict[str, torch.dtype] = {}
        self.loading: Any = None
        if not hasattr(model, "base_model_prefix"):
            return
        try:
            from transformers import core_model_loading as loading
            from transformers.conversion_mapping import get_model_conversion_mapping

            steps: list[Any] = get_model_conversion_mapping(model)  # type: ignore[arg-type]
            self.renamings = [s for s in steps if isinstance(s, loading.WeightRenaming)]
            self.converters = [s for s in steps if isinstance(s, loading.WeightConverter)]
            self.key_order, self.rename_key = loading.dot_natural_key, loading.rename_source_key
            if built is not None:
                self.dtypes = _own_dtypes(model, built, loading)
        except (ImportError, AttributeError) as error:
            import transformers

            raise CheckpointError(
                f"transformers {transformers.__version__} does not tell how it converts "
                f"checkpoints in the way that {KNOWN} does ({error}): install transformers {KNOWN}"
            ) from None
        self.loading = loading
        self.by_pattern = {p: c for c in self.converters for p in c.source_patterns}

    def order(self, keys: Iterable[str]) -> list[str]:
        """Return `keys` in the order in which transformers processes and merges them."""
        return list(keys) if self.loading is None else sorted(keys, key=self.key_order)

    def rename(self, key: str) -> tuple[str, str | None]:
        """Return the name that transformers gives `key`, and the converter pattern that matches it.

        A renaming may depend on earlier keys: call this once for each key, in `order`.
        """
        if self.loading is None:
            return key, None
        return self.rename_key(key, self.renamings, self.converters)

    def convert(
        self, tensors: Mapping[str, Entry], name: str, keys: Mapping[str, list[str]]
    ) -> dict[str, Source]:
        """Apply a converter to the stored tensors that it takes together.

        Args:
            tensors: all tensors of the checkpoint.
            name: what `rename` returned for these keys: the first parameter that they make.
            keys: pattern -> the keys that match it, in `order`.

        Returns:
            Parameter name -> its source, for all parameters that the converter makes.

        Raises:
            CheckpointError: the conversion fails, or does more than move elements.
        """
        converter: Any = copy.deepcopy(self.by_pattern[next(iter(keys))])
        first = next(iter(keys.values()))[0]
        more = sum(map(len, keys.values())) - 1
        called = first if not more else f"{first} and {more} more"
        try:
            with Recorder() as recorder:
                for pattern, group in keys.items():
                    for key in group:
                        entry = tensors[key]
                        tensor = recorder.stored(key, entry.shape, entry.dtype)
                        converter.add_tensor(name, key, pattern, tensor)
                made = converter.convert(name, model=self, config=self.config)
                values = {n: v[0] if isinstance(v, list) else v for n, v in made.items()}
                return {n: Source(called, recorder.expression(v)) for n, v in values.items()}
        except Exception as error:  # the operations may raise anything
            operations = ", ".join(type(o).__name__ for o in converter.operations)
            why = first_line(error)
            todo = "load it once with transformers and save it with save_pretrained(directory, "
            if isinstance(error, Unexpressed):
                todo = f"which Shardwright cannot do ({why}): {todo}save_original_format=False)"
            else:
                todo = f"which fails ({why}): use the config that belongs to this checkpoint"
            raise CheckpointError(
                f"{tensors[first].file}: {called} must be converted by {operations} to {name} of "
                f"{self.title}, {todo}"
            ) from None

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return a meta tensor of the full parameter's shape, as operations ask the model for."""
        return torch.empty(self.shapes[name], device="meta")


def _own_dtypes(model: Any, built: torch.dtype, loading: Any) -> dict[str, torch.dtype]:
    """Return the dtypes of tensors that stay in one of their own, as in `from_pretrained`.

    The class lists some, such as the biases of a router, by which a rounded number would choose
    another expert. The code of a module states those of others.
    """
    listed: dict[str, torch.dtype] = model._get_dtype_plan(built)
    pattern = loading.build_glob_alternation(list(listed))[0] if listed else None
    out: dict[str, torch.dtype] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found = pattern.search(name) if pattern is not None else None
        if found is not None and tensor.is_floating_point():
            out[name] = torch.float32
        elif tensor.is_floating_point() and tensor.dtype != built:
            out[name] = tensor.dtype
    return out


class Computed:
    """Values that a model's own initialisation gives to parameters that a checkpoint may lack.

    Create it from a model on meta, before its layers are replaced by local ones.
    """

    def __init__(self, model: nn.Module) -> None:
        patterns: tuple[str, ...] = tuple(
            getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        )
        self._owners: dict[str, tuple[Any, nn.Module]] = {}
        if not patterns or not hasattr(model, "_init_weights"):
            return
        for name, _ in model.named_parameters(remove_duplicate=False):
            if any(re.search(pattern, name) for pattern in patterns):
                owner = model.get_submodule(name.rpartition(".")[0])
                self._owners[name] = initializing(model, name)._init_weights, copy.deepcopy(owner)

    def value(self, name: str) -> Tensor | None:
        """Return the full parameter; None if it is random, and therefore has no one right value."""
        if name not in self._owners:
            return None
        initialize, owner = self._owners[name]
        drawn = [_drawn(initialize, owner, name.rpartition(".")[2], seed) for seed in range(2)]
        return drawn[0] if torch.equal(*drawn) else None


@torch.no_grad()
def _drawn(initialize: Any, owner: nn.Module, leaf: str, seed: int) -> Tensor:
    """Run `initialize` on a copy of `owner` filled with NaN (integers: `seed`); return `leaf`."""
    module = copy.deepcopy(owner)
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        parameter.fill_(torch.nan if parameter.is_floating_point() else seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        initialize(module)
    return module.get_parameter(leaf).detach()
