"""Modules of a split model that stay as they are: what hooks on them need to know."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

from torch import nn

from shardwright.planner.contract.plan_file import ModulePlan
from shardwright.runtime.calls.caches import Caches
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.outside.hooks import Hooked, see_whole
from shardwright.runtime.outside.shown import Shown
from shardwright.runtime.redistribution.interface import Again
from shardwright.runtime.running import ALWAYS, Always, Running
from shardwright.runtime.subclasses import subclass


class Unchanged(Again):
    """What hooks need on a module that the plan leaves as it is.

    Args:
        forward: The module's own.
        leaf: Whether there is no module in it.
        path: Its name.
        spec: What the plan says of the tensors around it; None where these are whole.
        mesh: Where this rank stands.
    """

    def __init__(
        self,
        forward: Any,
        leaf: bool,
        path: str = "",
        spec: ModulePlan | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(path)
        self.running: Running | Always = ALWAYS
        self.caches = Caches()
        self.hides = False
        """Whether a newcomer runs in its place, from which caches are hidden."""
        self.originals: Any = None
        """Of a newcomer whose place takes such: `LocalState.originals` of what was there."""
        self._forward, self._leaf = forward, leaf
        self._spec, self._mesh = spec, mesh

    @cached_property
    def shown(self) -> Shown | None:
        """What hooks see; made when one asks."""
        if self._spec is None or self._mesh is None:
            return None
        return Shown(self._forward, self._leaf, self._spec, self._mesh, self.path)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unchanged:
        twin = copy.copy(self)
        twin.running = copy.deepcopy(self.running, memo)
        twin.originals = copy.deepcopy(self.originals, memo)
        return twin


def watch_unchanged(
    module: nn.Module, path: str = "", spec: ModulePlan | None = None, mesh: Mesh | None = None
) -> None:
    """Let hooks on a module that stays as it is see whole tensors, and no part of a cache.

    What it is called in is put in later (`wrap_root`).
    """
    if type(module).forward is nn.Module.forward or isinstance(module, Hooked):
        return
    vars(module)["_shardwright_unchanged"] = Unchanged(
        type(module).forward, next(module.children(), None) is None, path, spec, mesh
    )
    module.__class__ = subclass(type(module), Hooked)
    see_whole(module)
