"""Nothing in torch.nn and torch.nn.functional is without a rule, or comes out wrong when split."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.marks import long
from tests.planner.equal import assert_equal, planned
from tests.torch_nn.functions import FUNCTIONS, NO_FUNCTIONS
from tests.torch_nn.models import WIDTH, Case, states
from tests.torch_nn.modules import MODULES, NO_MODULES

WEIGHT_NORMS = {
    "nn.utils.weight_norm": states(lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "parametrizations.weight_norm": states(
        lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    ),
    "spectral_norm": states(lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "parametrizations.spectral_norm": states(
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    ),
}
CASES: dict[str, Case] = {
    **{f"nn.{name}": case for name, case in MODULES.items()},
    **{f"F.{name}": case for name, case in FUNCTIONS.items()},
    **WEIGHT_NORMS,
}
OF_THEIR_OWN = ("Conv", "BatchNorm", "InstanceNorm", "Embedding", "Linear", "Bilinear", "PReLU")
"""Where names of modules begin that have parameters, and that a function is named like."""


def calls_a_function(case: str) -> bool:
    """Whether this is a module that does no more than call a function, which is a case, too."""
    kind, _, name = case.partition(".")
    like = {n.replace("_", "") for n in FUNCTIONS}
    named = name.lower().removesuffix("loss") in like or name.lower() in like
    return kind == "nn" and named and not name.startswith((*OF_THEIR_OWN, "Layer", "Group", "RMS"))


HALF = [
    long(n, tp) if (i + tp) % 2 or calls_a_function(n) else (n, tp)
    for i, n in enumerate(CASES)
    for tp in (2, 3)
]
"""Each case for two or for three ranks, and the others if long tests are run."""
WITHOUT_RULE = {
    "nn.AdaptiveLogSoftmaxWithLoss": {"module AdaptiveLogSoftmaxWithLoss": 1},
    "nn.CrossMapLRN2d": {"resize": 1},
}
"""The first asks how many rows data selects, the second allocates by hand: they stay whole."""


def test_each_module_is_there() -> None:
    found = {n for n, c in vars(nn).items() if isinstance(c, type) and issubclass(c, nn.Module)}
    assert {n for n in found if not n.startswith("Lazy")} == {*MODULES, *NO_MODULES}


def test_each_function_is_there() -> None:
    found = {n for n, f in vars(F).items() if callable(f) and not inspect.isclass(f)}
    public = {n for n in found if not n.startswith("_")} - {"Optional"}
    assert public == {*FUNCTIONS, *NO_FUNCTIONS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "tp"), HALF)
def test_equals_the_whole_model(name: str, tp: int) -> None:
    """Values and gradients; what is not split has a rule that says why."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make().double().eval()
    plan = planned(model, case.inputs, tp)
    assert plan.opaque == WITHOUT_RULE.get(name, {})
    if case.compared:
        assert_equal(model, case.inputs, plan, collectives=False)
