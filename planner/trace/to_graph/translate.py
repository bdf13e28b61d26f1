"""Translate the recorded calls of a run to the planner's `Graph`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from shardwright.planner.contract.names import is_within
from shardwright.planner.graph.graph import (
    EQUAL,
    Boundary,
    Graph,
    Op,
    Passing,
    RunFacts,
    SizeArgument,
    Slot,
    Tensor,
    Use,
)
from shardwright.planner.trace.data_queries.conditional_regions import SAME
from shardwright.planner.trace.record import boundaries
from shardwright.planner.trace.record.op_tensors import tensors_in
from shardwright.planner.trace.record.record import Call, Record
from shardwright.planner.trace.record.recorder import seen_by
from shardwright.planner.trace.sizes.expressions import Expression, attributes_of, reads_of
from shardwright.planner.trace.sizes.provenance import Provenance
from shardwright.planner.trace.to_graph.graph_facts import slice_of
from shardwright.rules.call import OpCall, Operand, name_of
from shardwright.rules.normalization import UPDATED

DETACH = torch.ops.aten.detach.default

T = TypeVar("T")

IGNORED = {
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range_for_size",
}


def translate(record: Record, module: nn.Module, provenance: Provenance) -> Graph:
    """Return the `Graph` of recorded runs of `module`, with its size arguments.

    Args:
        record: The recorded runs.
        module: The module.
        provenance: The sizes noted during the runs.
    """
    sources = provenance.sources
    translator = _Translator(module, {id(before) for before, _ in record.changed_in_regions})
    for fqn, tensor in record.stored.items():
        translator.store(fqn, tensor)
    for tensor in record.inputs:
        # The caller may want the gradient of an input: embeddings, or another module's output.
        translator.take("input", tensor, differentiable=True)
    needed = [*record.read, *record.outputs, *sources.values()]
    needed += chain.from_iterable(record.written.values())
    needed += [tensor for pair in (*record.resumed, *provenance.handed_on) for tensor in pair]
    origins = _Origins(record.calls)
    read = {id(call) for call in origins.alive(needed)}
    # Outputs of modules are computed, and priced, even if nothing reads them; they get no gradient.
    # Inputs that nothing reads, such as tensors that a cache holds already, may have any placement.
    crossed = [call for call in record.calls if call.op is boundaries.BOUNDARY]
    entering = [c for c in crossed if boundaries.read_tag(c.args[1])[1] == "in"]
    idle = {id(c) for c in entering if record.cache_arguments[c.traced_call]} - read
    given = [call.result for call in crossed if id(call) not in idle]
    calls = origins.alive([*needed, *given])
    for call in calls:
        translator.call(call, differentiable=id(call) in read)
    graph = translator.graph
    graph.passed = _passed(record, calls, translator, origins)
    graph.outputs = [translator.name_of(t) for t in record.outputs]
    vars(graph).update({fact.name: getattr(record, fact.name) for fact in fields(RunFacts)})
    _mark(translator, record, provenance)
    graph.reads = {n: translator.name_of(t) for n, t in sources.items()}
    _add_sizes(translator, provenance)
    _mark_lost_lengths(translator, record, provenance)
    _mark_cuts(translator, record)
    return graph


def _mark(translator: _Translator, record: Record, provenance: Provenance) -> None:
    """Set the marks of a graph, and which modules may do something else if they are called again.

    The order matters: a tensor that no call made gets the next number of a constant.
    """
    graph, name_of = translator.graph, translator.name_of
    marks = graph.marks
    marks.sized = {(name_of(t), t.dim() - 1) for t in record.wide}
    marks.in_place = translator.pairs(_in_place(record))
    marks.changed_in_regions = translator.pairs(record.changed_in_regions)
    marks.resumed = translator.pairs(record.resumed)
    marks.data_sized = {*translator.named(record.cut)}
    handed = translator.named(provenance.handed_on)
    marks.handed_on = {(before, name) for before, t in handed for name in translator.known([t])}
    marks.loop_masks = {name_of(loop.mask) for loop in record.regions if loop.mask is not None}
    marks.in_regions = _looped(record, translator)
    marks.overwritten = translator.known(record.overwritten)
    marks.drawn = {*translator.named(record.drawn)}
    marks.own_gradients, marks.linear_gradients = map(translator.known, record.own_gradients)
    marks.read_values = {name_of(t) for t in record.read}
    marks.decided_unseen = translator.known(record.seen)
    changed, uses = trained(graph), {use.fqn: use for use in graph.uses}
    for fqn, tensors in record.written.items():
        marks.written |= {(uses[fqn].stored, uses[fqn].used, name_of(t)) for t in tensors}
    marks.written |= {(use.stored, use.used, use.used) for use in changed}
    marks.assigned = {use.stored for use in graph.uses if use.fqn in record.assigned}
    writes = (*record.written, *(use.fqn for use in changed))
    graph.stateful = frozenset({*record.stateful, *(fqn.rpartition(".")[0] for fqn in writes)})
    marks.logits = {name_of(t) for t in record.scores}


def _add_sizes(translator: _Translator, provenance: Provenance) -> None:
    """Add the sizes of the graph's tensors that code computed, compared and asked for."""
    graph = translator.graph
    graph.sizes = [
        SizeArgument(f.expression, name, f.dim, f.bound, f.place, f.caller)
        for name, f in translator.named(provenance.sizes)
    ]
    compared = translator.named((t, n) for n, t in provenance.compared.items())
    graph.reads |= {n: name for name, n in compared}
    graph.equal = [*_equal(graph, provenance.equal)]
    graph.length_tests = provenance.deciding
    graph.asked_dims = dict(translator.named(provenance.dims))


