"""Find stacks of repeated blocks in a module, and choose the blocks to trace.

Blocks of a `ModuleList` are of one kind if they have the same classes, shapes and plain attributes,
apart from attributes that number the blocks. The traced blocks must contain every kind, and every
pair of kinds that are neighbors in the full stack. Every block, and every edge between two blocks,
then corresponds to a traced one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shardwright.planner.contract.names import block_number, grouped, is_within
from shardwright.planner.graph.buffer_values import number_of

COMPARED_BY_VALUE = frozenset((type(None), bool, int, str, torch.dtype))
"""Types of attributes that are compared by value."""

BLOCKS = "num_hidden_layers"
"""The config entry that holds the number of blocks; caches are created by it."""

JUNCTIONS = 10
"""Stacks with more distinct pairs of neighboring kinds than this are traced in full."""


@dataclass(frozen=True)
class Stack:
    """A `ModuleList` of which only the blocks `picks` are traced, in that order.

    `kinds` has the kind of every block of the full stack. `counters` are the attributes that number
    the blocks or their parts: (module within the block, name, parts of a block).
    """

    path: str
    kinds: tuple[int, ...]
    picks: tuple[int, ...]
    counters: frozenset[tuple[str, str, int]] = frozenset()

    @cached_property
    def traced(self) -> tuple[int, ...]:
        """For each block, the place among `picks` of the traced block that represents it.

        Both have the same kind, and so have their predecessors.
        """
        kinds = [self.kinds[i] for i in self.picks]
        first: dict[tuple[int, int], int] = {}
        for place, junction in enumerate(pairwise(kinds), 1):
            first.setdefault(junction, place)
        return (0, *(first[junction] for junction in pairwise(self.kinds)))

    def block(self, name: str) -> int | None:
        """Return the number of the block that contains `name`; None if there is none."""
        return block_number(name, self.path)

    def unique(self, kind: int) -> bool:
        """Return whether the full stack has exactly one block of this kind."""
        return self.kinds.count(kind) == 1


def condensed(places: Sequence[int], alike: int | None) -> list[tuple[int, list[int]]]:
    """Leave out blocks from the middle of a sequence that repeats more than `alike` times.

    Args:
        places: For each block of a stack, the place of its traced block.
        alike: How often in a row the same places may come; None for any number.

    Returns:
        The places that are left, each with the numbers of the blocks that it represents.
    """
    left = [(place, [number]) for number, place in enumerate(places)]
    for period in range(1, len(places) // (alike + 1) + 1 if alike else 1):
        rest, left = left, []
        while rest:
            count = _repeats(rest, period)
            if alike is None or count <= alike:
                left.append(rest.pop(0))
                continue
            kept, last = rest[: (alike - 1) * period], rest[(count - 1) * period : count * period]
            for i, (_, numbers) in enumerate(rest[len(kept) : (count - 1) * period]):
                kept[(alike - 2) * period + i % period][1].extend(numbers)
            left += kept + last
            rest = rest[count * period :]
    return left


def _repeats(left: Sequence[tuple[int, list[int]]], period: int) -> int:
    """Return how often the first `period` places come in a row."""
    places = [place for place, _ in left]
    count = 1
    while places[count * period : (count + 1) * period] == places[:period]:
        count += 1
    return count


def find_stacks(
    root: nn.Module,
    ends: Callable[[str], int] = lambda path: 0,
    label: Callable[[str], object] | None = None,
    owners: Mapping[int, list[str]] | None = None,
) -> list[Stack]:
    """Return the outermost lists of blocks in `root` that need not be traced in full.

    Args:
        root: The model.
        ends: Returns how many of the last blocks of a list are kinds of their own, by the path of
            the list, for models that treat inputs or outputs of these blocks differently. If any
            are, the first block is, too.
        label: Returns the label of a parameter, by name. Blocks are of one kind only if the labels
            of their parameters are equal.
        owners: The result of `holders(root)`, if it is known already.
    """
    out: list[Stack] = []
    configs = _configs(root)
    owners = holders(root) if owners is None else owners
    for path, module in root.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 3:
            continue
        if any(path.startswith(f"{s.path}.") for s in out):
            continue
        blocks = [block.children() for block in module._modules.values() if block is not None]
        if len(blocks) < len(module) or not all(any(True for _ in parts) for parts in blocks):
            continue
        kinds, counters = _kinds(path, module, owners, label, configs)
        if last := ends(path):
            kinds = (-1, *kinds[1:-last], *range(-1 - last, -1))
        picks = _picks(kinds)
        if picks is not None:
            out.append(Stack(path, kinds, picks, counters))
    return out


@contextmanager
def shortened(root: nn.Module, stacks: Sequence[Stack]) -> Iterator[None]:
    """Context manager in which `root` and its configs have only the blocks to trace.

    Attributes that number blocks are the places among these blocks, so that each block finds its
    entry in a shortened cache.
    """
    undo: list[tuple[dict[str, Any], str, Any]] = []
    lists: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for stack in stacks:
            module = root.get_submodule(stack.path)
            blocks: dict[str, Any] = dict(module._modules)
            lists.append((module, blocks))
            module._modules.clear()
            module._modules.update({str(i): blocks[str(i)] for i in stack.picks})
            # Blocks keep their names, but `layers[1]` must return the second block present.
            module.__dict__["_get_abs_string_index"] = lambda i, n=stack.picks: str(n[i])
            for place, i in enumerate(stack.picks):
                for path, key, parts in stack.counters:
                    block: Any = blocks[str(i)]
                    variables = vars(block.get_submodule(path))
                    undo.append((variables, key, variables[key]))
                    variables[key] += (place - i) * parts
        for config in _configs(root):
            number = getattr(config, "attribute_map", {}).get(BLOCKS, BLOCKS)
            for key, value in list(vars(config).items()):
                for stack in stacks:
                    count = len(stack.kinds)
                    if _by_block(value, count) or (key == number and value == count):
                        undo.append((vars(config), key, value))
                        vars(config)[key] = _shortened(value, stack.picks)
                        break
        yield
    finally:
        for module, modules in lists:
            module._modules.clear()
            module._modules.update(modules)
            module.__dict__.pop("_get_abs_string_index", None)
        for variables, key, value in reversed(undo):
            variables[key] = value


def _shortened(value: Any, picks: Sequence[int]) -> Any:
    """Shorten a config value to `picks`: a list with one entry per block, or their number."""
    return len(picks) if type(value) is int else type(value)(value[i] for i in picks)


def _by_block(value: Any, blocks: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == blocks


def _configs(root: nn.Module) -> list[Any]:
    """Return the distinct configs of all modules of `root`."""
    found = (m.__dict__.get("config") for m in root.modules())
    return [c for c in {id(c): c for c in found}.values() if hasattr(c, "to_dict")]


def holders(root: nn.Module) -> Mapping[int, list[str]]:
    """Map the id of each parameter and buffer to the modules that hold it."""
    return grouped(
        (id(tensor), path)
        for path, module in root.named_modules(remove_duplicate=False)
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )


def _beyond(owners: Sequence[str], block: str) -> bool:
    return not all(is_within(o, block) for o in owners)


def shared_beyond(
    root: nn.Module, stacks: Sequence[Stack], owners: Mapping[int, list[str]]
) -> frozenset[str]:
    """Return the names of tensors in traced blocks that modules outside of the block hold too."""
    out = set()
    for stack in stacks:
        for i in stack.picks:
            name = f"{stack.path}.{i}"
            block = root.get_submodule(name)
            named = (*block.named_parameters(remove_duplicate=False), *block.named_buffers())
            out |= {f"{name}.{n}" for n, t in named if _beyond(owners[id(t)], name)}
    return frozenset(out)


def _kinds(
    path: str,
    stack: nn.ModuleList,
    owners: Mapping[int, list[str]],
    label: Callable[[str], object] | None,
    configs: Sequence[Any],
) -> tuple[tuple[int, ...], frozenset[tuple[str, str, int]]]:
    """Return the kind of each block, and the attributes that number the blocks or their parts."""
    blocks = [_description(f"{path}.{n}", block, owners) for n, block in enumerate(stack)]
    counters = {
        key: parts
        for key, value in blocks[0].items()
        if type(value) is int and (parts := _parts(key, value, blocks))
    }
    lists = [v for c in configs for v in vars(c).values() if _by_block(v, len(blocks))]
    numbers: dict[Any, int] = {}
    out = []
    for n, block in enumerate(blocks):
        for key in counters:
            del block[key]
        made = tuple(block.items())
        labels = [label(f"{path}.{n}.{k}") for k, _ in stack[n].named_parameters()] if label else []
        kind = (made, *labels, *(repr(v[n]) for v in lists))
        out.append(numbers.setdefault(kind, len(numbers)))
    return tuple(out), frozenset((*key, parts) for key, parts in counters.items())


def _parts(key: tuple[str, str], first: int, blocks: Sequence[Mapping[Any, Any]]) -> int:
    """Return how many parts of a block an attribute numbers; 0 if it numbers none.

    Args:
        key: The attribute.
        first: Its value in the first block.
        blocks: The attributes of all blocks.
    """
    second = blocks[1].get(key)
    parts = second - first if type(second) is int else 0
    numbered = all(b.get(key) == first + n * parts for n, b in enumerate(blocks))
    return parts if numbered and (parts == 1 or 0 <= first < parts) else 0


def _description(
    name: str, block: nn.Module, owners: Mapping[int, list[str]]
) -> dict[tuple[str, str], Any]:
    """Return everything in a block that may affect its forward, by (module, attribute)."""
    out: dict[tuple[str, str], Any] = {}
    for path, module in block.named_modules(remove_duplicate=False):
        out[path, ""] = type(module)
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is None:
                    out[path, key] = None
                    continue
                held = owners[id(tensor)]
                shared = id(tensor) if len(held) > 1 and _beyond(held, name) else None
                number = None if (value := number_of(tensor)) is None else value.item()
                shape = tuple(tensor.shape)
                out[path, key] = (shape, tensor.dtype, tensor.requires_grad, shared, number)
        for key, value in module.__dict__.items():
            if key[:1] != "_":
                out[path, key] = _plain(value)
    return out


def _plain(value: Any) -> Any:
    """Return a comparable form of an attribute.

    Floats are reduced to whether they are 0, because they decide no shape.
    """
    kind = type(value)  # `value.__class__` is slow for configs
    if kind in COMPARED_BY_VALUE:
        return value
    if issubclass(kind, float):
        return bool(value)
    if issubclass(kind, (int, str, type)):
        return value
    if issubclass(kind, (tuple, list)):
        return tuple(_plain(v) for v in value)
    if issubclass(kind, (set, frozenset)):
        return tuple(sorted(map(repr, value)))
    if issubclass(kind, dict):
        return tuple((k, _plain(v)) for k, v in value.items())
    if issubclass(kind, partial):
        return _plain(value.func), _plain(value.args), _plain(value.keywords)
    return getattr(value, "__qualname__", None) or (type(value), id(value))


def _picks(kinds: Sequence[int]) -> tuple[int, ...] | None:
    """Return a short list of blocks to trace, first to last; None if all must be traced."""
    walk = _walk(kinds)
    if walk is None or len(walk) >= len(kinds):
        return None
    out, last = [0], len(kinds) - 1
    for kind in walk[1:-1]:
        later = [i for i, k in enumerate(kinds) if k == kind and out[-1] < i < last]
        other = [i for i, k in enumerate(kinds) if k == kind and i not in (*out, last)]
        if not later and not other:
            return None
        out.append((later or other)[0])
    return (*out, last)


def _walk(kinds: Sequence[int]) -> list[int] | None:
    """Return the shortest sequence of kinds, first to last, with every neighboring pair of `kinds`.

    Returns None if there are more than `JUNCTIONS` distinct pairs.
    """
    junctions = {j: 1 << n for n, j in enumerate(dict.fromkeys(pairwise(kinds)))}
    if len(junctions) > JUNCTIONS:
        return None
    goal, every = kinds[-1], (1 << len(junctions)) - 1
    queue = deque([(kinds[0], 0, [kinds[0]])])
    seen = {(kinds[0], 0)}
    while queue:
        kind, done, path = queue.popleft()
        if kind == goal and done == every:
            return path
        for (before, after), bit in junctions.items():
            state = (after, done | bit)
            if before == kind and state not in seen:
                seen.add(state)
                queue.append((*state, [*path, after]))
    return None
