"""Every rule is tested by what it means: the op on the parts of a split, against the whole op.

For each op of the table: what the rule lets move gives the same values and gradients by ranks;
pending sums pass where it says so; and what it forbids would really be wrong, or STRICT says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import chain, combinations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.rules.call import packet_named
from shardwright.rules.notation import Rule
from shardwright.rules.registry import TABLE
from shardwright.rules.testing.check import is_linear, movable, same
from shardwright.rules.testing.meaning import axes_of, check_split, has_numbers, sum_of
from shardwright.rules.testing.parts import partition, take

from .draw import Example, examples
from .examples import EXAMPLES, NO_RULE
from .local import Own, concrete
from .strict import GRANULE, LINEAR_BUT, STRICT, VALUES_UNKNOWN


def test_every_entry_is_tested() -> None:
    assert set(EXAMPLES) == set(TABLE)
    for op in TABLE:
        assert packet_named(op) is not None, op


WithValues = Callable[[int], Own]
"""The call of an example, with values drawn from a seed."""


class Evidence:
    """What was right in every example, though the rule forbids it."""

    def __init__(self) -> None:
        self._right: dict[tuple[str, ...], bool] = {}

    def add(self, key: tuple[str, ...], right: bool) -> None:
        self._right[key] = self._right.get(key, True) and right

    def always(self) -> set[tuple[str, ...]]:
        return {key for key, right in self._right.items() if right}


OFTEN_RIGHT = {"all", "any", "masked_fill", "max", "min"}
"""What is forbidden is right by chance in half as many examples. These also depend on which modules
are loaded: hypothesis draws numbers that it finds in their code."""


@pytest.mark.parametrize("op", sorted(TABLE))
def test_meaning(op: str) -> None:
    check_meaning(op, 1 if op in OFTEN_RIGHT else 2)


@pytest.mark.long
@pytest.mark.parametrize("op", sorted(TABLE.keys() - OFTEN_RIGHT))
def test_meaning_in_twice_as_many_examples(op: str) -> None:
    check_meaning(op, 1)


def check_meaning(op: str, share: int) -> None:
    strict, linear, granule = Evidence(), Evidence(), GRANULE.get(op, 1)

    @settings(
        max_examples=(20 + 8 * len(EXAMPLES[op])) // share,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(examples(EXAMPLES[op]), st.integers(0, 2**31))
    def check(example: Example, seed: int) -> None:
        with_values = cache(partial(concrete, example))
        call = with_values(seed)
        rule = call.rule
        assert rule is not None, f"no rule for {example}"
        for axis, ranks in movable(rule, granule):
            check_split(call, rule, partition(rule, [axis], ranks, seed, granule))
        for axes in sums(rule):
            check_split(call, rule, partition(rule, axes, 2, seed))
        if op not in VALUES_UNKNOWN:
            check_linear(with_values, rule, seed, linear)
            check_forbidden(with_values, rule, seed, strict)

    check()
    allowed = {axis for name, axis in STRICT if name == op}
    assert {axis for axis, *_ in strict.always()} == allowed, "stricter than need be, or not"
    allowed = {group for name, group in LINEAR_BUT if name == op}
    assert {group for group, *_ in linear.always()} == allowed, "linear in more, or not"


@pytest.mark.parametrize("example", NO_RULE, ids=lambda e: e.overload)
def test_calls_that_have_no_rule(example: Example) -> None:
    assert concrete(example, 0).rule is None


def sums(rule: Rule) -> Iterable[list[str]]:
    """Parts of a concatenation that are split together."""
    parts = [a for a in rule.axes() if a[0] in "pk" and rule.sizes[a] >= 2]
    return [parts] if len(parts) > 1 and not rule.immovable() & set(parts) else []


def check_linear(with_values: WithValues, rule: Rule, seed: int, evidence: Evidence) -> None:
    """The op is linear in exactly the sets of operands listed; in none of them if it gives 0."""
    call = with_values(seed)
    floats = [i for i, t in enumerate(call.tensors) if has_numbers(t) and t.numel()]
    if not has_numbers(call.results[0]) or not call.results[0].numel():
        return
    listed = [g & set(floats) for g in rule.linear if not g or g & set(floats)]
    for group in chain.from_iterable(combinations(floats, n) for n in range(len(floats) + 1)):
        right = all(
            is_linear(with_values(n), with_values(n + 7).tensors, group) for n in (seed, seed + 1)
        )
        if set(group) in listed:
            assert right, f"not linear in {group}"
        else:
            evidence.add((str(group), str(call.overload), str(len(call.tensors))), right)


def check_forbidden(with_values: WithValues, rule: Rule, seed: int, evidence: Evidence) -> None:
    """Split what the rule forbids to split: that must come out wrong, now or in another example."""
    call = with_values(seed)
    variant = str(call.overload) + str([v for v in call.arguments.values() if isinstance(v, bool)])
    if call.results[0].dtype == torch.bool:
        variant = ""  # truth values are too often right by chance to tell overloads apart
    for axis in rule.immovable():
        if rule.sizes[axis] >= 2:
            found = [ways(with_values(seed + k), axis, seed + k) for k in range(4)]
            # The same way each time: of two truth values, now one, now their sum may be right.
            right = all(set.intersection(*each) for each in zip(*found, strict=True))
            evidence.add((axis, variant), right)


def ways(call: Own, axis: str, seed: int) -> list[set[str]]:
    """For each result, how the ranks' results make the whole: as its parts, or as a sum."""
    rule, local, none = call.rule, [], [set[str]() for _ in call.results]
    if rule is None or rule.sizes[axis] < 2:  # the number of bins depends on the values
        return none
    split = partition(rule, [axis], 2, seed)
    for parts in split:
        pairs = zip(call.tensors, rule.operands, strict=True)
        # Clones, because some ops change their inputs.
        mine = [take(t, dims, rule.sizes, parts).clone() for t, dims in pairs]
        try:
            local.append(call.local(rule, mine, parts))
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
