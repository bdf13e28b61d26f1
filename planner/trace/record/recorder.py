"""Run a module's own code on fake tensors and record every ATen call that it makes.

`torch.export` with `run_decompositions` gives the same calls, in two passes and six times slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.errors import ModelError
from shardwright.planner.contract.names import MASKS, is_within
from shardwright.planner.graph.buffer_values import number_of
from shardwright.planner.graph.graph import KEEPS
from shardwright.planner.graph.marks import Draw
from shardwright.planner.trace.data_queries.conditional_regions import changed, inner
from shardwright.planner.trace.data_queries.known_values import DRAWS
from shardwright.planner.trace.data_queries.queries import DataQueries
from shardwright.planner.trace.model.argument_trees import tree_leaves, tree_map
from shardwright.planner.trace.model.input_values import pairs
from shardwright.planner.trace.opaque.custom_backward import OwnGradients
from shardwright.planner.trace.opaque.opaque_modules import Opaque
from shardwright.planner.trace.opaque.random_inputs import Spec
from shardwright.planner.trace.record.aliases import Aliases
from shardwright.planner.trace.record.boundaries import BOUNDARY, CallStack, read_tag
from shardwright.planner.trace.record.hook_leaks import HookLeaks
from shardwright.planner.trace.record.op_tensors import tensors_in
from shardwright.planner.trace.record.own_tensors import IsParameter, OwnTensors
from shardwright.planner.trace.record.record import Call, Record
from shardwright.planner.trace.record.recording_modes import (
    ATTENTION,
    Functional,
    Recorder,
    is_drawn_by_shape,
)
from shardwright.planner.trace.runs.run import Run, Runner, State, dtype_of
from shardwright.planner.trace.sizes.provenance import seen_by_users
from shardwright.planner.trace.state.cache_state import States
from shardwright.planner.trace.state.outside_state import LeftOutside, check_outside
from shardwright.planner.trace.state.persistent_state import Contained, KeptNumbers, KeptState
from shardwright.planner.trace.trace_lock import exporting
from shardwright.runtime.scopes import replaced
from shardwright.runtime.slots import but_state, returned


def record(
    top: Runner,
    runs: Sequence[Run],
    entered: CallStack,
    opaque: Opaque,
    exported: bool,
    numbers: KeptNumbers,
) -> Record:
    """Record `runs` of the root of `top`, one after the other. All tensors are on meta.

    Args:
        top: Makes the runs.
        runs: The runs to record.
        entered: The modules that currently run.
        opaque: Modules that do not run: a call of one is recorded as one op.
        exported: Whether model code is told that it is exported, so that it expects no data.
        numbers: Numbers in attributes that are hidden from model code.
    """
    recorder = Recorder(entered, runs[0].by_rows)
    # In inference mode composite ops are dispatched in one piece, so LEAVES can be kept.
    # (Parameters still require gradients: `matmul` checks that.)
    with torch.inference_mode(), recorder, exporting(exported), _restored(top.root):
        made = _Recording(top, opaque.made(runs), entered, recorder, numbers, opaque)
        return made.run(opaque)


@contextmanager
def _restored(root: nn.Module) -> Iterator[None]:
    """Context manager after which `root` has the modules, parameters and buffers as before."""
    kinds = ("_parameters", "_buffers", "_modules")
    stores = [getattr(module, kind) for module in root.modules() for kind in kinds]
    before = [(store, {**store}) for store in stores]
    try:
        yield
    finally:
        for store, held in before:
            if store.keys() != held.keys() or any(store[name] is not held[name] for name in held):
                store.clear()
                store.update(held)


class _Recording:
    """Calls of a model on fake tensors: what goes in, what is noted meanwhile, what comes out."""

    def __init__(
        self,
        top: Runner,
        runs: Sequence[Run],
        entered: CallStack,
        recorder: Recorder,
        numbers: KeptNumbers,
        opaque: Opaque,
    ) -> None:
        self.module, self.runs, self.entered, self.recorder = top.root, runs, entered, recorder
        self.functional = Functional(entered)
        arguments = [(run.args, dict(run.kwargs)) for run in runs]
        self.stored = {n: _like(t, dtype_of(runs, n, t.dtype)) for n, t in _state(self.module)}
        self.own = OwnTensors(self.module, dict(_state(self.module)), self.stored)
        self.given = tree_map(_like, arguments)
        recorder.calls.clear()
        for tensor, value in pairs(arguments, self.given):
            recorder.known.keep(tensor, value, fixed=False)
        self.numbered = {
            name: value
            for name, buffer in _state(self.module)
            if name not in numbers.written
            and not any(is_within(name, other) for other in opaque.alike)
            and (value := number_of(buffer)) is not None
        }
        """Buffers that are numbers, with their values: none that a run writes."""
        for name, value in self.numbered.items():
            recorder.known.keep_number(self.stored[name], value)
        self.numbers = numbers
        self.states = States(self.module, self.functional.aliases)
        keeps = any(run.again for run in runs)
        self.kept = KeptState(self.module, entered, numbers, keeps, lambda: len(recorder.calls))
        self.results: list[list[tuple[str, torch.Tensor]]] = []
        """Of each run that has ended, the slots of what it returned, and the tensors then."""
        self.written: dict[str, list[torch.Tensor]] = {}
        """By name of a parameter or buffer: the values that runs left there, each run its own."""
        self.outside: list[LeftOutside] = []
        self.asked = set[str]()
        """Parameters of which code asks whether they are parameters."""
        self.made: list[torch.Tensor] = []
        """Buffers that were not there before, or had another shape."""
        self.returned: list[torch.Tensor] = []
        """The same tensors, as code has them: it may write into them later."""
        self.state, self.wrapped = tree_map(self.functional.wrap, (self.stored, self.given))
        named = (name for name, x in _state(self.module) if isinstance(x, nn.Parameter))
        for name in named:
            self.state[name]._is_param = IsParameter(partial(self.asked.add, name))
        # Code may put more into what it is given.
        self.ends = [*zip(tree_leaves(self.given), tree_leaves(self.wrapped), strict=True)]
        self.top = top

    def run(self, opaque: Opaque) -> Record:
        """Make the calls, and return what was recorded."""
        recorder, functional = self.recorder, self.functional
        made = [
            run._replace(args=args, kwargs=kwargs)
            for run, (args, kwargs) in zip(self.runs, self.wrapped, strict=True)
        ]
        out = Record(recorder.calls, recorder.passed, self.stored, _tensors(self.given))
        out.overwritten = functional.overwritten
        out.replaced, out.changed = functional.replaced, functional.written
        out.wide = self._unpriced_floats()
        own = OwnGradients()
        assigned = partial(self._note_assigned, out)
        queries = DataQueries(opaque, recorder.known, out, own.whole.append, assigned)
        recorder.before = queries.regions.settle
        standing_in = opaque.standing_in(self.module, self._note_opaque, recorder.known)
        hooks = HookLeaks(self.module, lambda: recorder.calls)
        noting = replaced(self.top, begin=self._begin, end=self._end, around=self.kept.around)
        with noting, functional, standing_in, queries, own.noted(), hooks.watched():
            within = {f"root.{name}": tensor for name, tensor in self.state.items()}
            functional_call(self.top, within, (made,), tie_weights=False)
            self._note_results(out)
            out.outputs += hooks.leaked()
            self._note_state(out, within)
            out.stateful |= opaque.stateful
            self._note_randomness(out)
            out.own_gradients = [*map(inner, own.whole)], [*map(inner, own.unsplit)]
            out.regions = queries.regions.ended()
            results = [*out.outputs, *chain.from_iterable(out.written.values())]
            changes = changed(out.calls, out.regions, out.replaced, results, recorder.known)
            out.changed_in_regions = [*changes]
            self._note_reads(out)
            recorder.forget()
            return out

    def _begin(self, traced_call: int, state: State) -> None:
        self.recorder.begin(traced_call)
        self.functional.trains = self.runs[traced_call].training
        self.states.begin(state)

    def _end(self, state: State, result: Any) -> None:
        called = self.module.get_submodule(self.runs[len(self.results)].module)
        seen_by_users(but_state(result, signature(called.forward).parameters))
        gave = _given(called, result)
        self.states.end(state, [x for _, x in gave])
        self.results.append([(slot, inner(x)) for slot, x in gave])
        self.returned.extend(x for _, x in gave)
        self._note_held()
        left = tensors_in(self.top.left_outside())
        self.outside += [LeftOutside(inner(x), len(self.results) - 1) for x in left]

    def _note_held(self) -> None:
        """Note what a run left in parameters and buffers, in place or by an assignment.

        Raises:
            ModelError: another parameter is there.
            Unproven: code changed one by way of what a submodule returned.
        """
        self.functional.aliases.check([*self.state.values()])
        for path, module in self.module.named_modules():
            for at, value in (*module._parameters.items(), *module._buffers.items()):
                name = f"{path}.{at}".lstrip(".")
                stored, own = self.stored.get(name), self.state.get(name)
                if at in module._parameters and value is not own:
                    if any(value is x for x in self.state.values()):
                        raise ModelError(
                            f"a forward sets the parameter '{at}' of a {type(module).__name__}: "
                            "tie weights before the model is planned"
                        )
                    raise ModelError(
                        f"cannot split {type(self.module).__name__}: its forward puts a new "
                        f"parameter in '{name}': make parameters before, and set the data of "
                        f"those that there are (self.{at}.data = tensor)"
                    )
                now = None if value is None else inner(value)
                if now is None or now is stored:
                    continue
                if stored is None or now.shape != stored.shape:
                    self.made.append(now)
                else:
                    self.written.setdefault(name, []).append(now)

    def _note_opaque(
        self, name: str, taken: list[torch.Tensor], given: list[Spec]
    ) -> list[torch.Tensor]:
        """Record a call of an opaque module as one op, and return what it gives."""
        kind = type(self.module.get_submodule(name)).__name__
        with _disable_current_modes():
            made = self.recorder.whole_module(kind, tree_map(inner, taken), given)
        return [self.functional.wrap(t) for t in made]

    def _unpriced_floats(self) -> list[torch.Tensor]:
        """Return the inputs of unpriced runs that are floats, but for masks.

        The last dim of a mask is a length.
        """
        unpriced = [
            (args, {n: v for n, v in kwargs.items() if n not in MASKS})
            for run, (args, kwargs) in zip(self.runs, self.given, strict=True)
            if not run.priced
        ]
        return [t for t in _tensors(unpriced) if t.is_floating_point()]

    def _note_assigned(self, out: Record, x: torch.Tensor) -> bool:
        """Note a parameter that code has for more than its values; False if it is none."""
        found = {name for name, own in self.state.items() if own is x}
        out.assigned |= found
        return bool(found)

    def _note_results(self, out: Record) -> None:
        """Note what the runs returned, wrote into their arguments, and left in attributes."""
        out.written = self.written
        out.assigned |= self.asked
        aliases = self.functional.aliases
        out.outputs = _changed_for_users(self.ends, self.returned, aliases)
        for run, result in zip(self.runs, self.results, strict=True):
            out.returned_slots.append([slot for slot, _ in result])
            out.outputs += [tensor for _, tensor in result]
            usual = out.returned_slots[0]  # without hidden states
            out.scores += [t for slot, t in result if slot in usual and not run.module]
        out.outputs += [*_for_users(self.recorder.calls, self.kept.contained), *self.made]

    def _note_state(self, out: Record, within: Mapping[str, Any]) -> None:
        """Note caches, and what modules keep from one run to the next, in `within` among others."""
        out.cache_classes, out.cache_arguments = self.states.classes, self.states.given
        out.resumed = [*self.states.pairs, *self.kept.pairs()]
        self.kept.check()
        data = [*self.stored.values(), *_tensors(self.given)]
        outside = check_outside(self.recorder.calls, self.outside, data)
        out.leaves_attributes = outside or bool(self.kept.left)
        out.reads_left_attributes = bool(self.kept.read)
        replaced = {n for n, x in self.state.items() if within[f"root.{n}"] is not x}
        self.numbers.are_written(self.numbered.keys() & (replaced | out.written.keys()))
        out.stateful = {*self.kept.changed(), *(n.rpartition(".")[0] for n in replaced)}
        out.stateful |= self.entered.changing[any(run.training for run in self.runs)]

    def _note_randomness(self, out: Record) -> None:
        """Note what is drawn, and whether anything is in evaluation mode."""
        calls, runs = self.recorder.calls, self.runs
        others = [*_drawn(calls, numbered=True)]
        out.drawn = [*self.functional.dropped, *others]
        # Each rank would draw for its part alone.
        out.cut += ((x, dim) for x, _ in others for dim in range(x.dim()))
        in_eval_mode = (c for c in calls if not runs[c.traced_call].training)
        out.draws = self.functional.draws or any(True for _ in _drawn(in_eval_mode))
        random = {id(x) for x in _random(calls)}
        for x in chain.from_iterable(self.written.values()):
            if id(x) in random:  # else each rank would draw for its part alone
                out.cut += ((x, dim) for dim in range(x.dim()))

    def _note_reads(self, out: Record) -> None:
        """Note the tensors that code looks at otherwise than by ops, and flags made of data."""
        entered, kept = self.entered, self.kept
        out.cut += self.recorder.cut
        out.by_reads = self.recorder.by_reads
        reads = {*kept.modules} if entered.reads and kept.leaves_numbers() else entered.reads
        out.seen += seen_by(reads, self.recorder.calls)
        out.flags_from_data = entered.given_numbers()
        self.own.check(self.recorder.calls, out.written)


def seen_by(modules: Iterable[str], calls: Sequence[Call]) -> Iterator[torch.Tensor]:
    """Yield the tensors that code of `modules` takes, computes, and passes to other modules."""
    wanted = {*modules}
    for call in calls if wanted else ():
        at_boundary = call.op is BOUNDARY and read_tag(call.args[1])[0] in wanted
        if call.module in wanted or at_boundary:
            yield from _tensors((call.args, call.kwargs, call.result))


def _for_users(calls: Sequence[Call], contained: Iterable[Contained]) -> list[torch.Tensor]:
    """Return tensors that modules keep in attributes and that no later run reads."""
    ends = {call.traced_call: number + 1 for number, call in enumerate(calls)}
    found: list[tuple[object, torch.Tensor, int]] = [
        (read_tag(call.args[1]), call.result, ends[call.traced_call])
        for call in calls
        if call.op is BOUNDARY and read_tag(call.args[1])[1] == KEEPS
    ]
    # A tensor that is itself an attribute of a module that ran has a marker, or a hook made it.
    ran = {read_tag(call.args[1])[0] for call in calls if call.op is BOUNDARY}
    found += [
        ((one.place, one.slot), one.tensor, one.at)
        for one in contained
        if one.slot or one.place.path not in ran
    ]
    last: dict[int, int] = {}
    for number, call in enumerate(calls if found else ()):
        last.update((id(x), number) for x in tree_leaves((call.args, call.kwargs)))
    later = {key for key, x, end in found if last.get(id(x), -1) >= end}
    return [x for key, x, _ in found if key not in later]


def _drawn(calls: Iterable[Call], numbered: bool = False) -> Iterator[tuple[torch.Tensor, Draw]]:
    """Yield the results of ops that draw random numbers; with `numbered`, of those without one."""
    for call in calls:
        draws = DRAWS in getattr(call.op, "tags", ()) and call.op is not ATTENTION
        if draws and not (numbered and is_drawn_by_shape(call.op, call.args)):
            yield from (
                (t, Draw()) for t in tree_leaves(call.result) if isinstance(t, torch.Tensor)
            )


def _random(calls: Sequence[Call]) -> list[torch.Tensor]:
    """Return what is drawn, and the tensors of the same shape that are computed from it."""
    found = {id(x): x for x, _ in _drawn(calls)}
    for call in calls if found else ():
        sizes = {found[id(x)].shape for x in tensors_in((call.args, call.kwargs)) if id(x) in found}
        found |= {id(x): x for x in tensors_in(call.result) if x.shape in sizes}
    return [*found.values()]


def _changed_for_users(
    ends: Sequence[tuple[Any, Any]], given_out: list[torch.Tensor], aliases: Aliases
) -> list[torch.Tensor]:
    """Return the current values of arguments changed in place, except those that are returned.

    `ends` are the tensors that the runs are given, without and with functionalization.
    """
    changed = [x for was, x in ends if isinstance(x, torch.Tensor) and inner(x) is not was]
    return [inner(x) for x in changed if not aliases.among(x, given_out)]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [inner(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _given(module: nn.Module, result: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a call of `module` returned, with their slots.

    Raises:
        ModelError: the result contains an object that may hide tensors.
    """
    found = list(returned(result, signature(module.forward).parameters))
    for slot, leaf in found:
        if not isinstance(leaf, torch.Tensor):
            raise ModelError(
                f"output '{slot}' of {type(module).__name__} is a {type(leaf).__name__}, which may "
                "hide tensors: let it give tensors, in containers or in a class of its own"
            )
    return found


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter, then every buffer, under each of its names."""
    for kind in ("_parameters", "_buffers"):
        for path, part in module.named_modules():
            for name, tensor in getattr(part, kind).items():
                if tensor is not None:
                    yield f"{path}.{name}" if path else name, tensor


def _like(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a new empty tensor like `value`, so that each name of a tied weight has its own."""
    if not isinstance(value, torch.Tensor):
        return value
    like = {
        "dtype": dtype or value.dtype,
        "device": value.device,
        "requires_grad": value.requires_grad,
    }
    return torch.empty_strided(value.shape, value.stride(), **like)
