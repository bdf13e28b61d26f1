"""Isolate the state that model code keeps outside of modules: caches, class attributes, globals.

Code may keep integers and tensors in an `lru_cache`, in a dict of a class or of a Python module, in
a default argument or in a class attribute. Values left there by a trace would be wrong in the next
trace and in the user's process. While model code runs, values cached by integers or tensors are
therefore computed anew. Afterwards all other state is restored.

The state is found from the code: the names that a model's classes use, and the names that those use
in turn. (State that is not found so is safe, but may make a plan impossible: integers of a finished
trace are constants, and two integers that code finds equal must be equal on each rank, see
`sizes/provenance.py`.)
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, islice, repeat
from operator import is_not
from types import (
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

from shardwright.planner.trace.sizes.number_tables import NumberTable, holds_numbers, noting
from shardwright.planner.trace.state.attribute_contents import CONTAINERS, Contents
from shardwright.runtime.code.model_objects import LARGEST, OF_TORCH
from shardwright.runtime.code.source import codes_in

LruCache = type(functools.lru_cache(lambda: None))

FUNCTIONS = (FunctionType, LruCache)

OF_FILES = "huggingface_hub safetensors filelock tqdm psutil packaging httpx httpx2 requests yaml"
LIBRARIES = {"torch", "shardwright", "numpy", *OF_FILES.split(), *sys.stdlib_module_names}
"""Packages whose code keeps no state of a model."""

CALLED = ("forward", "__init__", "__new__", "__call__", "__getattr__", "__getitem__", "__setitem__")
CALLED_BY_PYTHON = (*CALLED, "__get__", "__iter__", "__enter__", "__exit__", "__post_init__")
"""Methods that run without being named in code."""

WITHOUT_SIZES = (str, bytes, bool, float, type(None), torch.dtype, torch.device)
CODE = (type, ModuleType, FunctionType)
"""Types whose instances hold no integers or tensors of a model."""

ABSENT: Any = object()

MAX_KNOWN = 16
"""Of how many sets of classes it is kept at most what they reach."""


@contextmanager
def isolated(root: nn.Module) -> Iterator[Snapshot]:
    """Context manager for running code of `root`; restores the state of the code afterwards.

    Yields the state before.

    Within, values cached by integers or tensors are neither looked up nor kept, and lists of
    numbers note by which sizes they are indexed.
    """
    own = [(vars(m), n, v) for m in root.modules() for n, v in vars(m).items() if n not in OF_TORCH]
    code = [part for _, _, value in own for part in _code_in(value)]
    reached = _reached(frozenset([*map(_class_of, root.modules()), *code]), len(sys.modules))
    before = reached.snapshot([Slot(o, n) for o, n, v in own if isinstance(v, LruCache)])
    names = [(cls, {*vars(cls)}) for cls in reached.classes.values()]
    uncached = [(slot, _uncached(value)) for slot, value in before.cached]
    reached.clear_caches(but=before.caches)
    try:
        for slot, value in uncached:
            slot.set(value)
        before.note_indexes()
        yield before
    finally:
        before.restore_slots()
        for cls, had in names:
            for name in vars(cls).keys() - had:
                if not isinstance(vars(cls)[name], CODE) and not name.startswith("__"):
                    type.__delattr__(cls, name)
        before.contents.restore()
        reached.clear_caches(but=before.caches)


def _code_in(value: Any) -> Iterator[Any]:
    """Yield the code in an attribute of a module: the value itself or container entries.

    Of wrappers of the planner, which each run of a model has anew, it is the code that they wrap.
    """
    while isinstance(value, FunctionType) and _of_planner(value.__globals__.get("__name__")):
        value = getattr(value, "__wrapped__", None)
    if isinstance(value, MethodType):
        kind, function = type(value.__self__), value.__func__
        if getattr(kind, getattr(function, "__name__", ""), None) is function:
            function = _class_of(value.__self__)  # the same for all objects of a class
        if isinstance(function, (type, *FUNCTIONS)) and not _of_library(function.__module__):
            yield function
    elif isinstance(value, FUNCTIONS):
        yield value
    elif isinstance(value, (*CONTAINERS, tuple)):
        parts = dict.values(value) if isinstance(value, dict) else value
        yield from (part for part in islice(parts, LARGEST) if isinstance(part, FUNCTIONS))


def _class_of(value: Any) -> type:
    """Return the class of an object, or the one that it had before it was split."""
    return getattr(type(value), "_shardwright_original", type(value))


class Slot:
    """A place where code keeps a value: a name in a module or class, or a cell of a closure.

    Or, by the name `__defaults__`, the default arguments of a function.
    `get` returns the current value, or ABSENT.
    """

    __slots__ = "get", "name", "owner"

    def __init__(self, owner: Any, name: str = "") -> None:
        self.owner, self.name = owner, name
        self.get: Callable[[], Any] = (  # without a frame: there are thousands
            functools.partial(getattr, owner, name or "cell_contents", ABSENT)
            if isinstance(owner, (CellType, FunctionType))
            else functools.partial(_names_of(owner).get, name, ABSENT)
        )

    def set(self, value: Any) -> None:
        """Set the value; ABSENT deletes it."""
        if isinstance(self.owner, CellType):
            if value is ABSENT:
                del self.owner.cell_contents
            else:
                self.owner.cell_contents = value
        elif isinstance(self.owner, FunctionType):
            self.owner.__defaults__ = value
        elif isinstance(self.owner, type):
            if value is ABSENT:
                type.__delattr__(self.owner, self.name)
            else:
                type.__setattr__(self.owner, self.name, value)
        elif value is ABSENT:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = value


def _names_of(owner: Any) -> Any:
    return vars(owner) if isinstance(owner, type) else owner


class Slots:
    """Thousands of slots, and what they all hold now: each kind of owner is looked up in one go."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        dicts = [slot for slot in slots if type(slot.owner) is dict]
        types = [slot for slot in slots if isinstance(slot.owner, type)]
        others = [s for s in slots if not (type(s.owner) is dict or isinstance(s.owner, type))]
        self.slots = [*dicts, *types, *others]
        self._in_dicts = [s.owner for s in dicts], [s.name for s in dicts]
        self._in_types = [vars(s.owner) for s in types], [s.name for s in types]
        self._elsewhere = [s.get for s in others]

    def values(self) -> list[Any]:
        """Return what each slot holds, or ABSENT."""
        in_dicts = map(dict.get, *self._in_dicts, repeat(ABSENT))
        in_types = map(MappingProxyType.get, *self._in_types, repeat(ABSENT))
        return [*in_dicts, *in_types, *(get() for get in self._elsewhere)]


