"""Split models of quantized checkpoints, against one process with the same numbers."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

import shardwright
from benchmarks.quantize import DENSE, quantize
from shardwright.errors import CheckpointError
from shardwright.planner.contract.mesh import replicas
from shardwright.planner.contract.plan_file import Plan
from shardwright.planner.report.quantized_cuts import stored_in_words
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.quantized.kept import KeptWeight
from shardwright.runtime.quantized.layout import computed
from tests import planning
from tests.ranks import copy_number, run_ranks

COMMON = {"hidden_size": 56, "num_hidden_layers": 2, "vocab_size": 96, "tie_word_embeddings": False}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    # 7 blocks of 8 columns, 9 of rows; key heads fewer than ranks
    "dense": lambda: LlamaConfig(
        **COMMON, intermediate_size=72, num_attention_heads=7, num_key_value_heads=1, head_dim=8
    ),
    "mixture": lambda: MixtralConfig(
        **COMMON,
        intermediate_size=40,
        num_attention_heads=7,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=5,
        num_experts_per_tok=2,
    ),
    "fused and tied": lambda: GPT2Config(n_embd=56, n_layer=2, n_head=7, vocab_size=96),
}
LOCK = Lock()
IDS = torch.arange(1, 15).view(2, 7)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Return a quantized checkpoint, and the unsplit model with the same numbers."""

    def make(name: str, how: str, eager: bool = False) -> tuple[Path, Any]:
        torch.manual_seed(0)
        grouped = name == "mixture" and not eager  # torch's grouped product has no float64
        dtype = torch.float32 if grouped else torch.float64
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
        model.save_pretrained(tmp_path)
        dense = quantize(tmp_path, how, (9, 7))
        whole = AutoModelForCausalLM.from_pretrained(dense, dtype=dtype).eval()
        if eager:
            whole.set_experts_implementation("eager")
        return tmp_path, whole

    return make


def close(found: torch.Tensor, expected: torch.Tensor, exact: float = 1e-9) -> None:
    exact = exact if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=0, atol=exact)


def split(directory: Path, plan: Plan, mesh: Mesh, **options: Any) -> Any:
    return shardwright.load(directory, plan, mesh=mesh.device_mesh, **options)


def saved_and_logits(directory: Path, plan: Plan, out: Path, ranks: int) -> torch.Tensor:
    """Load the model on ranks, save it in `out`, and return its logits."""

    def run(mesh: Mesh) -> torch.Tensor:
        model = split(directory, plan, mesh)
        shardwright.save(model, out)
        return model(IDS).logits

    return run_ranks(ranks, run)[0]


