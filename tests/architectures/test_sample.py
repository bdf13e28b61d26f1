"""One architecture of each sort, split over two thread ranks, equals the whole model.

`make zoo` does the same for every architecture, on real gloo processes.
"""

from __future__ import annotations

import pytest

from benchmarks.compare import compare, predicted
from benchmarks.zoo import SAMPLE
from benchmarks.zoo_case import case
from tests import planning
from tests.marks import long
from tests.ranks import run_ranks

LONG = {
    *"bart deepseek_v2 deepseek_v32 falcon_h1 gptj jamba longt5 marian minicpm3".split(),
    *"mobilebert mpt olmoe rwkv zamba2 gemma3n_text pegasus_x zaya mamba".split(),
    *"bamba mamba2 recurrent_gemma".split(),
}
"""Those are slow or resemble others."""
CASES = [
    long(kind, name) if name in LONG else (kind, name) for kind, n in SAMPLE.items() for name in n
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_equals_the_whole_model(kind: str, name: str) -> None:
    """Logits, all gradients and a decode step, and collectives as predicted."""
    it = case(kind, name)
    plan = planning.plan(it.model, tp=2, kwargs=it.example)
    assert not [w for w in plan.replicated if "own code fails" in w.reason]
    ranks = run_ranks(2, lambda mesh: compare(it.model, it.inputs, plan, mesh, it.expected))
    for found in ranks:
        assert found.logits <= it.tolerance
        assert found.gradients is None or found.gradients <= it.tolerance, found.worst
        assert found.decode is None or found.decode <= it.tolerance
        assert predicted(plan)["forward"] == dict(found.forward)
