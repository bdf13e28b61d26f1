"""Steps with a cache are in the plan's calls, proven, and equal those of the whole model."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DynamicCache, Gemma3TextConfig

import shardwright
from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.graph.trace_sizes import TRACE_SEQ
from shardwright.planner.trace.folded_trace import trace_all
from shardwright.planner.trace.model.source import read_source
from shardwright.runtime.api import apply
from shardwright.runtime.calls.proven import ALIKE
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.slots import state_of
from tests import planning, zoo
from tests.marks import long
from tests.ranks import run_ranks

KINDS = {"t5": "seq2seq", "bart": "seq2seq"}
NAMES = ["llama", "gpt2", "mistral", "falcon", "mamba2", "bamba", "t5"]
"""A sliding window, one head of keys and values, recurrent ones, cross-attention."""


@cache
def made(name: str, tp: int) -> tuple[nn.Module, Plan]:
    _, model = zoo.build(name, kind=KINDS.get(name, "causal"))
    plan = planning.plan(model, tp=tp)
    return model.double(), plan


def ids(length: int) -> torch.Tensor:
    return torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(length))


def decoded(model: Any, lengths: tuple[int, ...] = (5, 1, 1, 3)) -> list[torch.Tensor]:
    """The scores of calls with so many tokens, each with the cache of that before."""
    out: list[torch.Tensor] = []
    encoder = {"input_ids": ids(7)} if model.config.is_encoder_decoder else {}
    grows = "decoder_input_ids" if encoder else "input_ids"
    state: dict[str, Any] = {}
    with torch.no_grad():
        for n in lengths:
            found = model(**encoder, **{grows: ids(n)}, use_cache=True, **state)
            state = state_of(found, model)
            assert state
            out.append(found.logits)
    return out


@pytest.mark.parametrize(
    ("name", "tp"),
    [*((name, 2) for name in NAMES), *(long(name, 3) for name in NAMES[1:]), (NAMES[0], 3)],
)
def test_steps_equal_those_of_the_whole_model(name: str, tp: int) -> None:
    model, plan = made(name, tp)
    assert any(call.state for call in plan.calls)
    assert plan.predicted.collectives, "it is split"
    want = decoded(model)

    def work(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        for got, expected in zip(decoded(local), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)

    run_ranks(tp, work)


GENERATING = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generate_moves_caches_about(name: str) -> None:
    """Beams reorder them, candidates that are not taken are cropped: each rank's own part."""
    model, plan = made(name, 2)

    def generated(of: Any) -> list[torch.Tensor]:
        out = []
        for options in GENERATING.values():
            how = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **options}
            given = ids(6)[:1] if "prompt_lookup_num_tokens" in options else ids(6)
            out.append(of.generate(given, **how))
        return out

    want = generated(model)

    def work(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        for got, expected in zip(generated(local), want, strict=True):
            assert got.equal(expected)

    run_ranks(2, work)


def test_nobody_takes_a_part_of_a_cache_for_the_whole() -> None:
    model, plan = made("llama", 2)
    with torch.no_grad():
        filled = model(ids(5), use_cache=True).past_key_values

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        with torch.no_grad():
            cache = local(ids(5), use_cache=True).past_key_values
            layer = cache.layers[0]
            for look in (lambda: layer.keys, lambda: layer.keys[0], lambda: [*cache]):
                with pytest.raises(UsageError, match="'keys': a cache of a split model"):
                    look()
            assert isinstance(cache.layers, tuple)  # nobody adds to it
            with pytest.raises(UsageError, match="'keys'"):
                layer.keys = filled.layers[0].keys
            with pytest.raises(UsageError, match="update"):
                layer.update(filled.layers[0].keys, filled.layers[0].values)
            with pytest.raises(UsageError, match="filled by another model"):
                local(ids(1), past_key_values=copy.deepcopy(filled))
            with pytest.raises(UsageError, match="proven for steps with DynamicCache"):
                local(ids(1), past_key_values=Other(copy.deepcopy(cache)))
            copied = copy.deepcopy(cache)
            copied.crop(-2)
            assert (copied.get_seq_length(), cache.get_seq_length()) == (3, 5)
            other = copy.deepcopy(local)
            got = other(ids(5)[:, 3:], past_key_values=copied).logits
            torch.testing.assert_close(got, model(ids(5)).logits[:, 3:], rtol=0, atol=1e-9)
            part = local.model(ids(5), use_cache=True).past_key_values
            with pytest.raises(UsageError, match="'keys': a cache of a split model"):
                part.layers[0].keys.numpy()
            local(ids(1), past_key_values=cache)
            with pytest.raises(UsageError, match="'keys': a cache of a split model"):
                layer.keys.sum()  # read before the call: it is sealed behind that, too

    run_ranks(2, work)


def test_a_cache_of_a_plan_without_steps_is_hidden_too() -> None:
    """Where no step could be traced, a call gives out a cache all the same."""
    model, plan = made("llama", 2)
    plan = plan.model_copy(update={"calls": [c for c in plan.calls if not c.state]}).sealed()

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        with torch.no_grad():
            for part in (local.model, local):
                cache = part(ids(5), use_cache=True).past_key_values
                with pytest.raises(UsageError, match="'keys': a cache of a split model"):
                    _ = cache.layers[0].keys * 2
            with pytest.raises(UsageError, match="proven for steps with none"):
                local(ids(1), past_key_values=cache)

    run_ranks(2, work)


class Other:
    """A cache of a class that was in no call."""

    def __init__(self, cache: Any) -> None:
        self.keys = [vars(layer)["keys"] for layer in cache.layers]


class Keeps(nn.Module):
    """Attention with a cache of its own; of the keys in it a step by some tokens takes `kept`."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.heads, self.kept = 4, kept
        self.embed = nn.Embedding(60, 32)
        self.qkv, self.out = nn.Linear(32, 3 * 32), nn.Linear(32, 32)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False, state: Any = None) -> Any:
        x = self.embed(input_ids)
        batch, tokens, _ = x.shape
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (p.view(batch, tokens, self.heads, -1).transpose(1, 2) for p in parts)
        if state is not None:
            k, v = torch.cat([self.kept(state.k, tokens), k], 2), torch.cat([state.v, v], 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        out = x + self.out(y.transpose(1, 2).flatten(2))
        return {"hidden": out, "state": Kept(k, v)} if use_cache else {"hidden": out}


class Kept:
    """Keys and values."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = k, v


def mixed(keys: torch.Tensor, tokens: int = 1) -> torch.Tensor:
    return keys.flip(1).cumsum(1)


KEEPS = {
    "nothing": lambda keys, tokens: keys,
    "each": mixed,
    "several": lambda keys, tokens: mixed(keys) if tokens > 1 else keys,
}
"""Which steps mix heads."""


def keeping(kept: Any = KEEPS["nothing"]) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = Keeps(kept).double().eval()
    given = {"input_ids": torch.zeros(3, 19, dtype=torch.int64), "use_cache": False}
    return model, planning.plan(model, tp=2, kwargs=given)


@pytest.mark.parametrize("mixes", KEEPS)
def test_a_step_that_mixes_heads_keeps_attention_whole(mixes: str) -> None:
    """Without the step nothing shows that heads are not each for itself; nor with another one."""
    model, plan = keeping(KEEPS[mixes])
    known = [(call.state, call.several) for call in plan.calls if call.state]
    assert known == [({"state": "Kept"}, True), ({"state": "Kept"}, False)]
    split = "" in plan.modules and "heads" in plan.modules[""].attributes
    assert split == (mixes == "nothing")
    want = steps_of(model)

    def work(mesh: Mesh) -> None:
        for got, expected in zip(
            steps_of(apply(copy.deepcopy(model), plan, mesh)), want, strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)

    run_ranks(2, work)


def steps_of(model: nn.Module) -> list[torch.Tensor]:
    first = model(ids(5), use_cache=True)
    second = model(ids(1), use_cache=True, state=first["state"])
    return [first["hidden"], second["hidden"], model(ids(2), state=second["state"])["hidden"]]


def test_a_plan_that_a_step_forbids_is_refused() -> None:
    """That of the model whose step leaves heads alone, for the one whose step mixes them."""
    _, plan = keeping()
    model, _ = keeping(mixed)
    given = {"input_ids": torch.zeros(3, 19, dtype=torch.int64), "use_cache": False}
    with pytest.raises(PlanError, match="does not hold|which no plan of this model can"):
        shardwright.check(plan, model, kwargs=given)


def test_embeddings_are_proven_where_no_cache_is_left() -> None:
    """Elsewhere they are a step's."""
    _, model = zoo.build("bert", kind="masked")
    calls = planning.plan(model, tp=2).calls
    assert not any(call.state for call in calls)
    assert [c.inputs for c in calls if "inputs_embeds" in c.inputs] == [["inputs_embeds"]]


def test_a_cache_that_a_model_takes_and_does_not_give_out() -> None:
    """`generate` keeps it; this one keeps more of what it goes on with, as attributes."""
    model: Any = zoo.build("recurrent_gemma")[1].double().eval()
    plan = planning.plan(model, tp=2)
    assert {(*call.state.items(),) for call in plan.calls if call.state}
    want = copy.deepcopy(model).generate(ids(5), max_new_tokens=4, do_sample=False)
    scores = copy.deepcopy(model)(ids(6), use_cache=False).logits

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            local(ids(6)[:, :5], past_key_values=cache, use_cache=True)
            got = local(ids(6)[:, 5:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(got[:, 0], scores[:, -1], rtol=0, atol=1e-6)
        assert torch.equal(local.generate(ids(5), max_new_tokens=4, do_sample=False), want)

    run_ranks(2, work)


def test_embeddings_are_proven_where_a_step_takes_one_token_alone() -> None:
    _, model = zoo.build("mamba")
    further = trace_all(read_source(model))[0].further
    assert [r.kwargs["input_ids"].shape[1] for r in further if r.resumes] == [1]
    embedded = [r.kwargs["inputs_embeds"] for r in further if "inputs_embeds" in r.kwargs]
    assert [given.shape[1] for given in embedded] == [TRACE_SEQ]


def test_several_tokens_that_were_in_no_step_are_refused() -> None:
    """One behind a cache is not, nor several behind none."""
    model, plan = keeping()
    calls = [call.model_copy(update={"several": False}) for call in plan.calls]
    plan = plan.model_copy(update={"calls": calls}).sealed()

    def work(mesh: Mesh) -> None:
        local = apply(copy.deepcopy(model), plan, mesh)
        state = local(ids(5), use_cache=True)["state"]
        local(ids(1), state=state)
        with pytest.raises(UsageError, match="2 tokens after a filled cache of .*Keeps"):
            local(ids(2), state=state)

    run_ranks(2, work)


@pytest.mark.parametrize(("name", "like"), ALIKE.items())
def test_what_is_alike_keeps_each_head_for_itself(name: str, like: str) -> None:
    """So steps with the one lie over ranks as those with the other, for which plans are proven."""
    kinds = ["full_attention", "sliding_attention"]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=4)
    given = torch.randn(2, 2, 4, 7, 8, generator=torch.Generator().manual_seed(1))

    def shown(kind: str, heads: slice) -> list[torch.Tensor]:
        options = {"max_cache_len": 9} if name == kind else {}
        cache = getattr(transformers, kind)(config=config, **options)
        parts = [given[:, :, heads, at] for at in (slice(5), slice(5, 6), slice(6, 7))]
        steps = [cache.update(*part, layer) for part in parts for layer in range(2)]
        return [tensor.clone() for step in steps for tensor in step]

    every, some = shown(name, slice(None)), shown(name, slice(1, 3))
    for got, whole in zip(some, every, strict=True):
        assert torch.equal(got, whole[:, 1:3])
    grown = shown(like, slice(None))[-4:-2]
    assert all(torch.equal(a[:, :, :7], b) for a, b in zip(every[-4:-2], grown, strict=True))


def test_steps_are_given_what_the_encoder_gives_in_its_own_class() -> None:
    _, model = zoo.build("nllb-moe", kind="seq2seq")
    source = read_source(model.to("meta"))
    given = [run.kwargs.get("encoder_outputs") for wish in source.wishes for run in wish]
    made = [each for each in given if each is not None]
    assert made and all(hasattr(each, "router_logits") for each in made)  # its code reads it


@pytest.mark.parametrize("decodes", [True, False])
def test_the_cache_of_generate(decodes: bool) -> None:
    """RemBERT makes a cache of another class than `generate` gives it, or none if it is no decoder.

    Its own cache works, too.
    """
    config = transformers.RemBertConfig(
        hidden_size=32, input_embedding_size=32, output_embedding_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64, vocab_size=96, max_position_embeddings=64,
        is_decoder=decodes, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model: Any = transformers.RemBertForCausalLM(config).double().eval()
    plan = planning.plan(model, 2)
    given = {"input_ids": ids(5), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    how: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    want = model.generate(**given, **how)
    scores = decoded(model) if decodes else []

    def rank(mesh: Mesh) -> torch.Tensor:
        split: Any = apply(copy.deepcopy(model), plan, mesh)
        if not decodes:
            with pytest.raises(UsageError, match="call with use_cache=False"):
                split.generate(**given, **how)
            return split.generate(**given, **how, use_cache=False)
        for got, one in zip(decoded(split), scores, strict=True):
            torch.testing.assert_close(got, one, rtol=0, atol=1e-9)
        return split.generate(**given, **how)

    for got in run_ranks(2, rank):
        assert torch.equal(got, want)
