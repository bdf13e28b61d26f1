"""Models that ranks do not divide, and split sequences, each compared on real ranks.

The models for heads are llamas with torch's own norms. The norms of transformers compute in float32
whatever the dtype, so that sums in another order differ by a float32 rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.compare import badness, compare, of_all, predicted, reference
from benchmarks.loading import local_tensors
from benchmarks.zoo_case import EXACT, FIGURES, case
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests import planning, zoo

HEADS, SEQUENCE = "heads", "sequence"
WIDTH, BATCH = 8, 2
ROOM = {"batch": 64, "seq": 1024, "memory": 2**40}
"""A workload and a memory limit with which time, not bytes, decides."""
KEYED = {**ROOM, "pins": {"model.layers.*.self_attn.k_proj.weight": "shard:0"}}
"""The same with the keys split: otherwise a plan could replicate all of these few keys."""


class Heads(NamedTuple):
    """A model, how it is planned, and the expected placement of its query and key weights."""

    tp: int
    heads: int
    keys: int
    vocabulary: int
    options: dict[str, Any]
    query: str
    key: str


CASES = {
    "2 kv heads over 4": Heads(4, 8, 2, 131, {}, "2@tp.0*4@tp.1*8, 64", "2@tp.0*8, 64"),
    "6 heads over 4": Heads(4, 6, 6, 131, ROOM, "6@tp*8, 48", "6@tp*8, 48"),
    "10 kv heads over 4": Heads(4, 40, 10, 131, ROOM, "10@tp.0*4@tp.1*8, 320", "10@tp.0*8, 320"),
    "2 kv heads over 8": Heads(8, 32, 2, 131, KEYED, "2@tp.0*16@tp.1*8, 256", "2@tp.0*8, 256"),
    "4 kv heads over 8": Heads(8, 32, 4, 131, KEYED, "4@tp.0*8@tp.1*8, 256", "4@tp.0*8, 256"),
    "50257 words over 4": Heads(4, 4, 4, 50257, {}, "4@tp*8, 32", "4@tp*8, 32"),
    "50257 words over 8": Heads(8, 8, 8, 50257, {}, "8@tp*8, 64", "8@tp*8, 64"),
}
FUSED = "gpt2: 6 heads and 50257 words over 4"
SEQUENCES = {
    f"{name}, {length} tokens": (name, length)
    for name in ("llama", "gpt2", "gemma2")
    for length in (16, 19)
}


def jobs(tp: int) -> list[tuple[str, str]]:
    """Return the kind and name of each case on this many ranks."""
    out = [(HEADS, name) for name, of in CASES.items() if of.tp == tp]
    out += [(HEADS, FUSED)] if tp == 4 else []
    return out + [(SEQUENCE, name) for name in SEQUENCES if tp in (2, 4)]


def llama(heads: int, keys: int, vocabulary: int = 131, layers: int = 2) -> nn.Module:
    """Build a tiny float64 llama with weights that show a mistake in the logits."""
    config = LlamaConfig(
        hidden_size=WIDTH * heads,
        head_dim=WIDTH,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
    )
    model = LlamaForCausalLM(config).double().eval()
    for name in [n for n, _ in model.named_modules()]:
        if name.endswith("norm"):
            owner, _, leaf = name.rpartition(".")
            norm = nn.RMSNorm(WIDTH * heads, 1e-6, dtype=torch.float64)
            setattr(model.get_submodule(owner), leaf, norm)
    return redrawn(model)


def gpt2() -> nn.Module:
    """Build a tiny float64 gpt2: query, key and value in one weight, none of which 4 divides."""
    config = GPT2Config(n_embd=6 * WIDTH, n_head=6, n_layer=2, vocab_size=50257)
    return redrawn(GPT2LMHeadModel(config).double().eval())


def redrawn(model: nn.Module) -> nn.Module:
    """Draw the weights again, the same on every rank."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, parameter.shape[-1] ** -0.5)
    return model