def assert_stored_alike(directory: Path, out: Path) -> None:
    """Compare the bytes of a quantized mixture's weights and scales."""
    before, after = (load_file(at / "model.safetensors") for at in (directory, out))
    quantized = {name: t for name, t in before.items() if "scale" in name or "experts" in name}
    assert len(quantized) > 50
    for name, tensor in quantized.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("how", ["fp8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_one_process(saved: Any, name: str, how: str, tp: int) -> None:
    directory, whole = saved(name, how)
    plan = planning.plan(directory, tp=tp)
    assert plan.workload.quantized is not None
    expected = whole(IDS).logits
    tokens = whole.generate(IDS, max_new_tokens=4, do_sample=False)

    def run(mesh: Mesh) -> Any:
        kept = split(directory, plan, mesh)
        dense = split(directory, plan, mesh, dequantize=True)
        logits = [model(IDS).logits for model in (kept, dense)]
        report = kept.shardwright_report, dense.shardwright_report
        return logits, kept.generate(IDS, max_new_tokens=4, do_sample=False), report

    for rank, (logits, generated, (kept, dense)) in enumerate(run_ranks(tp, run)):
        for found in logits:
            close(found, expected)
        assert torch.equal(generated, tokens)
        assert kept.read <= dense.read * 1.05  # the second is read in pieces, with common scales
        assert kept.held <= plan.predicted.parameter_bytes[rank] * 1.5  # blocks here are tiny


@pytest.mark.parametrize(
    ("how", "dims"), [("fp8", {"ep": 2, "tp": 2}), ("int4", {"dp": 2, "ep": 2, "tp": 1})]
)
def test_experts_over_ranks(
    saved: Any, how: str, dims: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Five experts on two ranks: logits, the gradients of embeddings, and what is saved."""
    directory, whole = saved("mixture", how, eager=True)
    rows = torch.randint(96, (8, 7), generator=torch.Generator().manual_seed(0))
    copies = replicas(dims)
    plan, out = planning.plan(directory, mesh=dims, dtype="float32"), tmp_path_factory.mktemp("out")
    assert plan.workload.quantized is not None
    assert all(spec.dispatch for name, spec in plan.modules.items() if name.endswith("experts"))
    expected = whole(rows).logits
    expected.square().sum().backward()

    def run(mesh: Mesh) -> Any:
        model = split(directory, plan, mesh, experts_implementation="eager", dtype=torch.float64)
        stacks = {name: p for name, p in model.named_parameters() if "experts" in name}
        assert all(isinstance(p._local_tensor, KeptWeight) for p in stacks.values())
        part = copy_number(mesh)
        logits = model(rows.chunk(copies)[part]).logits
        logits.square().sum().backward()
        shardwright.save(model, out)
        name = "model.embed_tokens.weight"
        grads = {name: model.get_parameter(name).grad}
        return part, logits, shardwright.full_tensors(model, grads)[name]

    found = run_ranks(prod(dims.values()), run, dims)
    for part, logits, _ in found:
        close(logits, expected.chunk(copies)[part])
    by_part = {part: grad for part, _, grad in found}
    # The router computes in float32, and what its rounding does is in the gradient.
    close(torch.stack([*by_part.values()]).sum(0), whole.get_input_embeddings().weight.grad, 1e-5)
    assert_stored_alike(directory, out)


def test_one_expert_of_a_stack_is_computed_alone(saved: Any) -> None:
    directory, _ = saved("mixture", "fp8")
    plan = planning.plan(directory, tp=1)
    sizes: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        out = computed(*args)
        sizes.append(out.numel())
        return out

    def run(mesh: Mesh) -> None:
        model = split(directory, plan, mesh)
        stack = model.model.layers[0].mlp.experts.gate_up_proj
        with mock.patch("shardwright.runtime.quantized.layout.computed", counted):
            one = stack[3]
        assert sum(sizes) == one.numel() == stack.numel() // 5
        assert torch.equal(one, stack._local_tensor.dense()[3])

    run_ranks(1, run)


def test_adapters_train_over_frozen_weights(saved: Any) -> None:
    directory, whole = saved("dense", "int4")
    plan = planning.plan(directory, tp=2, phase="train")
    norms = [name for name, _ in whole.named_parameters() if "norm" in name]
    whole(IDS, labels=IDS).loss.backward()
    expected = {name: whole.get_parameter(name).grad for name in norms}

    def run(mesh: Mesh) -> Any:
        model = split(directory, plan, mesh).train()
        weights = dict(model.named_parameters())
        quantized = [w for w in weights.values() if isinstance(w._local_tensor, KeptWeight)]
        assert quantized and not any(w.requires_grad for w in quantized)
        model(IDS, labels=IDS).loss.backward()
        return {name: weights[name].grad.full_tensor() for name in norms}

    for found in run_ranks(2, run):
        for name, gradient in expected.items():
            close(found[name], gradient, 1e-7)  # the loss is computed in float32


def adapted(model: Any) -> Any:
    """Add adapters with the same numbers to a split or an unsplit model."""
    config = LoraConfig(target_modules=["q_proj", "o_proj", "down_proj"], r=3)
    torch.manual_seed(1)
    with shardwright.adding_adapters():
        model = get_peft_model(model, config, autocast_adapter_dtype=False).double()
    for number, (_, p) in enumerate(n for n in model.named_parameters() if "lora_" in n[0]):
        torch.nn.init.normal_(p, 0.0, 0.1, torch.Generator().manual_seed(number))
    return model


def test_lora_trains_over_quantized_weights(saved: Any) -> None:
    directory, whole = saved("dense", "int4")
    plan = planning.plan(directory, tp=2, phase="train")
    with LOCK:
        whole = adapted(whole)
    whole(input_ids=IDS, labels=IDS).loss.backward()
    expected = {n: p.grad for n, p in whole.named_parameters() if "lora_" in n}
    assert len(expected) == 12

    def run(mesh: Mesh) -> Any:
        model = split(directory, plan, mesh)
        with LOCK:  # peft's own state
            model = adapted(model)
        model(input_ids=IDS, labels=IDS).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if "lora_" in n}

    for found in run_ranks(2, run):
        for name, gradient in expected.items():
            close(found[name], gradient, 1e-7)  # the loss is computed in float32


def test_saved_dense(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory, whole = saved("mixture", "fp8")
    plan, out = planning.plan(directory, tp=2), tmp_path_factory.mktemp("out")

    def run(mesh: Mesh) -> None:
        shardwright.save(split(directory, plan, mesh), out, dequantize=True)

    run_ranks(2, run)
    again = AutoModelForCausalLM.from_pretrained(out)
    assert not hasattr(again.config, "quantization_config")
    close(again(IDS).logits, whole(IDS).logits)


@pytest.mark.parametrize("how", ["fp8", "int4"])
def test_saved_as_stored(saved: Any, how: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory, _ = saved("mixture", how)
    plan, out = planning.plan(directory, tp=3), tmp_path_factory.mktemp("out")
    run_ranks(3, lambda mesh: shardwright.save(split(directory, plan, mesh), out))
    assert_stored_alike(directory, out)
    configs = [json.loads((at / "config.json").read_text()) for at in (directory, out)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    first, again = (
        run_ranks(3, lambda mesh, at=at: split(at, plan, mesh)(IDS).logits)[0]  # type: ignore[misc]
        for at in (directory, out)
    )
    assert torch.equal(first, again)


def test_an_expert_that_is_not_quantized_is_saved_as_it_is(
    saved: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory, whole = saved("mixture", "int4")
    file = "model.safetensors"
    tensors, dense = load_file(directory / file), load_file(directory / DENSE / file)
    (name,) = (key for key in dense if "layers.0" in key and "experts.3.w1" in key)
    mixed = {key: t for key, t in tensors.items() if not key.startswith(name)}
    save_file({**mixed, name: dense[name]}, directory / file, metadata={"format": "pt"})
    plan, out = planning.plan(directory, tp=3), tmp_path_factory.mktemp("out")
    close(saved_and_logits(directory, plan, out, 3), whole(IDS).logits)
    assert torch.equal(load_file(out / file)[name], dense[name])
    assert_stored_alike(directory, out)


def test_explain_says_where_cuts_fall(saved: Any) -> None:
    """The 72 rows of a projection in blocks of 8 on 3 ranks: 24 each; on 4: 18, 36 and 54."""
    directory, _ = saved("dense", "fp8")
    said = [
        stored_in_words(planning.plan(directory, tp=tp), "model.layers.0.mlp.up_proj.weight")
        for tp in (1, 3, 4)
    ]
    assert all(text and "a scale for 8 x 11" in text for text in said)
    assert said[0] and "cut" not in said[0]
    assert said[1] and said[1].endswith("all cuts fall between blocks")
    assert said[2] and "3 of 3 cuts fall inside a block" in said[2]


def test_planned_by_stored_bytes(saved: Any) -> None:
    directory, _ = saved("dense", "fp8")
    kept, dense = planning.plan(directory, tp=2), planning.plan(directory, tp=2, dequantize=True)
    assert dense.workload.quantized is None
    assert kept.predicted.unsharded_bytes < dense.predicted.unsharded_bytes
    files = [*directory.glob("*.safetensors")]
    stored = sum(file.stat().st_size for file in files)
    assert kept.predicted.unsharded_bytes == pytest.approx(stored, rel=0.5)
    assert (directory / DENSE).is_dir()


def test_a_format_that_cannot_be_is_refused_by_plan(saved: Any) -> None:
    directory, _ = saved("dense", "int4")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 3}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"cannot be stored .* of GPTQ: elements of 3 bits"):
        planning.plan(directory, tp=2)


def test_what_packages_store_beside_weights(
    saved: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Scales of KV caches are saved again; biases of zeros that the model lacks are not read."""
    directory, whole = saved("dense", "fp8")
    file, layer = directory / "model.safetensors", "model.layers.0."
    scales = {
        f"{layer}self_attn.{name}": torch.tensor([0.5 + at])
        for at, name in enumerate(("k_scale", "v_scale", "k_proj.k_scale", "v_proj.output_scale"))
    }
    bias = {f"{layer}mlp.up_proj.bias": torch.zeros(72)}
    tensors = load_file(file)
    save_file({**tensors, **scales, **bias}, file, metadata={"format": "pt"})
    plan, out = planning.plan(directory, tp=2), tmp_path_factory.mktemp("out")
    close(saved_and_logits(directory, plan, out, 2), whole(IDS).logits)
    after = load_file(out / file.name)
    assert all(torch.equal(after[name], scale) for name, scale in scales.items())
    assert not bias.keys() & after.keys()
    bias[f"{layer}mlp.up_proj.bias"][3] = 1.0
    save_file({**tensors, **bias}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no place for: model.layers.0.mlp.up_proj.bias"):
        saved_and_logits(directory, plan, out, 2)
