"""Plans of text models hold for sequences of several lengths too: with a mask for padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.planner.search.emitted_plan import NO_PADDING_MASK
from shardwright.planner.trace.model import source
from shardwright.planner.trace.model.source import read_source
from shardwright.planner.trace.runs.example_calls import text_inputs
from shardwright.planner.trace.runs.further_runs import padding
from shardwright.runtime.api import apply
from tests import planning, zoo
from tests.planner.test_unused import TOKENS, WIDTH, Text, is_split, text
from tests.ranks import run_ranks


class Masks(Text):
    """Leaves out what its first layer gives for padding."""

    def __init__(self) -> None:
        super().__init__(None)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = self.norm(self.embed(input_ids))
        h = self.hidden(self.mlp.up(x), attention_mask)
        return self.head(self.norm(x + self.mlp.down(h)))

    def hidden(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else x * mask.unsqueeze(-1)


class Mixes(Masks):
    """Each of its features then hangs on others."""

    def hidden(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else (x * mask.unsqueeze(-1)).cumsum(-1)


class Without(Masks):
    """Each of its features hangs on others where nothing is padded."""

    def hidden(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x.cumsum(-1) if mask is None else x * mask.unsqueeze(-1)


class Needs(Masks):
    """Cannot do without a mask."""

    def hidden(self, x: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        return x * mask.unsqueeze(-1)


class Asks(Masks):
    """Of a mask that it makes itself where it is given none."""

    def hidden(self, x: Tensor, mask: Tensor | None) -> Tensor:
        mask = torch.ones(x.shape[:2], device=x.device) if mask is None else mask
        return x if mask.all() else (x * mask.unsqueeze(-1)).cumsum(-1)


class Refuses(Masks):
    """Takes a mask as an argument, and that is all."""

    def hidden(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            raise NotImplementedError
        return x


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return make().double().eval()


IDS = torch.randint(0, TOKENS, (2, 5), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])


@pytest.mark.parametrize("kwargs", [{}, {"input_ids": IDS, "attention_mask": MASK}])
@pytest.mark.parametrize("make", [Masks, Mixes, Without, Asks])
def test_with_and_without_a_mask(make: Callable[[], nn.Module], kwargs: dict[str, Tensor]) -> None:
    """Whether it was given to plan or not."""
    model, ids, mask = made(make), IDS, MASK
    plan = planning.plan(model, tp=2, kwargs=kwargs)
    assert is_split(plan, "mlp.down.weight") and is_split(plan, "mlp.up.weight")
    want = [model(ids), model(ids, mask)]
    assert not want[0].equal(want[1])

    def run(mesh: Any) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        for got, expected in zip([local(ids), local(ids, mask)], want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)

    run_ranks(2, run)


def test_which_masks_there_are() -> None:
    """None for what takes none, one for each sequence of tokens, given ones included."""
    assert read_source(text()).runs[1:] == []
    ids = torch.zeros(3, 19, dtype=torch.int64)
    (masked,) = read_source(made(Masks), kwargs={"input_ids": ids}).runs[1:]
    assert masked.kwargs.keys() == {"input_ids", "attention_mask"} and not masked.priced
    (unmasked,) = read_source(made(Masks), kwargs=dict(masked.kwargs)).runs[1:]
    assert unmasked.kwargs.keys() == {"input_ids"} and not unmasked.priced
    _, both = zoo.build("t5", kind="seq2seq")
    given = text_inputs(both)
    masks = padding(both, given)
    assert masks["attention_mask"].shape == given["input_ids"].shape
    assert masks["decoder_attention_mask"].shape == given["decoder_input_ids"].shape


def test_what_it_costs_is_the_call_without(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planning.plan(made(Masks), tp=2)
    assert "attention_mask" in {name for call in plan.calls for name in call.inputs}
    monkeypatch.setattr(source, "wishes", lambda *_: ())
    plain = planning.plan(made(Masks), tp=2)
    assert "attention_mask" not in {name for call in plain.calls for name in call.inputs}
    assert plan.predicted == plain.predicted


def test_a_mask_that_cannot_be_traced() -> None:
    """The plan is that of the plain call, and says so; the other is refused."""
    model = made(Refuses)
    plan = planning.plan(model, tp=2)
    assert is_split(plan, "mlp.up.weight")
    assert plan.solver.note == NO_PADDING_MASK
    assert not planning.plan(made(Masks), tp=2).solver.note
    ids = torch.zeros(2, 5).long()

    def run(mesh: Any) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        torch.testing.assert_close(local(ids), model(ids))
        with pytest.raises(UsageError, match="'attention_mask' of Refuses was given in no call"):
            local(ids, torch.ones(2, 5))

    run_ranks(2, run)


def test_a_mask_that_is_needed() -> None:
    """What cannot be traced without it is refused without it."""
    model, kwargs = made(Needs), {"input_ids": IDS, "attention_mask": MASK}
    plan = planning.plan(model, tp=2, kwargs=kwargs)
    assert is_split(plan, "mlp.up.weight")

    def run(mesh: Any) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        torch.testing.assert_close(local(**kwargs), model(**kwargs))
        with pytest.raises(UsageError, match="'attention_mask' of Needs is left out"):
            local(IDS)

    run_ranks(2, run)


def test_inputs_by_position_are_as_those_by_name() -> None:
    """Masks, labels, embeddings and caches are proven for them, too."""
    ids = torch.zeros(3, 19, dtype=torch.int64)
    model: Any = zoo.build("llama")[1]
    given = [read_source(model, args=ids), read_source(model, kwargs={"input_ids": ids})]
    one, other = ([sorted(run.kwargs) for run in source.further] for source in given)
    assert one == other and {"attention_mask", "labels", "output_hidden_states"} <= {*one[0]}
    assert given[0].masks() == given[0].along_sequence().masks() == {"attention_mask"}
