"""Checks that hold for any plan, whatever its model: the parts of a plan agree with each other.

A plan that fails here never reaches torch. Whether a plan is right for its model is checked in
`planner/prove/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from shardwright.errors import PlanError
from shardwright.planner.contract.dims import (
    MAX_PIECES,
    Atom,
    Dim,
    Product,
    atoms,
    experts_of_ranks,
    pieces,
)
from shardwright.planner.contract.length_comparisons import parsed
from shardwright.planner.contract.mesh import (
    CP,
    EP,
    MAX_RANKS,
    TP,
    batch_dims,
    coords_of,
    fault_of_dim,
    fault_of_sub_axes,
    replicas,
    sub_axes_of,
)
from shardwright.planner.contract.names import is_within, lookup
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.placement import Placement
from shardwright.planner.contract.plan_figures import LARGEST
from shardwright.planner.contract.redistribution_steps import side, steps
from shardwright.planner.contract.styles import UNCHANGED

if TYPE_CHECKING:
    from shardwright.planner.contract.mesh import Coords
    from shardwright.planner.contract.plan_file import Dispatch, ModulePlan, Plan, Redistribution

MAX_ITEMS = 1 << 20
"""Most items of a drawing, counted as often as they run in the model."""

ATTRIBUTE = re.compile(r"[A-Za-z]\w*|_[A-Za-z0-9]\w*|\d+", re.ASCII)
"""A name in the path to an attribute; Python's special names (`__class__`) do not match."""

CALL = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.\d{1,5}", re.ASCII)
"""A call in a module's code: the method, the name that is called, and a number."""

INPUT = re.compile(r"(\*\d{1,4}|[A-Za-z_]\w*)(\.\w+)*", re.ASCII)
OUTPUT = re.compile(r"(\w+(\.\w+)*)?", re.ASCII)
"""Slots of a module's inputs and outputs."""


def check(plan: Plan) -> None:
    """Check that a plan does not contradict itself.

    Raises:
        PlanError: it contradicts itself; the message says where.
    """
    for name, size in plan.mesh.items():
        fault = fault_of_dim(name, size)
        _need(fault is None, f"mesh: {fault}")
    _need(TP in plan.mesh, f"mesh: it has no dim '{TP}', whose ranks split the weights")
    _need(
        prod(plan.mesh.values()) <= MAX_RANKS,
        f"mesh: {prod(plan.mesh.values()):,} ranks, and {MAX_RANKS:,} are the most",
    )
    _need(
        sorted(plan.batch_dims) == sorted(batch_dims(plan.mesh)),
        f"batch_dims: {plan.batch_dims}, but the mesh dims beside {TP} and {CP} are "
        f"{batch_dims(plan.mesh)}",
    )
    for name, sizes in plan.sub_axes.items():
        _need(name == TP, f"sub_axes: '{name}' splits no weights")
        fault = fault_of_sub_axes(sizes, plan.mesh[name])
        _need(fault is None, f"sub_axes: {fault}")
    _check_figures(plan)
    for name, shape in plan.model.parameters.items():
        _need(
            all(0 <= n <= LARGEST for n in shape) and len(shape) <= 16 and prod(shape) < 2**60,
            f"model.parameters.{name}: {shape!r:.60} is no shape",
        )
    split = {name: size for name, size in plan.mesh.items() if name in (CP, EP, TP)}
    coords = coords_of(split, plan.sub_axes, 0)
    _check_drawing(plan, coords)
    for call in plan.calls:
        for text in call.lengths:
            parsed(text)
    done: set[int] = set()
    for name, module in plan.modules.items():
        if id(module) not in done:
            done.add(id(module))
            for where, test in _tests(plan, name, module, coords):
                try:
                    test()
                except PlanError as error:
                    raise PlanError(f"modules.{name}.{where}: {error}") from None


def _check_figures(plan: Plan) -> None:
    load, copies = plan.workload, replicas(plan.mesh)
    _need(load.replicas == copies, f"workload.replicas: {load.replicas}, the mesh has {copies}")
    _need(load.batch >= copies, f"workload.batch: {load.batch}, for {copies} copies of the model")
    _need(bool(load.phases), "workload.phases: there are none")
    counts = len(plan.predicted.parameter_bytes)
    _need(
        counts == plan.world_size,
        f"predicted.parameter_bytes: of {counts} ranks, and there are {plan.world_size}",
    )
    first = plan.meshes[0].mesh if plan.meshes else plan.mesh
    _need(first == plan.mesh, f"meshes.0: it is {first!r:.80}, and the plan's is {plan.mesh}")
    for n, choice in enumerate(plan.meshes):
        _need(prod(choice.mesh.values()) == counts, f"meshes.{n}: not of {counts} ranks")
    _need(len(plan.solver.objective) == 4, "solver.objective: it has not four numbers")
    _need(len(plan.solver.bound) == 1, "solver.bound: it is not one number")