def words(vocabulary: int, length: int = 13) -> dict[str, Any]:
    """Return token ids from all of a vocabulary."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (BATCH, length), generator=generator)
    return {"input_ids": ids, "use_cache": False}


class Prepared(NamedTuple):
    """A model, its inputs, its planning options, and its tolerance."""

    model: nn.Module
    inputs: dict[str, Any]
    options: Mapping[str, Any]
    tolerance: float


def prepared(kind: str, name: str) -> Prepared:
    """Return the model of a case."""
    if kind == SEQUENCE:
        architecture, length = SEQUENCES[name]
        whole = case("causal", architecture)
        inputs = zoo.inputs(architecture, whole.model.config, batch=BATCH, seq=length)
        options = {"batch": BATCH, "seq": length, "sequence_parallel": True}
        return Prepared(whole.model, inputs, options, whole.tolerance)
    if name == FUSED:
        return Prepared(gpt2(), words(50257), ROOM, EXACT)
    of = CASES[name]
    model = llama(of.heads, of.keys, of.vocabulary)
    return Prepared(model, words(of.vocabulary), of.options, EXACT)


def compared(kind: str, name: str, rank: int, tp: int, mesh: Mesh) -> dict[str, Any]:
    """Plan, split and compare a case on all ranks; each returns the same row."""
    model, inputs, options, tolerance = prepared(kind, name)
    expected = reference(model, inputs)
    plan = _planned(model, tp, options, rank)
    if name in CASES:
        of = CASES[name]
        assert (placement(plan, "q_proj"), placement(plan, "k_proj")) == (of.query, of.key)
    found = compare(model, inputs, plan, mesh, expected)
    every = of_all(found, tp)
    row: dict[str, Any] = {"kind": kind, "name": name, "tp": tp, "tolerance": tolerance}
    for key in FIGURES:
        figures = [getattr(one, key) for one in every]
        row[key] = None if None in figures else max(figures, key=badness)
    row |= {"forward": dict(found.forward), "backward": dict(found.backward)}
    row["as_predicted"] = all(
        predicted(plan) == {"forward": dict(one.forward), "backward": dict(one.backward)}
        for one in every
    )
    if kind == SEQUENCE:
        whole = _planned(model, tp, {**options, "sequence_parallel": False}, rank)
        row["kept"] = max(of_all(kept_bytes(model, plan, inputs, mesh), tp))
        row["kept_without"] = max(of_all(kept_bytes(model, whole, inputs, mesh), tp))
    return row


def placement(plan: Plan, module: str) -> str:
    """Return the placement of the weight of the modules of that name, equal in all of them."""
    (found,) = {
        spec.parameters["weight"].placement
        for name, spec in plan.modules.items()
        if name.rpartition(".")[2] == module
    }
    return found


def kept_bytes(
    model: nn.Module, plan: Plan | None, given: Mapping[str, Any], mesh: Mesh | None = None
) -> int:
    """Return the bytes that autograd saves on this rank for the backward pass, without parameters.

    Without a plan and a mesh, measure the unsharded model.
    """
    local = copy.deepcopy(model)
    if plan is not None and mesh is not None:
        apply(local, plan, mesh)
    own = {p.untyped_storage().data_ptr() for p in local_tensors(local)}
    found: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        output = local(**given)  # kept until all is counted, so that no address is reused
    assert output is not None
    return sum(found.values())


def passed(row: Mapping[str, Any]) -> bool:
    """Return whether all is equal and complete, and a split sequence saves fewer bytes."""
    if "error" in row:
        return False
    # Written so that NaN fails.
    equal = all(row[key] is not None and row[key] <= row["tolerance"] for key in FIGURES)
    return equal and row["as_predicted"] and row.get("kept", 0) < row.get("kept_without", 1)


def _planned(model: nn.Module, tp: int, options: Mapping[str, Any], rank: int) -> Plan:
    """Return the plan that rank 0 makes."""
    box = [planning.proven(model, tp=tp, **options).to_json() if rank == 0 else ""]
    dist.broadcast_object_list(box)
    return Plan.from_json(box[0])
