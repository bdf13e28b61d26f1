"""Run a module's own code on fake tensors and note every ATen call that it makes.

Two modes in a row see each call: `_Functional` turns changes in place into new tensors, and
`_Recorder` takes apart what has no rule of its own, notes the rest and says what shapes come out.
`torch.export` with `run_decompositions` gives the same calls, in two passes and six times slower.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.planner.trace.boundaries import BOUNDARY
from shardwright.planner.trace.data_dependent.asked import Asked
from shardwright.planner.trace.data_dependent.known import Known
from shardwright.planner.trace.data_dependent.loops import Loop, carried, inner, known
from shardwright.planner.trace.data_dependent.numbers import Questions
from shardwright.planner.trace.opaque import Opaque, Spec, Unknown, exporting
from shardwright.planner.trace.traced_calls import Run, Runner, dtype_of
from shardwright.rules.added import added
from shardwright.rules.call import name_of

aten = torch.ops.aten

LEAVES = {
    aten.linear.default,
    aten.scaled_dot_product_attention.default,
    aten.embedding.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.group_norm.default,
    aten.cross_entropy_loss.default,
    aten.silu.default,
    aten.glu.default,
}
"""Ops that have a rule of their own and so are not taken apart."""


def is_leaf(op: Any) -> bool:
    """Whether `op` is not taken apart: one of LEAVES, or somebody added a rule for it."""
    return op in LEAVES or (op.namespace != "prim" and added(name_of(op)) is not None)


@dataclass(frozen=True)
class Untraced:
    """Stands for the op of a call of a whole module."""

    _opname: str


@dataclass(frozen=True)
class Call:
    """One call of an op. The tensors in it are fake; they are told apart by identity."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    module: str
    source: str
    turn: int
    """Number of the run that it was made in."""


@dataclass
class Record:
    """What ran: the calls in order, and the tensors that went in and came out."""

    calls: list[Call]
    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and buffers by name; those with several names are a tensor under each."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    """What was returned, after the new values of inputs and buffers that were changed in place."""

    written: dict[str, torch.Tensor] = field(default_factory=dict)
    """New values of parameters that were changed in place, by name."""

    read: list[torch.Tensor] = field(default_factory=list)
    """Tensors that numbers were read off."""

    cut: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Tensors, and a dim of each that is as long as data says."""

    overwritten: list[torch.Tensor] = field(default_factory=list)
    """What tensors were before code changed them in place."""

    replaced: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What they are after that, and before; not those that are parts of others."""

    loops: list[Loop] = field(default_factory=list)
    """Loops that may make fewer passes than they did."""

    carried: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What those changed in place, before and after each change."""

    scores: list[torch.Tensor] = field(default_factory=list)
    """What of them runs of the root returned."""


def record(
    top: Runner,
    runs: Sequence[Run],
    entered: Sequence[str],
    opaque: Opaque,
    exported: bool = True,
) -> Record:
    """Make `runs` of the root of `top`, one after the other; its tensors and theirs are on meta.

    `entered` holds the paths of the modules that run at present, the innermost last. The modules in
    `opaque` do not run: a call of one is a call of an op. Model code is told that it is `exported`:
    that there is no data to look at.
    """
    recorder, functional, module = _Recorder(entered), _Functional(), top.root
    # In inference mode composite ops come in one piece, so LEAVES can be kept. (Gradients are
    # still required of parameters: `matmul` looks.)
    with torch.inference_mode(), recorder, exporting(exported):
        runs = opaque.made(runs)
        plain = [(run.args, dict(run.kwargs)) for run in runs]
        stored = {n: _like(t, dtype_of(runs, n, t.dtype)) for n, t in _state(module)}
        given = tree_map(_like, plain)
        recorder.calls.clear()
        top.begin = recorder.begin

        def note(name: str, taken: list[torch.Tensor], given: list[Spec]) -> list[torch.Tensor]:
            kind = type(module.get_submodule(name)).__name__
            with _disable_current_modes():
                made = recorder.whole_module(kind, tree_map(inner, taken), given)
            return [functional.wrap(t) for t in made]

        state, wrapped = tree_map(functional.wrap, (stored, given))
        made = [r._replace(args=a, kwargs=k) for r, (a, k) in zip(runs, wrapped, strict=True)]
        out = Record(recorder.calls, stored, _tensors(given), overwritten=functional.overwritten)
        out.replaced = functional.replaced
        questions = Questions(
            opaque,
            lambda x: out.read.append(inner(x)),
            lambda x, dim: out.cut.append((inner(x), dim)),
            lambda: len(recorder.calls),
            lambda x: recorder.known.value(inner(x)),
        )
        out.loops = questions.loops
        with functional, opaque.standing_in(module, note), Asked(questions):
            within = {f"root.{name}": tensor for name, tensor in state.items()}
            returned = functional_call(top, within, (made,), tie_weights=False)
            changed = _changed(stored, state)
            parameters = dict(module.named_parameters(remove_duplicate=False))
            out.written = {n: t for n, t in changed.items() if n in parameters}
            pairs = zip(_tensors(given), _tensors(wrapped), strict=True)
            out.outputs = [t for n, t in changed.items() if n not in out.written]
            out.outputs += [after for before, after in pairs if after is not before]
            out.outputs += _tensors(returned)
            results = zip(runs, returned, strict=True)
            out.scores = _tensors([r for run, r in results if not run.module])
            out.carried = _carried(out, lambda t: known(t) or t in recorder.known)
            return out


