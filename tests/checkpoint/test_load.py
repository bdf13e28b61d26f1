"""Whole models from checkpoints, against transformers' own loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BertForMaskedLM, BertModel, GPT2LMHeadModel, GPT2Model, LlamaForCausalLM

from shardwright.errors import CheckpointError, PlanError
from shardwright.planner.contract.dims import local_ranges
from shardwright.planner.contract.notation import parse
from shardwright.runtime.checkpoint.load import load_weights
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.model.build import empty_model
from tests.checkpoint.make import (
    bert_config,
    gpt2,
    gpt2_config,
    llama,
    llama_config,
    randomized,
    write,
)


def load(cls: type[Any], config: Any, directory: Path, **options: Any) -> Any:
    model = empty_model(cls, config)
    load_weights(model, Checkpoint.open(directory), {}, {}, **options)
    return model.eval()


def same(a: nn.Module, b: nn.Module) -> None:
    expected = b.state_dict()
    got = a.state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
        assert got[name].dtype == tensor.dtype


@pytest.mark.parametrize("size", ["1GB", "10KB"])
def test_llama(tmp_path: Path, size: str) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size=size)
    got = load(LlamaForCausalLM, llama_config(), tmp_path)
    same(got, model)
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(got(ids).logits, model(ids).logits)


def test_split(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    q, down, norm = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
    )
    placements = {
        q: parse("4@tp*8, 32"),
        down: parse("32, 48@tp"),
        norm: parse("32 | grad-partial tp"),
    }
    whole = model.state_dict()
    for rank in range(2):
        got = empty_model(LlamaForCausalLM, llama_config())
        coords = {"tp": (rank, 2)}
        report = load_weights(got, Checkpoint.open(tmp_path), placements, coords)
        parts = dict(got.named_parameters())
        assert torch.equal(parts[q], whole[q].chunk(2)[rank])
        assert torch.equal(parts[down], whole[down].chunk(2, 1)[rank])
        assert torch.equal(parts[norm], whole[norm])
        assert report.held == report.read == sum(p.nbytes for p in got.parameters())
        assert report.tensors == len(list(got.parameters()))


def test_dtype_and_device(tmp_path: Path) -> None:
    model = llama().bfloat16()
    model.save_pretrained(tmp_path)
    kept = load(LlamaForCausalLM, llama_config(), tmp_path)
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}
    assert kept.model.rotary_emb.inv_freq.dtype == torch.float32  # not in the checkpoint: untouched
    cast = load(LlamaForCausalLM, llama_config(), tmp_path, dtype=torch.float32, device="cpu:0")
    same(cast, model.float())


def test_parameters_keep_what_they_carry(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = empty_model(LlamaForCausalLM, llama_config())
    model.model.norm.weight.requires_grad_(False)
    setattr(model.model.norm.weight, "note", "kept")  # noqa: B010
    load_weights(model, Checkpoint.open(tmp_path), {}, {})
    assert not model.model.norm.weight.requires_grad
    assert vars(model.model.norm.weight)["note"] == "kept"
    assert model.lm_head.weight.requires_grad


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_with_and_without_prefix(tmp_path: Path, prefix: str) -> None:
    """Old checkpoints lack 'transformer.' and hold the causal masks."""
    model = gpt2()
    tensors = {
        name.replace("transformer.", prefix): tensor
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    tensors[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril().bool()
    write(tmp_path, tensors)
    got = load(GPT2LMHeadModel, gpt2_config(), tmp_path)
    same(got, model)
    assert got.lm_head.weight is got.transformer.wte.weight
    base = load(GPT2Model, gpt2_config(), tmp_path)
    same(base, model.transformer)


def test_tied(tmp_path: Path) -> None:
    model = gpt2()
    tensors = dict(model.state_dict())
    embedding = tensors.pop("transformer.wte.weight")
    write(tmp_path / "head", tensors)  # only under the other name
    same(load(GPT2LMHeadModel, gpt2_config(), tmp_path / "head"), model)
    tensors["transformer.wte.weight"] = embedding.clone()
    write(tmp_path / "both", tensors)
    got = load(GPT2LMHeadModel, gpt2_config(), tmp_path / "both")
    assert got.lm_head.weight is got.transformer.wte.weight
    tensors["transformer.wte.weight"][1, 1] += 1
    write(tmp_path / "apart", tensors)
    with pytest.raises(
        CheckpointError, match=r"differ, but GPT2LMHeadModel ties .* tie_word_embeddings"
    ):
        load(GPT2LMHeadModel, gpt2_config(), tmp_path / "apart")
    del tensors["transformer.wte.weight"], tensors["lm_head.weight"]
    write(tmp_path / "none", tensors)
    with pytest.raises(CheckpointError, match=r"lacks 1 of .*: transformer\.wte\.weight"):
        load(GPT2LMHeadModel, gpt2_config(), tmp_path / "none")


def test_tied_placements(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path)
    placement = parse("53@tp, 32")
    coords = {"tp": (1, 2)}
    (rows,) = local_ranges(placement.dims[0], coords)
    for name in ("lm_head.weight", "transformer.wte.weight"):
        got = empty_model(GPT2LMHeadModel, gpt2_config())
        load_weights(got, Checkpoint.open(tmp_path), {name: placement}, coords)
        assert torch.equal(got.lm_head.weight, model.lm_head.weight[slice(*rows)])
        assert got.lm_head.weight is got.transformer.wte.weight
    clash = {"lm_head.weight": placement, "transformer.wte.weight": parse("53, 32")}
    with pytest.raises(PlanError, match="are one parameter, but the plan places it as"):
        load_weights(
            empty_model(GPT2LMHeadModel, gpt2_config()), Checkpoint.open(tmp_path), clash, coords
        )


def test_bert_both_ways(tmp_path: Path) -> None:
    masked = randomized(BertForMaskedLM(bert_config()))
    masked.save_pretrained(tmp_path / "masked")
    base = empty_model(BertModel, bert_config(), add_pooling_layer=False)
    report = load_weights(base, Checkpoint.open(tmp_path / "masked"), {}, {})
    same(base, masked.bert)
    assert report.unread
    assert all(name.startswith("cls.") for name in report.unread)
    with pytest.raises(CheckpointError, match=r"lacks 2 of .* BertModel: pooler\.dense\.weight"):
        load(BertModel, bert_config(), tmp_path / "masked")

    base = randomized(BertModel(bert_config()))
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(
        CheckpointError, match=r"lacks 5 of .*: cls\..* holds 2 tensors .* pooler\."
    ):
        load(BertForMaskedLM, bert_config(), tmp_path / "base")
    head = {
        n: t.clone()
        for n, t in masked.state_dict().items()
        if n.startswith("cls.") and "decoder" not in n
    }
    write(tmp_path / "joined", {**load_file(tmp_path / "base" / "model.safetensors"), **head})
    with pytest.raises(
        CheckpointError, match="holds 2 tensors that BertForMaskedLM has no place for"
    ):
        load(BertForMaskedLM, bert_config(), tmp_path / "joined")
    got = load(BertForMaskedLM, bert_config(), tmp_path / "joined", allow_surplus=True)
    name = "encoder.layer.1.output.dense.weight"
    assert torch.equal(got.bert.get_parameter(name), base.get_parameter(name))


def test_old_layer_norm_names(tmp_path: Path) -> None:
    masked = randomized(BertForMaskedLM(bert_config()))
    masked.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): t
        for n, t in tensors.items()
    }
    assert old.keys() != tensors.keys()
    old["bert.embeddings.position_ids"] = torch.arange(32)[None]  # once kept, now computed
    write(tmp_path, old)
    same(load(BertForMaskedLM, bert_config(), tmp_path), masked)


def test_wrong_config(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"has shape \[32, 48\], .* has \[32, 64\]: use the config"
    ):
        load(LlamaForCausalLM, llama_config(intermediate_size=64), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"holds 9 tensors that LlamaForCausalLM .*layers\.1\."
    ):
        load(LlamaForCausalLM, llama_config(num_hidden_layers=1), tmp_path)


class Lenient(nn.Module):
    """Allows its checkpoint to lack what it can make itself."""

    _keys_to_ignore_on_load_missing = ["steps", "table"]
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.arange(4))


def test_computed_buffer(tmp_path: Path) -> None:
    write(tmp_path, {"weight": torch.full((3,), 2.0)})
    got = empty_model(Lenient)
    load_weights(got, Checkpoint.open(tmp_path), {}, {})
    assert got.weight.tolist() == [2, 2, 2]
    assert got.steps.tolist() == [0, 1, 2, 3]


class Quantized(nn.Module):
    """Buffers that checkpoints hold: one is made of a parameter, one has a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("rounded", torch.zeros_like(self.weight))
        self.register_buffer("offset", torch.zeros(3))