class Snapshot:
    """What slots hold, and the contents of the containers in them and among `held`.

    Attributes:
        cached: Slots with cached functions, and these.
        caches: All cached functions, also those that an outer trace replaced.
        contents: The contents.
    """

    def __init__(self, slots: Slots, held: Sequence[Any]) -> None:
        self._now, self._slots, self._values = slots.values, slots.slots, slots.values()
        functions = [_function_of(value) for value in self._values]
        each = zip(self._slots, self._values, functions, strict=True)
        self.cached = [(slot, value) for slot, value, f in each if isinstance(f, LruCache)]
        self.caches = [getattr(f, "cached", f) for f in functions if isinstance(f, CACHES)]
        kinds = {id(type(v)): type(v) for v in self._values}  # a type need not be hashable
        may_hold = {number for number, kind in kinds.items() if _may_hold(kind)}
        self.contents = Contents([*held, *(v for v in self._values if id(type(v)) in may_hold)])

    @functools.cached_property
    def _lists(self) -> list[tuple[Any, Callable[[Any], None]]]:
        """The lists of numbers, with a function for each that puts another one in its place."""
        pairs = zip(self._values, self._slots, strict=True)
        found = [(value, slot.set) for value, slot in pairs if holds_numbers(value)]
        return [*found, *self.contents.entries(holds_numbers)]

    def note_indexes(self) -> None:
        """Replace each list of numbers by a `NumberTable`, until all is restored."""
        made: dict[int, NumberTable] = {}
        for value, put in self._lists:
            put(noting(value, made))

    def holds(self) -> bool:
        """Return whether all is still as it was."""
        return not (any(self._changes()) or self.contents.changed())

    def left(self) -> list[Any]:
        """Return what is in changed slots, and in containers and objects that changed."""
        changed = [slot.get() for slot in compress(self._slots, self._changes())]
        return [*changed, *self.contents.now_other()]

    def restore_slots(self) -> None:
        """Restore what the slots hold, but not the contents of that."""
        for slot, value in compress(zip(self._slots, self._values, strict=True), self._changes()):
            slot.set(value)

    def _changes(self) -> Iterable[bool]:
        return map(is_not, self._now(), self._values)


