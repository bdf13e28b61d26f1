"""The parallel layers, and `apply_module`, which turns a module into one in place.

    ColumnParallelLinear     weight sharded by output features, output sharded
    RowParallelLinear        weight sharded by input features, output Partial, bias added once
    VocabParallelEmbedding   weight sharded by rows, output Partial
    LocalModule              any other module: its own code on local parameters

The first three are layer styles: `planner/contract/styles.py` says which modules become what, also
for styles of other packages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from shardwright.errors import PlanError, PluginError
from shardwright.planner.contract.mesh import CP, TP
from shardwright.planner.contract.names import grouped
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import ModulePlan, Redistribution
from shardwright.planner.contract.styles import LOCAL, UNCHANGED, needed
from shardwright.runtime.boundary.hooks import wrap_hooks
from shardwright.runtime.boundary.module_boundary import ModuleBoundary, SlotChange, boundary_of
from shardwright.runtime.boundary.module_class import LocalModule, put_class
from shardwright.runtime.code.attributes import set_local, size_attributes
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.logits.split_logits import SplitHead
from shardwright.runtime.modules.given_sizes import GivenSizes
from shardwright.runtime.modules.parameters import LocalTensors
from shardwright.runtime.modules.vocab import VocabLookup
from shardwright.runtime.redistribution.dispatch import Dispatcher
from shardwright.runtime.redistribution.draws import Part
from shardwright.runtime.redistribution.lengths import Length, Lengths
from shardwright.runtime.redistribution.reshard import ByDims, Reshard
from shardwright.runtime.rows.attention_rows import AttentionRows
from shardwright.runtime.slots import index_of, keys_of, positions


class ColumnParallelLinear(LocalModule, nn.Linear):
    """A linear layer sharded by output features: y = x Aᵀ + b, each rank with some rows of A and b.

    Shapes: [..., in_features] -> [..., out_features of this rank].
    """


class RowParallelLinear(LocalModule, nn.Linear):
    """A linear layer sharded by input features: each rank computes one term of the output's sum.

    The bias is added once, not once per rank.

    Shapes: [..., in_features of this rank] -> [..., out_features].
    """


class VocabParallelEmbedding(LocalModule, VocabLookup):
    """An embedding sharded by rows: each rank computes one term of the output's sum.

    The number of rows need not be divisible by the number of ranks. `padding_idx` is an index into
    the full vocabulary.

    Shapes: ids [...] -> [..., embedding_dim].
    """


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
    boundary = ModuleBoundary(mesh, module, path, spec)
    if spec.layer == UNCHANGED:
        vars(module)["_shardwright"] = boundary  # `wrap_root` changes its class
        return
    if "forward" in vars(module):
        raise PlanError(
            f"the forward of '{path}' was replaced on the instance (a hook or a kernel): "
            "apply the plan first"
        )
    original, lengths = type(module), lengths or Lengths()
    own: Any = original.forward
    cls, bases = _classes(original, spec.layer, path)
    boundary.group = mesh.groups.get(TP)
    boundary.assigned = tuple(n for n, p in spec.parameters.items() if p.assigned)
    boundary.linear = own is nn.Linear.forward and not (spec.sizes or boundary.assigned)
    reshards = _Reshards(mesh, path, lengths)
    _add_slot_changes(boundary, spec, reshards, defer)
    _place(module, spec, boundary, tensors or LocalTensors(), reshards)
    for attribute, dim in spec.attributes.items():
        name = attribute.partition(".")[0]
        if name in vars(module):
            boundary.full_values.setdefault(name, vars(module)[name])
        set_local(module, attribute, dim, mesh)
    boundary.sizes = {c: GivenSizes(c, d, mesh.coords, path) for c, d in spec.sizes.items()}
    if spec.draws:
        boundary.draws, boundary.draws_apart = [Part(d, mesh, lengths) for d in spec.draws], True
    if spec.dispatch is not None:
        boundary.dispatcher = Dispatcher(spec, mesh, own, path)
    if spec.attention:
        boundary.attention = reshards.attention_rows(spec.attention)
    boundary.settle()
    put_class(module, boundary, *bases, named=original if cls is LocalModule else cls)
    wrap_hooks(module)
    if (set_up := getattr(cls, "set_up", None)) is not None:
        set_up(module)


def _add_slot_changes(
    boundary: ModuleBoundary, spec: ModulePlan, reshards: _Reshards, defer: bool
) -> None:
    """Give a boundary the redistributions of inputs, outputs and attributes."""
    names, varargs = positions(boundary.unsplit_class.forward)
    before = {change.slot: change.before for change in spec.inputs}
    for slot, reshard in reshards.by_slot(spec.inputs).items():
        root, *keys = keys_of(slot)
        change = SlotChange(slot, root, tuple(keys), reshard, index_of(root, names, varargs))
        boundary.inputs.append(change)
        if before[slot] is not None:
            change.outer_slot = before[slot]
            boundary.inputs_from_outer.append(change)
    for slot, reshard in reshards.by_slot(spec.outputs).items():
        head = SplitHead.of(reshard, boundary.mesh) if defer else None
        boundary.outputs.append(SlotChange(slot, slot, keys_of(slot), reshard, head=head))
    for slot, reshard in reshards.by_slot(spec.keeps).items():
        boundary.attributes.append(SlotChange(slot, slot, (), reshard))


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


class _Reshards(NamedTuple):
    """Makes the redistributions of one module."""

    mesh: Mesh
    path: str
    lengths: Lengths

    def one(self, change: Redistribution) -> Reshard:
        """The redistribution that an entry of the plan describes."""
        length = Length(self.lengths, change.length) if change.length is not None else None
        try:
            return Reshard(parse(change.source), parse(change.target), self.mesh, length)
        except PlanError as error:
            raise PlanError(f"tensor '{change.slot}' of '{self.path}': {error}") from None

    def by_slot(self, changes: list[Redistribution]) -> dict[str, Reshard | ByDims]:
        """The redistribution of each slot."""
        by_slot = grouped((change.slot, change) for change in changes)
        return {slot: self._of_slot(slot, found) for slot, found in by_slot.items()}

    def _of_slot(self, slot: str, changes: list[Redistribution]) -> Reshard | ByDims:
        """The redistribution of a slot; several are for different numbers of dims."""
        made = [*map(self.one, changes)]
        if len(made) == 1:
            return made[0]
        if any(c.before is not None for c in changes):
            raise PlanError(
                f"the plan has several redistributions of '{slot}' of '{self.path}', and one has "
                "`before`: only a single one may, plan again"
            )
        by_dims = {len(reshard.source.dims): reshard for reshard in made}
        if len(by_dims) < len(made):
            raise PlanError(f"the plan has two ways for tensor '{slot}' of '{self.path}'")
        return ByDims(by_dims)

    def attention_rows(self, changes: list[Redistribution]) -> AttentionRows:
        """The mode for a module's attention, from the redistributions of its arguments."""
        rows = None
        for query in (change for change in changes if change.slot == "query"):
            if CP in parse(query.target).meshes and query.length is not None:
                rows = self.mesh[CP], Length(self.lengths, query.length)
        return AttentionRows(self.by_slot(changes), rows, self.path)


def _place(
    module: nn.Module,
    spec: ModulePlan,
    boundary: ModuleBoundary,
    tensors: LocalTensors,
    reshards: _Reshards,
) -> None:
    """Replace full parameters and buffers by local ones."""
    for name, entry in spec.parameters.items():
        full = f"{boundary.path}.{name}" if boundary.path else name
        home: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        old = home.get(name)
        if old is None:
            raise PlanError(f"the plan splits '{full}', which the model does not have")
        placement = parse(entry.placement)
        home[name] = tensors.local(old, placement, boundary.mesh, full)
        home[name].shardwright_placement = placement
        boundary.placements[name] = used = placement
        if entry.use is not None and (used := parse(entry.use)) != placement:
            change = Redistribution(slot=name, source=entry.placement, target=entry.use)
            boundary.uses[name] = reshards.one(change)
        if name == "weight":
            local = used.local_shape(boundary.mesh.coords)
            for attribute, size in zip(size_attributes(module), local, strict=False):
                boundary.full_values[attribute] = vars(module)[attribute]
                setattr(module, attribute, size)