def test_buffers_that_checkpoints_hold(tmp_path: Path) -> None:
    saved = {name: torch.randn(n).double() for name, n in (("weight", 4), ("rounded", 4))}
    write(tmp_path, saved | {"offset": torch.randn(3).double()})
    placed = {"weight": parse("4@tp"), "rounded": parse("4@tp"), "offset": parse("3")}
    for rank in range(2):
        got = empty_model(Quantized)
        load_weights(got, Checkpoint.open(tmp_path), placed, {"tp": (rank, 2)})
        for name, whole in saved.items():
            assert torch.equal(got.state_dict()[name], whole.chunk(2)[rank])
        assert got.state_dict()["offset"].dtype == torch.float32


class Twice(nn.Module):
    """A module under two names, with a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.first.register_buffer("bands", torch.arange(4.0), persistent=False)
        self.second = self.first


def test_a_shared_module_with_a_buffer_that_no_checkpoint_holds(tmp_path: Path) -> None:
    whole = Twice()
    write(tmp_path, dict(whole.first.state_dict(prefix="first.")))
    got = empty_model(Twice)
    load_weights(got, Checkpoint.open(tmp_path), {}, {})
    assert got.second is got.first
    assert torch.equal(got.second.weight, whole.first.weight)
    assert got.get_buffer("second.bands").tolist() == [0, 1, 2, 3]


def test_buffers_go_to_the_device(tmp_path: Path) -> None:
    """Meta stands for a device that tests need not have."""
    model = Quantized()
    write(tmp_path, dict(model.state_dict()))
    got = empty_model(Quantized)
    load_weights(got, Checkpoint.open(tmp_path), {}, {}, device="meta")
    assert all(tensor.is_meta for tensor in got.state_dict().values())


class Initialised(Lenient):
    """A parameter that may be missing too, and what it is then."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.table = nn.Parameter(torch.ones(4, 3))


