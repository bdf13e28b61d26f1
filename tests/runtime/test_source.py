"""The source of a method is found whatever surrounds it, and only where it is just what runs."""

import importlib.util
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from shardwright.runtime.code.source import source_of

TEXT = '''"""A file."""
from __future__ import annotations

import math
from os import (
    path,
)

def plain(x: Unknown) -> None:
    return math.floor(x)

def kept(f):
    f.kept = True
    return f

@kept
def decorated(
    x,
):
    return x

class First:
    """It has
text at the left.
    """

    def calls_imports(self, x):
        return math.sqrt(x), path.join("a", "b")

    def asks_above(self):
        return super().__repr__()

    @staticmethod
    def is_static(x):
        def within():
            return x

        return within

if math.pi > 3:
    import json

    class Second:
        def under_if(self, x):
            return json.dumps(x)
else:
    class Second:
        def under_if(self, x):
            return None

class Last(First):
    # a comment
# another

    def at_the_end(self):
        return self.__private'''

METHODS = ["plain", "decorated", "calls_imports", "asks_above", "is_static", "under_if"]


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    """The file as a module."""
    file = tmp_path / "made.py"
    file.write_text(TEXT)
    spec = importlib.util.spec_from_file_location("made", file)
    assert spec is not None and spec.loader is not None
    out = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(out)
    return out


def methods(module: ModuleType) -> dict[str, FunctionType]:
    """The functions of the file by name."""
    spaces = [vars(module), *(vars(k) for k in vars(module).values() if isinstance(k, type))]
    found = {name: getattr(f, "__func__", f) for space in spaces for name, f in space.items()}
    return {name: f for name, f in found.items() if isinstance(f, FunctionType)}


@pytest.mark.parametrize("name", [*METHODS, "at_the_end"])
def test_source_compiles_to_what_runs(module: ModuleType, name: str) -> None:
    method = methods(module)[name]
    source = source_of(method)
    assert source is not None
    assert source.definition.name == name
    assert source.code(method) == method.__code__


@pytest.mark.parametrize("name", ["plain", "at_the_end"])
def test_only_what_matters_is_parsed(module: ModuleType, name: str) -> None:
    source = source_of(methods(module)[name])
    assert source is not None
    imports, other = source.tree.body[:-1], source.tree.body[-1]
    assert [type(statement).__name__ for statement in imports] == [
        "ImportFrom",
        "Import",
        "ImportFrom",
    ]
    assert getattr(other, "name", None) in ("plain", "Last")


def test_a_file_that_was_changed_since_has_no_source(module: ModuleType) -> None:
    assert module.__file__ is not None
    Path(module.__file__).write_text(TEXT.replace("floor", "ceil").replace("sqrt", "exp"))
    found = methods(module)
    assert source_of(found["plain"]) is None
    assert source_of(found["calls_imports"]) is None
    assert source_of(found["asks_above"]) is not None


def test_code_without_a_file_has_no_source() -> None:
    space: dict[str, FunctionType] = {}
    exec("def f(x):\n    return x", space)
    assert source_of(space["f"]) is None
