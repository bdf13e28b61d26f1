"""Load models and inputs from Python references: `package.module:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError, first_line, in_one_line

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and arguments by name, of a call."""
Calls = tuple[tuple[Any, ...], dict[str, Any] | Sequence[dict[str, Any]]]
"""The same of one call or, with a list of dicts, of several."""


def is_code(name: Any) -> bool:
    """Return whether a name is a Python reference, not a directory or a hub id."""
    return isinstance(name, str) and ":" in name and not Path(name).exists()


def made(name: str) -> Any:
    """Return the object that a Python reference names.

    If it is callable and no module, returns the result of calling it without arguments.

    Raises:
        UsageError: there is no such code, or it fails.
    """
    home, _, path = name.rpartition(":")
    try:
        found = reduce(getattr, path.split("."), _module(home))
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise UsageError(f"cannot find {name}: {first_line(error)}") from error
    except (Exception, SystemExit) as error:  # any exception of user code in an import
        raise UsageError(f"cannot import {home or 'nothing'}: {in_one_line(error)}") from error
    if not callable(found) or isinstance(found, nn.Module):
        return found
    try:
        return found()
    except Exception as error:  # any exception of user code
        raise UsageError(f"{name}() raised {in_one_line(error)}") from error


def inputs(name: str) -> Calls:
    """Return inputs from a Python reference or from a file that `torch.save` wrote.

    Either holds a tensor, a tuple of arguments, a dict of arguments by name, or a tuple and a dict.
    A list of dicts is for several calls.

    Raises:
        UsageError: there is no such code or file, or it holds something else.
    """
    if is_code(name):
        return _as_inputs(made(name), name)
    if name.endswith(".py"):
        raise UsageError(f"which function of {name} makes the inputs? Give {name}:FUNCTION")
    try:
        found = torch.load(name, weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise UsageError(
            f"cannot read inputs from {name}: {first_line(error)}; give a file that torch.save "
            "wrote, or MODULE:FUNCTION"
        ) from error
    return _as_inputs(found, name)


def _as_inputs(found: Any, name: str) -> Calls:
    match found:
        case Tensor():
            return (found,), {}
        case dict():
            return (), found
        case [dict(), dict(), *_] if all(isinstance(call, dict) for call in found):
            return (), found
        case (tuple() | list() as args, dict() as kwargs):
            return tuple(args), kwargs
        case tuple() | list() if found:
            return tuple(found), {}
    raise UsageError(
        f"{name} gives a {type(found).__name__}: inputs are a tensor, a tuple of them, a dict by "
        "name, a tuple and a dict, or a list of dicts for several calls"
    )


def _module(home: str) -> Any:
    if not home.endswith(".py"):
        here = str(Path.cwd())
        if here not in sys.path:  # unlike `python`, a console command does not add it
            sys.path.insert(0, here)
        return importlib.import_module(home)
    spec = importlib.util.spec_from_file_location(Path(home).stem, home)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
