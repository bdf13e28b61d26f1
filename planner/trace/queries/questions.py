"""Answers to queries of model code about its context: training mode, gradients and autocast.

All queries that model code may make:

| query | answer | consequence |
|---|---|---|
| training mode: `self.training` | the current mode of the module | if code may do something else in the other mode, all runs are made in training mode too (`compared_runs.py`) |
| gradients: `torch.is_grad_enabled()` | both | the run is made once with each answer (`data_queries/branch_paths.py`) |
| autocast | off | the runs are made again with autocast on; if code then does more than cast, the plan is not for autocast (`compared_runs.py`) |
| export: `torch.compiler.is_exporting()` | yes; no, if the code fails under export | none (`trace_lock.py`) |
| numbers among the arguments | their values | the runs are made again with opaque numbers; the plan is for any number if no code depends on its value (`compared_runs.py`) |
| flags among the arguments | their values | the plan is for these flags (`flags.py`) |
| sizes and integers | integers that record what they were computed from | equations that the plan must satisfy (`sizes/`) |
| values of tensors | see `data_queries/` | see `data_queries/` |

This file answers the first three. A query does not count if the expression that makes it has the
same value with either answer (`harmless.py`).
"""  # noqa: E501 a table

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn

from shardwright.planner.trace.data_queries.branch_paths import answer_for_all
from shardwright.planner.trace.data_queries.model_code import is_plumbing
from shardwright.planner.trace.queries.harmless import harmless
from shardwright.runtime.scopes import PerThread, replaced

MAKES_CONTEXTS = "transformers.utils."
"""Package that queries autocast only to decide whether it needs a context that turns it off."""


@dataclass
class Asked:
    """The queries of model code that may matter.

    Attributes:
        training: Whether code queried the training mode.
        autocast: Whether code queried autocast.
        autocast_dtype: If set, code is told that autocast is on with this dtype.
    """

    training: bool = False
    autocast: bool = False
    autocast_dtype: torch.dtype | None = None


_present: Any = PerThread(asked=Asked())
"""Its `asked` has the queries of the code that this thread traces."""


@contextmanager
def noted(autocast: torch.dtype | None = None) -> Iterator[Asked]:
    """Note the queries of model code in this thread; `autocast` is the dtype if it is to be on."""
    thread, asked = get_ident(), Asked(autocast_dtype=autocast)

    def get(self: nn.Module) -> bool:
        if get_ident() == thread and not asked.training:
            asked.training = not harmless(sys._getframe(1))
        return self.__dict__["training"]

    def put(self: nn.Module, value: bool) -> None:
        self.__dict__["training"] = value

    with replaced(nn.Module, training=property(get, put)), replaced(_present, asked=asked):
        yield asked


def _about_gradients(frame: Any, name: str, torchs: Callable[..., Any], *args: Any) -> Any:
    counts = frame and not (is_plumbing(frame.f_globals["__name__"]) or harmless(frame))
    found = answer_for_all(name) if counts else None
    return torchs(*args) if found is None else found


def _about_autocast(frame: Any, name: str, torchs: Callable[..., Any], *args: Any) -> Any:
    asks = frame.f_globals["__name__"] if frame else "torch"
    if not (is_plumbing(asks) or asks.startswith(MAKES_CONTEXTS)):
        asked = _present.asked
        asked.autocast = True
        if asked.autocast_dtype is not None:
            return True if name.endswith("enabled") else asked.autocast_dtype
    return torchs(*("cpu" if one == "meta" else one for one in args))


ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.is_grad_enabled: _about_gradients,
    torch.is_inference_mode_enabled: _about_gradients,
    torch.is_autocast_enabled: _about_autocast,
    torch.is_autocast_cpu_enabled: _about_autocast,
    torch.get_autocast_dtype: _about_autocast,
    torch.get_autocast_gpu_dtype: _about_autocast,
    torch.get_autocast_cpu_dtype: _about_autocast,
}
"""Query function -> function that answers it.

An answer is called with the frame of the caller (None in other threads), the name of the query
function, the original function and the arguments.
"""

_by_id = {id(question): question for question in ANSWERS}


@contextmanager
def answered() -> Iterator[None]:
    """Context manager in which this thread's calls of functions in `ANSWERS` are answered.

    Code may have imported them by name, so they are replaced in all Python modules. Autocast for
    the meta device, which torch does not support, becomes autocast for the CPU: it casts nothing.
    """
    thread = get_ident()

    def answering(question: Any, before: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any) -> Any:
            frame = sys._getframe(1) if get_ident() == thread else None
            return ANSWERS[question](frame, question.__name__, before, *args)

        return answer

    enter = torch.autocast.__init__

    def enter_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    held = [(names, name, question, names[name]) for names, name, question in _bindings.found()]
    try:
        for names, name, question, before in held:
            names[name] = answering(question, before)
        with replaced(torch.autocast, __init__=enter_autocast):
            yield
    finally:
        for names, name, _, before in held:
            names[name] = before


class _Bindings:
    """The names of query functions in all Python modules, which have some hundred thousand names.

    A module is searched again only if its number of names has changed.
    """

    def __init__(self) -> None:
        self._modules: list[Any] = []
        self._spaces: list[tuple[str, dict[str, Any]]] = []
        self._lengths: list[int] = []
        self._found: list[tuple[dict[str, Any], str, Any]] = []
        self._known: dict[str, tuple[int, list[tuple[str, Any]]]] = {}

    def found(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return (namespace, name, query function) for each binding of a query function."""
        modules = list(sys.modules.values())
        if [*map(id, modules)] != [*map(id, self._modules)]:
            names = [(n, getattr(m, "__dict__", None)) for n, m in list(sys.modules.items())]
            self._spaces = [(n, own) for n, own in names if type(own) is dict and _searched(n, own)]
            self._modules, self._lengths = modules, []
        lengths = [len(names) for _, names in self._spaces]
        if lengths != self._lengths:
            found = ((names, self._in(module, names)) for module, names in self._spaces)
            self._found = [(names, *binding) for names, bindings in found for binding in bindings]
            self._lengths = lengths
        return [binding for binding in self._found if binding[1] in binding[0]]

    def _in(self, module: str, names: dict[str, Any]) -> list[tuple[str, Any]]:
        if (known := self._known.get(module)) is None or known[0] != len(names):
            found = [(n, _by_id[id(v)]) for n, v in [*names.items()] if id(v) in _by_id]
            known = self._known[module] = len(names), found
        return known[1]


def _searched(module: str, names: dict[str, Any]) -> bool:
    return names is vars(torch) or not is_plumbing(module)


_bindings = _Bindings()
