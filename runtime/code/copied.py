"""Copies of modules of a split model: as a module's own class makes one, and split as it is."""

from __future__ import annotations

import copy
from typing import Any

from torch.nn.utils.parametrize import is_parametrized

OWN = "_shardwright"
"""How the names begin of what splitting puts into a module."""


class Copied:
    """Mixin in front of the class of a module.

    `copy` goes around `__reduce_ex__`, which refuses to take the module elsewhere. A class may say
    what its copy is made of, and know nothing of what was put in since.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        calls = vars(self).get("_shardwright_calls")
        if calls is not None and calls.root is not self and id(calls.root) not in memo:
            # A copy of a part goes on with what the model's modules share.
            memo.update({id(calls): calls, id(calls.running): calls.running})
        if is_parametrized(self):  # type: ignore[arg-type]
            return super().__deepcopy__(memo)  # type: ignore[misc]
        out = copy._reconstruct(self, memo, *object.__reduce_ex__(self, 4))  # type: ignore[attr-defined]
        for name in _lost(self, out):
            vars(out)[name] = copy.deepcopy(vars(self)[name], memo)
        return out

    def __copy__(self) -> Any:
        out = copy._reconstruct(self, None, *object.__reduce_ex__(self, 4))  # type: ignore[attr-defined]
        vars(out).update({name: vars(self)[name] for name in _lost(self, out)})
        return out


def _lost(before: Any, after: Any) -> list[str]:
    """What splitting put into a module, and a copy that its own class makes does not have."""
    lost = [n for n in vars(before) if n.startswith(OWN) and n not in vars(after)]
    state = vars(before)["_shardwright"] if "_shardwright" in lost else None
    return lost if state is None else [*lost, *state.wholes]
