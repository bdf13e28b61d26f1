"""The two dispatch modes that see every call of an op while model code is traced.

`Functional` turns in-place changes into new tensors. `Recorder` decomposes ops that have no rule of
their own, records the others and computes the shapes of results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._C import (  # pyright: ignore
    DispatchKey,
    DispatchKeySet,
    _DisableTorchDispatch,
    _ForceDispatchKeyGuard,
)
from torch._decomp import _core_aten_decompositions_post_autograd
from torch._higher_order_ops.auto_functionalize import can_auto_functionalize
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardwright.errors import ModelError
from shardwright.planner.contract.names import DRAWN_INTO, is_drawn_like
from shardwright.planner.graph.marks import Draw
from shardwright.planner.trace.data_queries.conditional_regions import inner
from shardwright.planner.trace.data_queries.errors import Unproven
from shardwright.planner.trace.data_queries.known_values import DRAWS, OF_SIZES
from shardwright.planner.trace.data_queries.model_code import frames, is_plumbing, module_of
from shardwright.planner.trace.opaque.random_inputs import Spec
from shardwright.planner.trace.record.aliases import Aliases
from shardwright.planner.trace.record.attention_rows import ROWS, by_rows
from shardwright.planner.trace.record.boundaries import BOUNDARY, PASSES, WRITES, CallStack
from shardwright.planner.trace.record.fake_mode import DEVICE, META, OnMeta
from shardwright.planner.trace.record.op_tensors import mapped, tensors_in
from shardwright.planner.trace.record.record import Call, Passed, Untraced
from shardwright.rules.added import added
from shardwright.rules.call import name_of

aten = torch.ops.aten

FUNCTIONALIZE = DispatchKeySet(DispatchKey.Functionalize)
EXTRA_KEYS = FunctionalTensor._extra_dispatch_keys

ATTENTION = aten.scaled_dot_product_attention.default

LEAVES = {
    aten.linear.default,
    aten.bilinear.default,
    ATTENTION,
    ROWS,
    aten.embedding.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.group_norm.default,
    aten.cross_entropy_loss.default,
    aten.silu.default,
    aten.glu.default,
}
"""Ops that have a rule of their own and are therefore not decomposed."""


FEATURES = {aten.feature_dropout.default, aten.feature_dropout_.default}
DROPOUT = {aten.dropout.default, aten.dropout_.default, *FEATURES}
"""Ops that drop elements at random; their third argument says whether they do."""


def is_drawn_by_shape(op: Any, args: Sequence[Any]) -> bool:
    """Whether a call draws random numbers by the shape of its first argument alone."""
    if DRAWS not in getattr(op, "tags", ()) or any(isinstance(x, torch.Tensor) for x in args[1:]):
        return False
    name = name_of(op)
    into = name if name.endswith("_") else f"{name.removesuffix('_functional')}_"
    drawn_into = into in DRAWN_INTO and op is not aten.bernoulli.default
    return drawn_into or is_drawn_like(name, op._overloadname)


RESHAPES = (aten.view.default, aten._unsafe_view.default)
"""Ops that reshape, where other ops are decomposed."""


def is_leaf(op: Any) -> bool:
    """Return whether `op` is not decomposed: it is in LEAVES, or a rule was added for it."""
    return op in LEAVES or (op.namespace != "prim" and added(name_of(op)) is not None)


@cache
def is_pure(op: Any) -> bool:
    """Return whether `op` is an ATen op without decomposition, aliases or in-place changes.

    Such an op needs no functionalization.
    """
    if op.namespace != "aten" or op is aten._unsafe_view.default or op._can_decompose():
        return False
    return not (op._schema.is_mutable or any(r.alias_info for r in op._schema.returns))


@cache
def gives_views(op: Any) -> bool:
    """Return whether `op` is an ATen op that returns views and changes nothing."""
    views = not op._schema.is_mutable and any(r.alias_info for r in op._schema.returns)
    return op.namespace == "aten" and views and op is not aten.lift_fresh.default


def _of_run(value: Any) -> bool:
    """Return whether all tensors in `value` are functional tensors, as model code sees them."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, FunctionalTensor)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return True
    return all(map(_of_run, value))