class Uncached:
    """Wraps an `lru_cache`d function; calls that involve sizes or tensors bypass the cache."""

    def __init__(self, cached: Any) -> None:
        functools.update_wrapper(self, cached)
        self.cached = cached

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, without its cache if arguments or result involve sizes or tensors."""
        if not all(map(_is_without_sizes, (*args, *kwargs.values()))):
            return self.cached.__wrapped__(*args, **kwargs)
        misses = self.cached.cache_info().misses
        result = self.cached(*args, **kwargs)
        if _is_without_sizes(result):
            return result
        if self.cached.cache_info().misses > misses:
            self.cached.cache_clear()
        elif _is_data(result):
            return self.cached.__wrapped__(*args, **kwargs)
        return result  # an object cached before

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the bound method of `instance`."""
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cached, name)


def _is_data(value: Any) -> bool:
    """Return whether a value is or contains a tensor or an integer."""
    if isinstance(value, (*CONTAINERS, tuple, frozenset)):
        return any(map(_is_data, dict.values(value) if isinstance(value, dict) else value))
    return isinstance(value, (torch.Tensor, int))


def _is_without_sizes(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_without_sizes, value))
    if isinstance(value, dict):
        return all(map(_is_without_sizes, (*value, *value.values())))
    return isinstance(value, (*WITHOUT_SIZES, *CODE))


CACHES = (LruCache, Uncached)


def _uncached(value: Any) -> Any:
    """Return `value`, a cached function or method, as an `Uncached` one."""
    new = Uncached(_function_of(value))
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(new)
    return value.getter(new) if isinstance(value, property) else new


