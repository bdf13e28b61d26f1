"""Plain attributes of modules, and entries of configs, that change after a model was split.

Code may do something else with another value, which no traced call ran. So a module notes what is
set on it from outside of calls, and the root compares at its next call; configs are compared then,
as nothing tells of their changes. What the model's own code sets in a call is its own business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from inspect import isfunction
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from shardwright.errors import UsageError
from shardwright.planner.contract.plain_values import FREE, is_plain
from shardwright.runtime.copied import OURS, Copied
from shardwright.runtime.names_in_code import names_in

HARMLESS = frozenset(
    """
_is_hf_initialized _name_or_path _output_attentions _commit_hash architectures dtype
gradient_checkpointing id2label initializer_range label2id name_or_path transformers_version
""".split()
)
"""Names of what may change, besides `FREE` flags, what torch keeps in each module, and token ids.
Whether modules train is seen to elsewhere."""

OF_TORCH = frozenset(vars(nn.Module()))

NOT_MODELS = (
    *("torch.", "builtins.", "shardwright.", "transformers.modeling_utils."),
    *("transformers.generation.", "transformers.integrations.", "transformers.utils."),
)
"""Packages whose code does not say what a model computes, though models inherit from it."""


class MISSING:
    """Stands for what is not there."""


class Change(NamedTuple):
    """An attribute that was set, and what it was when the model was split."""

    module: nn.Module
    name: str
    before: Any


class Settled(Copied):
    """Mixin in front of the class of a module: notes what is set on it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter) and _is_distributed(sys._getframe(1)):
            self.__dict__["_parameters"][name] = value  # as where no class sets otherwise
            return
        if name == "forward" and (calls := self.__dict__.get("_shardwright_calls")) is not None:
            calls.put_forward(self, value)
            return
        if is_plain(value) and not torch.compiler.is_compiling():
            calls = self.__dict__.get("_shardwright_calls")
            if calls is not None and not _may_change(name) and not name.startswith(OURS):
                before = vars(self).get(name, getattr(type(self), name, MISSING))
                known = before is MISSING or is_plain(before)
                own = calls.switching or calls.inside() or _is_distributed(sys._getframe(1))
                if known and not own:
                    calls.changed = True
                    calls.settings.append(Change(self, name, before))  # type: ignore[arg-type]
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Any:
        """As the module has it: what its own code sets then is what it set while it was traced."""
        calls = self.__dict__.get("_shardwright_calls")
        if calls is None or calls.switching:
            return super().train(mode)  # type: ignore[misc]
        calls.switching = True
        try:
            return super().train(mode)  # type: ignore[misc]
        finally:
            calls.switching = False


def _is_distributed(frame: Any) -> bool:
    """Whether code of torch.distributed runs in a frame: FSDP2 puts parameters together so."""
    return frame.f_globals.get("__name__", "").startswith("torch.distributed.")


class Settings:
    """What code of a split model may ask for, as it was when the model was split."""

    def __init__(self, model: nn.Module) -> None:
        self.asked = frozenset(_names_in_code(model))
        self.configs = [(config, dict(vars(config))) for config in _configs(model)]

    def configs_changed(self) -> bool:
        """Whether a config is not what it was."""
        return any(vars(config) != before for config, before in self.configs)

    def keep_configs(self) -> None:
        """Take configs as they are: the model's own code has changed them."""
        self.configs = [(config, dict(vars(config))) for config, _ in self.configs]

    def check(self, model: nn.Module, changes: list[Change]) -> None:
        """Look whether what was set matters to no code that was traced.

        Raises:
            UsageError: it may.
        """
        first: dict[tuple[int, str], Change] = {}
        for change in changes:
            first.setdefault((id(change.module), change.name), change)
        for module, name, before in first.values():
            now = vars(module).get(name, getattr(type(module), name, MISSING))
            drops = isinstance(module, _DropoutNd) and name == "p"
            if not (drops and now == 0) and self._matters(name, before, now):
                path = next((n for n, m in model.named_modules() if m is module), "")
                raise _refused(f"{path}.{name}".lstrip("."), before, now)
        for config, entries in self.configs:
            for name in {**entries, **vars(config)}:
                before, now = entries.get(name, MISSING), vars(config).get(name, MISSING)
                if not _may_change(name) and self._matters(name, before, now):
                    raise _refused(f"config.{name.removesuffix('_internal')}", before, now)

    def _matters(self, name: str, before: Any, now: Any) -> bool:
        """Whether code may do something else with another value; what is new it must ask for."""
        if before is MISSING and (name not in self.asked or now is None):
            return False
        if "drop" in name and now == 0:
            return False  # nothing is dropped then, as in eval mode
        return before is not now and (type(before) is not type(now) or before != now)


def _refused(name: str, before: Any, now: Any) -> UsageError:
    was = "not there" if before is MISSING else repr(before)
    return UsageError(
        f"'{name}' is {now!r:.60}, and was {was:.60} when the model was split: its code may do "
        "what nobody has proven then: set it before the model is planned and split"
    )


def _may_change(name: str) -> bool:
    known = name in HARMLESS or name in FREE or name in OF_TORCH
    return known or name.endswith(("token_id", "token_ids"))


def _configs(model: nn.Module) -> Iterator[Any]:
    """The config of a model, and those in it."""
    todo = [vars(model).get("config")]
    found: set[int] = set()
    while todo:
        config = todo.pop()
        if hasattr(config, "to_dict") and hasattr(config, "__dict__") and id(config) not in found:
            found.add(id(config))
            todo += vars(config).values()
            yield config


def _names_in_code(model: nn.Module) -> Iterator[str]:
    """Every name, and string, in the code of the classes of modules, and of the files they are in.

    But for what only builds them.
    """
    kinds = {
        kind
        for own in {type(m) for m in model.modules()}
        for kind in own.__mro__
        if not f"{kind.__module__}.".startswith(NOT_MODELS)
    }
    for home in {kind.__module__ for kind in kinds}:
        beside = list(vars(sys.modules[home]).values()) if home in sys.modules else []
        kinds |= {v for v in beside if isinstance(v, type) and v.__module__ == home}
        yield from _names_of(v for v in beside if not isinstance(v, type))
    for kind in kinds:
        yield from _names_of(vars(kind).values())


def _names_of(members: Iterable[Any]) -> Iterator[str]:
    for function in filter(isfunction, map(_unwrapped, members)):
        if function.__name__ not in ("__init__", "_init_weights"):
            yield from names_in([function.__code__])


def _unwrapped(member: Any) -> Any:
    """The function that a property, a decorator or the like stands for."""
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    while type(member) is not type and "__wrapped__" in getattr(member, "__dict__", ()):
        member = member.__wrapped__
    return member
