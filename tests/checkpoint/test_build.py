"""Models without parameter memory: buffers real, ties kept, nothing random needed."""

import resource
import threading

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    BertForMaskedLM,
    BertModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PretrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from shardwright.errors import ModelError
from shardwright.runtime.model.build import empty_model, model_class, parameters_on_meta
from tests.checkpoint.make import bert_config, gpt2_config, llama_config

T5 = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=53)
MODELS = {
    "llama": (LlamaForCausalLM, llama_config()),
    "llama tied": (LlamaForCausalLM, llama_config(tie_word_embeddings=True)),
    "gpt2": (GPT2LMHeadModel, gpt2_config()),
    "bert": (BertModel, bert_config()),
    "bert masked": (BertForMaskedLM, bert_config()),
    "t5": (T5ForConditionalGeneration, T5),
}


def ties(model: nn.Module) -> list[list[str]]:
    out: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        out.setdefault(id(parameter), []).append(name)
    return sorted(out.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_is_the_model_but_for_the_parameters(name: str, dtype: torch.dtype) -> None:
    cls, config = MODELS[name]
    normal = cls._from_config(config, dtype=dtype)
    empty = empty_model(cls, config, dtype=dtype)
    assert all(p.is_meta for p in empty.parameters())
    assert ties(empty) == ties(normal)
    expected = {n: (p.shape, p.dtype) for n, p in normal.named_parameters()}
    assert {n: (p.shape, p.dtype) for n, p in empty.named_parameters()} == expected
    buffers = dict(empty.named_buffers(remove_duplicate=False))
    assert buffers.keys() == dict(normal.named_buffers(remove_duplicate=False)).keys()
    for key, buffer in normal.named_buffers(remove_duplicate=False):
        assert torch.equal(buffers[key], buffer), key
        assert buffers[key].dtype == buffer.dtype
    assert torch.get_default_dtype() == torch.float32


def test_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = llama_config(hidden_size=4096, intermediate_size=11008, num_hidden_layers=8)
    model = empty_model(LlamaForCausalLM, config)
    assert sum(p.nbytes for p in model.parameters()) > 5 * 10**9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


class Odd(nn.Module):
    """Parameters that come in by every door."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(2))
        self.a, self.b = shared, shared
        self.list = nn.ParameterList([torch.ones(3), torch.ones(4)])
        self.none = None
        self.register_parameter("missing", None)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        setattr(self.frozen, "tag", "kept")  # noqa: B010
        self._parameters["late"] = nn.Parameter(torch.ones(5))
        self.register_buffer("mask", torch.empty(2, 2).fill_(3.0), persistent=False)
        self.plain = torch.arange(3)


def test_odd_modules() -> None:
    model = empty_model(Odd)
    assert isinstance(model, Odd)
    assert all(p.is_meta for p in model.parameters())
    assert model.a is model.b
    assert not model.frozen.requires_grad
    assert vars(model.frozen)["tag"] == "kept"
    assert torch.equal(model.mask, torch.full((2, 2), 3.0))
    assert model.plain.tolist() == [0, 1, 2]


def test_an_outer_meta_device_does_not_reach_buffers() -> None:
    with torch.device("meta"):
        assert not empty_model(Odd).mask.is_meta


@pytest.mark.parametrize("persistent", [False, True])
def test_buffer_made_from_a_parameter(persistent: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("norm", self.layer.weight.norm(), persistent=persistent)

    if persistent:
        assert empty_model(Net).norm.is_meta  # a checkpoint holds it
    else:
        with pytest.raises(ModelError, match="buffer norm of Net is computed from parameters"):
            empty_model(Net)


def test_torch_is_put_back_after_an_error() -> None:
    register = nn.Module.register_parameter
    with pytest.raises(RuntimeError, match="no"), parameters_on_meta():
        raise RuntimeError("no")
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta


def test_other_threads_build_as_ever() -> None:
    """The ranks of an in-process test are threads."""
    seen: list[bool] = []
    with parameters_on_meta():
        other = threading.Thread(target=lambda: seen.append(nn.Linear(2, 2).weight.is_meta))
        other.start()
        other.join()
    assert seen == [False]


def test_model_class() -> None:
    assert model_class(PretrainedConfig(architectures=["LlamaForCausalLM"])) is LlamaForCausalLM
    inner = CONFIG_MAPPING["deepseek_ocr2"]().vision_config.encoder_config
    inner.architectures = ["DeepseekOcr2VisionEncoder"]  # transformers does not export it
    assert model_class(inner).__name__ == "DeepseekOcr2VisionEncoder"
    with pytest.raises(ModelError, match=r'names no class: add "architectures"'):
        model_class(PretrainedConfig())
    with pytest.raises(ModelError, match="has no class NoSuchModel: check"):
        model_class(PretrainedConfig(architectures=["NoSuchModel"]))
    remote = {"architectures": ["NoSuchModel"], "auto_map": {"AutoModel": "x.Y"}}
    with pytest.raises(ModelError, match="runs only with --trust-remote-code"):
        model_class(PretrainedConfig.from_dict(remote))
    with pytest.raises(ModelError, match="has no class LlamaConfig"):
        model_class(PretrainedConfig(architectures=["LlamaConfig"]))
