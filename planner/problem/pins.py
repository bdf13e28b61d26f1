"""Pins: what a user wants of parameters, as restrictions of what the solver may choose.

    model.layers.*.mlp.*=replicate      whole on every rank
    lm_head.weight=shard:0              split along dim 0, whichever of its axes that is

The name is that of a parameter, or of a module and stands for all parameters below. `*` stands for
any part of a name between dots, or within one. A pin is about what a rank holds: of what it holds
whole it may still use its own part alone, where the plan has that cheaper.
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
from shardwright.planner.solvers.problem import Row
from shardwright.planner.strategies.obstacles import obstacle
from shardwright.planner.strategies.state import State
from shardwright.planner.strategies.states import States

REPLICATE, SHARD = "replicate", "shard:"


class Pin(NamedTuple):
    """Parameters by name, and the dim that they are to be split along; None for whole."""

    name: str
    dim: int | None

    def __str__(self) -> str:
        return f"{self.name}={self.placement}"

    @property
    def placement(self) -> str:
        """As users write it: replicate, shard:0, shard:1, ..."""
        return REPLICATE if self.dim is None else f"{SHARD}{self.dim}"

    def allows(self, state: State) -> bool:
        """Whether a parameter stored in this state is as the pin wants it."""
        return {shard[0] for shard in state.shards} == (set() if self.dim is None else {self.dim})


def make_pin(name: str, placement: object) -> Pin:
    """The pin of `name` to `placement`: "replicate", or "shard:" and a dim.

    Raises:
        UsageError: neither of them.
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
    """Pins as they are written on the command line, after those of a JSON file.

    Raises:
        UsageError: one that is none, two for one name, or a file that cannot be read.
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
    """Pins of a mapping: name -> placement."""
    return tuple(make_pin(name, placement) for name, placement in table.items())


def read_table(path: str | Path) -> dict[str, object]:
    """The JSON object in a file.

    Raises:
        UsageError: the file cannot be read, or holds something else.
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
    """Whether `pattern` names the parameter `name` or a module around it."""
    have, want = name.split("."), pattern.split(".")
    return len(want) <= len(have) and all(map(fnmatchcase, have, want))


def parameters(graph: Graph, pattern: str) -> dict[str, str]:
    """Parameters and buffers that `pattern` names, each with the tensor it is stored in.

    Raises:
        UsageError: there are none.
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
    """The pin of each stored tensor.

    A pin of a module to a dim leaves the buffers below alone, which are never split.

    Raises:
        UsageError: a name that nothing has, a dim that a tensor does not have, or two pins that
            contradict each other.
        InfeasibleError: a dim that these ranks cannot share.
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
    """Leave the stored tensors only the states that their pins allow."""
    zero = (0,) * len(network.problem.components)
    for stored, pin in wanted.items():
        domain = network.states.domain(stored)
        rows = [Row((i,), zero) for i, state in enumerate(domain) if pin.allows(state)]
        network.problem.factor(f"pin {stored}", [network.variables[stored]], rows)


def as_table(pins: Sequence[Pin]) -> dict[str, str]:
    """The mapping that `as_pins` reads."""
    return {pin.name: pin.placement for pin in pins}
