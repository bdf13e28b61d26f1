"""What model code may ask about its surroundings, what it is told, and what follows.

| asked | told | what follows |
|---|---|---|
| whether a module trains: `self.training` | the mode that it is in | if code may do something else in the other mode, all runs are made in training mode too (`runs/training_runs.py`) |
| whether gradients are wanted: `torch.is_grad_enabled()` | both | the run is made once with each answer (`data_queries/branch_paths.py`) |
| whether autocast is on | no | the runs are made again with it on; if code then does more than cast, a plan is not for autocast (`runs/autocast_runs.py`) |
| whether it is exported: `torch.compiler.is_exporting()` | yes; no, if the code fails under export | nothing (`trace_lock.py`) |
| numbers among the arguments | their values | the runs are made again with the numbers opaque; a plan is for any number if nothing asks for its value (`free_numbers.py`) |
| flags among the arguments | their values | a plan is for these flags (`flags.py`) |
| sizes and integers | integers that remember what they were computed from | equations that the plan must satisfy (`sizes/`) |
| values of tensors | what is the same for any data | see `data_queries/` |

This file answers the first three. A question does not count where the expression that asks is the
same with either answer (`harmless.py`).
"""  # noqa: E501 a table

from __future__ import annotations

import sys
import threading
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

MAKES_CONTEXTS = "transformers.utils."
"""Where code asks for autocast only to know whether it needs a context that turns it off."""


@dataclass
class Asked:
    """What model code asked, where it matters.

    Attributes:
        training: Whether a module trains.
        autocast: Whether autocast is on.
        autocast_dtype: Autocast is said to be on, with this dtype.
    """

    training: bool = False
    autocast: bool = False
    autocast_dtype: torch.dtype | None = None


class _Present(threading.local):
    """What the code asked that this thread traces."""

    asked = Asked()


_present = _Present()


@contextmanager
def noted(autocast: torch.dtype | None = None) -> Iterator[Asked]:
    """Within, what model code of this thread asks is noted; autocast is on if it has a dtype."""
    thread, outer, asked = get_ident(), _present.asked, Asked(autocast_dtype=autocast)

    def get(self: nn.Module) -> bool:
        if get_ident() == thread and not asked.training:
            asked.training = not harmless(sys._getframe(1))
        return self.__dict__["training"]

    def put(self: nn.Module, value: bool) -> None:
        self.__dict__["training"] = value

    around = vars(nn.Module).get("training")  # model code may plan, too
    nn.Module.training = property(get, put)  # type: ignore[assignment]
    _present.asked = asked
    try:
        yield asked
    finally:
        _present.asked = outer
        if around is None:
            del nn.Module.training
        else:
            nn.Module.training = around


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
"""Functions that ask -> what answers.

That is given the frame of the caller (None in other threads), the name of the function, what would
answer without, and the arguments.
"""

_by_id = {id(question): question for question in ANSWERS}
_bindings_of: dict[str, tuple[int, list[tuple[str, Any]]]] = {}
"""Python modules that were searched: how many names each had, and which are questions."""


@contextmanager
def answered() -> Iterator[None]:
    """Within, and in this thread, the functions in `ANSWERS` are answered.

    Code may have imported them by name, so they are replaced in all Python modules. Autocast of
    the meta device, of which torch knows nothing, casts nothing.
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

    held = [(names, name, question, names[name]) for names, name, question in _bindings()]
    torch.autocast.__init__ = enter_autocast
    try:
        for names, name, question, before in held:
            names[name] = answering(question, before)
        yield
    finally:
        torch.autocast.__init__ = enter
        for names, name, _, before in held:
            names[name] = before


def _bindings() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where Python modules hold questions: their names, the name, and the question.

    A module is searched again only if it has more or fewer names than before: there are some
    hundred thousand.
    """
    for module, names in [(n, getattr(m, "__dict__", None)) for n, m in list(sys.modules.items())]:
        if type(names) is not dict or (is_plumbing(module) and names is not vars(torch)):
            continue
        if (known := _bindings_of.get(module)) is None or known[0] != len(names):
            found = [(n, _by_id[id(v)]) for n, v in list(names.items()) if id(v) in _by_id]
            known = _bindings_of[module] = len(names), found
        yield from ((names, name, question) for name, question in known[1] if name in names)
