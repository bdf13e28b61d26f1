"""Replace integer attributes of modules and their configs by `SourcedInt`s during a trace."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwright.planner.trace.sizes.loops import ranges_watched
from shardwright.planner.trace.sizes.provenance import UNSEEN, Provenance, SourcedInt
from shardwright.planner.trace.sizes.size_mode import SizeMode
from shardwright.planner.trace.state.attribute_contents import KeptContents
from shardwright.planner.trace.thread_patches import patched_in_this_thread


@contextmanager
def marked(root: nn.Module, top: nn.Module) -> Iterator[Provenance]:
    """Context manager in which int attributes of modules and their configs are `SourcedInt`s.

    Yields the provenance that is noted while `top`, which contains `root`, runs.
    """
    provenance = Provenance({id(module): name for name, module in root.named_modules()})
    undo = [(m, type(m), dict(m.__dict__), _contents(m)) for m in root.modules()]
    kept = KeptContents(root)
    for path, module in root.named_modules():
        _mark(module.__dict__, path, "", provenance)
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "__dict__") and hasattr(config, "to_dict"):
            module.__dict__["config"] = local = copy.copy(config)
            _mark(local.__dict__, path, "config.", provenance)
    forward = top.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with SizeMode(provenance), patched_in_this_thread(UNSEEN), ranges_watched(top):
            output = forward(*args, **kwargs)
        provenance.close()
        return output

    functools.update_wrapper(watched, forward)
    top.__dict__["forward"] = watched
    try:
        yield provenance
    finally:
        provenance.ended = True
        del top.__dict__["forward"]  # it refers to all notes in a reference cycle
        for module, kind, attributes, contents in undo:  # also drops attributes set by a forward
            if type(module) is not kind:
                object.__setattr__(module, "__class__", kind)
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, before in contents.items():
                attributes[name].clear()
                attributes[name].update(before)
        kept.restore()


def _contents(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """Return copies of a module's buffers and hook dicts: some modules add hooks as they run."""
    tables = ((k, v) for k, v in module.__dict__.items() if k == "_buffers" or k.endswith("_hooks"))
    return {name: dict(table) for name, table in tables if isinstance(table, dict)}


def _mark(attributes: dict[str, Any], path: str, prefix: str, provenance: Provenance) -> None:
    for key, value in list(attributes.items()):
        if type(value) in (int, SourcedInt) and not key.startswith("_"):
            plain = int.__int__(value)
            source = ("attribute", path, f"{prefix}{key}", plain)
            attributes[key] = SourcedInt.make(plain, source, provenance)
