"""`SplitTensor`: the class of parameters, gradients and sharded buffers outside of planned calls.

It is a DTensor, so FSDP2, gradient clipping, optimizers and distributed checkpoints work with it,
and torch is not patched. `op_dispatch.py` runs its ops, not torch's rules. All ranks of its mesh
must call each op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.errors import UsageError
from shardwright.runtime.communication.replicas import Copies
from shardwright.runtime.redistribution import overlap
from shardwright.runtime.tensors import checkpoint_chunks, layouts
from shardwright.runtime.tensors.by_name import NOW, as_planned, in_place, is_op


class SplitTensor(DTensor):
    """A DTensor of a split model; `to_local()` is the local tensor of this rank."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; on full tensors if a plain operand requires a gradient.

        The gradient of that operand might otherwise be a SplitTensor, which the code that made the
        operand does not expect.

        Raises:
            UsageError: `func` writes to a SplitTensor, and a plain operand requires a gradient.
        """
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if NOW.attribute is not None:
                args, kwargs = as_planned(cls, func, args, kwargs)
            several = len(args) > 1 or kwargs
            if several and torch.is_grad_enabled() and is_op(func):
                given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                if any(not isinstance(x, DTensor) and x.requires_grad for x in given):
                    _check_not_written(func, args, kwargs)
                    args, kwargs = tree_map_only(cls, cls.full_tensor, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `op` (`op_dispatch.py`)."""
        from shardwright.runtime.tensors.op_dispatch import dispatch  # it imports this file

        return dispatch(op, args, kwargs or {})

    @classmethod
    def of(
        cls, local: Tensor, spec: DTensorSpec, shape: Sequence[int] | None = None
    ) -> SplitTensor:
        """Make a SplitTensor of a local tensor, sharing its memory. Not differentiable."""
        spec = layouts.spec_of(local, spec.shape if shape is None else shape, spec)
        return cls(local, spec, requires_grad=False)  # type: ignore[call-arg]

    @classmethod
    def adopt(cls, tensor: Any) -> Any:
        """Change the class of a DTensor that FSDP2 made from a SplitTensor; the same object."""
        if type(tensor) is DTensor:
            tensor.__class__ = cls
        return tensor

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]  # pyright: ignore
        """The gradient with these placements. One that an op left in full is sharded here."""
        found: Any = _GRAD.__get__(self)
        if isinstance(found, DTensor):
            return self.adopt(found)
        if found is None:
            return None
        part = self.of(layouts.cut(found, self._spec).clone(), self._spec)
        _GRAD.__set__(self, part)
        return part

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore
        _GRAD.__set__(self, None)

    def _set_data(self, value: Any) -> None:
        local = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if local and NOW.attribute is not None and NOW.attribute(self) is not None:
            value = self.of(value.detach(), self._spec)  # code of a planned call has local tensors
        if isinstance(value, Tensor) and value.shape != self._spec.shape:
            raise UsageError(
                f".data of a parameter of a split model, {list(self._spec.shape)}, is set to one "
                f"of another shape, {list(value.shape)}: change the model before it is planned and "
                "split"
            )
        if not isinstance(value, Tensor):
            _DATA.__set__(self, value)  # raises
        if not isinstance(value, SplitTensor) or value.placements != self.placements:
            value = value.full_tensor() if isinstance(value, DTensor) else value
            value = self.of(layouts.cut(value.detach(), self._spec).clone(), self._spec)
        _DATA.__set__(self, value)
        self._local_tensor, self._spec = value._local_tensor, value._spec

    data = property(
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        _set_data,
        doc="The values without a gradient. May be set to a full tensor or a DTensor.",
    )

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """The local tensor. Its gradient gets the placements of this tensor."""
        local = ToLocal.apply(self) if torch.is_grad_enabled() else self._local_tensor
        return local  # type: ignore[return-value]

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The full tensor, on every rank; all ranks call this. Differentiable."""
        return _Gather.apply(self)  # type: ignore[return-value]

    def redistribute(  # type: ignore[override]
        self, device_mesh: Any = None, placements: Sequence[Any] | None = None, **_: Any
    ) -> SplitTensor:
        """This tensor with other placements on its mesh, by way of the full tensor.

        Raises:
            UsageError: there are no placements, or it is another mesh.
        """
        if placements is None or device_mesh not in (None, self.device_mesh):
            raise UsageError("redistribute of a parameter of a split model: over its own mesh only")
        if tuple(placements) == self._spec.placements:
            return self
        meta = self._spec.tensor_meta
        spec = DTensorSpec(self._spec.mesh, tuple(placements), tensor_meta=meta)
        return _Cut.apply(self.full_tensor(), spec)  # type: ignore[return-value]

    def share_memory_(self) -> SplitTensor:  # type: ignore[override]
        """Move the local tensor to shared memory."""
        self._local_tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the local tensor is in shared memory."""
        return self._local_tensor.is_shared()

    def storage(self) -> NoReturn:
        """Refuse: safetensors, and peft before it, call this before they write anything."""
        raise UsageError(
            "the storage of a tensor of a split model is wanted, of which this rank has a part: "
            "write full tensors with shardwright.save(model, directory), adapters too, or take "
            "them with shardwright.full_tensors"
        )

    def numpy(self, *, force: bool = False) -> Any:
        """The full tensor as an array, on every rank."""
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        """The full tensor as nested lists, on every rank."""
        return self.full_tensor().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain DTensor: without a PlannedShard, reading needs no Shardwright."""
        plain: Any = DTensor
        return plain(
            self._local_tensor, self._spec, requires_grad=self.requires_grad
        ).__reduce_ex__(protocol)

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, *outer: Any) -> SplitTensor:
        """Rebuild a SplitTensor in compiled graphs."""
        made: Any = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, *outer)
        return SplitTensor(made._local_tensor, made._spec, requires_grad=made.requires_grad)  # type: ignore[call-arg]

    # The protocol of torch.distributed.checkpoint.

    __create_write_items__: Any = checkpoint_chunks.write_items
    __create_chunk_list__: Any = checkpoint_chunks.chunk_list
    __get_tensor_shard__: Any = checkpoint_chunks.shard_at


def _check_not_written(func: Any, args: Any, kwargs: Any) -> None:
    if isinstance(kwargs.get("out"), SplitTensor) or (
        in_place(func) and args and isinstance(args[0], SplitTensor)
    ):
        raise UsageError(
            f"{func.__name__} writes a plain tensor that gets a gradient to a tensor of a split "
            "model: detach it, or write under torch.no_grad(); or compute with p.full_tensor(), "
            "and not in place"
        )


_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


# Conversions between a SplitTensor, its local tensor and the full tensor. The backward pass of each
# is another of them.


class ToLocal(torch.autograd.Function):
    """From a SplitTensor to its local tensor: as `DTensor.to_local`, which takes twice as long."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, copies: Copies | None = None) -> Tensor:  # type: ignore[override]
        """Return the local tensor; `copies` average its gradient."""
        ctx.spec, ctx.owed = x._spec, None
        ctx.noted = None if copies is None else (copies, x)
        return x._local_tensor.detach()  # not a view: code may write into the parameter later

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """Return the gradient as a SplitTensor with the same placements.

        Raises:
            UsageError: the gradient is sparse.
        """
        if grad.layout is not torch.strided:
            raise UsageError(
                "a parameter of a split model gets a sparse gradient, which cannot be sharded: "
                "make its module without sparse=True"
            )
        grad = (grad if ctx.owed is None else overlap.paid(ctx, grad)).contiguous()
        if ctx.noted is not None:
            copies, stored = ctx.noted
            if not torch.is_grad_enabled():  # otherwise it may be differentiated again
                copies.expect(stored)
            if (ranks := copies.ranks_apart(stored)) > 1:
                grad = grad / ranks
        if torch.is_grad_enabled():  # it will be differentiated again
            return _FromLocal.apply(grad, ctx.spec), None
        return SplitTensor.__new__(SplitTensor, grad, ctx.spec, requires_grad=False), None  # type: ignore[return-value]


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> SplitTensor:  # type: ignore[override]
        ctx.spec = spec
        return SplitTensor.of(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad if isinstance(grad, SplitTensor) else _Cut.apply(grad, ctx.spec)  # type: ignore[assignment]
        return ToLocal.apply(grad), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: SplitTensor) -> Tensor:  # type: ignore[override]
        ctx.spec = x._spec
        full = layouts.gathered(x._local_tensor, x._spec)
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Cut.apply(grad, ctx.spec)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, spec: DTensorSpec) -> SplitTensor:  # type: ignore[override]
        ctx.spec = spec
        if isinstance(full, SplitTensor):
            full = layouts.gathered(full._local_tensor, full._spec)
        return SplitTensor.of(layouts.cut(full, spec).clone(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return (_Gather.apply(grad) if isinstance(grad, SplitTensor) else grad), None


class ViewCopy(SplitTensor):
    """A read-only copy that stands for a view (rows, a reshape) across the shards of ranks.

    Every rank has it in full, and ops on it return plain tensors.
    """
