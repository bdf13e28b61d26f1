"""The parallel layers, and `apply_module`, which turns a module into one in place.

    ColumnParallelLinear     weight sharded by output features, output sharded
    RowParallelLinear        weight sharded by input features, output Partial, bias added once
    VocabParallelEmbedding   weight sharded by rows, output Partial
    LocalModule              any other module: its own code on local parameters

The first three are layer styles: `planner/contract/styles.py` says which modules become what, also
for styles of other packages. They can also be made directly, with full sizes and a `Group`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.errors import PlanError, PluginError
from shardwright.planner.contract.mesh import CP, TP
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ModulePlan, ParameterPlan, Redistribution
from shardwright.planner.contract.styles import LOCAL, UNCHANGED, needed
from shardwright.runtime.boundary.hooks import wrap_hooks
from shardwright.runtime.boundary.module_boundary import ModuleBoundary, SlotChange, boundary_of
from shardwright.runtime.boundary.module_class import LocalModule, put_class
from shardwright.runtime.code.attributes import SIZES, set_local, set_sizes
from shardwright.runtime.communication.mesh import Group, Mesh
from shardwright.runtime.logits.split_logits import SplitHead
from shardwright.runtime.modules.given_sizes import GivenSizes
from shardwright.runtime.modules.parameters import LocalTensors
from shardwright.runtime.modules.vocab import VocabLookup
from shardwright.runtime.redistribution.dispatch import Dispatcher
from shardwright.runtime.redistribution.draws import Part
from shardwright.runtime.redistribution.lengths import Length, Lengths
from shardwright.runtime.redistribution.reshard import ByDims, LastDim, Reshard
from shardwright.runtime.rows.attention_rows import AttentionRows
from shardwright.runtime.slots import index_of, keys_of, positions


class ColumnParallelLinear(LocalModule, nn.Linear):
    """A linear layer sharded by output features: y = x Aᵀ + b, each rank with some rows of A and b.

    Args:
        in_features: Full size of the input.
        out_features: Full size of the output.
        bias: Whether there is a bias.
        group: The ranks that share the layer.
        gather_output: Return the full output on each rank, instead of its own features.

    Shapes: [..., in_features] -> [..., out_features of this rank].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group,
        gather_output: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        rows, columns = f"{out_features}@tp", f"{in_features}"
        placements = {"weight": f"{rows}, {columns}", "bias": rows}
        inputs = {"input": (columns, f"{columns} | grad-partial tp")}
        outputs = {"": (rows, f"{out_features}")} if gather_output else {}
        _alone(self, group, placements, inputs, outputs)


class RowParallelLinear(LocalModule, nn.Linear):
    """A linear layer sharded by input features: each rank computes one term of the output's sum.

    Args:
        in_features: Full size of the input.
        out_features: Full size of the output.
        bias: Whether there is a bias. It is added once, not once per rank.
        group: The ranks that share the layer.
        split_input: Take a full input and shard it, instead of this rank's features.
        reduce_output: Sum over the ranks; otherwise each rank returns its own term.

    Shapes: [..., in_features of this rank] -> [..., out_features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group,
        split_input: bool = False,
        reduce_output: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        rows, columns = f"{out_features}", f"{in_features}@tp"
        placements = {"weight": f"{rows}, {columns}", "bias": rows}
        inputs = {"input": (f"{in_features}", columns)} if split_input else {}
        outputs = {"": (f"{rows} | partial tp", rows)} if reduce_output else {}
        _alone(self, group, placements, inputs, outputs, bias_use=f"{rows} | partial tp")


class VocabParallelEmbedding(LocalModule, VocabLookup):
    """An embedding sharded by rows.

    Args:
        num_embeddings: Full size of the vocabulary; need not be divisible by the number of ranks.
        embedding_dim: Size of a row.
        padding_idx: The row that gets no gradient, as an index into the full vocabulary.
        group: The ranks that share the layer.
        reduce_output: Sum over the ranks; otherwise each rank returns its own term.

    Shapes: ids [...] -> [..., embedding_dim].
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group,
        reduce_output: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        placements = {"weight": f"{num_embeddings}@tp, {embedding_dim}"}
        outputs = {"": (f"{embedding_dim} | partial tp", f"{embedding_dim}")}
        _alone(self, group, placements, {}, outputs if reduce_output else {})


