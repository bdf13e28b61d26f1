"""`plan`: the whole way from a model to a plan that was checked and tried."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from shardwright.errors import InfeasibleError, SolverError, UsageError

from . import solvers
from .attributes import Unsolvable, local_attributes
from .axes import Axes, refine
from .check import Assignment, check, price
from .cost import Costs
from .emit import Layouts, count, folded, module_plans, rank_bytes, shapes, wholes
from .graph import Graph
from .network import BACKWARD, BYTES, TIME, build_network
from .optimize import Optimum, optimize
from .plan_file import ModelIdentity, Plan, Prediction, SolverReport, Workload
from .simplify import simplify
from .source import Source, read_source
from .states import Shards, States
from .trace import trace
from .verify import Mismatch, verify

ATTEMPTS = 12
"""How often a plan that fails its trial is solved again without what failed."""


def plan(
    model: Any,
    tp: int,
    *,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    memory: int | None = None,
    solver: str | None = None,
    time_limit: float = 60.0,
    batch: int = 1,
    seq: int = 512,
    dtype: torch.dtype | None = None,
    device: str = "h100-nvlink",
) -> Plan:
    """The cheapest correct way to split `model` over `tp` ranks; no weights are read.

    Args:
        model: Hub id, local directory, transformers config, or `nn.Module`.
        tp: Ranks.
        args, kwargs: Example inputs, needed for a module that is no transformers text model. Let
            sizes that vary at run time be 3 (batch) and 19 (sequence).
        memory: Bytes that parameters and buffers may take on a rank; by default the least
            possible, plus 5 % where that saves time.
        solver: Name of an installed solver: "cpsat" (default), "backtracking", or another's.
        time_limit: Seconds for the solver.
        batch, seq: Size of the forward pass that is priced.
        dtype: Of the parameters; else the config's own.
        device: Name of the device profile that is priced.

    Raises:
        UsageError: an argument that cannot be meant.
        ModelError: the model cannot be read or traced.
        InfeasibleError: no plan fits; says the least that would.
        SolverError: the solver is missing or found nothing in time.
    """
    if tp < 1:
        raise UsageError(f"tp must be at least 1, not {tp}")
    if batch < 1 or seq < 1:
        raise UsageError(f"batch and seq must be at least 1, not {batch} and {seq}")
    name, note = (solver, "") if solver else solvers.default()
    source = read_source(model, args, kwargs, dtype)
    graph = trace(source.module, source.args, source.kwargs)
    workload = Workload(batch=batch, seq=seq, dtype=str(source.dtype).removeprefix("torch."), device=device)
    search = Search(source, graph, refine(graph), workload, tp)
    return search.run(name, note, time_limit, memory)


@dataclass
class Search:
    """One planning run: solve, check, try; what fails its trial is forbidden and solved again."""

    source: Source
    graph: Graph
    axes: Axes
    workload: Workload
    tp: int

    def run(self, solver: str, note: str, seconds: float, memory: int | None) -> Plan:
        """The first plan that passes its trial."""
        forbidden: frozenset[tuple[str, Shards]] = frozenset()
        for _ in range(ATTEMPTS):
            states = States(self.graph, self.axes, self.tp, replaceable(self.graph, self.source.module), forbidden)
            costs = Costs(self.graph, self.axes, states, self.workload)
            rigid = frozenset({""} if any(True for _ in self.source.module.children()) else ())
            network = build_network(self.graph, states, costs, rigid)
            small = simplify(network.problem)
            if small is None:
                raise InfeasibleError("the rules contradict each other on this model: please report it")
            optimum = optimize(small, solvers.load(solver), seconds, memory)
            assignment = network.assignment(optimum.assignment)
            check(self.graph, states, assignment)
            agree(price(self.graph, costs, assignment), optimum)
            possible = {n: any(old for old in small.source[v][1].values()) for n, v in network.variables.items()}
            layouts = Layouts(self.graph, states, assignment)
            outcome = self._try(layouts, costs, optimum, solver, note, possible)
            if isinstance(outcome, Plan):
                return outcome
            if not outcome - forbidden:
                break
            forbidden |= outcome
        raise SolverError("no plan passed its trial on meta: please report this model")

    def _try(self, layouts: Layouts, costs: Costs, optimum: Optimum, solver: str, note: str,
             possible: dict[str, bool]) -> Plan | frozenset[tuple[str, Shards]]:
        """The plan, or the splits that it may not have."""
        corners = [{"tp": (rank, self.tp)} for rank in sorted({0, self.tp - 1})]
        assignment = layouts.assignment
        try:
            attributes = local_attributes(self.graph, {n: layouts.traced(n) for n in self.graph.tensors}, corners)
        except Unsolvable as failure:
            return splits_near(self.graph, assignment, failure.size.tensor)
        modules = module_plans(self.source.module, layouts, attributes)
        result = Plan(
            model=ModelIdentity(
                architecture=self.source.architecture,
                config_hash=self.source.config_hash,
                parameters=shapes(self.source.module),
            ),
            mesh={"tp": self.tp},
            workload=self.workload,
            modules=folded(self.source.module, modules),
            whole=wholes(layouts, possible),
            opaque=opaque(self.graph, self.axes),
            predicted=Prediction(
                parameter_bytes=[rank_bytes(layouts, {"tp": (r, self.tp)}) for r in range(self.tp)],
                whole_bytes=rank_bytes(layouts, None),
                time_ns=optimum.costs[TIME],
                collectives=count(self.graph, costs, assignment),
            ),
            solver=SolverReport(
                name=solver,
                status="optimal" if optimum.optimal else "feasible",
                objective=[optimum.objective, optimum.costs[BYTES], optimum.costs[TIME], optimum.costs[BACKWARD]],
                bound=[optimum.bound],
                note=note,
            ),
            versions={p: version(p) for p in ("torch", "transformers")},
        )
        for coords in corners:
            mismatch = verify(self.source.module, self.source.args, self.source.kwargs, result, layouts, coords)
            if mismatch is not None:
                return self._blame(mismatch, assignment)
        return result

    def _blame(self, mismatch: Mismatch, assignment: Assignment) -> frozenset[tuple[str, Shards]]:
        """All splits inside the module that failed; if there are none, inside those around it."""
        module = mismatch.module
        while True:
            inside = {n for op in self.graph.ops if op.module == module or op.module.startswith(module + ".") or not module
                      for n in (*op.inputs, *op.outputs)}
            found = frozenset((n, assignment[n].shards) for n in inside if assignment[n].shards)
            if found:
                return found
            if not module:
                raise SolverError(f"the unsplit model itself fails on meta: {mismatch.text}")
            module = module.rpartition(".")[0]


def replaceable(graph: Graph, root: nn.Module) -> frozenset[str]:
    """Lookups that are those of an `nn.Embedding` in its own weight: the runtime can replace them."""
    owned = {u.used: u.fqn for u in graph.uses}
    return frozenset(
        op.name for op in graph.ops
        if op.call.op == "embedding" and owned.get(op.inputs[0]) == f"{op.module}.weight".lstrip(".")
        and isinstance(root.get_submodule(op.module), nn.Embedding)
    )


def opaque(graph: Graph, axes: Axes) -> dict[str, int]:
    """Ops without a rule, and how often each occurs."""
    out: dict[str, int] = {}
    for op in graph.ops:
        if axes.rules.get(op.name) is None:
            out[op.call.op] = out.get(op.call.op, 0) + 1
    return dict(sorted(out.items()))


def splits_near(graph: Graph, assignment: Assignment, tensor: str) -> frozenset[tuple[str, Shards]]:
    """The split of `tensor`, or of what its op was given."""
    if assignment[tensor].shards:
        return frozenset({(tensor, assignment[tensor].shards)})
    op = graph.producers().get(tensor)
    names = op.inputs if op else ()
    return frozenset((n, assignment[n].shards) for n in names if assignment[n].shards)


def agree(found: tuple[int, int, int], optimum: Optimum) -> None:
    """Compare the checker's price with the solver's.

    Raises:
        SolverError: they differ; such a plan is never written.
    """
    claimed = (optimum.costs[BYTES], optimum.costs[TIME], optimum.costs[BACKWARD])
    if found != claimed:
        raise SolverError(f"the solver claims bytes and times {claimed}, the checker finds {found}: please report it")
