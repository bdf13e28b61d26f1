"""Every rule is tested by what it means: the op on the parts of a split, against the whole op.

For each op of the table: what the rule lets move gives the same values and gradients by ranks;
pending sums pass where it says so; and what it forbids would really be wrong, or STRICT says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, combinations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.rules.notation import Dims, Rule, letters
from shardwright.rules.registry import TABLE

from .draw import Example, examples
from .examples import EXAMPLES, NO_RULE
from .local import Concrete, Parts, Tensors, add_at, concrete, covered, find_op, run_local, take
from .strict import CONSTANT, GRANULE, LINEAR_BUT, NO_DERIVATIVE, STRICT, VALUES_UNKNOWN

Split = list[Parts]
"""What each rank holds."""


def test_every_entry_is_tested() -> None:
    assert set(EXAMPLES) == set(TABLE)
    for op in TABLE:
        find_op(op)


class Evidence:
    """What was right in every example, though the rule forbids it."""

    def __init__(self) -> None:
        self._right: dict[tuple[str, ...], bool] = {}

    def add(self, key: tuple[str, ...], right: bool) -> None:
        self._right[key] = self._right.get(key, True) and right

    def always(self) -> set[tuple[str, ...]]:
        return {key for key, right in self._right.items() if right}


@pytest.mark.parametrize("op", sorted(TABLE))
def test_meaning(op: str) -> None:
    strict, linear, granule = Evidence(), Evidence(), GRANULE.get(op, 1)

    @settings(
        max_examples=20 + 8 * len(EXAMPLES[op]),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(examples(EXAMPLES[op]), st.integers(0, 2**31))
    def check(example: Example, seed: int) -> None:
        call = concrete(example, seed)
        rule = call.rule
        assert rule is not None, f"no rule for {example}"
        for axis, ranks in movable(rule, granule):
            check_split(call, rule, partition(rule, [axis], ranks, seed, granule))
        for axes in sums(rule):
            check_split(call, rule, partition(rule, axes, 2, seed))
        if op not in VALUES_UNKNOWN:
            check_linear(example, rule, seed, linear)
            check_forbidden(example, rule, seed, strict)

    check()
    allowed = {axis for name, axis in STRICT if name == op}
    assert {axis for axis, *_ in strict.always()} == allowed, "stricter than need be, or not"
    allowed = {group for name, group in LINEAR_BUT if name == op}
    assert {group for group, *_ in linear.always()} == allowed, "linear in more, or not"


@pytest.mark.parametrize("example", NO_RULE, ids=lambda e: e.overload)
def test_calls_that_have_no_rule(example: Example) -> None:
    assert concrete(example, 0).rule is None


def movable(rule: Rule, granule: int) -> Iterable[tuple[str, int]]:
    for axis in rule.axes():
        for ranks in (2, 3):
            if axis not in rule.immovable() and rule.sizes[axis] >= ranks * granule:
                yield axis, ranks


def sums(rule: Rule) -> Iterable[list[str]]:
    """Parts of a concatenation that are split together."""
    parts = [a for a in rule.axes() if a[0] in "pk" and rule.sizes[a] >= 2]
    return [parts] if len(parts) > 1 and not rule.immovable() & set(parts) else []


def partition(rule: Rule, axes: Iterable[str], ranks: int, seed: int, granule: int = 1) -> Split:
    """Parts of each axis, not empty, in order and seldom even."""
    generator = torch.Generator().manual_seed(seed)
    split: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    for axis in axes:
        n = rule.sizes[axis]
        cuts = torch.randperm(n // granule - 1, generator=generator)[: ranks - 1].sort().values
        ends = granule * (cuts + 1)
        for rank, held in enumerate(torch.arange(n).tensor_split(ends.tolist())):
            split[rank][axis] = held
    return list(split)


def close(got: torch.Tensor, want: torch.Tensor, call: Concrete) -> None:
    single = any(t.dtype == torch.float32 for t in call.tensors + call.results)
    eps = (1e-4 if single else 1e-12) if differentiable(want) else 0
    torch.testing.assert_close(got, want, rtol=eps, atol=eps, equal_nan=True)


def differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def leaf(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(wanted and differentiable(tensor))


def check_split(call: Concrete, rule: Rule, split: Split) -> None:
    """Values and gradients are those of the whole op."""
    used = split[0].keys()
    reduced = bool(used & (rule.sum | rule.lookup))
    additive = added(rule, used) if reduced else set()
    fixed = {call.arguments[name].index for name in CONSTANT.get(call.op, ())}
    inputs = [leaf(t, i not in fixed) for i, t in enumerate(call.tensors)]
    # Some ops give back or change what they are given.
    whole = call.run([t.clone() for t in inputs])
    local_inputs, local = [], []
    for rank, parts in enumerate(split):
        mine = [
            leaf(
                t * (rank == 0) if i in additive else take(t, dims, rule.sizes, parts),
                t.requires_grad,
            )
            for i, (t, dims) in enumerate(zip(inputs, rule.operands, strict=True))
        ]
        local_inputs.append(mine)
        local.append(run_local(call, rule, [t.clone() for t in mine], parts))
    for k, dims in enumerate(rule.results):
        shape_only = call.op in VALUES_UNKNOWN
        if reduced:
            close(sum_of([results[k] for results in local]), whole[k], call)
            continue
        for parts, results in zip(split, local, strict=True):
            want = take(whole[k], dims, rule.sizes, parts)
            assert results[k].shape == want.shape
            if not shape_only:
                close(results[k], want, call)
    if str(call.overload).removeprefix("aten.") not in NO_DERIVATIVE:
        check_gradients(
            call, rule, split, (inputs, whole), list(zip(local_inputs, local, strict=True))
        )


def sum_of(tensors: Tensors) -> torch.Tensor:
    total = torch.stack(tensors).sum(0)
    # A sum of truth values is their number.
    return total if tensors[0].dtype == torch.bool else total.to(tensors[0].dtype)


def added(rule: Rule, used: Iterable[str]) -> set[int]:
    """Operands that are added to a sum: only one rank may hold them."""
    axes = [axes_of(dims) for dims in rule.operands]
    have = {i for i, a in enumerate(axes) if a & set(used)}
    return {i for g in rule.linear if g & have for i in g - have}


def axes_of(dims: Dims) -> set[str]:
    """The axes in the dims of a tensor."""
    return {a for e in dims for a in letters(e)}


def check_gradients(
    call: Concrete,
    rule: Rule,
    split: Split,
    whole: tuple[Tensors, Tensors],
    local: list[tuple[Tensors, Tensors]],
) -> None:
    """The gradient of a part is part of the gradient; those of whole operands add up to it.

    Where the results are pending sums, each rank gets the whole gradient of the result; where they
    are whole, each rank gets one term of it, as a grad-Partial tensor of
    `planner/contract/transitions.py` does.
    """
    used = split[0].keys()
    reduced = bool(used & (rule.sum | rule.lookup))
    additive = added(rule, used) if reduced else set()
    upstream = [torch.randn_like(t) if differentiable(t) else t for t in whole[1]]
    terms = [
        [u] * len(split) if reduced else term_of(u, dims, rule, split)
        for u, dims in zip(upstream, rule.results, strict=True)
    ]
    want = gradients(*whole, upstream)
    got = [
        gradients(
            *sides,
            [
                t[rank] if reduced else take(t[rank], dims, rule.sizes, split[rank])
                for t, dims in zip(terms, rule.results, strict=True)
            ],
        )
        for rank, sides in enumerate(local)
    ]
    for i, dims in enumerate(rule.operands):
        if want[i] is None:
            assert all(g[i] is None for g in got)
        elif i in additive:
            for g in got:
                close(g[i], want[i], call)
        else:
            total = torch.zeros_like(want[i])
            for g, parts in zip(got, split, strict=True):
                add_at(total, g[i], dims, rule.sizes, parts)
            close(total, want[i], call)


def term_of(upstream: torch.Tensor, dims: Dims, rule: Rule, split: Split) -> Tensors:
    """Per rank, the gradient of a result where it is split, and one term of it where it is not."""
    if not differentiable(upstream):
        return [upstream] * len(split)
    mask = torch.zeros(upstream.shape, dtype=torch.bool)
    for d, expr in enumerate(dims):
        shape = [-1 if i == d else 1 for i in range(upstream.ndim)]
        mask = mask | covered(expr, rule.sizes, split[0]).view(shape)
    terms = [torch.randn_like(upstream) for _ in split[1:]]
    terms.append(upstream - sum(terms))
    return [torch.where(mask, upstream, t) for t in terms]


def gradients(inputs: Tensors, results: Tensors, upstream: Tensors) -> list:
    """Gradients of the inputs; None for one that has none, zeros for one that is not used."""
    pairs = [(r, u) for r, u in zip(results, upstream, strict=True) if r.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = torch.autograd.grad(
        [r for r, _ in pairs],
        wanted,
        [u for _, u in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    of = dict(zip(map(id, wanted), found, strict=True))
    return [of.get(id(t)) for t in inputs]


def check_linear(example: Example, rule: Rule, seed: int, evidence: Evidence) -> None:
    """The op is linear in exactly the sets of operands listed; in none of them if it gives 0."""
    call = concrete(example, seed)
    floats = [i for i, t in enumerate(call.tensors) if differentiable(t) and t.numel()]
    if not differentiable(call.results[0]) or not call.results[0].numel():
        return
    listed = [g & set(floats) for g in rule.linear if not g or g & set(floats)]
    for group in chain.from_iterable(combinations(floats, n) for n in range(len(floats) + 1)):
        right = all(is_linear(example, group, seed + k) for k in range(2))
        if set(group) in listed:
            assert right, f"not linear in {group}"
        else:
            evidence.add((str(group), example.overload, str(len(call.tensors))), right)


def is_linear(example: Example, group: tuple[int, ...], seed: int) -> bool:
    one, other = concrete(example, seed), concrete(example, seed + 7)

    def run(values: list[Tensors]) -> Tensors:
        mixed = [
            sum_of([v[i] for v in values]) if i in group else t for i, t in enumerate(one.tensors)
        ]
        return one.run([t.clone() for t in mixed])

    both = run([one.tensors, other.tensors])
    terms = zip(run([one.tensors]), run([other.tensors]), strict=True)
    return all(same(a, sum_of([b, c])) for a, (b, c) in zip(both, terms, strict=True))


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    eps = 1e-10 if want.dtype in (torch.float64, torch.complex128) else 1e-4
    if want.dtype == torch.bool:
        want = want.to(got.dtype)
    return got.shape == want.shape and torch.allclose(got.to(want.dtype), want, eps, eps)


def check_forbidden(example: Example, rule: Rule, seed: int, evidence: Evidence) -> None:
    """Split what the rule forbids to split: that must come out wrong, now or in another example."""
    call = concrete(example, seed)
    variant = str(call.overload) + str([v for v in call.arguments.values() if isinstance(v, bool)])
    if call.results[0].dtype == torch.bool:
        variant = ""  # truth values are too often right by chance to tell overloads apart
    for axis in rule.immovable():
        if rule.sizes[axis] >= 2:
            found = [ways(concrete(example, seed + k), axis, seed + k) for k in range(4)]
            # The same way each time: of two truth values, now one, now their sum may be right.
            right = all(set.intersection(*each) for each in zip(*found, strict=True))
            evidence.add((axis, variant), right)


def ways(call: Concrete, axis: str, seed: int) -> list[set[str]]:
    """For each result, how the ranks' results make the whole: as its parts, or as a sum."""
    rule, local, none = call.rule, [], [set[str]() for _ in call.results]
    if rule is None or rule.sizes[axis] < 2:  # the number of bins depends on the values
        return none
    split = partition(rule, [axis], 2, seed)
    for parts in split:
        pairs = zip(call.tensors, rule.operands, strict=True)
        mine = [take(t, dims, rule.sizes, parts) for t, dims in pairs]
        try:
            local.append(run_local(call, rule, mine, parts))
        except (RuntimeError, IndexError, ValueError):
            return none
    if len(local[0]) != len(call.results):
        return none
    out: list[set[str]] = []
    for k, (whole, dims) in enumerate(zip(call.results, rule.results, strict=True)):
        mine = [results[k] for results in local]
        wants = [take(whole, dims, rule.sizes, parts) for parts in split]
        out.append(set())
        if all(same(m, w) for m, w in zip(mine, wants, strict=True)):
            out[-1].add("parts")
        alike = len({m.shape for m in mine}) == 1
        if axis not in axes_of(dims) and alike and same(sum_of(mine), whole):
            out[-1].add("sum")
    return out
