"""Small checkpoints and models that several tests share."""

import json
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

M = TypeVar("M", bound=PreTrainedModel)


def write(directory: Path, *files: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of one file, or of several with their index."""
    directory.mkdir(parents=True, exist_ok=True)
    if len(files) == 1:
        save_file(files[0], directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, directory / name, metadata={"format": "pt"})
    write_index(directory, {k: n for n, f in zip(names, files, strict=True) for k in f})
    return directory


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


def llama_config(**changes: object) -> LlamaConfig:
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=53,
        max_position_embeddings=32,
    )
    return LlamaConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def llama(**changes: object) -> LlamaForCausalLM:
    return randomized(LlamaForCausalLM(llama_config(**changes)))


def gpt2_config() -> GPT2Config:
    return GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=53, n_positions=32)


def gpt2() -> GPT2LMHeadModel:
    return randomized(GPT2LMHeadModel(gpt2_config()))


def bert_config() -> BertConfig:
    return BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=53,
        max_position_embeddings=32,
    )


def randomized(model: M) -> M:
    """The model with no parameter left at a constant, so that mix-ups show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model.eval()