def apply_module(
    module: nn.Module,
    spec: ModulePlan,
    mesh: Mesh,
    *,
    tensors: LocalTensors | None = None,
    path: str = "",
    defer: bool = False,
    lengths: Lengths | None = None,
) -> None:
    """Make `module` the parallel layer that `spec` describes, in place, by changing its class.

    Args:
        module: A module of the real model, with full parameters (on meta or not).
        spec: The plan's entry for the module.
        mesh: The mesh, with the coordinates of this rank.
        tensors: Shared by all calls for one model, so that tied parameters stay tied.
        path: The name of the module, for error messages.
        defer: For the module that computes logits: keep them sharded while a loss is computed
            (see `split_logits`), instead of gathering them.
        lengths: Shared by all calls for one model, if some redistribution names a length.

    Raises:
        PlanError: the plan does not fit this module.
    """
    if boundary_of(module) is not None:
        raise PlanError(f"'{path}' is split already: a plan is applied to a whole model, once")
    state = ModuleBoundary(mesh, module, path, spec)
    if spec.layer == UNCHANGED:
        vars(module)["_shardwright"] = state  # `wrap_root` changes its class
        return
    if "forward" in vars(module):
        raise PlanError(
            f"the forward of '{path}' was replaced on the instance (a hook or a kernel): "
            "apply the plan first"
        )
    original, lengths = type(module), lengths or Lengths()
    state.group = mesh.groups.get(TP)
    own: Any = original.forward
    plain = own is nn.Linear.forward or own is LocalModule.forward  # or a style made directly
    state.linear = issubclass(original, nn.Linear) and plain and not spec.sizes
    cls, bases = _classes(original, spec.layer, path)
    names, varargs = positions(original.forward)
    for slot, changes in _by_slot(spec.inputs).items():
        root, *keys = keys_of(slot)
        index = index_of(root, names, varargs)
        reshard = _reshards(changes, mesh, path, lengths)
        outer = changes[0].before
        state.inputs.append(SlotChange(slot, root, tuple(keys), reshard, index, outer_slot=outer))
    state.inputs_from_outer = [change for change in state.inputs if change.outer_slot is not None]
    for slot, changes in _by_slot(spec.outputs).items():
        reshard = _reshards(changes, mesh, path, lengths)
        head = SplitHead.of(reshard, mesh) if defer and isinstance(reshard, Reshard) else None
        state.outputs.append(SlotChange(slot, slot, keys_of(slot), reshard, head=head))
    for slot, changes in _by_slot(spec.keeps).items():
        reshard = _reshards(changes, mesh, path, lengths)
        state.attributes.append(SlotChange(slot, slot, (), reshard))
    _place(module, spec, state, tensors or LocalTensors())
    for attribute, dim in spec.attributes.items():
        name = attribute.partition(".")[0]
        if name in vars(module):
            state.full_values.setdefault(name, vars(module)[name])
        set_local(module, attribute, dim, mesh)
    state.sizes = {c: GivenSizes(c, d, mesh.coords, path) for c, d in spec.sizes.items()}
    if spec.draws:
        state.draws, state.draws_apart = [Part(d, mesh, lengths) for d in spec.draws], True
    if spec.dispatch is not None:
        state.dispatcher = Dispatcher(spec, spec.dispatch, mesh, own, path)
    if spec.attention:
        state.attention = _attention_rows(spec.attention, mesh, path, lengths)
    state.settle()
    put_class(module, state, *bases, named=original if cls is LocalModule else cls)
    wrap_hooks(module)
    if (set_up := getattr(cls, "set_up", None)) is not None:
        set_up(module)


def _classes(original: type, layer: str, path: str) -> tuple[type, tuple[type, ...]]:
    """The class of a layer style, and the bases of the new class of a module.

    Args:
        original: The class of the module.
        layer: The name of the style.
        path: The name of the module, for messages.

    Raises:
        PluginError: the style's class has the wrong bases.
        PlanError: a module of class `original` cannot have the style.
    """
    if layer == LOCAL:
        return LocalModule, (LocalModule, original)
    style = needed(layer)
    cls, plain = style.becomes, style.replaced
    if cls.__bases__[0] is not LocalModule or not issubclass(cls, plain):
        raise PluginError(f"'{style.layer}' should be a class of LocalModule and {plain.__name__}")
    if not issubclass(original, plain):
        raise PlanError(f"'{path}' is a {original.__name__}, which cannot become a {cls.__name__}")
    if original in (cls, plain):
        return cls, (cls,)
    behind = cls.__bases__[1]
    own_code = original.forward is not plain.forward and not calls_super(original)
    if own_code and behind.forward is not plain.forward:
        raise PlanError(
            f"'{path}', a {original.__name__}, computes by itself what {cls.__name__} replaces"
        )
    return cls, (LocalModule, original, behind)