def _mark_lost_lengths(translator: _Translator, record: Record, provenance: Provenance) -> None:
    """Mark tensors of code that compares lengths, or gets one as a plain number.

    A comparison of a tensor that the graph lacks is like a plain number: nothing guards it.
    """
    graph, lost = translator.graph, dict[str, set[tuple[int, int]]]()
    for module, expression in provenance.lost:
        lost.setdefault(module, set()).update(reads_of(expression))
    for test in provenance.deciding:
        reads = reads_of(test.left) | reads_of(test.right)
        unguarded = {read for read in reads if read[0] not in graph.reads}
        lost.setdefault(test.module, set()).update(unguarded)
    asking = {test.module for test in provenance.deciding}
    for module, reads in lost.items():
        near = translator.known(seen_by([module], record.calls))
        if module in asking:
            graph.marks.beside_tests |= {(n, module) for n in near}
        for number, dim in reads:
            if number in graph.reads:
                graph.marks.beside_lost |= {(n, graph.reads[number], dim) for n in near}
            else:
                graph.marks.decided_unseen |= near


def _mark_cuts(translator: _Translator, record: Record) -> None:
    """Mark the results of ops that cut by a length: in functions that get it, and slices."""
    graph, found = translator.graph, [*translator.named(record.by_reads)]
    producers = graph.producers()
    for size in graph.sizes:
        if (op := slice_of(producers, size)) is not None:
            found.append((op.outputs[0], frozenset(reads_of(size.expression))))
    graph.marks.cut_by = {
        (name, graph.reads[n], dim) for name, reads in found for n, dim in reads if n in graph.reads
    }


def _equal(graph: Graph, pairs: Iterable[tuple[Expression, Expression]]) -> Iterator[SizeArgument]:
    """Yield the integers that code found equal, except those of tensors outside of the graph."""
    of_attribute = {a: s.tensor for s in graph.sizes for a in attributes_of(s.expression)}
    for pair in pairs:
        difference = ("-", *pair)
        reads = [n for n, _ in sorted(reads_of(difference))]
        near = [graph.reads.get(n, "") for n in reads]
        near += [of_attribute[a] for a in sorted(attributes_of(difference)) if a in of_attribute]
        if near and all(near):
            yield SizeArgument(difference, near[0], 0, EQUAL)