def _check_drawing(plan: Plan, coords: Coords) -> None:
    """Check that items read earlier items, blocks contain later ones, and the total is bounded."""
    sizes = [0] * len(plan.drawing)
    for n, block in reversed([*enumerate(plan.drawing)]):
        where = f"drawing.{n}"
        _need(bool(block.modules), f"{where}.modules: there are none")
        for i, item in enumerate(block.items):
            for key, text in item.takes.items():
                _need(not key.isdigit() or _below(key, i), f"{where}.items.{i}.takes: '{key:.40}'")
                _placement(text, coords)
            for key, times in item.blocks.items():
                known = _below(key, len(sizes)) and int(key) > n
                _need(known, f"{where}.items.{i}.blocks: '{key:.40}' is no block after it")
                sizes[n] += times * sizes[int(key)]
        for key, text in block.gives.items():
            _need(_below(key, len(block.items)), f"{where}.gives: '{key:.40}' is no item")
            _placement(text, coords)
        sizes[n] += len(block.items)
        _need(sizes[n] <= MAX_ITEMS, f"{where}: more than {MAX_ITEMS:,} items")


def _below(key: str, end: int) -> bool:
    """Return whether a key is a number below `end`."""
    return key.isascii() and key.isdigit() and len(key) < 10 and int(key) < end