def _function_of(value: Any) -> Any:
    """Return the function behind a static method, class method or property; else the value."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


class _Reached:
    """All values that the code of classes and functions can reach by names.

    Attributes:
        slots: The places of these values.
        held: Default arguments by keyword and attributes of functions.
        classes: The classes reached, by id.
    """

    def __init__(self, code: Iterable[Any]) -> None:
        self.slots: list[Slot] = []
        self.held: list[Any] = []
        self.classes: dict[int, type] = {}
        self._seen: set[Any] = set()
        self._names: set[str] = set()
        self._owners: dict[str, list[Any]] = defaultdict(list)
        """Name that no code was found to use yet -> classes and namespaces that define it."""
        self._caches: list[Any] = []
        self._last: Snapshot | None = None
        self._todo: list[Any] = list(code)
        self._use(frozenset(CALLED_BY_PYTHON))
        while self._todo:
            self._visit(self._todo.pop())

    def snapshot(self, own: Sequence[Slot]) -> Snapshot:
        """Return what all slots hold, and those of a model's `own` attributes.

        The last snapshot is used if all is as it was: to look into containers takes much longer.
        """
        if own:
            return Snapshot(Slots([*self.slots, *own]), self.held)
        if self._last is None or not self._last.holds():
            self._last = Snapshot(Slots(self.slots), self.held)
        return self._last

    def clear_caches(self, but: Iterable[Any]) -> None:
        """Empty the caches of all functions reached, except those in `but`."""
        kept = {*map(id, but)}
        for function in self._caches:
            if id(function) not in kept and function.cache_info().currsize:
                function.cache_clear()

    def _use(self, names: frozenset[str]) -> None:
        """Note that code uses these names, as globals or as attributes of any object."""
        for name in names - self._names:
            self._names.add(name)
            for owner in self._owners.pop(name, ()):
                self._keep(Slot(owner, name))

    def _keep(self, slot: Slot) -> None:
        if (key := (id(slot.owner), slot.name)) not in self._seen:
            self._seen.add(key)
            self.slots.append(slot)
            self._todo.append(slot.get())

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (*WITHOUT_SIZES, int, torch.Tensor)):
            return
        self._seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            self._todo.append(value.__func__)
        elif isinstance(value, property):
            self._todo += [value.fget, value.fset]
        elif isinstance(value, functools.partial):
            self._todo.append(value.func)
        elif isinstance(value, CACHES):
            self._caches.append(getattr(value, "cached", value))
            self._todo.append(value.__wrapped__)
        elif isinstance(value, FunctionType) and not _of_library(value.__module__):
            self._visit_function(value)
        elif isinstance(value, ModuleType) and not _of_library(value.__name__):
            self._visit_names(vars(value))
        elif isinstance(value, type):
            for cls in value.__mro__:
                if not _of_library(cls.__module__) and id(cls) not in self.classes:
                    self.classes[id(cls)] = cls
                    self._visit_names(cls)
        elif isinstance(value, (*CONTAINERS, tuple)):
            self._todo += islice(dict.values(value) if isinstance(value, dict) else value, LARGEST)
        elif not isinstance(value, CODE) and not _of_library(type(value).__module__):
            # Not `getattr`: an object may raise any exception for a missing attribute.
            own = value.__dict__ if type(value).__dictoffset__ else {}
            self._todo += [type(value), *own.values()]

    def _visit_function(self, function: Any) -> None:
        code, namespace = function.__code__, function.__globals__
        names = _names_in(code)
        self._use(names)
        for name in names if _sets_globals(code) else names & namespace.keys():
            self._keep(Slot(namespace, name))
        for cell in function.__closure__ or ():
            self._keep(Slot(cell))
        if function.__defaults__:
            self.slots.append(Slot(function, "__defaults__"))
        self.held += [vars(function), *(function.__defaults__ or ())]
        if function.__kwdefaults__:
            self.held.append(function.__kwdefaults__)

    def _visit_names(self, owner: Any) -> None:
        for name in _names_of(owner):
            if name in self._names:
                self._keep(Slot(owner, name))
            else:
                self._owners[name].append(owner)


_known: dict[tuple[frozenset[Any], int], _Reached] = {}


def _reached(code: frozenset[Any], modules: int) -> _Reached:
    """Return what code reaches, or what more code reaches: towers are tried alone, for example.

    With more Python `modules` imported it may reach more.
    """
    for (known, count), reached in _known.items():
        if code <= known and count == modules:
            return reached
    if len(_known) >= MAX_KNOWN:
        look_anew()
    return _known.setdefault((code, modules), _Reached(code))


def look_anew() -> None:
    """Forget what code was found to reach: users may have changed it since the last plan."""
    _known.clear()


STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


@functools.lru_cache(maxsize=4096)
def _sets_globals(code: CodeType) -> bool:
    return any(STORE_GLOBAL in c.co_code[::2] for c in codes_in(code))


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code uses."""
    return frozenset(name for c in codes_in(code) for name in c.co_names)


def _may_hold(kind: type) -> bool:
    """Return whether a type is a container, or a class outside `LIBRARIES`.

    Containers of the planner, which wraps modules while it runs them, do not count.
    """
    module = kind.__module__
    return not _of_library(module) or (issubclass(kind, CONTAINERS) and not _of_planner(module))


def _of_planner(module: str | None) -> bool:
    return (module or "").startswith("shardwright.")


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES
