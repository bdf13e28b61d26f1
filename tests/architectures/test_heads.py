"""Heads and vocabularies that ranks do not divide, on thread ranks, equal to the whole model."""

from __future__ import annotations

import pytest

from benchmarks.ranks_case import CASES, HEADS, WIDTH, placement, prepared
from tests import planning
from tests.equal import assert_equal_to_the_whole
from tests.marks import sampled


@pytest.mark.parametrize("name", sampled(CASES, ("10 kv heads over 4", "50257 words over 4")))
def test_equal_in_float64(name: str) -> None:
    """Logits, all gradients and a decode step; the collectives are those predicted."""
    case = CASES[name]
    model, inputs, options, _ = prepared(HEADS, name)
    plan = planning.plan(model, tp=case.tp, **options)
    assert (placement(plan, "q_proj"), placement(plan, "k_proj")) == (case.query, case.key)
    if case.vocabulary == 50257:
        assert placement(plan, "lm_head") == f"50257@tp, {WIDTH * case.heads}"
    assert_equal_to_the_whole(model, inputs, plan)