def _tests(
    plan: Plan, name: str, module: ModulePlan, coords: Coords
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the checks of a module's entry, each with its place in the entry."""
    if module.layer == UNCHANGED:
        yield "layer", lambda: _need(not module.changes, f"an {UNCHANGED} module changes nothing")
    for key, entry in module.parameters.items():
        full = f"{name}.{key}" if name else key
        shape = lookup(plan.model.parameters, full)
        yield (
            f"parameters.{key}",
            lambda e=entry, s=shape: _check_stored(e.placement, e.use, s, coords),
        )
    yield "dispatch", lambda: _check_dispatch(module, _around(plan, name), coords)
    if module.dispatch is not None:
        yield "dispatch", lambda: _check_spread(plan, name)
    for way in ("inputs", "outputs", "attention", "keeps"):
        changes: list[Redistribution] = getattr(module, way)
        for i, change in enumerate(changes):
            yield f"{way}.{i}", lambda c=change, w=way: _check_change(c, w == "inputs", coords)
        yield way, lambda c=changes: _check_slots(c)
    for way, placed in (("takes", module.takes), ("gives", module.gives)):
        for i, one in enumerate(placed):
            yield f"{way}.{i}", lambda p=one.placement: _check_from_replicated(p, coords)
    for i, drawn in enumerate(module.draws):
        yield f"draws.{i}", lambda p=drawn.placement: _check_from_replicated(p, coords)
    for path, dim in module.attributes.items():
        yield f"attributes.{path}", lambda p=path, d=dim: _check_attribute(p, d, coords)
    for call, dims in module.sizes.items():
        yield f"sizes.{call}", lambda c=call, d=dims: _check_sizes(c, d, coords)


def _check_stored(
    placement: str, use: str | None, shape: Sequence[int] | None, coords: Coords
) -> None:
    stored = _placement(placement, coords)
    _need(None not in stored.shape, f"'{placement}' leaves a size open")
    _need(not (stored.partial or stored.grad_partial), f"'{placement}' is a Partial parameter")
    _need(
        shape is None or stored.shape == tuple(shape),
        f"'{placement}' has shape {list(stored.shape)}, and the parameter {shape}",
    )
    if use is not None:
        used = _placement(use, coords)
        _need(used.shape == stored.shape, f"'{use}' and '{placement}' have not the same shape")
        steps(stored, used, coords)


def _around(plan: Plan, name: str) -> Dispatch | None:
    """Return how tokens travel to the experts of a module, or of one around it; None if not."""
    steps = name.split(".")
    around = (plan.modules.get(".".join(steps[:n])) for n in range(len(steps), 0, -1))
    return next((m.dispatch for m in around if m is not None and m.dispatch is not None), None)


def _check_dispatch(module: ModulePlan, around: Dispatch | None, coords: Coords) -> None:
    """Check that only experts, and their number, are split over ep, and only if tokens travel."""
    if module.dispatch is not None:
        _need(EP in coords, f"tokens travel, and the mesh has no dim '{EP}'")
        told = module.dispatch.experts is None, module.dispatch.weights is None
        _need(len({*told}) == 1, "tokens have experts, or weights, and not both")
        _need(all(told) or module.dispatch.counts is None, "tokens lie by expert, and have experts")
    texts = [t for e in module.parameters.values() for t in (e.placement, e.use) if t is not None]
    dims = [dim for text in (*texts, *module.attributes.values()) for dim in parse(text).dims]
    over = [dim for dim in dims if any(atom.mesh == EP for atom in atoms(dim))]
    for dim in over:
        first, *others = dim.factors if isinstance(dim, Product) else (dim,)
        held = around is not None and _is_of_experts(first, around.count, coords) and EP not in {
            atom.mesh for other in others for atom in atoms(other)
        }  # fmt: skip
        _need(held, f"'{dim}' is not the dim of the experts to which tokens travel")


def _is_of_experts(dim: Dim, count: int, coords: Coords) -> bool:
    """Return whether a dim is that of all experts, or of the first, as their ranks hold them."""
    if not isinstance(dim, Atom) or dim.size is None or not dim.size <= count:
        return False
    return dim == experts_of_ranks(dim.size, count, coords.get(EP, (0, 1))[1])


def _check_spread(plan: Plan, name: str) -> None:
    """Check that the experts to which tokens travel are not all on each rank."""
    within = (m for n, m in plan.modules.items() if is_within(n, name))
    placements = (e.placement for m in within for e in m.parameters.values())
    _need(any(EP in parse(text).meshes for text in placements), "each rank has all experts")


def _check_change(change: Redistribution, entering: bool, coords: Coords) -> None:
    source, target = _placement(change.source, coords), _placement(change.target, coords)
    text = f"from '{change.source}' to '{change.target}'"
    _need(len(source.dims) == len(target.dims), f"{text}: not the same number of dims")
    for a, b in zip(source.shape, target.shape, strict=True):
        _need(a is None or b is None or a == b, f"{text}: {a} elements become {b}")
    steps(source, target, coords)
    slot = (INPUT if entering else OUTPUT).fullmatch(change.slot)
    _need(slot is not None, f"slot {change.slot!r:.60} names no tensor")
    if change.before is not None:
        path = change.before.lstrip(".")
        _need(
            entering and path != change.before and INPUT.fullmatch(path) is not None,
            f"before: {change.before!r:.60} names no tensor of a module around",
        )


def _check_from_replicated(placement: str, coords: Coords) -> None:
    """Check that transitions lead from the replicated tensor to this placement, and back."""
    placed = _placement(placement, coords)
    steps(placed.replicated(), placed, coords)
    steps(placed, placed.replicated(), coords)


def _check_slots(changes: Sequence[Redistribution]) -> None:
    seen: dict[tuple[str, int], Redistribution] = {}
    for change in changes:
        key = (change.slot, len(parse(change.source).dims))
        _need(key not in seen, f"two for tensor '{change.slot}' of {key[1]} dims")
        seen[key] = change


def _check_attribute(path: str, dim: str, coords: Coords) -> None:
    _need(
        all(ATTRIBUTE.fullmatch(step) for step in path.split(".")),
        "a plan may replace plain sizes only, and this names none",
    )
    found = _placement(dim, coords)
    _need(
        len(found.dims) == 1 and None not in found.shape and not found.partial
        and not found.grad_partial,
        f"'{dim}' is no size",
    )  # fmt: skip


def _check_sizes(call: str, dims: str, coords: Coords) -> None:
    _need(CALL.fullmatch(call) is not None, "this names no call in a method")
    found = _placement(dims, coords)
    _need(not found.partial and not found.grad_partial, f"'{dims}' is no list of sizes")


def _placement(text: str, coords: Coords) -> Placement:
    """Parse `text` to a placement, and check that it is possible on this mesh.

    Raises:
        PlanError: it is not in the notation, or not possible.
    """
    found = parse(text)
    for name in sorted(found.named):
        _need(name in coords, f"'{text}': there is no mesh dim '{name:.40}' that splits weights")
    _need(
        all(a.size is None or a.size <= LARGEST for d in found.dims for a in atoms(d)),
        f"'{text:.60}': too large a size",
    )
    for atom in (a for d in found.dims for a in atoms(d) if a.shares):
        ranks = coords[atom.mesh or ""][1]
        _need(
            len(atom.shares) == ranks, f"'{text:.60}': {len(atom.shares)} shares of {ranks} ranks"
        )
    _need(sum(map(pieces, found.dims)) <= MAX_PIECES, f"'{text:.60}': too finely split")
    for dim in found.dims:
        _split(dim, coords, text)
    for name in coords.keys() & {CP, TP}:
        for bit in sub_axes_of(name, coords):
            side(found, bit, coords)
    return found


def _split(dim: Dim, coords: Coords, text: str) -> set[str]:
    """Return the sub-axes that split parts of a dim; in a product, each may split one factor."""
    if isinstance(dim, Atom):
        return sub_axes_of(dim.mesh, coords) if dim.mesh else set()
    out: set[str] = set()
    for part in dim.factors if isinstance(dim, Product) else dim.terms:
        here = _split(part, coords, text)
        twice = here & out if isinstance(dim, Product) else set[str]()
        _need(not twice, f"'{text}' splits a dim over {' '.join(sorted(twice))} twice")
        out |= here
    return out


def _need(holds: bool, text: str) -> None:
    if not holds:
        raise PlanError(text)
