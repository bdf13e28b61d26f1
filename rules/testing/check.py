"""Tests a rule: compares the op on the shards of its tensors with the op on the full tensors.

    check_rule(my_lib.gated, torch.randn(4, 6), torch.randn(6))

If the rule lets an axis be sharded, sharding it must give the same values and the same gradients.
If the rule says that an op is linear, sums must pass through it. The test does not find that a rule
forbids more than it must.
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
    """Test the registered rule of `op` on a call of it, sharded over 2 and 3 ranks.

    Integer arguments are the same on each rank, so an op that takes a size cannot be tested.

    Args:
        op: An op as for `register_rule`, or an overload.
        *args: Arguments of the op. Tensors should be float64, with shardable dims of at least 3.
        gradients: Whether to test gradients too; False for an op without gradients.
        **kwargs: Keyword arguments of the op.

    Raises:
        AssertionError: the rule is wrong; the message has the axis and the difference.
        UsageError: the op has no rule for this call, or an axis is too small to be sharded.
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
    """Yield (axis, ranks) for each axis that may be sharded over 2 or 3 ranks."""
    for axis in rule.axes():
        for ranks in (2, 3):
            if axis not in rule.immovable() and rule.sizes[axis] >= ranks * granule:
                yield axis, ranks


def is_linear(call: Concrete, other: Tensors, group: Collection[int]) -> bool:
    """Whether the op is linear in these operands; `other` are the second terms of the sums."""

    def run(values: Tensors) -> Tensors:
        mixed = [values[i] if i in group else t for i, t in enumerate(call.tensors)]
        return call.run([t.clone() for t in mixed])

    both = run([sum_of([*pair]) for pair in zip(call.tensors, other, strict=True)])
    terms = zip(call.results, run(other), strict=True)
    return all(same(a, sum_of([b, c])) for a, (b, c) in zip(both, terms, strict=True))


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two tensors are equal up to rounding; booleans count as numbers."""
    eps = 1e-10 if want.dtype in (torch.float64, torch.complex128) else 1e-4
    if want.dtype == torch.bool:
        want = want.to(got.dtype)
    return got.shape == want.shape and torch.allclose(got.to(want.dtype), want, eps, eps)
