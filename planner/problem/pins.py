"""Pins: placements of parameters that the user sets, as restrictions on the solver.

    model.layers.*.mlp.*=replicate      replicated on every rank
    lm_head.weight=shard:0              sharded along dim 0, by any of its axes

The name is that of a parameter, or of a module and stands for all its parameters. `*` stands for
any part of a name between dots, or for a piece of a part. A pin sets how a rank stores a parameter.
A rank may still use only its own part of a replicated parameter, if the plan is cheaper so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from shardwright.errors import InfeasibleError, UsageError
from shardwright.planner.contract.files import read_json
from shardwright.planner.graph.graph import Graph
from shardwright.planner.problem.builder import CostFunctionNetwork
from shardwright.planner.strategies.obstacles import obstacle
from shardwright.planner.strategies.state import State
from shardwright.planner.strategies.states import States

REPLICATE, SHARD = "replicate", "shard:"


class Pin(NamedTuple):
    """A name pattern of parameters, and the dim to shard them along; None for replicated."""

    name: str
    dim: int | None

    def __str__(self) -> str:
        return f"{self.name}={self.placement}"

    @property
    def placement(self) -> str:
        """The placement as users write it: replicate, shard:0, shard:1, ..."""
        return REPLICATE if self.dim is None else f"{SHARD}{self.dim}"

    def allows(self, state: State) -> bool:
        """Whether a parameter may be stored in this state."""
        return {shard[0] for shard in state.shards} == (set() if self.dim is None else {self.dim})


def make_pin(name: str, placement: object) -> Pin:
    """Return the pin of `name` to `placement`: "replicate", or "shard:" and a dim.

    Raises:
        UsageError: the placement is neither.
    """
    if placement == REPLICATE:
        return Pin(name, None)
    text = str(placement)
    if name and re.fullmatch(f"{SHARD}[0-9]{{1,4}}", text):
        return Pin(name, int(text.removeprefix(SHARD)))
    raise UsageError(
        f"'{name:.200}={text:.60}' is not a pin: write NAME=replicate or NAME=shard:DIM, "
        "for example lm_head.weight=shard:0"
    )


def gather(texts: Iterable[str], path: str | Path | None = None) -> dict[str, str]:
    """Return name -> placement from the pins of a JSON file and of the command line.

    Raises:
        UsageError: a pin is invalid, two pins of one name differ, or the file cannot be read.
    """
    named = list(read_table(path).items()) if path is not None else []
    named += [text.rpartition("=")[::2] for text in texts]
    out: dict[str, str] = {}
    for name, placement in named:
        pin = make_pin(name, placement)
        if out.setdefault(name, pin.placement) != pin.placement:
            raise UsageError(f"pins {name}={out[name]} and {pin} contradict each other")
    return out


def as_pins(table: Mapping[str, object]) -> tuple[Pin, ...]:
    """Return the pins of a mapping name -> placement.

    Raises:
        UsageError: a name is no text, or a placement is invalid.
    """
    if wrong := [name for name in table if not isinstance(name, str)]:
        raise UsageError(f"a pin has the name {wrong[0]!r:.60}, which is no text")
    return tuple(make_pin(name, placement) for name, placement in table.items())


def read_table(path: str | Path) -> dict[str, object]:
    """Return the JSON object in a file.

    Raises:
        UsageError: the file cannot be read, or does not hold a JSON object.
    """
    try:
        table = read_json(Path(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path} holds no JSON object of names and placements")
    return table


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches the parameter `name` or a module that contains it."""
    have, want = name.split("."), pattern.split(".")
    return len(want) <= len(have) and all(map(fnmatchcase, have, want))


def parameters(graph: Graph, pattern: str) -> dict[str, str]:
    """Return the parameters and buffers that `pattern` matches, each with its stored tensor.

    Raises:
        UsageError: nothing matches.
    """
    found = {u.fqn: u.stored for u in graph.uses if matches(pattern, u.fqn)}
    if not found:
        names = {u.fqn for u in graph.uses}
        names |= {n.rpartition(".")[0] for n in names}
        near = get_close_matches(pattern, sorted(names), 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"no parameter or module of the model is named '{pattern}'{hint}")
    return found


def resolve(pins: Iterable[Pin], graph: Graph, states: States) -> dict[str, Pin]:
    """Return the pin of each pinned stored tensor.

    A pin of a module to a dim does not apply to its buffers, which are never sharded.

    Raises:
        UsageError: a name matches nothing, a tensor does not have the dim, or two pins contradict
            each other.
        InfeasibleError: a pinned dim cannot be sharded.
    """
    out: dict[str, tuple[str, Pin]] = {}
    buffers = {u.fqn for u in graph.uses if u.is_buffer}
    for pin in pins:
        for fqn, stored in parameters(graph, pin.name).items():
            if pin.dim is not None and fqn in buffers and fqn != pin.name:
                continue
            other, had = out.setdefault(stored, (fqn, pin))
            if had.dim != pin.dim:
                same = "" if other == fqn else f" (tied to {other})"
                raise UsageError(f"pins {had} and {pin} contradict each other on {fqn}{same}")
            shape = graph.tensors[stored].shape
            if pin.dim is not None and pin.dim >= len(shape):
                raise UsageError(f"pin {pin}: {fqn} has shape {list(shape)}, so no dim {pin.dim}")
            if not any(pin.allows(s) for s in states.domain(stored)):
                why = obstacle(graph, states, stored, pin.dim or 0)
                raise InfeasibleError(f"pin {pin}: dim {pin.dim} of {fqn} cannot be split: {why}")
    return {stored: pin for stored, (_, pin) in out.items()}


def restrict(network: CostFunctionNetwork, wanted: Mapping[str, Pin]) -> None:
    """Restrict the stored tensors to the states that their pins allow."""
    for stored, pin in wanted.items():
        network.allow(f"pin {stored}", stored, pin.allows)


def as_table(pins: Sequence[Pin]) -> dict[str, str]:
    """Return the mapping that `as_pins` reads."""
    return {pin.name: pin.placement for pin in pins}