def calls_super(cls: type) -> bool:
    """Whether `cls.forward` may call that of its base class."""
    code = getattr(cls.forward, "__code__", None)  # type: ignore[attr-defined]
    return code is not None and ("super" in code.co_names or "__class__" in code.co_freevars)


def _by_slot(changes: list[Redistribution]) -> dict[str, list[Redistribution]]:
    out: dict[str, list[Redistribution]] = {}
    for change in changes:
        out.setdefault(change.slot, []).append(change)
    return out


def _reshards(
    changes: list[Redistribution], mesh: Mesh, path: str, lengths: Lengths
) -> Reshard | ByDims:
    """The redistribution of a slot; several are for different numbers of dims."""
    made = [_reshard(c, mesh, path, lengths) for c in changes]
    if len(made) == 1:
        return made[0]
    if any(c.before is not None for c in changes):
        raise PlanError(
            f"the plan has several redistributions of '{changes[0].slot}' of '{path}', and one has "
            "`before`: only a single one may, plan again"
        )
    by_dims = {len(reshard.source.dims): reshard for reshard in made}
    if len(by_dims) < len(made):
        raise PlanError(f"the plan has two ways for tensor '{changes[0].slot}' of '{path}'")
    return ByDims(by_dims)


def _attention_rows(
    changes: list[Redistribution], mesh: Mesh, path: str, lengths: Lengths
) -> AttentionRows:
    """The mode for a module's attention, from the redistributions of its arguments."""
    by_slot = _by_slot(changes)
    reshards = {slot: _reshards(found, mesh, path, lengths) for slot, found in by_slot.items()}
    rows = None
    for query in by_slot.get("query", []):
        if CP in parse(query.target).meshes and query.length is not None:
            rows = mesh[CP], Length(lengths, query.length)
    return AttentionRows(reshards, rows, path)


def _reshard(change: Redistribution, mesh: Mesh, path: str, lengths: Lengths) -> Reshard:
    length = Length(lengths, change.length) if change.length is not None else None
    try:
        return Reshard(parse(change.source), parse(change.target), mesh, length)
    except PlanError as error:
        raise PlanError(f"tensor '{change.slot}' of '{path}': {error}") from None


def _place(
    module: nn.Module, spec: ModulePlan, state: ModuleBoundary, tensors: LocalTensors
) -> None:
    """Replace full parameters and buffers by local ones."""
    for name, entry in spec.parameters.items():
        full = f"{state.path}.{name}" if state.path else name
        home: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        old = home.get(name)
        if old is None:
            raise PlanError(f"the plan splits '{full}', which the model does not have")
        placement = parse(entry.placement)
        home[name] = tensors.local(old, placement, state.mesh, full)
        home[name].shardwright_placement = placement
        state.placements[name] = used = placement
        if entry.use is not None and (used := parse(entry.use)) != placement:
            change = Redistribution(slot=name, source=entry.placement, target=entry.use)
            state.uses[name] = _reshard(change, state.mesh, state.path, Lengths())
        if name == "weight":
            sizes = (n for kind, names in SIZES if isinstance(module, kind) for n in names)
            state.full_values |= {name: vars(module)[name] for name in sizes}
            set_sizes(module, used.local_shape(state.mesh.coords))


def _alone(
    module: nn.Module,
    group: Group,
    placements: dict[str, str],
    inputs: dict[str, tuple[str, str]],
    outputs: dict[str, tuple[str, str]],
    bias_use: str | None = None,
) -> None:
    """Set up a layer that was made directly; its input may have any number of dims."""
    plans = {
        name: ParameterPlan(placement=placement, use=bias_use if name == "bias" else None)
        for name, placement in placements.items()
        if getattr(module, name) is not None
    }
    mesh = Mesh({"tp": group})
    apply_module(module, ModulePlan(layer=type(module).__name__, parameters=plans), mesh)
    state: Any = module._shardwright
    for slot, ends in inputs.items():
        state.inputs.append(SlotChange(slot, slot, (), LastDim(*ends, mesh), 0))
    for slot, ends in outputs.items():
        state.outputs.append(SlotChange(slot, slot, (), LastDim(*ends, mesh)))
    state.settle()
