"""Runs a module as a program; forked ranks find it by name."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence


def as_main(module: str, arguments: Sequence[str]) -> None:
    """As `python -m module arguments`."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
