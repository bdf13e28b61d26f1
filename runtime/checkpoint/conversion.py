"""What transformers makes of a checkpoint while it loads it, as expressions of stored tensors.

Which keys go together, under which name and by which operations is transformers' to say; its
operations are run on tensors without memory (`expressions.py`), so any that only moves elements
will do. Parameters that a checkpoint may lack are computed as the model's own code does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import CheckpointError
from shardwright.planner.contract.dims import local_ranges
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.checkpoint.expressions import Recorder, Shape, Unexpressed
from shardwright.runtime.checkpoint.header import Entry
from shardwright.runtime.checkpoint.names import Source

KNOWN = "5.23"
"""The transformers version whose conversions were read."""


class Conversions:
    """How the keys of a model's checkpoints are renamed, and tensors that are converted made.

    Made of a model before its layers are swapped for local ones: classes and whole shapes count.
    `computed` gives the parameters that a checkpoint may lack.

    Raises:
        CheckpointError: this version of transformers keeps its conversions elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self.title = type(model).__name__
        self.config: Any = getattr(model, "config", None)
        self.shapes: dict[str, Shape] = {
            name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)
        }
        self.computed = Computed(model)
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
        except (ImportError, AttributeError) as error:
            import transformers

            raise CheckpointError(
                f"transformers {transformers.__version__} does not tell how it converts "
                f"checkpoints in the way that {KNOWN} does ({error}): install transformers {KNOWN}"
            ) from None
        self.loading = loading
        self.by_pattern = {p: c for c in self.converters for p in c.source_patterns}

    def order(self, keys: Iterable[str]) -> list[str]:
        """`keys` as transformers goes through them, which is the order that it merges them in."""
        return list(keys) if self.loading is None else sorted(keys, key=self.key_order)

    def rename(self, key: str) -> tuple[str, str | None]:
        """The name that transformers gives `key`, and the pattern that a converter knows it by.

        Renamings may hang on keys seen before: ask for each key once, in `order`.
        """
        if self.loading is None:
            return key, None
        return self.rename_key(key, self.renamings, self.converters)

    def convert(
        self, tensors: Mapping[str, Entry], name: str, keys: Mapping[str, list[str]]
    ) -> dict[str, Source]:
        """What becomes of the stored tensors that a converter takes together.

        Args:
            tensors: what the checkpoint holds.
            name: what `rename` called all of them: the first parameter that they make.
            keys: pattern -> the keys that match it, in `order`.

        Returns:
            Parameter name -> where it comes from, for all parameters that they make.

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
                made = converter.convert(name, model=_Shapes(self), config=self.config)
                values = {n: v[0] if isinstance(v, list) else v for n, v in made.items()}
                return {n: Source(called, recorder.expression(v)) for n, v in values.items()}
        except Exception as error:  # the operations may raise anything
            operations = ", ".join(type(o).__name__ for o in converter.operations)
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            todo = "load it once with transformers and save it with save_pretrained(directory, "
            if isinstance(error, Unexpressed):
                todo = f"which Shardwright cannot do ({why}): {todo}save_original_format=False)"
            else:
                todo = f"which fails ({why}): use the config that belongs to this checkpoint"
            raise CheckpointError(
                f"{tensors[first].file}: {called} must be converted by {operations} to {name} of "
                f"{self.title}, {todo}"
            ) from None


class _Shapes:
    """All that operations may know of the model: its config and the shapes of its parameters."""

    def __init__(self, conversions: Conversions) -> None:
        self.config = conversions.config
        self._shapes = conversions.shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        """A tensor of the whole parameter's shape, on meta."""
        return torch.empty(self._shapes[name], device="meta")


class Computed:
    """Values that a model's own initialisation gives to parameters that may be missing.

    Made of a model on meta before its layers are swapped for local ones.
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
                self._owners[name] = _innermost(model, name)._init_weights, copy.deepcopy(owner)

    def value(self, name: str) -> Tensor | None:
        """The whole parameter; None if it is drawn at random, so that there is no right value."""
        if name not in self._owners:
            return None
        initialize, owner = self._owners[name]
        drawn = [_drawn(initialize, owner, name.rpartition(".")[2], seed) for seed in range(2)]
        return drawn[0] if torch.equal(*drawn) else None


def held(whole: Tensor, placement: Placement | None, coords: Coords) -> Tensor:
    """The part of `whole` that the rank at `coords` holds."""
    for d, dim in enumerate(placement.dims if placement is not None else ()):
        ranges = [torch.arange(a, b) for a, b in local_ranges(dim, coords)]
        whole = whole.index_select(d, torch.cat(ranges or [torch.arange(0)]))
    return whole.clone()


def _innermost(model: Any, name: str) -> Any:
    """The innermost model of transformers that holds `name`: they initialise their own modules."""
    inner = found = model
    for step in name.split(".")[:-1]:
        inner = getattr(inner, step)
        found = inner if hasattr(inner, "_init_weights") else found
    return found


@torch.no_grad()
def _drawn(initialize: Any, owner: nn.Module, leaf: str, seed: int) -> Tensor:
    """What `initialize` makes of `leaf` of a copy of `owner`, over memory filled with NaN."""
    module = copy.deepcopy(owner)
    module.to_empty(device="cpu", recurse=False)
    for parameter in module.parameters(recurse=False):
        parameter.fill_(torch.nan if parameter.is_floating_point() else seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        initialize(module)
    return module.get_parameter(leaf).detach()