def _in_place(record: Record) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tensor given to a module, tensor inside it) for changes that code outside reads."""
    readers: dict[int, list[Call]] = {}
    for call in record.calls if record.changed else ():
        for tensor in tensors_in(call.args):
            readers.setdefault(id(tensor), []).append(call)
    outputs = {*map(id, record.outputs)}
    for was, now, module in record.changed:
        copies = [now]  # and its detached copies
        for copy in copies:
            read = readers.get(id(copy), ())
            copies += [call.result for call in read if call.op is DETACH]
        read = [call for copy in copies for call in readers.get(id(copy), ())]
        places = (_module_of(call) for call in read if call.op is not DETACH)
        outside = bool(module) and not all(is_within(place, module) for place in places)
        if not outside and outputs.isdisjoint(map(id, copies)):
            continue
        for call in readers.get(id(was), ()):
            crosses = call.op is boundaries.BOUNDARY and call.args[0] is was
            if crosses and boundaries.read_tag(call.args[1])[:2] == (module, "in"):
                yield was, call.result


def _module_of(call: Call) -> str:
    marked = call.op is boundaries.BOUNDARY
    return boundaries.read_tag(call.args[1])[0] if marked else call.module


def _passed(
    record: Record, calls: Sequence[Call], translator: _Translator, origins: _Origins
) -> list[tuple[int, Passing]]:
    """Return `Graph.passed`; for a tensor outside of the graph, what it was computed from."""
    at = {id(call): i for i, call in enumerate(record.calls)}
    crossed = [at[id(call)] for call in calls if call.op is boundaries.BOUNDARY]

    def known(tensor: torch.Tensor) -> Iterator[str]:
        found, made = set[int](), [tensor]
        while made:
            each = made.pop()
            if id(each) in found:
                continue
            found.add(id(each))
            if id(each) in translator.names:
                yield translator.names[id(each)]
            elif (maker := origins.maker.get(id(each))) is not None:
                made += _given(record.calls[maker])

    out = []
    for tensor, tag, behind in record.passed:
        slot = Slot(*boundaries.read_tag(tag), tensor.dim())
        passing = Passing(slot, translator.names.get(id(tensor)), frozenset(known(tensor)))
        out.append((bisect_left(crossed, behind), passing))
    return out


def _looped(record: Record, translator: _Translator) -> set[str]:
    """Return boundary targets in conditional regions, and the parameters that the regions read.

    Only regions that some ranks may run alone count.
    """
    parameters = {id(t) for t in record.stored.values()}
    found: list[torch.Tensor] = []
    for loop in (loop for loop in record.regions if not loop.same_on_all_ranks):
        for call in record.calls[loop.starts[0] : loop.stop] if loop.starts else ():
            found += [call.result] if call.op is boundaries.BOUNDARY else []
            found += [t for t in tensors_in(call.args) if id(t) in parameters]
    return translator.known(found)


class _Origins:
    """Which of `calls` made each tensor, by id, and which calls made what each call is given."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.maker: dict[int, int] = {}
        self.needs: list[set[int]] = []
        for i, call in enumerate(calls):
            self.needs.append({self.maker[id(t)] for t in _given(call) if id(t) in self.maker})
            self.maker.update({id(t): i for t in tensors_in(call.result)})

    def alive(self, results: Iterable[torch.Tensor]) -> list[Call]:
        """Return the calls that `results` depend on, in order."""
        found = {self.maker[id(t)] for t in results if id(t) in self.maker}
        for i in reversed(range(len(self.calls))):
            if i in found:
                found |= self.needs[i]
        return [call for i, call in enumerate(self.calls) if i in found]


def _given(call: Call) -> list[torch.Tensor]:
    return tensors_in((call.args, dict(call.kwargs)))


def trained(graph: Graph) -> list[Use]:
    """Return the parameters and buffers that ops change in place in training mode."""
    changed = {
        op.inputs[op.call.arguments[name].index]
        for op in graph.ops
        for name in UPDATED.get(op.call.op, ())
    }
    return [use for use in graph.uses if use.used in changed]