class Functional(FunctionalTensorMode):
    """Functionalization that does not decompose leaves and boundaries.

    `entered` has the modules that currently run.
    """

    def __init__(self, entered: CallStack) -> None:
        super().__init__()
        self.entered = entered
        self.aliases = Aliases()
        self.overwritten: list[torch.Tensor] = []
        self.replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.written: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        """Tensors that modules took and changed in place: before, after, name of the module."""
        self.dropped: list[tuple[torch.Tensor, Draw]] = []
        """Tensors with dropout (or with dropout in training mode), and where they are drawn."""
        self.trains = False
        """Whether the current call is in training mode."""
        self.draws = False
        """Whether elements are dropped in eval mode too."""
        self._left: Counter[str] = Counter()
        """Module -> number of tensors that have left it so far."""
        self._draws: Counter[tuple[str, int]] = Counter()
        """(module, value in `_left`) -> number of draws so far."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return OnMeta._should_skip_dynamo()

    def wrap(self, value: Any) -> Any:
        """Return the functional tensor that model code sees for `value`; other values unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        # As `to_functional`, but without its search for this mode, and on meta without a mode.
        on_meta = isinstance(value, FakeTensor) and value.fake_device == META
        with _DisableTorchDispatch() if on_meta else self:
            elem = torch._to_functional_tensor(value)
            torch._mirror_autograd_meta_to(value, elem)  # pyright: ignore
            return _shown(elem)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what torch's mode returns for a view, by the same kernel.

        Torch's mode takes twice as long: it searches pytrees, and asks whether the op has effects.
        """
        given, named = mapped(_elem, (args, kwargs))
        here = torch._C._dispatch_tls_local_include_set() | FUNCTIONALIZE
        without = torch._C._dispatch_tls_local_exclude_set() - FUNCTIONALIZE - EXTRA_KEYS
        with _ForceDispatchKeyGuard(here, without):
            before = torch._functionalize_enable_reapply_views(True)  # pyright: ignore
            try:
                made = func._op_dk(DispatchKey.Functionalize, *given, **named)
            finally:
                torch._disable_functionalization()  # pyright: ignore
                torch._functionalize_enable_reapply_views(before)  # pyright: ignore
        return return_and_correct_aliasing(func, args, kwargs, mapped(_shown, made))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, or calls that compute the same without in-place changes."""
        if func is DEVICE:
            return inner(args[0]).device
        args, kwargs = self._kept(func, tuple(args), kwargs or {})
        if func is WRITES:
            return self._write(*args)
        self.aliases.check((args, kwargs))
        if func is BOUNDARY and "|out|" in args[1]:
            self._left[args[1].partition("|")[0]] += 1
        if (
            func in (BOUNDARY, PASSES)
            or is_leaf(func)
            or (is_pure(func) and _of_run((args, kwargs)))
        ):
            given = args
            args, kwargs = mapped(inner, (args, kwargs))
            out = mapped(self.wrap, func(*args, **kwargs))
            if func is BOUNDARY:
                self.aliases.cross(given[0], out)
            return out
        if gives_views(func) and _of_run((args, kwargs)):
            if not func._can_decompose():
                return self._view(func, args, kwargs)
            with self:
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        pairs = zip(func._schema.arguments, args, strict=False) if func._schema.is_mutable else ()
        writes = [x for a, x in pairs if a.alias_info and a.alias_info.is_write]
        changed = [x for x in writes if isinstance(x, FunctionalTensor)]
        there_before = [x for x in tensors_in(writes) if not isinstance(x, FunctionalTensor)]
        if there_before and any(isinstance(x, FunctionalTensor) for x in args):
            raise ModelError(
                f"cannot split '{self.entered.innermost}' ({_source()}): it writes to a tensor "
                "that is neither a parameter nor a buffer, and was there before the call: keep it "
                "by register_buffer(NAME, TENSOR, persistent=False)"
            )
        if changed and can_auto_functionalize(func):
            raise Unproven(
                f"the op {func.name()} writes to its arguments (mutates_args): let it return new "
                "tensors, or call it in a module of its own, which then stays replicated"
            )
        before = [inner(x) for x in changed]
        self.overwritten += before
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for x, was in zip(changed, before, strict=True):
            self.aliases.write(x)
            if not _is_part(x) and (now := inner(x)) is not was:
                self.replaced.append((now, was))
        return out

    def _write(self, outside: FunctionalTensor, inside: FunctionalTensor, module: str) -> None:
        """Copy to `outside` the value of `inside`, which `module` has changed in place."""
        self.aliases.give_back(outside, inside)
        was, now = inner(outside), inner(inside)
        outside.replace_(now)
        outside.commit_update()
        outside.sync()
        self.written.append((was, now, module))
        self.overwritten.append(was)
        if not _is_part(outside):
            self.replaced.append((now, was))

    def _kept(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note where numbers are drawn, and return the arguments of a call with dropout turned off.

        Dropout needs no rule because all ranks draw the same numbers. On replicated and partial
        tensors each rank drops the same elements, which is linear. On shards each rank drops what
        is dropped at that place of the full tensor (`runtime/redistribution/draws.py`).
        """
        if func in DROPOUT:
            if args[1]:
                self._drop(args[0], args[2], features=func in FEATURES)
            return (*args[:2], False), kwargs
        if is_drawn_by_shape(func, args):
            self._drop(args[0], True)
        if func is ATTENTION:
            dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            if dropout:
                self._drop(args[0], True, weights=True)
                if len(args) > 4:
                    return (*args[:4], 0.0, *args[5:]), kwargs
                return args, {**kwargs, "dropout_p": 0.0}
        return args, kwargs

    def _drop(self, x: Any, now: bool, features: bool = False, weights: bool = False) -> None:
        self.draws |= now and not self.trains
        module = self.entered.innermost
        call = module, self._left[module]
        number = self._draws[call]
        self._draws[call] += 1
        always = now and not self.trains
        draw = Draw(*call, number, weights, features, self.trains, always)
        self.dropped.append((inner(x), draw))


def _elem(x: Any) -> Any:
    return x.elem if isinstance(x, FunctionalTensor) else x


def _shown(elem: torch.Tensor) -> FunctionalTensor:
    """Return `FunctionalTensor(elem, mode)`, but without its notes for auto-functionalized ops.

    These are refused. The notes take most of its time.
    """
    dense = elem.layout == torch.strided
    stride, offset = (elem.stride(), elem.storage_offset()) if dense else (None, None)
    like = elem.shape, stride, offset, None, elem.dtype, elem.layout
    keys = EXTRA_KEYS & torch._C._dispatch_keys(elem)  # pyright: ignore
    how = elem.device, False, elem.requires_grad, None, False, False, keys
    out: Any = torch.Tensor._make_wrapper_subclass(FunctionalTensor, *like, *how)
    torch._C._set_throw_on_mutable_data_ptr(out)
    out.elem = elem
    return out


def _is_part(x: FunctionalTensor) -> bool:
    """Return whether a tensor is a view: a change of it changes another tensor."""
    views = torch._C._functionalization.get_view_meta_sequence(x.elem)  # pyright: ignore
    return any(type(v).__name__ not in ("detach_ViewMeta", "alias_ViewMeta") for v in views)


class Recorder(OnMeta):
    """Fake tensor mode that records every call of an op."""

    def __init__(self, entered: CallStack, by_rows: bool = False) -> None:
        super().__init__()
        self.entered, self.by_rows = entered, by_rows
        self.known.looked = entered.read
        self.forget()
        self.table: Mapping[Any, Callable[..., Any]] = _core_aten_decompositions_post_autograd()
        self.noting = True
        self.traced_call = 0

    def forget(self) -> None:
        """Drop the recorded calls: they refer to this mode, and the mode refers to itself."""
        self.calls: list[Call] = []
        self.passed: list[Passed] = []
        self.cut: list[tuple[torch.Tensor, int]] = []
        """Dims that are never sharded, because code takes parts of them at opaque positions."""
        self.by_reads: list[tuple[torch.Tensor, frozenset[tuple[int, int]]]] = []
        """Results of ops in functions that got sizes, with the reads of these."""
        self.before: Callable[[], None] = lambda: None
        """Called before each call is recorded."""

    def begin(self, traced_call: int) -> None:
        """Begin a traced call: later calls are recorded with its number."""
        self.traced_call = traced_call

    def seen(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record a call, or the calls that it decomposes into."""
        if func is PASSES:
            self.passed.append(Passed(args[0], args[1], len(self.calls)))
            return None
        if not self.noting or func.namespace == "prim" or func in FunctionalTensor.metadata_fns:
            return self.dispatch(func, types, args, kwargs)
        if func is aten.detach_.default:  # called on a constant that was just made
            return args[0]
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default
        if func is ATTENTION and self.by_rows:
            with self:
                args, kwargs = by_rows(self.entered.innermost, args, kwargs)
            func = ROWS
        apart = self.table.get(func) or (func.decompose if func._can_decompose() else None)
        if apart is not None and func is not aten.detach.default and not is_leaf(func):
            first = len(self.calls)
            with self:
                try:
                    parts = apart(*args, **kwargs)
                except RuntimeError:  # some decompositions need all tensors on one device
                    to_meta = partial(aten._to_copy, device="meta")
                    there, named = self.moved(func, args, kwargs, to_meta)
                    if there is args:
                        raise
                    parts = apart(*there, **named)
            if parts is not NotImplemented:
                self._keep_numbers(first, args)
                return parts
        asked = False
        self.noting = False
        try:
            if func is BOUNDARY:
                result = self.dispatch(aten.empty_like.default, types, args[:1])
                self.known.same(result, args[0])
            else:
                fake = partial(self.dispatch, func, types, args, kwargs)
                result, asked = self.known.result(func, args, kwargs, fake)
        finally:
            self.noting = True
        if asked:
            return result  # a constant
        module = self.entered.innermost
        self.before()
        self.calls.append(
            Call(func, tuple(args), kwargs, result, module, _source(), self.traced_call)
        )
        if reads := OF_SIZES.get():
            self.by_reads += [(made, reads) for made in tensors_in(result)]
        return result

    def _keep_numbers(self, first: int, args: Sequence[Any]) -> None:
        """Keep dims whole that an op makes by a number, such as the groups of a channel shuffle.

        The op gets the same number on each rank. Calls from the `first` on are those of the op.
        """
        numbers = {n for n in args if type(n) is int and n > 1}
        for call in self.calls[first:] if numbers else ():
            if call.op in RESHAPES:
                dims = enumerate(call.result.shape)
                self.cut += [(call.result, dim) for dim, n in dims if n in numbers]

    def whole_module(
        self, kind: str, taken: list[torch.Tensor], given: list[Spec]
    ) -> list[torch.Tensor]:
        """Record a call of a module that is not traced; returns its results."""
        self.noting = False
        try:
            with self:
                made = [spec.empty() for spec in given]
        finally:
            self.noting = True
        op, module = Untraced(f"module {kind}"), self.entered[-1]
        self.before()
        self.calls.append(Call(op, tuple(taken), {}, made, module, _source(), self.traced_call))
        return made


def _source() -> str:
    """Return the file and line that the innermost `forward` of model code executes."""
    for frame in frames():
        if frame.f_code.co_name == "forward" and not is_plumbing(module_of(frame)):
            return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
    return ""
