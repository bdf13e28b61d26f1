"""A real transformers model, split by hand: logits, loss, gradients, generate(), torch.compile."""
# pyright: reportAttributeAccessIssue=false

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.runtime.boundary.root import wrap_root
from shardwright.runtime.communication.audit import count_collectives, counts
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.logits.split_logits import SplitLogits
from shardwright.runtime.modules.layers import apply_module
from shardwright.runtime.modules.parameters import LocalTensors
from shardwright.runtime.state.gather import full_tensors
from tests.ranks import run_ranks
from tests.runtime.test_layers import plan

WIDTH, HEADS, KV, DIM, INNER, VOCAB, LAYERS = 16, 4, 2, 4, 24, 33, 2


def make() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        intermediate_size=INNER,
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()


def specs():
    """One all-reduce for the embedding, two a layer; k and v in the order of their heads."""
    x = f"?, ?, {WIDTH}"
    enter = [("hidden_states", x, f"{x} | grad-partial tp")]
    leave = [("", f"{x} | partial tp", x)]
    out = {
        "model.embed_tokens": plan(
            "VocabParallelEmbedding", {"weight": f"{VOCAB}@tp, {WIDTH}"}, outputs=leave
        ),
        "lm_head": plan(
            "ColumnParallelLinear",
            {"weight": f"{VOCAB}@tp, {WIDTH}"},
            [("input", x, f"{x} | grad-partial tp")],
            [("", f"?, ?, {VOCAB}@tp", f"?, ?, {VOCAB}")],
        ),
    }
    for n in range(LAYERS):
        layer = f"model.layers.{n}."
        rows = {
            "self_attn.q_proj": f"{KV}@tp*{HEADS // KV * DIM}",
            "self_attn.k_proj": f"{KV}@tp*{DIM}",
            "self_attn.v_proj": f"{KV}@tp*{DIM}",
            "mlp.gate_proj": f"{INNER}@tp",
            "mlp.up_proj": f"{INNER}@tp",
        }
        for name, dim in rows.items():
            out[layer + name] = plan("ColumnParallelLinear", {"weight": f"{dim}, {WIDTH}"})
        for name, dim in (("self_attn.o_proj", f"{KV}@tp*8"), ("mlp.down_proj", f"{INNER}@tp")):
            out[layer + name] = plan(
                "RowParallelLinear", {"weight": f"{WIDTH}, {dim}"}, outputs=leave
            )
        out[layer + "self_attn"] = plan(inputs=enter)
        out[layer + "mlp"] = plan(inputs=[("x", x, f"{x} | grad-partial tp")])
    return out


def split(model, mesh: Mesh):
    model, tensors = copy.deepcopy(model), LocalTensors()
    for name, spec in specs().items():
        module = model.get_submodule(name)
        apply_module(module, spec, mesh, tensors=tensors, path=name, defer=name == "lm_head")
    tensors.check_ties(model)
    wrap_root(model)
    return model


IDS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
LABELS = torch.where(torch.arange(7) < 2, -100, IDS)


def test_logits_loss_gradients():
    model = make()
    want = model(IDS, labels=LABELS)
    want.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}

    def work(mesh):
        mine = split(model, mesh)
        assert {n: p.shape for n, p in mine.named_parameters()}.keys() == grads.keys()
        torch.testing.assert_close(mine(IDS).logits, want.logits)
        with count_collectives() as calls:
            out = mine(IDS, labels=LABELS)
            out.loss.backward()
        assert isinstance(out.logits, SplitLogits)
        torch.testing.assert_close(out.loss, want.loss)
        got = full_tensors(mine, {n: p.grad for n, p in mine.named_parameters()})
        for name, grad in grads.items():
            torch.testing.assert_close(got[name], grad, msg=lambda m, n=name: f"{n}: {m}")
        return counts(calls)

    # Forward: embedding, 2 a layer, 2 of the loss. Backward: 2 a layer, the head.
    assert run_ranks(2, work) == [{"all_reduce": 1 + 2 * LAYERS + 2 + 2 * LAYERS + 1}] * 2


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_generate(options):
    model = make()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **options}
    want = model.generate(IDS, **options)
    for got in run_ranks(2, lambda mesh: split(model, mesh).generate(IDS, **options)):
        assert torch.equal(got, want)


def test_compile():
    model = make()
    want = model(IDS, labels=LABELS, use_cache=False)

    def work(mesh):
        torch._dynamo.reset()
        mine = torch.compile(split(model, mesh), fullgraph=True, backend="aot_eager")
        out = mine(IDS, labels=LABELS, use_cache=False)
        torch.testing.assert_close(out.loss, want.loss)
        out.loss.backward()

    run_ranks(2, work)


def test_an_optimizer_step_equals_the_whole():
    model = make()

    def step(m, **options):
        adam = torch.optim.AdamW(m.parameters(), lr=1e-2)
        for _ in range(2):
            adam.zero_grad()
            m(IDS, labels=LABELS).loss.backward()
            adam.step()
        names = [n for n, _ in m.named_parameters()]
        state = [adam.state[p] for p in m.parameters()]
        return {n: s["exp_avg"] for n, s in zip(names, state, strict=True)}

    whole = copy.deepcopy(model)
    moments = step(whole)

    def work(mesh):
        mine = split(model, mesh)
        got = full_tensors(mine, step(mine))
        values = full_tensors(mine, dict(mine.named_parameters()))
        for name, value in whole.named_parameters():
            torch.testing.assert_close(values[name], value.detach())
            torch.testing.assert_close(got[name], moments[name])

    run_ranks(2, work)
