"""The whole way as a user goes it: plan, torchrun, load, generate, train, save."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig

from benchmarks.demo_compute import embed
from benchmarks.demo_models import published_encoder
from benchmarks.forked import run_forked
from tests import planning

from .as_main import as_main

LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=160,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    initializer_range=0.1,
    eos_token_id=None,
    architectures=["LlamaForCausalLM"],
)
# A vocabulary that does not divide, tied to the head, in a model that is otherwise small.
GPT2 = GPT2Config(
    n_embd=16,
    n_layer=2,
    n_head=4,
    n_positions=64,
    vocab_size=50257,
    initializer_range=0.1,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    eos_token_id=None,
    bos_token_id=None,
    architectures=["GPT2LMHeadModel"],
)


def run(what: str, *paths: Path, ranks: int) -> None:
    """`worker.py` on ranks that are forked, with the environment of torchrun."""
    given = ("tests.end_to_end.worker", [what, *map(str, paths)])
    for end in run_forked(ranks, as_main, given, paths[-1]):
        assert end.how == "well", (end.text, end.log)


@pytest.mark.parametrize(
    ("config", "sequence_parallel"),
    [(LLAMA, False), (LLAMA, True), (GPT2, False)],
    ids=["llama", "llama-sequence-parallel", "vocabulary-50257"],
)
def test_a_decoder_on_two_ranks(config, sequence_parallel, tmp_path: Path):
    torch.manual_seed(0)
    checkpoint, plan = tmp_path / "checkpoint", tmp_path / "plan.json"
    model = AutoModelForCausalLM.from_config(config)
    for p in model.parameters():  # biases too, and norms that are not all ones
        torch.nn.init.normal_(p.data, 1.0 if p.dim() == 1 and p.min() == 1 else 0.0, 0.1)
    model.save_pretrained(checkpoint, max_shard_size="200KB")
    made = planning.plan(checkpoint, tp=2, time_limit=10, sequence_parallel=sequence_parallel)
    assert ("?, ?@tp, 64" in made.to_json()) == sequence_parallel
    # Rows of the embedding split, which for a vocabulary of 50257 are not equally many.
    assert config is LLAMA or "50257@tp" in made.to_json()
    made.save(plan)
    run("decoder", checkpoint, plan, tmp_path, ranks=2)

    want = load_file(tmp_path / "want.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(again) is type(model)
    got = dict(again.named_parameters())
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name].detach(), tensor, rtol=0, atol=1e-4)


def test_a_published_encoder(tmp_path: Path):
    """On three ranks, so that heads are not split evenly."""
    checkpoint = published_encoder()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sentences = ["Split by three.", "A longer sentence, so that the other one is padded."]
    inputs = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
    want = embed(AutoModel.from_pretrained(checkpoint).eval(), inputs)
    save_file(inputs, tmp_path / "inputs.safetensors")
    save_file({"embeddings": want}, tmp_path / "want.safetensors")
    plan = planning.plan(checkpoint, tp=3, time_limit=10)
    assert max(plan.predicted.parameter_bytes) < 1.03 * plan.predicted.unsharded_bytes / 3
    plan.save(tmp_path / "plan.json")
    run("encoder", checkpoint, tmp_path / "plan.json", tmp_path, ranks=3)