def test_computed_parameter(tmp_path: Path) -> None:
    class Net(Initialised):
        def _init_weights(self, module: Any) -> None:
            if hasattr(module, "table"):
                module.table.copy_(torch.arange(12).reshape(module.table.shape))

    write(tmp_path, {"weight": torch.ones(3)})
    placed = {"inner.table": parse("4@tp, 3"), "weight": parse("3")}
    for rank in range(2):
        model = empty_model(Net)
        load_weights(model, Checkpoint.open(tmp_path), placed, {"tp": (rank, 2)})
        expected = torch.arange(12.0).reshape(4, 3).chunk(2)[rank]
        assert torch.equal(model.get_parameter("inner.table"), expected)


def test_random_parameter_is_refused(tmp_path: Path) -> None:
    class Random(Initialised):
        def _init_weights(self, module: Any) -> None:
            if hasattr(module, "table"):
                module.table.normal_()

    class Untouched(Initialised):
        def _init_weights(self, module: Any) -> None:
            pass

    write(tmp_path, {"weight": torch.ones(3)})
    for cls in (Random, Untouched, Initialised):
        text = f"lacks inner.table, which {cls.__name__} draws at random where it is missing"
        with pytest.raises(CheckpointError, match=text):
            load_weights(empty_model(cls), Checkpoint.open(tmp_path), {}, {})


def test_sinusoids_that_checkpoints_lack(tmp_path: Path) -> None:
    """For one model, save_pretrained leaves out what the model computes."""
    from tests import zoo

    _, model = zoo.build("marian", kind="seq2seq")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    cls: Any = type(model)
    reference = cls.from_pretrained(tmp_path)
    name = "model.encoder.embed_positions.weight"
    assert name not in Checkpoint.open(tmp_path).tensors
    got = load(cls._from_config, reference.config, tmp_path)
    same(got, reference)


@pytest.mark.parametrize(("kind", "name"), [("masked", "ibert"), ("causal", "glm4_moe")])
def test_buffers_as_transformers_reads_them(tmp_path: Path, kind: str, name: str) -> None:
    """Rounded weights beside the weights; a bias that is float32 in a model of float64."""
    from tests import zoo

    _, model = zoo.build(name, kind=kind)
    model.double().save_pretrained(tmp_path)  # type: ignore[operator]
    cls: Any = type(model)
    reference = cls.from_pretrained(tmp_path, dtype=torch.float64)
    got = empty_model(cls._from_config, reference.config, dtype=torch.float64)
    load_weights(got, Checkpoint.open(tmp_path), {}, {})
    same(got, reference)
