"""Ranks that generate stop at the same token, whatever decides when."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MaxTimeCriteria

from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests import planning, zoo
from tests.ranks import run_ranks
from tests.serving.tiny import tokenizer

IDS = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(0))
HOW: dict[str, Any] = {"max_new_tokens": 9, "pad_token_id": 0, "do_sample": False}
MODEL: Any = zoo.build("llama")[1].double().eval()
PLANNED = planning.Once(lambda: planning.plan(copy.deepcopy(MODEL), tp=2))


class AtLength:
    """A criterion of the caller's own that another rank meets later, as one by a clock may be."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_when_the_first_rank_does(mode: dict[str, Any]) -> None:
    ids = IDS[:1] if "prompt_lookup_num_tokens" in mode else IDS
    want = MODEL.generate(ids, **HOW, **mode, stopping_criteria=[AtLength(8)])
    assert want.shape[1] < IDS.shape[1] + HOW["max_new_tokens"]

    def work(mesh: Mesh) -> None:
        split: Any = apply(copy.deepcopy(MODEL), PLANNED(), mesh)
        criteria = [AtLength(8 + mesh["tp"].rank)]
        assert torch.equal(split.generate(ids, **HOW, **mode, stopping_criteria=criteria), want)

    run_ranks(2, work)


def test_by_the_clock_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs slower for a rank that allows itself more time."""

    def out_of_time(self: Any, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.max_time)

    monkeypatch.setattr(MaxTimeCriteria, "__call__", out_of_time)
    want = MODEL.generate(IDS, **HOW, max_time=8)
    assert want.shape[1] == 8

    def work(mesh: Mesh) -> None:
        split: Any = apply(copy.deepcopy(MODEL), PLANNED(), mesh)
        assert torch.equal(split.generate(IDS, **HOW, max_time=8 + mesh["tp"].rank), want)

    run_ranks(2, work)


def test_at_strings() -> None:
    """`generate` leaves the tokenizer among the arguments of a forward that does not read it."""
    words = tokenizer()
    third = MODEL.generate(IDS, **HOW)[:, IDS.shape[1] + 2]
    stops = {"stop_strings": words.batch_decode(third[:, None]), "tokenizer": words}
    want = MODEL.generate(IDS, **HOW, **stops)
    assert want.shape[1] < IDS.shape[1] + HOW["max_new_tokens"]

    def work(mesh: Mesh) -> None:
        split: Any = apply(copy.deepcopy(MODEL), PLANNED(), mesh)
        assert torch.equal(split.generate(IDS, **HOW, **stops), want)

    run_ranks(2, work)
