"""Attributes of modules, and what modules keep, that change after a model was split.

Code may do something else with another value, which no traced call ran. So a module notes what is
set on it from outside of calls, and the root compares at its next call; configs, lists and the like
(`contents.py`), and classes, are compared then, as nothing tells of their changes. What the model's
own code sets in a call is its own business. What is not plain (a function, a list) matters where
code that a forward runs asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from operator import ne
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from shardwright.planner.contract.plain_values import is_plain
from shardwright.runtime.code.copied import OWN, Copied
from shardwright.runtime.code.names_in_code import NOT_MODELS, Asked
from shardwright.runtime.noticed.changes import (
    MISSING,
    differ,
    differences,
    is_config,
    may_change,
    refused,
)
from shardwright.runtime.noticed.contents import Content, Contents, contents, snapshot
from shardwright.runtime.tensors import buffers

IN_TURN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""What runs all modules in it, whatever they are called."""


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
        if not isinstance(value, (Tensor, nn.Module)):
            note(self, name, value)  # type: ignore[arg-type]
        elif isinstance(value, DTensor) and name in buffers.names(self):
            value = buffers.local(self, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name != "forward":
            note(self, name, MISSING)  # type: ignore[arg-type]
        super().__delattr__(name)

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


def note(module: nn.Module, name: str, value: Any) -> None:
    """Note that an attribute of a module of a split model is set, but by the model's own code."""
    calls = vars(module).get("_shardwright_calls")
    if calls is None or torch.compiler.is_compiling() or may_change(name) or name.startswith(OWN):
        return
    before = _now(module, name)
    if isinstance(before, (Tensor, nn.Module)):
        calls.changed = True  # the guard sees to these
        return
    known = is_plain(value) or value is MISSING or isinstance(module, IN_TURN)
    if not (known or name in calls.asked):
        return
    if calls.switching or calls.inside() or _is_distributed(sys._getframe(2)):
        return
    new = (c for c in calls.settings if c.before is MISSING and c.module is module)
    came = any(change.name == name for change in new)
    if not came:
        calls.settings.append(Change(module, name, before))
        came = before is MISSING
    if not came or name in calls.asked or isinstance(module, IN_TURN):
        calls.changed = True  # else no code asks for it: torch.compile leaves its notes so


def _now(module: nn.Module, name: str) -> Any:
    """What an attribute is: of the module, or of its class."""
    own = vars(module)
    for store in (own, own["_modules"], own["_parameters"], own["_buffers"]):
        if name in store:
            return store[name]
    return getattr(type(module), name, MISSING)


def _is_distributed(frame: Any) -> bool:
    """Whether code of torch.distributed runs in a frame: FSDP2 puts parameters together so."""
    return frame.f_globals.get("__name__", "").startswith("torch.distributed.")


class Classes:
    """The classes of the modules of a split model, and what was in them; copies share it."""

    def __init__(self, model: nn.Module) -> None:
        own = dict.fromkeys(map(type, model.modules()))
        found = dict.fromkeys(kind for one in own for kind in one.__mro__)
        self.kinds = [kind for kind in found if kind in own or not _is_of_framework(kind)]
        self.now = [vars(kind) for kind in self.kinds]
        self.before = [snapshot(entries) for entries in self.now]

    def changes(self) -> Iterator[tuple[type, str, Any, Any]]:
        """Classes, with the names in them that changed, and what was and is there."""
        for kind, now, before in zip(self.kinds, self.now, self.before, strict=True):
            for difference in differences(before, now):
                yield kind, *difference

    def __deepcopy__(self, memo: dict[int, Any]) -> Classes:
        return self


class Settings:
    """What code of a split model may ask for, as it was when the model was split."""

    def __init__(self, model: nn.Module) -> None:
        self.asked = Asked(model)
        self.contents = Contents(contents(model, self._asks))
        self.classes = Classes(model)

    def changed(self) -> bool:
        """Whether what a class or the model keeps is not what it was; asked for each call."""
        classes = self.classes
        return any(map(ne, classes.now, classes.before)) or self.contents.changed()  # all in C

    def keep_contents(self) -> None:
        """Take configs as they are, which the model's own code has changed; the rest is its own."""
        known = (c for c in self.contents.every if is_config(c.kept) or not c.changed())
        self.contents = Contents(content.again() for content in known)

    def keep(self, model: nn.Module) -> None:
        """Take all as it is, which was looked at."""
        self.contents = Contents(contents(model, self._asks))
        self.classes.before[:] = map(snapshot, self.classes.now)

    def check(self, model: nn.Module, changes: list[Change]) -> None:
        """Look whether what was set matters to no code that was traced.

        Raises:
            UsageError: it may.
        """
        first: dict[tuple[int, str], Change] = {}
        for change in changes:
            first.setdefault((id(change.module), change.name), change)
        for module, name, before in first.values():
            now = _now(module, name)
            drops = isinstance(module, _DropoutNd) and name == "p"
            runs = isinstance(module, IN_TURN) and isinstance(now, nn.Module)
            if runs or (not (drops and now == 0) and self._matters(name, before, now)):
                path = next((n for n, m in model.named_modules() if m is module), "")
                raise refused(f"{path}.{name}".lstrip("."), before, now)
        for content in self.contents.every:
            self._check_content(content)
        for kind, name, before, now in self.classes.changes():
            if name == "forward" or (not may_change(name) and self._matters(name, before, now)):
                raise refused(f"{name}' of the class '{kind.__name__}", before, now)

    def _check_content(self, content: Content) -> None:
        """Look whether what changed in something that the model keeps matters."""
        path, before, now = content.path, content.before, content.now
        if now is content.kept:
            if differ(before, now):
                raise refused(path, before, now)
            return
        for name, was, is_now in differences(before, now):
            known = is_config(content.kept) or self._asks(name)
            if known and not may_change(name) and self._matters(name, was, is_now):
                raise refused(f"{path}.{name.removesuffix('_internal')}", was, is_now)

    def _asks(self, name: str) -> bool:
        """Whether code that a forward may run asks for what has this name."""
        return name in self.asked.in_forwards

    def _matters(self, name: str, before: Any, now: Any) -> bool:
        """Whether code may do something else with another value; what is new it must ask for."""
        if before is MISSING and (name not in self.asked.names or now is None):
            return False
        if "drop" in name and is_plain(now) and now == 0:
            return False  # nothing is dropped then, as in eval mode
        plain = all(one is MISSING or is_plain(one) for one in (before, now))
        return (plain or self._asks(name)) and differ(before, now)


def _is_of_framework(kind: type) -> bool:
    """Whether it is a class that all models have in common: nobody changes those for one."""
    home = f"{kind.__module__}."
    return kind in (object, nn.Module) or home.startswith(
        tuple(place for place in NOT_MODELS if place != "torch.")
    )
