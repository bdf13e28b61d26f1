"""The argument for a cache has another name in newer versions of transformers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import ModelOutput

from shardwright.errors import UsageError
from shardwright.planner.contract.names import cache_argument, is_batched
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.modules.recomputation import is_cache
from shardwright.runtime.slots import state_of
from tests import planning
from tests.ranks import run_ranks


def name_of(model: Any) -> str:
    """What a model, or a class of models, calls the argument."""
    return cache_argument(inspect.signature(model.forward).parameters)


OWN = name_of(LlamaForCausalLM)
"""What the installed version calls it."""


@dataclass
class WithCache(ModelOutput):
    logits: Tensor | None = None
    cache: Any = None


class Newer(LlamaForCausalLM):
    """Takes `cache`, or renames what an older caller gives, as transformers 5.24 does."""

    @deprecate_kwarg("past_key_values", "99.0", new_name="cache")
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> WithCache:
        given: dict[str, Any] = {"inputs_embeds": inputs_embeds, "use_cache": use_cache, OWN: cache}
        out = super().forward(input_ids, attention_mask, **given)
        return WithCache(logits=out.logits, cache=out.get(OWN))


class Older(LlamaForCausalLM):
    """Takes `past_key_values`; transformers 5.24 returns that as `cache`, in the same class."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutputWithPast:
        given: dict[str, Any] = {"inputs_embeds": inputs_embeds, "use_cache": use_cache}
        out = super().forward(input_ids, attention_mask, **given, **{OWN: past_key_values})
        return CausalLMOutputWithPast(logits=out.logits, past_key_values=out.get(OWN))


for one in (Newer, Older):
    one.__name__ = "Renamed"  # plans of one are tried with the other


def made(kind: Callable[[LlamaConfig], Any] = LlamaForCausalLM) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(LlamaConfig(**sizes, **heads)).double().eval()  # type: ignore[arg-type]


def ids(count: int) -> Tensor:
    return torch.randint(3, 60, (2, count), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def decoded(model: Any) -> list[Tensor]:
    """The scores of a prompt and of steps behind it, each with the cache of that before."""
    found, state = [], {}
    for count in (5, 1, 3):
        out = model(ids(count), use_cache=True, **state)
        state = state_of(out, model)
        assert [*state] == [name_of(model)]
        found.append(out.logits)
    return found


@pytest.mark.parametrize("planned", [Newer, Older])
@pytest.mark.parametrize("run", [Newer, Older])
def test_plans_hold_whatever_the_forward_calls_its_cache(planned: Any, run: Any) -> None:
    plan, model = planning.plan(made(planned), tp=2), made(run)
    assert any(call.several for call in plan.calls)
    assert plan.predicted.collectives, "it is split"
    want = decoded(model)

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        for got, expected in zip(decoded(local), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
        cache = local(ids(5), use_cache=True)[1]
        with pytest.raises(UsageError, match="a cache of a split model"):
            cache.layers[0].keys.sum()
        with pytest.raises(UsageError, match="is a Other"):
            local(ids(1), **{name_of(local): Other(cache)})

    run_ranks(2, work)


class Other:
    def __init__(self, cache: Any) -> None:
        self.kept = [torch.zeros(2, 2), cache]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_an_old_name_is_checked_as_the_new_one() -> None:
    model = made(Newer)
    plan = planning.plan(model, tp=2)
    want = decoded(model)[1]

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        with torch.no_grad():
            cache = local(ids(5), use_cache=True).cache
            got = local(ids(1), past_key_values=cache, use_cache=True)
            torch.testing.assert_close(got.logits, want, rtol=0, atol=1e-9)
            with pytest.raises(UsageError, match="a cache of a split model"):
                cache.layers[0].keys.sum()
            with pytest.raises(UsageError, match="'cache' of Renamed is a Other"):
                local(ids(1), past_key_values=Other(cache))
            with pytest.raises(UsageError, match="'past_key_values' of Renamed is a DynamicCache"):
                local(ids(1), past_key_values=cache, cache=cache)

    run_ranks(2, work)


def test_batches_prove_no_other_cache() -> None:
    """transformers 5.24 gives a paged cache by the name of any other."""
    model = made()
    plan = planning.plan(model, tp=2, continuous_batching=True)
    calls = [call for call in plan.calls if not call.state or is_batched(call.state)]
    assert any(call.state for call in calls)
    plan = plan.model_copy(update={"calls": calls}).sealed()

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        with torch.no_grad():
            state = state_of(local(ids(5), use_cache=True), local)
            with pytest.raises(UsageError, match="proven for steps with none"):
                local(ids(1), **state)

    run_ranks(2, work)


@pytest.mark.parametrize("name", ["cache", OWN])
def test_only_caches_are_left_out_of_blocks_that_run_again(name: str) -> None:
    assert is_cache(name, DynamicCache())
    assert not is_cache("hidden_states", DynamicCache())
    for other in (torch.zeros(2), nn.Linear(2, 2), [torch.zeros(2)], Other(None)):
        assert not is_cache("cache", other)
