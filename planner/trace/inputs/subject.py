"""A module whose arguments are wanted, and the sizes that its configs and layers say."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn


def floating_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating parameter of a module; float32 if it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


@dataclass(frozen=True)
class Subject:
    """A module whose arguments are wanted, and the dtype that its floating inputs are to have."""

    module: nn.Module
    wanted: torch.dtype | None = None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of its floating inputs: that of its parameters if no other is wanted."""
        return self.wanted or floating_dtype(self.module)

    @cached_property
    def names(self) -> dict[str, inspect.Parameter]:
        """The named arguments of its forward."""
        found = inspect.signature(self.module.forward).parameters
        return {n: p for n, p in found.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    @cached_property
    def needed(self) -> list[str]:
        """Those without a default."""
        return [name for name, p in self.names.items() if p.default is p.empty]

    @cached_property
    def main(self) -> list[str]:
        """What a model of transformers names as its main inputs."""
        main = getattr(self.module, "main_input_name", None)
        return [main] if isinstance(main, str) else list(main or ())

    @cached_property
    def configs(self) -> list[Any]:
        """Its config and those nested in it, outer ones first."""
        found: list[Any] = [getattr(self.module, "config", None)]
        for config in found:
            nested = vars(config).values() if hasattr(config, "__dict__") else ()
            found += [v for v in nested if hasattr(v, "to_dict") and v not in found]
        return found

    @cached_property
    def first_width(self) -> int | None:
        """How many features the first layer with weights takes."""
        for layer in self.module.modules():
            found = getattr(layer, "in_features", None) or getattr(layer, "in_channels", None)
            if isinstance(found, int):
                return found
        return None

    @cached_property
    def stated_sides(self) -> tuple[int, int] | None:
        """The height and width of images that a layer says it takes."""
        return next((size for layer in self.module.modules() if (size := sides(layer))), None)

    def number(self, *keys: str) -> int | None:
        """Return the first number that a config says, outer configs first."""
        found = (number(config, *keys) for config in self.configs)
        return next((n for n in found if n), None)

    def floats(self, *shape: int) -> Tensor:
        """Return a floating tensor on meta."""
        return torch.empty(shape, dtype=self.dtype, device="meta")


def number(config: Any, *keys: str) -> int | None:
    """Return the first of these config entries that is a positive int or a list of equal ones."""
    for key in keys:
        value = getattr(config, key, None)
        if isinstance(value, (list, tuple)) and len(set(value)) == 1:
            value = value[0]
        if type(value) is int and value > 0:
            return value
    return None


def sides(config: Any) -> tuple[int, int] | None:
    """Return the height and width of an image, if the config (or layer) has them."""
    for key in ("image_size", "img_size", "max_img_size"):
        value = getattr(config, key, None)
        if isinstance(value, dict):
            value = [value.get("height"), value.get("width")]
        value = [value, value] if type(value) is int else value
        if isinstance(value, (list, tuple)) and len(value) == 2:
            high, wide = value
            if type(high) is int and type(wide) is int and min(high, wide) > 0:
                return high, wide
    return None
