"""Planned models on ranks that are threads: what a user may do with one, and what is refused."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from transformers import StaticCache

import shardwright
from shardwright.errors import UsageError
from shardwright.runtime.communication.audit import count_collectives
from shardwright.runtime.logits.split_logits import SealedLogitsError, SplitLogits
from tests import planning, zoo
from tests.ranks import run_ranks

IDS = torch.randint(1, 100, (2, 7), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(7) < 2, -100, IDS)


@cache
def planned(name: str, kind: str = "causal", **overrides: Any) -> tuple[Any, Any]:
    """A tiny model of the zoo, and its plan for two ranks."""
    _, model = zoo.build(name, kind=kind, **overrides)
    return model, planning.plan(model, tp=2)


def on_two_ranks(model, plan, work):
    return run_ranks(2, lambda mesh: work(shardwright.apply(copy.deepcopy(model), plan, mesh)))


def test_compiled_equals_eager():
    model, plan = planned("llama")
    want = model(IDS, labels=LABELS, use_cache=False)

    def work(mine):
        torch._dynamo.reset()
        traced = torch.compile(mine, fullgraph=True, backend="aot_eager")
        assert_close(traced(IDS, use_cache=False).logits, want.logits)
        results = []
        for m in (mine, traced):
            mine.zero_grad()
            loss = m(IDS, labels=LABELS, use_cache=False).loss
            loss.backward()
            results.append((loss.detach(), [p.grad.clone() for p in mine.parameters()]))
        assert_close(results[0][0], want.loss)
        assert_close(results[1], results[0])

    on_two_ranks(model, plan, work)


def test_decode_steps_are_one_compiled_graph():
    """Nothing breaks it, no step compiles anew, and its collectives are those that Inductor knows.

    The cache has a fixed size; the step before, which fills it, is not compiled.
    """
    model, plan = planned("llama")
    prompt = IDS[:1]

    def decoded(eager, step):
        cache, out = StaticCache(config=model.config, max_cache_len=12), []
        with torch.no_grad():
            out.append(eager(prompt, past_key_values=cache).logits[:, -1:])
            for token in IDS[1, :4]:
                out.append(step(token.view(1, 1), past_key_values=cache).logits)
        return torch.cat(out)

    want = decoded(model, model)

    def work(mine):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        assert_close(decoded(mine, torch.compile(mine, fullgraph=True, backend=counter)), want)
        assert counter.frame_count == 1
        (graph,) = counter.graphs
        called = [str(node.target) for node in graph.graph.nodes]
        with count_collectives() as calls, torch.no_grad():
            mine(prompt[:, :1])
        assert calls
        assert len(calls) == called.count("_c10d_functional.wait_tensor")

    on_two_ranks(model, plan, work)


def test_logits_with_labels_are_no_tensor():
    model, plan = planned("llama")
    want = model(IDS, labels=LABELS)

    def work(mine):
        assert_close(mine(IDS).logits, want.logits)  # without labels: whole
        out = mine(IDS, labels=LABELS)
        assert isinstance(out.logits, SplitLogits)
        for use in (lambda x: x.argmax(-1), lambda x: x.shape, lambda x: x[0], lambda x: x + 1):
            with pytest.raises(SealedLogitsError, match="call `.whole\\(\\)` on all ranks"):
                use(out.logits)
        assert_close(out.logits.whole(), want.logits)
        assert_close(mine(IDS, None, None, None, None, LABELS).loss, want.loss)  # by position

    on_two_ranks(model, plan, work)


FAMILIES = ("llama", "gpt2", "phi3", "gpt_neox", "bert")


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_whole(name: str):
    model, plan = planned(name, "masked" if name == "bert" else "causal")
    want = model(IDS, output_hidden_states=True).hidden_states
    assert len(want) == 3

    def work(mine):
        got = mine(IDS, output_hidden_states=True).hidden_states
        assert len(got) == len(want)
        for n, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_close(a, b, msg=lambda m, n=n: f"hidden state {n}: {m}")

    on_two_ranks(model, plan, work)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_weights_are_refused(name: str):
    model, plan = planned(name, "masked" if name == "bert" else "causal")

    def work(mine):
        with pytest.raises(UsageError) as error:
            mine(IDS, output_attentions=True)
        assert str(error.value) == (
            "output_attentions=True on a split model: each rank computes the attention weights "
            "of its own heads, never those of all: take them from the unsplit model"
        )
        assert mine(IDS, output_attentions=False).logits.shape[:2] == IDS.shape
        mine.config.output_attentions = True
        with pytest.raises(UsageError, match="output_attentions=True"):
            mine(IDS)

    on_two_ranks(model, plan, work)


def test_generate_refuses_attention_weights():
    model, plan = planned("llama")

    def work(mine):
        with pytest.raises(UsageError, match="output_attentions=True"):
            mine.generate(
                IDS, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True
            )

    on_two_ranks(model, plan, work)


def test_tied_weights_are_one_parameter():
    model, plan = planned("llama", tie_word_embeddings=True)

    def work(mine):
        assert mine.lm_head.weight is mine.model.embed_tokens.weight
        assert mine.lm_head.weight.shape == model.lm_head.weight.shape
        assert mine.lm_head.weight.to_local().numel() == model.lm_head.weight.numel() // 2
        names = [n for n, _ in mine.named_parameters()]
        assert names == [n for n, _ in model.named_parameters()]
        optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)  # twice the same is a warning
        (group,) = optimizer.param_groups
        assert len({id(p) for p in group["params"]}) == len(group["params"]) == len(names)

    on_two_ranks(model, plan, work)


def test_the_model_keeps_its_name():
    model, plan = planned("llama")

    def work(mine):
        assert type(mine).__name__ == type(model).__name__
        assert isinstance(mine, type(model))
        assert mine.state_dict().keys() == model.state_dict().keys()

    on_two_ranks(model, plan, work)