def _carried(
    found: Record, has_value: Callable[[torch.Tensor], bool]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What loops over data change in place.

    Raises:
        Unknown: one is left early, or hands on something else.
    """
    if any(loop.stop is None for loop in found.loops):
        raise Unknown("a loop over data ends early")
    results = [*found.outputs, *found.written.values()]
    try:
        return list(carried(found.calls, found.loops, found.replaced, results, has_value))
    except ValueError as error:
        raise Unknown(str(error)) from error


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The present values of those tensors that were changed in place."""
    now = {name: inner(value) for name, value in after.items()}
    return {name: value for name, value in now.items() if value is not before[name]}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [inner(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, then every buffer, by each of its names."""
    for kind in ("_parameters", "_buffers"):
        for path, part in module.named_modules():
            for name, tensor in getattr(part, kind).items():
                if tensor is not None:
                    yield f"{path}.{name}" if path else name, tensor


def _like(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A tensor like `value`, of its own: tied weights are told apart by who reads them."""
    if not isinstance(value, torch.Tensor):
        return value
    like = {
        "dtype": dtype or value.dtype,
        "device": value.device,
        "requires_grad": value.requires_grad,
    }
    return torch.empty_strided(value.shape, value.stride(), **like)


class _Functional(FunctionalTensorMode):
    """Functionalization that leaves leaves and boundaries in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.overwritten: list[torch.Tensor] = []
        self.replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wrap(self, value: Any) -> Any:
        """`value`, or the tensor that model code sees for it."""
        if not isinstance(value, torch.Tensor):
            return value
        with self:
            return FunctionalTensor.to_functional(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Hand on `func`, or the calls that compute the same without changing a tensor."""
        if func is BOUNDARY or is_leaf(func):
            args, kwargs = tree_map(inner, (tuple(args), kwargs or {}))
            return tree_map(self.wrap, func(*args, **kwargs))
        pairs = zip(func._schema.arguments, args, strict=False) if func._schema.is_mutable else ()
        changed = [
            x
            for a, x in pairs
            if a.alias_info and a.alias_info.is_write and isinstance(x, FunctionalTensor)
        ]
        before = [inner(x) for x in changed]
        self.overwritten += before
        out = super().__torch_dispatch__(func, types, tuple(args), kwargs)
        for x, was in zip(changed, before, strict=True):
            if not _is_part(x) and (now := inner(x)) is not was:
                self.replaced.append((now, was))
        return out


def _is_part(x: FunctionalTensor) -> bool:
    """Whether it is a view: where it changes, another tensor does."""
    views = torch._C._functionalization.get_view_meta_sequence(x.elem)  # pyright: ignore
    return any(type(v).__name__ not in ("detach_ViewMeta", "alias_ViewMeta") for v in views)


class _Recorder(FakeTensorMode):
    """Fake tensors, and a note of every call of an op on them."""

    def __init__(self, entered: Sequence[str]) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.entered = entered
        self.calls: list[Call] = []
        self.table: Mapping[Any, Callable[..., Any]] = _core_aten_decompositions_post_autograd()
        self.noting = True
        self.known = Known(self)
        self.turn = 0

    def begin(self, turn: int) -> None:
        """From here on calls are made in run number `turn`."""
        self.turn = turn

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Note a call, or the calls that it is made of."""
        kwargs = kwargs or {}
        if not self.noting or func.namespace == "prim" or func in FunctionalTensor.metadata_fns:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.detach_.default:  # of a constant that was just made
            return args[0]
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default
        if func is not aten.detach.default and not is_leaf(func):
            with self:
                parts = self.table.get(func, func.decompose)(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        super_dispatch, asked = super().__torch_dispatch__, False
        self.noting = False
        try:
            if func is BOUNDARY:
                with self:
                    result = torch.empty_like(args[0])
                self.known.same(result, args[0])
            else:
                result, asked = self.known.result(
                    func, args, kwargs, lambda: super_dispatch(func, types, args, kwargs)
                )
        finally:
            self.noting = True
        if asked:
            return result  # a constant
        module = self.entered[-1] if self.entered else ""
        self.calls.append(Call(func, tuple(args), kwargs, result, module, _source(), self.turn))
        return result

    def whole_module(
        self, kind: str, taken: list[torch.Tensor], given: list[Spec]
    ) -> list[torch.Tensor]:
        """Note a call of a module that is not traced."""
        self.noting = False
        try:
            with self:
                made = [spec.empty() for spec in given]
        finally:
            self.noting = True
        op, module = Untraced(f"module {kind}"), self.entered[-1]
        self.calls.append(Call(op, tuple(taken), {}, made, module, _source(), self.turn))
        return made


def _source() -> str:
    """File and line at which the innermost `forward` of model code stands."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_code.co_name == "forward" and package not in ("torch", "shardwright"):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
