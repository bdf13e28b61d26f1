"""Trace a set of calls of a module on meta into one ATen graph with module boundaries.

The module's own Python code runs (`recorder.py`). Wrapped forwards put a marker where a tensor
enters or leaves a module (`boundaries.py`). The provenance of sizes is noted (`provenance.py`).
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwright.errors import ModelError, ShardwrightError, first_line, in_one_line
from shardwright.planner.contract.names import is_within
from shardwright.planner.graph.graph import Graph
from shardwright.planner.trace import advice
from shardwright.planner.trace.data_queries.conditional_regions import masks_have_stated_lengths
from shardwright.planner.trace.data_queries.errors import (
    DATA_DEPENDENT,
    NeedsData,
    Unproven,
    needs_memory,
)
from shardwright.planner.trace.data_queries.model_code import place_of
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.record import boundaries, parametrized
from shardwright.planner.trace.record.record import Record
from shardwright.planner.trace.record.recorder import record
from shardwright.planner.trace.runs.run import Run, Runner, RunRefused
from shardwright.planner.trace.sizes import sourced_attributes
from shardwright.planner.trace.sizes.expressions import attributes_of
from shardwright.planner.trace.sizes.provenance import Provenance
from shardwright.planner.trace.state.code_state import isolated
from shardwright.planner.trace.state.persistent_state import Keeps, KeptNumbers, Retrace
from shardwright.planner.trace.to_graph import graph_facts
from shardwright.planner.trace.to_graph.translate import translate
from shardwright.planner.trace.torch_features.traceable import traceable
from shardwright.planner.trace.trace_lock import alone


def trace_runs(
    module: nn.Module,
    runs: Sequence[Run],
    skips: bool = False,
    settled: bool = False,
    shortened: bool = False,
) -> Graph:
    """Return the graph of several runs of `module`, which it does not run on data.

    The first run is a call of the root. Sizes that vary at run time (batch, sequence) should be
    distinct primes, so that they differ from sizes of the model.

    With `skips`, skippable code is traced as if it always ran, if that is correct
    (`data_queries/conditional_code.py`). With `settled`, runs that depend on data are refused.
    `shortened` says whether blocks of `module` stand for more blocks like them.

    Raises:
        ModelError: the module cannot be traced; the message says why.
    """
    opaque = Opaque(module, skips=skips, settled=settled, shortened=shortened)
    graph = _traced(module, runs, opaque)
    if not masks_have_stated_lengths(graph):
        opaque.drop_stand_ins()
        graph = _traced(module, runs, opaque)
    free = {i for i, run in enumerate(runs) if run.training or not run.priced}
    graph.unpriced = frozenset(i for i, (run, _) in enumerate(graph.branch_paths) if run in free)
    return graph


def _traced(module: nn.Module, runs: Sequence[Run], opaque: Opaque) -> Graph:
    """Return the graph of `runs`, with boundaries pruned and marks set."""
    found, provenance = run(module, runs, opaque)
    graph = translate(found, module, provenance)
    graph.untraced, graph.stand_ins = frozenset(opaque.alike), opaque.stand_ins
    graph.branch_paths, graph.skips = opaque.branch_paths, opaque.skips
    graph.lengths = graph_facts.lengths(runs[0])
    graph.pinned = provenance.pinned | inside(graph)
    graph.marks.carried = graph_facts.carried(graph, module)
    graph_facts.prune_boundaries(graph)
    graph.marks.modes = graph_facts.modes(graph, runs)
    graph_facts.name_literals(graph)
    marks, reads = graph.marks, graph.reads
    marks.overwritten = graph_facts.overwritten(graph)
    marks.fixed = graph_facts.fixed(graph, provenance.fixed) | marks.data_sized
    marks.counted = {(reads[n], dim) for n, dim in provenance.counted if n in reads}
    marks.inferred = {(reads[n], dim) for n, dim in provenance.inferred if n in reads}
    if any(run.module for run in runs):
        marks.joined = graph_facts.joined(graph, module)
    has_loss = "labels" in inspect.signature(module.forward).parameters
    marks.logits = graph_facts.logits(graph) if has_loss else set()
    marks.reused_outputs = graph_facts.gone_on(graph)
    return graph


def run(module: nn.Module, runs: Sequence[Run], opaque: Opaque) -> tuple[Record, Provenance]:
    """Record `runs` with markers, and the provenance of sizes.

    A module that depends on data is added to `opaque`, and the runs are made again without tracing
    it. If code fails under export, the runs are made again without telling it that it is exported.
    """
    with alone(), warnings.catch_warnings(), parametrized.refused(module):
        warnings.simplefilter("ignore")
        tries, numbers = _Tries(module, runs, opaque), KeptNumbers()
        while True:
            entered = boundaries.CallStack()
            top = Runner(module)
            try:
                with (
                    isolated(module) as outside,
                    traceable(module),
                    boundaries.marked(module) as (entered, noted),
                    sourced_attributes.marked(module, top) as provenance,
                ):
                    provenance.running, top.left_outside = entered, outside.left
                    found = record(top, runs, entered, opaque, tries.exported, numbers)
                tries.furthest = len(runs)  # what fails from here on is no single run
                if not numbers.made([call.op for call in found.calls]):
                    entered = boundaries.CallStack([""])
                    raise Keeps(min(numbers.places))
                found.reads_left_attributes |= tries.keeps is not None
                found.flags = {name: one.flags() for name, one in noted.items() if one.calls}
                others = {name: one.unsaid for name, one in noted.items() if one.unsaid}
                found.other_arguments = others
                if not (around := opaque.used_from_outside(called(found))):
                    return found, provenance
                entered = boundaries.CallStack(around)
                raise NeedsData(f"a module in '{around[-1]}' is called from outside of it too")
            except ShardwrightError:
                raise
            except Retrace:
                continue
            except Exception as raised:
                error = Unproven(advice.NESTED) if _makes_nested(raised) else raised
                if not tries.another(error, raised, entered, top.now):
                    raise tries.refusal(error, raised) from error


@dataclass
class _Tries:
    """The tries of recording runs, all of which failed so far.

    Attributes:
        exported: Whether code is told that it is exported.
        keeps: The error of code that keeps numbers, if there was one.
        refused: How code failed under export.
        furthest: The number of the run in which a try failed.
    """

    module: nn.Module
    runs: Sequence[Run]
    opaque: Opaque
    exported: bool = True
    keeps: Exception | None = None
    refused: str = ""
    furthest: int = 0

    def another(
        self, error: Exception, raised: Exception, entered: boundaries.CallStack, call: int
    ) -> bool:
        """Return whether another try may do better, and set how it is made.

        Args:
            error: What the failure means.
            raised: What the code raised.
            entered: The modules that ran.
            call: The number of the traced call.
        """
        opaque = self.opaque
        if opaque.branch_paths:
            self.furthest = max(self.furthest, opaque.branch_paths[call][0])
        self.keeps = self.keeps or (error if isinstance(error, Keeps) else None)
        needs_data = isinstance(error, DATA_DEPENDENT)
        made_up = 0 < self.furthest < len(self.runs) and self.runs[self.furthest].made_up
        missing = isinstance(error, ImportError)
        # What the code refuses with and without export is refused for another reason.
        alike = repr(raised) == self.refused
        if alike and needs_memory(raised) and not made_up and opaque.after(NeedsData(), entered):
            self.exported, self.refused = True, ""
            return True
        if not (alike or missing) and opaque.after(error, entered, made_up):
            return True
        # Without export, code asks more of data: a made-up call is not worth that.
        if self.exported and not (needs_data or missing or made_up):
            self.exported, self.refused = False, repr(raised)
            return True
        return False

    def refusal(self, error: Exception, raised: Exception) -> ModelError:
        """Return the error that says why the runs cannot be traced; arguments as in `another`."""
        name = type(self.module).__name__
        if unproven := self.keeps or (error if isinstance(error, Unproven) else None):
            return ModelError(f"cannot split {name}: {unproven}")
        needs_data = isinstance(error, DATA_DEPENDENT)
        needs = f"data-dependent: {first_line(error)}"
        text = f"{needs if needs_data else in_one_line(error):.300}{place_of(raised)}"
        todo = advice.on(text, needs_data, needs_memory(raised))
        refusal = RunRefused(f"cannot trace {name}: {text}; {todo}")
        refusal.behind = len(self.runs) - self.furthest
        return refusal


def _makes_nested(error: Exception) -> bool:
    """Return whether torch's code for nested tensors failed."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(f.f_globals.get("__name__", "").startswith("torch.nested") for f, _ in frames)


def called(found: Record) -> set[str]:
    """Return the modules that took or returned a tensor in the runs."""
    calls = (call for call in found.calls if call.op is boundaries.BOUNDARY)
    return {boundaries.read_tag(call.args[1])[0] for call in calls}


def inside(graph: Graph) -> set[tuple[str, str]]:
    """Return the attributes of untraced modules that sizes depend on: these must not change."""
    read = {a for size in graph.sizes for a in attributes_of(size.expression)}
    return {a for a in read if any(is_within(a[0], n) for n in graph.untraced)}
