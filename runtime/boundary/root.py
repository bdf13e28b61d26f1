"""The root module of a split model, which handles what concerns a full forward pass.

It refuses calls that the plan is not proven for, makes all ranks draw the same random numbers,
keeps logits sharded for the loss, and opens and seals caches.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from shardwright.errors import UsageError
from shardwright.planner.contract.mesh import CP, EP
from shardwright.planner.contract.plan_file import TracedCall
from shardwright.runtime.boundary import hooks
from shardwright.runtime.boundary.changes import check_compiled
from shardwright.runtime.boundary.model_boundary import ModelBoundary
from shardwright.runtime.boundary.module_boundary import (
    ModuleBoundary,
    boundaries,
    boundary_of,
    placements,
)
from shardwright.runtime.boundary.module_class import BoundaryModule, LocalModule, put_class
from shardwright.runtime.boundary.transforms import check_no_transform
from shardwright.runtime.calls.batching import init_continuous_batching
from shardwright.runtime.calls.stopping import stopping_as_first
from shardwright.runtime.checkpoint.write import save
from shardwright.runtime.code.model_objects import has_forward
from shardwright.runtime.code.names_in_code import names_read
from shardwright.runtime.communication.generators import draw_as_first
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.communication.replicas import average_gradients
from shardwright.runtime.logits.split_logits import LossSeal
from shardwright.runtime.model.unregistered import held_apart
from shardwright.runtime.redistribution.lengths import Lengths
from shardwright.runtime.rows.own_rows import joined_rows, shown_rows
from shardwright.runtime.slots import named
from shardwright.runtime.tensors.by_name import NOW

TOKENIZER = "tokenizer"


class RootModule(LocalModule):
    """Class in front of that of a split model."""

    config: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Check the call and the model, then run the model's own forward.

        Raises:
            UsageError: the plan is not proven for this call, or for a change to the model since it
                was split.
        """
        compiling, share = torch.compiler.is_compiling(), None
        model: Any = self._shardwright.model
        self._shardwright_check_unchanged(compiling)
        if model.own_rows is not None:
            args, kwargs, share = joined_rows(model.positions, args, kwargs, model.own_rows)  # pyright: ignore[reportCallIssue]
        if TOKENIZER in kwargs and not self._shardwright_takes_tokenizer():
            kwargs = {name: value for name, value in kwargs.items() if name != TOKENIZER}
        given = model.named(args, kwargs)
        self._shardwright_check_wanted(given)
        proven, as_tuple, known = model.proven, False, False
        if proven is not None:
            known = proven.check_given(given)
            proven.check_modes(model.modules)
            if proven.named:
                args, kwargs, as_tuple = self._shardwright_by_name(args, kwargs, given)
        model.draw_as_first(self, model.modules)
        call = model.call
        # Dynamo handles nn.CrossEntropyLoss itself and needs a tensor: gather the logits then.
        split_loss = given.get("labels") is not None and (model.traceable_loss or not compiling)
        opened, filled = model.open(given, compiling)
        outer, outside = (call.active, call.hook_views, model.loss_seal), None
        call.active, call.hook_views = True, ()
        model.loss_seal = seal = LossSeal() if split_loss else None
        if not compiling:  # dynamo would guard what a thread has there
            outside, NOW.attribute = NOW.attribute, model.attribute
        try:
            with model.lengths.forward() if model.lengths.axes else nullcontext():
                output = model.patched(LocalModule.forward)(self, *args, **kwargs)
            model.check_end(output, opened, filled, () if proven is None else proven.arguments)
        finally:
            call.active, call.hook_views, model.loss_seal = outer
            if not compiling:
                NOW.attribute = outside
            if seal is not None:
                seal.closed = True
            model.caches.seal(opened)
            if not compiling and model.changes is not None and model.changes.kept.changed():
                model.changes.keep_own()
        if known and proven is not None:
            proven.check_output(output)
        output = _as_tuple(output) if as_tuple else output
        return output if share is None else shown_rows(output, share)  # pyright: ignore[reportCallIssue]

    def _shardwright_check_unchanged(self, compiling: bool) -> None:
        """Check that the model is as it was when it was split.

        Raises:
            UsageError: it was changed, all modules have a hook, or a transform of torch.func runs.
        """
        changes: Any = self._shardwright.model.changes  # type: ignore[union-attr]
        if changes is not None and compiling:
            check_compiled(self)
        elif changes is not None and (changes.changed or changes.differs()):
            check: Any = changes.check_and_accept
            if "torch._dynamo" in sys.modules:
                check = torch.compiler.disable(check)
            check()
        if (hooks.BEFORE_ALL or hooks.BEHIND_ALL) and not compiling:
            hooks.check_hooks_on_all()
        check_no_transform()

    def _shardwright_check_wanted(self, given: dict[str, Any]) -> None:
        """Refuse outputs of which each rank would hold a shard.

        Raises:
            UsageError: hidden states of sharded sequences, or attention weights, are requested.
        """
        config = getattr(self, "config", None)
        wanted = {}
        for name in ("output_hidden_states", "output_attentions"):
            asked = given.get(name)
            wanted[name] = getattr(config, name, None) if asked is None else asked
        if wanted["output_hidden_states"] and self._shardwright.model.lengths.axes:  # type: ignore[union-attr]
            raise UsageError(
                "output_hidden_states=True on a model that splits sequences: each rank holds its "
                "own part: plan without sequence_parallel or cp to get them whole"
            )
        if wanted["output_attentions"]:
            raise UsageError(
                "output_attentions=True on a split model: each rank computes the attention weights "
                "of its own heads, never those of all: take them from the unsplit model"
            )

    def _shardwright_takes_tokenizer(self) -> bool:
        """Whether code of the model may read the tokenizer that `generate` passes on.

        It has it for `stop_strings`, and leaves it among the arguments of the forward.
        """
        model: Any = self._shardwright.model
        read = model.changes is None or TOKENIZER in model.changes.read_names.in_forwards
        forwards = {type(module).forward for module in model.modules}  # each generated token asks
        codes = (getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards)
        return read or any(code is None or TOKENIZER in code.co_varnames for code in codes)

    def _shardwright_by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """Set `return_dict=True`. Returns args, kwargs, and whether the caller wants a tuple."""
        wanted = given.get("return_dict")
        if wanted is None:
            wanted = getattr(getattr(self, "config", None), "return_dict", True)
        if wanted:
            return args, kwargs, False
        at = self._shardwright.model.positions.get("return_dict", len(args))  # type: ignore[union-attr]
        if at < len(args):
            return (*args[:at], True, *args[at + 1 :]), kwargs, True
        return args, {**kwargs, "return_dict": True}, True

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`; ranks that sample take the same tokens.

        Raises:
            UsageError: each rank is given its own rows of a sequence (`cp="local"`).
        """
        model: Any = self._shardwright.model
        if model.own_rows is not None:
            raise UsageError(
                'generate() of a model with cp="local": apply the plan with cp="whole"'
            )
        draw_as_first(self, model.mesh)  # type: ignore[arg-type]
        mesh = self._shardwright.mesh
        if EP in mesh.groups and mesh[EP].size > 1:
            # A rank whose sequences are done still computes tokens of others.
            kwargs.setdefault("synced_gpus", True)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own criteria, for `generate`; ranks stop when the first rank does."""
        found = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        return stopping_as_first(found, self._shardwright.model.mesh)  # type: ignore[union-attr]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        if (copies := twin._shardwright.model.copies) is not None:
            given = (held.tensor for held in held_apart(twin))
            average_gradients(twin, copies.mesh, copies.groups, given)
        return twin

    def _shardwright_save_pretrained(
        self, save_directory: Any, max_shard_size: int | str = "5GB", **options: Any
    ) -> None:
        """Write the same as `shardwright.save`. All ranks call it.

        Raises:
            UsageError: an option is set that `shardwright.save` does not have.
        """
        for name, value in options.items():
            if name not in ("is_main_process", "safe_serialization") and value:
                raise UsageError(f"save_pretrained({name}=...) of a split model: leave it out")
        model: Any = self
        mesh = self._shardwright.mesh
        save(model, save_directory, placements(model), mesh, max_shard_size=max_shard_size)

    def _shardwright_init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """The model's own method; the manager keeps keys and values of this rank's heads.

        Raises:
            UsageError: the plan is not proven for continuous batching.
        """
        model: Any = self._shardwright.model
        if model.proven is not None:
            model.proven.check_batches()
        own: Any = super()
        make = partial(
            own.init_continuous_batching, generation_config, workload_hints=workload_hints
        )
        return init_continuous_batching(self, model.mesh, make, continuous_batching_config)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuse: DDP reads this attribute, and so does torch.jit, which reads all of them."""
        raise UsageError(
            "DistributedDataParallel takes the shards of a split model for copies of it: use "
            "shardwright.SplitTrainer in place of transformers' Trainer, and "
            "shardwright.SplitAccelerator in place of accelerate's; for your own loop, plan with a "
            "mesh (mesh={'dp': 2, 'tp': 2}), whose copies average their gradients by themselves, "
            "or use torch's fully_shard over the other ranks. torch.jit cannot see what ranks send "
            "each other: use torch.compile or torch.export"
        )


def _as_tuple(output: Any) -> Any:
    """Return an output with names as the tuple that the model's `return_dict=False` gives.

    Raises:
        UsageError: the output does not say how it becomes one.
    """
    if hasattr(output, "to_tuple"):
        return output.to_tuple()
    if named(output) is not None:
        raise UsageError(
            f"return_dict=False for a model that returns a {type(output).__name__}: the plan has "
            "placements for outputs by name, so leave return_dict=False out"
        )
    return output


def wrap_root(
    model: nn.Module,
    lengths: Lengths | None = None,
    calls: Sequence[TracedCall] | None = None,
    mesh: Mesh | None = None,
) -> None:
    """Make `model` the root of its split modules, in place; after the last `apply_module`.

    Args:
        model: The model.
        lengths: The lengths that `apply_module` was given.
        calls: The calls that the plan is proven for. Without them, or if nothing is split, any call
            is allowed.
        mesh: The mesh; that of a split module by default.
    """
    if isinstance(model, RootModule):
        return
    found = dict(boundaries(model))
    mesh = mesh or next((boundary.mesh for boundary in found.values()), None)
    if mesh is None:
        return
    shared = ModelBoundary(model, mesh, lengths or Lengths())
    if calls is not None and any(boundary.changes_tensors for boundary in found.values()):
        shared.prove(calls)
    draw = [model.get_submodule(path) for path, b in found.items() if b.draws is not None]
    apart = {id(within) for module in draw for within in module.modules()}
    reads = cache(names_read)  # once for all blocks of a kind
    for path, module in model.named_modules():
        boundary = boundary_of(module) or ModuleBoundary(mesh, module, path)
        boundary.model, boundary.call = shared, shared.call
        boundary.draws_apart = id(module) in apart
        boundary.settle()
        if module is model:
            bases = [base for base in boundary.bases if base is not LocalModule]
            bases = bases or [boundary.unsplit_class]
            put_class(model, boundary, RootModule, *bases, named=boundary.shown_class)
        elif not boundary.bases:
            own: Any = type(module)
            front = LocalModule if boundary.draws_apart else front_for(module, reads)
            put_class(module, boundary, front, own, named=own)
            hooks.wrap_hooks(module)


def take_own_rows(model: nn.Module, mesh: Mesh) -> None:
    """Let each rank of `cp` pass its own rows of a sequence to `model`, a root; in place."""
    boundary = boundary_of(model)
    assert boundary is not None and boundary.model is not None
    boundary.model.own_rows = mesh[CP]


def takes_own_rows(model: nn.Module) -> bool:
    """Whether each rank passes its own rows to `model` or to a split model in it."""
    models = (boundary.model for _, boundary in boundaries(model))
    return any(shared is not None and shared.own_rows is not None for shared in models)


def front_for(module: nn.Module, reads: Callable[[type, frozenset[type]], set[str]]) -> type:
    """The class to put in front of that of a module that the plan does not change.

    This is `LocalModule` if the module's forward may see sharded parameters or buffers. If not, the
    forward need not know whether a planned call runs. `reads` is `names_read`, or a cache of it.
    """
    if not has_forward(module):
        return BoundaryModule
    if any(p is not None for p in (*module._parameters.values(), *module._buffers.values())):
        return LocalModule
    modules = [*module.modules()]
    inner = {name for m in modules for name, p in m._parameters.items() if p is not None}
    names = reads(type(module), frozenset(map(type, modules)))
    return BoundaryModule if inner.isdisjoint(names) else LocalModule
