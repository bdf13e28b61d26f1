"""Texts for placements, redistributions, solver results and costs. This module needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import get_args

from shardwright.planner.contract.dims import is_split
from shardwright.planner.contract.mesh import Coords
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_figures import (
    CollectiveCount,
    Memory,
    Objective,
    Phase,
    Prediction,
    Quantized,
    SolverReport,
    Workload,
)
from shardwright.planner.contract.plan_file import ParameterPlan, Plan, Redistribution
from shardwright.planner.contract.redistribution_steps import steps
from shardwright.planner.contract.styles import style_of
from shardwright.planner.units import human_bytes, human_time


def collectives_of(source: str, target: str, coords: Coords) -> list[tuple[str, str]]:
    """Return the (forward, backward) collectives of each step of a redistribution."""
    pairs = [step.transition[:2] for step in steps(parse(source), parse(target), coords)]
    return [(a.kind.replace("_", "-"), b.kind.replace("_", "-")) for a, b in pairs]


def collectives_in_words(changes: Iterable[Redistribution], coords: Coords) -> str:
    """Return the collectives at a module's boundary, one a line: `fwd all-reduce`.

    Args:
        changes: The module's redistributions.
        coords: Coordinates of any rank on each mesh dim and sub-axis.
    """
    found: Counter[str] = Counter()
    for change in changes:
        for pair in collectives_of(change.source, change.target, coords):
            found.update(
                f"{way} {name}" for way, name in zip(("fwd", "bwd"), pair, strict=True) if name
            )
    texts = [text if n == 1 else f"{text} x{n}" for text, n in found.items()]
    return "\n".join(sorted(texts, key=lambda text: not text.startswith("fwd")))


def placement_in_words(layer: str, entry: ParameterPlan) -> str:
    """Return the placement of a parameter: `column 2@tp*32`; by dim if the layer has no style."""
    placement = parse(entry.placement)
    cut = [i for i, dim in enumerate(placement.dims) if is_split(dim)]
    if not cut:
        if entry.use is None:
            return "replicated"
        word = use_in_words(parse(entry.use))
        return f"replicated, {word}" if word else "replicated"
    style = style_of(layer)
    plain = "part" if len(placement.dims) == 1 else f"dim {', '.join(map(str, cut))}"
    word = style.word if style else plain
    gathered = entry.use is not None and not parse(entry.use).meshes
    return f"{word} {', '.join(str(placement.dims[i]) for i in cut)}{', gathered' * gathered}"


def parameter_in_words(plan: Plan, name: str) -> str:
    """Return how a plan places the parameter `name`."""
    spec, entry = plan.module(name.rpartition(".")[0]), plan.parameter(name)
    return placement_in_words(spec.layer, entry) if spec and entry else "replicated"


def use_in_words(used: Placement) -> str:
    """Return how a module uses a replicated parameter."""
    if used.partial:
        return "added once"
    if used.meshes:
        return "used as " + ", ".join(str(d) for d in used.dims if is_split(d))
    return "gradient summed" if used.grad_partial else ""


def solver_in_words(report: SolverReport) -> str:
    """Return the solver's status with objective, bound and gap."""
    objective, bound = report.objective[0], report.bound[0]
    if report.status == "optimal":
        return f"proven optimal by {report.name} (objective {objective} = bound)"
    gap = (objective - bound) / max(objective, 1)
    return (
        f"found by {report.name}, at most {gap:.2%} above the optimum, not proven optimal "
        f"(objective {objective}, bound {bound})"
    )


def objective_in_words(objective: Objective) -> str:
    """Return the objective: `least time within 74.5 GiB (saving 1 GiB is worth 12.3 us)`."""
    room, price = objective.memory_bytes, objective.byte_price_ns
    within = "" if room is None else f" within {human_bytes(room)}"
    if objective.name == "memory" and room is None:
        return "least memory, or up to 5 % more if that is faster"
    if objective.name == "memory" or price is None:
        return f"least time{within}"
    return f"least time{within} (saving 1 GiB is worth {human_time(round(price * 2**30))})"


def ranges(numbers: Iterable[int], to: str = "-") -> str:
    """Write numbers as ranges, in ascending order: `0-2, 5`."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}{to}{b}" for a, b in found)


def mesh_in_words(plan: Plan) -> str:
    """Return the mesh: `on 4 ranks (dp=2, tp=2)`."""
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh.items())
    return f"on {plan.world_size} rank{'s' if plan.world_size > 1 else ''} ({mesh})"


def workload_in_words(load: Workload) -> str:
    """Return the workload: `prefill, 128 decode, batch 1, seq 512, bfloat16 on h100-nvlink`."""
    counts = [(phase, load.phases[phase]) for phase in get_args(Phase) if phase in load.phases]
    phases = ", ".join(f"{n} {phase}" if n > 1 else phase for phase, n in counts)
    dtype = load.dtype + (f" ({quantized_in_words(load.quantized)})" if load.quantized else "")
    hosts = f", {load.gpus_per_host} on a host" if load.gpus_per_host else ""
    return f"{phases}, batch {load.batch}, seq {load.seq}, {dtype} on {load.device}{hosts}"


def quantized_in_words(quantized: Quantized) -> str:
    """Return what is quantized and how: `fp8 weights, 8 bits`, or `4.25 to 8 bits`."""
    bits = sorted({f"{bits:.3g}" for bits in quantized.bits.values()}, key=float)
    return f"{quantized.method} weights, {' to '.join(dict.fromkeys([bits[0], bits[-1]]))} bits"


def costs_in_words(predicted: Prediction) -> dict[str, str]:
    """Return the predicted costs by row: memory, time, then collectives, backward last."""
    held, whole = max(predicted.parameter_bytes), max(predicted.unsharded_bytes, 1)
    out = {
        "memory per rank": f"{human_bytes(held)} ({held / whole:.1%})",
        "predicted time": human_time(predicted.time_ns),
    }
    for c in sorted(predicted.collectives, key=lambda c: c.phase == "backward"):
        out[f"{c.phase} {kind_in_words(c)}"] = f"{c.count:,} ({human_bytes(c.bytes)})"
    return out


WAYS = {"": "", "ring": " in a ring", "levels": " by levels"}
"""How a collective goes over several hosts."""


def kind_in_words(calls: CollectiveCount) -> str:
    """Return the kind of collectives, and if there are several hosts, how they go over them."""
    over = f" over {calls.hosts} hosts{WAYS[calls.way]}" if calls.hosts > 1 else ""
    return calls.kind.replace("_", "-") + over


HELD = {name: name for name in Memory.model_fields} | {"cache": "KV cache"}
"""Names of the fields of `Memory`."""


def memory_in_words(memory: Memory, parameters: str = "") -> str:
    """Return the memory of a rank item by item; `parameters` is added to the parameters' item."""
    found = [
        (name, human_bytes(n)) for field, name in HELD.items() if (n := getattr(memory, field))
    ]
    more = f" ({parameters})" if parameters else ""
    return ", ".join(f"{name} {n}{more * (name == HELD['parameters'])}" for name, n in found)
