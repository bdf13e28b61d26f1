"""Checkpoints that transformers converts while it loads them, against its own loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import conversion_mapping, core_model_loading

import shardwright
from shardwright.errors import CheckpointError
from shardwright.planner.contract.dims import Atom, Concat, local_ranges
from shardwright.planner.contract.placement import Placement
from shardwright.runtime.boundary.module_boundary import placements
from shardwright.runtime.checkpoint.conversion import Conversions
from shardwright.runtime.checkpoint.load import load_weights
from shardwright.runtime.checkpoint.read import Report
from shardwright.runtime.checkpoint.source import Checkpoint
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.model.build import empty_model
from tests import planning, zoo
from tests.checkpoint.make import llama, llama_config, write
from tests.ranks import run_ranks

EXPERTS = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def saved(name: str, directory: Path, size: str = "1GB") -> tuple[Any, nn.Module]:
    """A tiny model's class, and the model as transformers loads it from where it was saved."""
    _, model = zoo.build(name)
    model.save_pretrained(directory, max_shard_size=size)  # type: ignore[operator]
    return type(model), type(model).from_pretrained(directory)  # type: ignore[attr-defined]


def load(cls: Any, config: Any, directory: Path, rank: int, ranks: int, split: Any) -> Any:
    model = empty_model(cls._from_config, config)
    report = load_weights(model, Checkpoint.open(directory), split, {"tp": (rank, ranks)})
    return model, report


