"""A sample of the search for silently wrong numbers (`benchmarks.uses`): each use, two models."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.uses.case import compared
from benchmarks.uses.subject import USES
from benchmarks.uses.threads import by_threads
from tests.marks import long

MODELS = (
    ("causal/llama", 2),
    ("causal/mixtral", 2),
    ("causal/gpt_neox", 3),
    ("masked/bert", 3),
    ("seq2seq/t5", 2),
    ("vision/vit", 2),
)
BY_THREADS = [name for name, use in USES.items() if not use.own_process]
CASES = [
    long(model, tp, use) if (m - u) % len(MODELS) else (model, tp, use)
    for m, (model, tp) in enumerate(MODELS)
    for u, use in enumerate(BY_THREADS)
    if (m - u) % len(MODELS) in (0, 3)  # of the first half, and of the second
]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


# Uses ignore warnings, but that is of the process, and ranks are threads: one ends as another runs.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "tp", "use"), CASES)
def test_equals_the_whole_model_or_is_refused(plans: Path, model: str, tp: int, use: str) -> None:
    case = partial(compared, str(plans))
    (row,) = by_threads([(model, use)], tp, case)
    if "error" in row:  # once in some hundreds: threads share what processes have of their own
        (row,) = by_threads([(model, use)], tp, case)
    assert "error" not in row, row["raised"]
    if row["verdict"] == "unfit":
        pytest.skip("the whole model has no such thing")
    assert row["verdict"] in ("equal", "refused"), f"{row['verdict']}: {row['text']}"
