"""Places in model code that call a module, for modules that are called several times."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from types import CodeType

from shardwright.planner.trace.data_queries.model_code import model_frame


def place_of_call() -> str:
    """Return the place in model code that calls the current module; empty if it is unknown.

    The place includes a digest of all code positions in that function, so it does not match
    another version of the code.
    """
    frame = model_frame()
    return "" if frame is None else _place(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=1024)
def _place(code: CodeType, at: int) -> str:
    first, found = code.co_firstlineno, [*code.co_positions()]
    _, line, _, column = found[at // 2]
    if line is None or column is None:
        return ""
    spans = {tuple(-1 if n is None else n for n in span) for span in found}
    moved = sorted((a - first, b - first, c, d) for a, b, c, d in spans)
    digest = sha256(repr(moved).encode()).hexdigest()[:8]
    return f"{code.co_qualname}:{line - first}:{column}@{digest}"