class _Translator:
    """Builds the graph, and maps ids of recorded tensors to names.

    `carried` has the ids of tensors that conditional code changes.
    """

    def __init__(self, module: nn.Module, carried: Collection[int] = ()) -> None:
        self.carried = carried
        self.graph = Graph()
        self.names: dict[int, str] = {}
        self.counts: dict[str, int] = {}
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        self.held = {**buffers, **parameters}
        self.buffers = buffers.keys()
        self.trainable = {
            n for n, p in parameters.items() if p.is_floating_point() or p.is_complex()
        }
        self.stored: dict[int, str] = {}
        self.owners = {n.rpartition(".")[0] for n in parameters}

    def fresh(self, base: str) -> str:
        """Return an unused name made from `base`."""
        count = self.counts[base] = self.counts.get(base, -1) + 1
        return f"{base}_{count}" if count else base

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name of `tensor`; a tensor that no call made is added as a constant."""
        if id(tensor) not in self.names:
            self.take("constant", tensor, differentiable=tensor.requires_grad)
            self.graph.constants.add(self.names[id(tensor)])
        return self.names[id(tensor)]

    def pairs(self, found: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> set[tuple[str, str]]:
        """Return the names of pairs of tensors."""
        return {(self.name_of(one), self.name_of(other)) for one, other in found}

    def named(self, found: Iterable[tuple[torch.Tensor, T]]) -> Iterator[tuple[str, T]]:
        """Yield (name, value) for (tensor, value) pairs, of the tensors in the graph."""
        return ((self.names[id(t)], value) for t, value in found if id(t) in self.names)

    def known(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        """Return the names of those of some tensors that are in the graph."""
        return {self.names[id(t)] for t in tensors if id(t) in self.names}

    def add(self, name: str, value: torch.Tensor, differentiable: bool) -> None:
        """Add a tensor to the graph."""
        can = differentiable and (value.dtype.is_floating_point or value.dtype.is_complex)
        shape = tuple(int(s) for s in value.shape)
        self.graph.tensors[name] = Tensor(name, shape, value.dtype, can)
        self.names[id(value)] = name

    def take(self, kind: str, value: torch.Tensor, differentiable: bool) -> None:
        """Add an input or constant; `kind` is the base of its name."""
        name = self.fresh(kind)
        self.add(name, value, differentiable)
        self.graph.inputs.append(name)

    def store(self, fqn: str, value: torch.Tensor) -> None:
        """Add a parameter or a buffer."""
        is_buffer = fqn in self.buffers
        used = self.fresh(f"{'b' if is_buffer else 'p'}_{fqn.replace('.', '_')}")
        held = self.held[fqn]
        stored = self.stored.setdefault(id(held), used + ".stored")
        self.add(stored, held, fqn in self.trainable)
        self.add(used, value, fqn in self.trainable)
        self.graph.uses.append(Use(fqn, stored, used, is_buffer))

    def call(self, call: Call, differentiable: bool) -> None:
        """Add a call: an op or a boundary marker."""
        name = name_of(call.op)
        if name in IGNORED:
            return
        if name in SAME:
            self.names[id(call.result)] = self.name_of(call.args[0])
        elif call.op is boundaries.BOUNDARY:
            source = self.name_of(call.args[0])
            (target,) = self.results(call, self.fresh("boundary"), differentiable)
            module, side, slot = boundaries.read_tag(call.args[1])
            has_parameters = module in self.owners
            self.graph.boundaries.append(
                Boundary(module, side, slot, source, target, has_parameters, call.traced_call)
            )
        else:
            self.op(call, name, differentiable)

    def results(self, call: Call, name: str, differentiable: bool) -> list[str]:
        """Add the results of a call to the graph and return their names."""
        sources = [self.name_of(t) for t in _given(call)]
        differentiable &= any(self.graph.tensors[n].differentiable for n in sources) or (
            id(call.result) in self.carried  # passes of a loop add differentiable values to it
        )
        several = isinstance(call.result, (tuple, list))
        names = []
        for i, result in enumerate(call.result if several else [call.result]):
            if isinstance(result, torch.Tensor):
                names.append(f"{name}.{i}" if several else name)
                self.add(names[-1], result, differentiable)
        return names

    def argument(self, value: Any, inputs: list[str]) -> Any:
        """Return an argument with tensors replaced by `Operand`s; adds their names to `inputs`."""
        if isinstance(value, torch.Tensor):
            inputs.append(self.name_of(value))
            return Operand(len(inputs) - 1)
        several = isinstance(value, (list, tuple))
        return [self.argument(v, inputs) for v in value] if several else value

    def op(self, call: Call, name: str, differentiable: bool) -> None:
        """Add the call of an op, with its inputs and outputs."""
        inputs: list[str] = []
        arguments = {k: self.argument(v, inputs) for k, v in named_arguments(call).items()}
        unique = self.fresh(name.rpartition("::")[2])
        outputs = self.results(call, unique, differentiable)
        tensors = self.graph.tensors
        seen = OpCall(
            op=name,
            arguments=arguments,
            operands=tuple(tensors[t].shape for t in inputs),
            results=tuple(tensors[t].shape for t in outputs),
            operand_dtypes=tuple(tensors[t].dtype for t in inputs),
            result_dtypes=tuple(tensors[t].dtype for t in outputs),
        )
        self.graph.ops.append(
            Op(
                unique,
                seen,
                tuple(inputs),
                tuple(outputs),
                call.module,
                call.source,
                traced_call=call.traced_call,
            )  # fmt: skip
        )


def named_arguments(call: Call) -> Mapping[str, Any]:
    """Return the arguments of a call by their names in the op's schema, with defaults."""
    schema = getattr(call.op, "_schema", None)
    if schema is None:
        return {str(i): a for i, a in enumerate(call.args)} | dict(call.kwargs)
    out: dict[str, Any] = {}
    for i, parameter in enumerate(schema.arguments):
        if i < len(call.args):
            out[parameter.name] = call.args[i]
        elif parameter.name in call.kwargs:
            out[parameter.name] = call.kwargs[parameter.name]
        elif parameter.has_default_value():
            out[parameter.name] = parameter.default_value
    return out
