"""Is a rule right? Tried by what it means: the op on the parts of a split, against the whole op.

    check_rule(my_lib.gated, torch.randn(4, 6), torch.randn(6))

Sharding an axis that the rule lets move gives the same values, and the same gradients on the way
back; where the rule says that an op is linear, sums pass through it. That a rule forbids more than
it must is not found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from shardwright.errors import UsageError

from ..added import overload_of
from ..notation import Rule
from ..registry import rule_for
from .concrete import Concrete, Tensors, arguments_of
from .meaning import check_split, has_numbers, sum_of
from .parts import partition


def check_rule(op: Any, *args: Any, gradients: bool = True, **kwargs: Any) -> None:
    """Try the registered rule of `op` on a call of it, sharded over 2 and 3 ranks.

    Integer arguments are the same on each rank: an op that is told a size cannot be tried so.

    Args:
        op: What `register_rule` takes, or one overload.
        *args: Of the op. Tensors are best float64, no dim that may be split smaller than 3.
        gradients: Try those, too; for an op that has none, False.
        **kwargs: Of the op.

    Raises:
        AssertionError: the rule is wrong; the message says which axis, and what differs.
        UsageError: the op has no rule for this call, or the call is too small to tell.
    """
    overload = overload_of(op)
    arguments, tensors = arguments_of(overload, args, kwargs, torch.Tensor)
    call = Concrete(overload, arguments, tensors, has_gradient=gradients)
    rule = rule_for(call.call)
    if rule is None:
        raise UsageError(f"op '{call.op}' has no rule for this call")
    moved = [a for a in rule.axes() if a not in rule.immovable()]
    if small := [a for a in moved if rule.sizes[a] < 2]:
        raise UsageError(f"axes {small} of rule '{rule}' have size 1 here, which cannot be split")
    for axis, ranks in movable(rule):
        try:
            check_split(call, rule, partition(rule, [axis], ranks, seed=0))
        except (AssertionError, RuntimeError) as error:
            where = f"rule '{rule}', axis '{axis}' on {ranks} ranks"
            raise AssertionError(f"{where}: {error}") from error
    other = [torch.randn_like(t) if has_numbers(t) else t for t in tensors]
    for group in rule.linear:
        if not is_linear(call, other, group):
            raise AssertionError(f"rule '{rule}': not linear in operands {sorted(group)}")


def movable(rule: Rule, granule: int = 1) -> Iterable[tuple[str, int]]:
    """Axes that may be split, and over how many ranks that can be tried."""
    for axis in rule.axes():
        for ranks in (2, 3):
            if axis not in rule.immovable() and rule.sizes[axis] >= ranks * granule:
                yield axis, ranks


def is_linear(call: Concrete, other: Tensors, group: Collection[int]) -> bool:
    """Whether the op of a sum in these operands is the sum of the ops, `other` being a term."""

    def run(values: list[Tensors]) -> Tensors:
        mixed = [
            sum_of([v[i] for v in values]) if i in group else t for i, t in enumerate(call.tensors)
        ]
        return call.run([t.clone() for t in mixed])

    both = run([call.tensors, other])
    terms = zip(run([call.tensors]), run([other]), strict=True)
    return all(same(a, sum_of([b, c])) for a, (b, c) in zip(both, terms, strict=True))


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether they are equal up to rounding; truth values count as numbers."""
    eps = 1e-10 if want.dtype in (torch.float64, torch.complex128) else 1e-4
    if want.dtype == torch.bool:
        want = want.to(got.dtype)
    return got.shape == want.shape and torch.allclose(got.to(want.dtype), want, eps, eps)