def halves(model: nn.Module, dim: int) -> dict[str, Placement]:
    """Every parameter that has it split along `dim`; a doubled dim (gate|up) half by half."""
    out: dict[str, Placement] = {}
    for name, p in model.named_parameters():
        d = dim % p.ndim if -p.ndim <= dim < p.ndim else None
        dims: list[Any] = [Atom(n) for n in p.shape]
        if d is not None:
            n = p.shape[d]
            split = Atom(n // 2, "tp")
            doubled = "gate_up" in name and n % 2 == 0
            dims[d] = Concat((split, split)) if doubled else Atom(n, "tp")
        out[name] = Placement(tuple(dims))
    return out


def held(whole: Tensor, placement: Placement, rank: int, ranks: int) -> Tensor:
    for d, dim in enumerate(placement.dims):
        ranges = local_ranges(dim, {"tp": (rank, ranks)})
        index = torch.cat([torch.arange(a, b) for a, b in ranges])
        whole = whole.index_select(d, index)
    return whole


def check(cls: Any, reference: Any, directory: Path, ranks: int, dim: int) -> None:
    """Every rank holds its slices of the reference's parameters, and has read no byte more."""
    split = halves(reference, dim)
    whole = dict(reference.named_parameters())
    for rank in range(ranks):
        model, report = load(cls, reference.config, directory, rank, ranks, split)
        parts = dict(model.named_parameters())
        assert parts.keys() == whole.keys()
        for name, tensor in parts.items():
            assert torch.equal(tensor, held(whole[name], split[name], rank, ranks)), name
            assert tensor.is_contiguous()
        stored = sum(t.nbytes for t in [*parts.values(), *_stored_buffers(model)])
        assert report.read == report.held == stored


def _stored_buffers(model: nn.Module) -> list[Tensor]:
    state = model.state_dict()
    return [b for name, b in model.named_buffers() if name in state]


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_stored_one_by_one(tmp_path: Path, name: str, dim: int) -> None:
    cls, reference = saved(name, tmp_path, size="100KB")
    names = Checkpoint.open(tmp_path).tensors
    merged = [n for n in reference.state_dict() if n.endswith(EXPERTS)]
    assert merged
    assert not set(merged) & set(names)
    check(cls, reference, tmp_path, 2, dim)


def test_experts_on_four_ranks(tmp_path: Path) -> None:
    cls, reference = saved("mixtral", tmp_path)
    check(cls, reference, tmp_path, 4, -1)


def test_published_layout(tmp_path: Path) -> None:
    """Per-expert tensors written by hand, in an order of files that is not theirs."""
    cls, model = saved("qwen3_moe", tmp_path / "saved")
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner = name.rpartition(".")[0]
        for k in range(len(tensor) if name.endswith(EXPERTS) else 0):
            if name.endswith("down_proj"):
                tensors[f"{owner}.{k}.down_proj.weight"] = tensor[k].clone()
            else:
                gate, up = tensor[k].chunk(2)
                tensors[f"{owner}.{k}.gate_proj.weight"] = gate.clone()
                tensors[f"{owner}.{k}.up_proj.weight"] = up.clone()
        if not name.endswith(EXPERTS):
            tensors[name] = tensor
    names = sorted(tensors, key=lambda n: n[::-1])
    files = [{n: tensors[n] for n in names[i::3]} for i in range(3)]
    write(tmp_path / "published", *files)
    model.config.save_pretrained(tmp_path / "published")  # type: ignore[union-attr,operator]
    reference = cls.from_pretrained(tmp_path / "published")
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    check(cls, reference, tmp_path / "published", 2, 1)
    check(cls, reference, tmp_path / "published", 2, 0)


def test_more_than_ten_experts_keep_their_order(tmp_path: Path) -> None:
    _, model = zoo.build("mixtral", num_local_experts=12)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    cls: Any = type(model)
    check(cls, cls.from_pretrained(tmp_path), tmp_path, 2, 0)


def test_already_merged(tmp_path: Path) -> None:
    _, model = zoo.build("mixtral")
    model.save_pretrained(tmp_path, save_original_format=False)  # type: ignore[operator]
    assert any(n.endswith(EXPERTS) for n in Checkpoint.open(tmp_path).tensors)
    cls: Any = type(model)
    check(cls, cls.from_pretrained(tmp_path), tmp_path, 2, 1)


def test_dtype(tmp_path: Path) -> None:
    _, model = zoo.build("mixtral")
    model.bfloat16().save_pretrained(tmp_path)  # type: ignore[operator]
    cls: Any = type(model)
    reference = cls.from_pretrained(tmp_path, dtype=torch.float32)
    got = empty_model(cls._from_config, reference.config, dtype=torch.float32)
    load_weights(got, Checkpoint.open(tmp_path), {}, {}, dtype=torch.float32)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name


def test_an_expert_is_missing(tmp_path: Path) -> None:
    cls, reference = saved("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")

    def refused(drop: str, text: str) -> None:
        write(tmp_path, {n: t for n, t in tensors.items() if drop not in n})
        with pytest.raises(CheckpointError, match=text):
            load(cls, reference.config, tmp_path, 0, 1, {})

    refused("layers.1.block_sparse_moe.experts.2.", r"w1.weight and \d+ more has shape")
    refused("layers.1.block_sparse_moe.experts.2.w1", "must be converted by .*, which fails")
    refused("layers.1.block_sparse_moe.experts.", r"lacks 2 of the .*gate_up_proj")


class Mapped:
    """Conversions registered for Llama while a test runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, *steps: Any) -> None:
        known = conversion_mapping.get_checkpoint_conversion_mapping

        def get(model_type: str) -> Any:
            return list(steps) if model_type == "llama" else known(model_type)

        self.monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", get)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Mapped:
    return Mapped(monkeypatch)


def converter(source: Any, target: Any, *operations: Any) -> Any:
    return core_model_loading.WeightConverter(source, target, list(operations))


OPERATIONS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "transposed": (
        [converter(r"mlp\.down\.w", "mlp.down_proj.weight", core_model_loading.Transpose(0, 1))],
        {"mlp.down_proj.weight": lambda t: {"mlp.down.w": t.t().contiguous()}},
    ),
    "transposed if need be": (
        [
            converter(
                r"mlp\.down_proj\.weight",
                "mlp.down_proj.weight",
                core_model_loading.Transpose(0, 1, check_dims=True),
            )
        ],
        {"mlp.down_proj.weight": lambda t: {"mlp.down_proj.weight": t.t().contiguous()}},
    ),
    "permuted for rope": (
        [
            converter(
                r"self_attn\.wq\.weight",
                "self_attn.q_proj.weight",
                core_model_loading.PermuteForRope(),
            )
        ],
        {"self_attn.q_proj.weight": lambda t: {"self_attn.wq.weight": t}},
    ),
    "interleaved": (
        [converter(r"mlp\.up\.w", "mlp.up_proj.weight", core_model_loading.Interleave(dim=0))],
        {"mlp.up_proj.weight": lambda t: {"mlp.up.w": t}},
    ),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(tmp_path: Path, mapped: Mapped, name: str, dim: int) -> None:
    steps, changes = OPERATIONS[name]
    tensors: dict[str, Tensor] = {}
    for key, tensor in llama().state_dict().items():
        end = next((end for end in changes if key.endswith(end)), None)
        made = {end or "": tensor} if end is None else changes[end](tensor)
        stem = key if end is None else key.removesuffix(end)
        tensors.update({stem + new: t for new, t in made.items()})
    write(tmp_path, tensors)
    llama_config().save_pretrained(tmp_path)
    mapped(*steps)
    reference = type(llama()).from_pretrained(tmp_path)
    check(type(llama()), reference, tmp_path, 2, dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("cut", ["Chunk", "Split"])
def test_one_tensor_for_several_parameters(
    tmp_path: Path, mapped: Mapped, cut: str, dim: int
) -> None:
    """Also where layers were swapped for local ones, of other shapes, before the weights come."""
    config = llama_config(num_key_value_heads=4 if cut == "Chunk" else 2)
    projections = [f"self_attn.{p}_proj.weight" for p in "qkv"]
    tensors = dict(llama(num_key_value_heads=config.num_key_value_heads).state_dict())
    for i in range(2):
        stem = f"model.layers.{i}."
        fused = torch.cat([tensors.pop(stem + p) for p in projections])
        tensors[stem + "self_attn.qkv.weight"] = fused
    write(tmp_path, tensors)
    config.save_pretrained(tmp_path)
    operation = getattr(core_model_loading, cut)(dim=0)
    mapped(converter(r"self_attn\.qkv\.weight", projections, operation))
    cls: Any = type(llama())
    reference = cls.from_pretrained(tmp_path)
    check(cls, reference, tmp_path, 2, dim)

    split = halves(reference, dim)
    for rank in range(2):
        model: Any = empty_model(cls._from_config, config)
        conversions = Conversions(model)
        for name, whole in reference.named_parameters():
            local = torch.empty_like(held(whole, split[name], rank, 2), device="meta")
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(local))
        checkpoint = Checkpoint.open(tmp_path)
        load_weights(model, checkpoint, split, {"tp": (rank, 2)}, conversions=conversions)
        for name, whole in reference.named_parameters():
            part = model.get_parameter(name)
            assert torch.equal(part, held(whole, split[name], rank, 2)), name


class Doubled(core_model_loading.ConversionOps):
    """More than a move."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_: Any) -> Any:
        (tensors,) = input_dict.values()
        return {target_patterns[0]: tensors[0] * 2}

    @property
    def reverse_op(self) -> Any:
        raise NotImplementedError


def test_arithmetic_is_refused(tmp_path: Path, mapped: Mapped) -> None:
    llama().save_pretrained(tmp_path)
    mapped(converter(r"^model\.norm\.weight", "model.norm.weight", Doubled()))
    with pytest.raises(CheckpointError) as caught:
        load(type(llama()), llama_config(), tmp_path, 0, 1, {})
    message = str(caught.value)
    assert "model.norm.weight must be converted by Doubled to model.norm.weight" in message
    assert "cannot do (it calls aten.mul.Tensor): load it once with transformers" in message
    assert "\n" not in message


def test_mixed_dtypes_are_refused(tmp_path: Path) -> None:
    cls, reference = saved("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = next(n for n in tensors if "experts" in n)
    tensors[key] = tensors[key].bfloat16()
    write(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"MergeModulelist.*cannot do \(it mixes dtypes\)"):
        load(cls, reference.config, tmp_path, 0, 1, {})


def test_another_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core_model_loading, "dot_natural_key")
    with pytest.raises(CheckpointError, match=r"in the way that 5\.23 does .*: install"):
        Conversions(llama())


def test_report(tmp_path: Path) -> None:
    cls, reference = saved("mixtral", tmp_path)
    _, report = load(cls, reference.config, tmp_path, 0, 1, {})
    assert isinstance(report, Report)
    assert report.tensors == len(list(reference.parameters()))
    assert report.read == Checkpoint.open(tmp_path).nbytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_under_a_plan(tmp_path: Path, ranks: int) -> None:
    """The whole way: planned from the directory, each rank loads its part, same logits."""
    _, reference = saved("mixtral", tmp_path, size="100KB")
    plan = planning.plan(tmp_path, ranks)
    ids = torch.randint(3, 90, (2, 7), generator=torch.manual_seed(0))
    whole = dict(reference.named_parameters())
    with torch.no_grad():
        expected_logits = reference(ids).logits

    def work(mesh: Mesh) -> None:
        model: Any = shardwright.load(tmp_path, plan, device="cpu")
        placed, coords = placements(model), mesh.with_sub_axes(plan.sub_axes).coords
        for name, tensor in model.named_parameters():
            expected = whole[name]
            for d, dim in enumerate(placed[name].dims if name in placed else ()):
                ranges = local_ranges(dim, coords)
                index = torch.cat([torch.arange(a, b) for a, b in ranges])
                expected = expected.index_select(d, index)
            assert torch.equal(tensor.to_local(), expected), name
        experts = [n for n in placed if n.endswith(EXPERTS) and placed[n].meshes]
        assert len(experts) == len([n for n in whole if n.endswith(EXPERTS)])
        assert model.shardwright_report.read == model.shardwright_report.held
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected_logits)

    run_ranks(ranks, work)


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("name", ["gpt_oss", "llama4", "phi3", "bloom", "falcon", "gpt2"])
def test_with_and_without_the_base_model_prefix(tmp_path: Path, name: str, prefixed: bool) -> None:
    cls, model = saved(name, tmp_path)
    prefix = cls.base_model_prefix + "."
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {n.removeprefix(prefix): t for n, t in tensors.items()}
    if prefixed:
        tensors = {n if n.startswith("lm_head") else prefix + n: t for n, t in bare.items()}
    write(tmp_path, tensors if prefixed else bare)
    reference = cls.from_pretrained(tmp_path)
    for key, tensor in reference.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key
    for dim in (0, -1):
        check(cls, reference, tmp_path, 2, dim)
