"""A decoder as somebody writes one: heads interleaved in one projection, a gate for each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class OwnConfig(PreTrainedConfig):
    """Sizes of the decoder."""

    model_type = "own_decoder"

    def __init__(
        self,
        vocab_size: int = 96,
        hidden_size: int = 256,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 8,
        max_position_embeddings: int = 256,
        **more: Any,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**more)


class Attention(nn.Module):
    """Queries, keys, values and a gate of each head lie beside one another."""

    is_causal = True

    def __init__(self, config: OwnConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads = config.num_attention_heads
        self.width = config.hidden_size // self.heads
        self.scaling = self.width**-0.5
        self.mix = nn.Linear(config.hidden_size, self.heads * (3 * self.width + 1))
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Return what is added to `x`."""
        mixed = self.mix(x).view(*x.shape[:-1], self.heads, 3 * self.width + 1).transpose(1, 2)
        q, k, v, gate = mixed.split([self.width, self.width, self.width, 1], -1)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation or "sdpa", nn.Identity()
        )
        out, _ = attend(self, q, k, v, None, scaling=self.scaling, **kwargs)
        out = out.reshape(*x.shape[:-1], self.heads, self.width) * gate.transpose(1, 2).sigmoid()
        return self.out(out.flatten(-2))


class Block(nn.Module):
    """Attention, then an MLP."""

    def __init__(self, config: OwnConfig, layer_idx: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(config, layer_idx)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Return the next `x`."""
        x = x + self.attention(self.before(x), **kwargs)
        return x + self.mlp(self.between(x))


class OwnPreTrained(PreTrainedModel):
    """What transformers asks of both classes."""

    config_class = OwnConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class Own(OwnPreTrained):
    """The decoder without its head."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of tokens."""
        return self.tokens

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return hidden states."""
        x = self.tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        x = x + self.places(position_ids)
        kwargs.pop("use_cache", None)
        for layer in self.layers:
            x = layer(x, **kwargs)
        return (x,) if return_dict is False else BaseModelOutputWithPast(last_hidden_state=x)


class CausalOwn(OwnPreTrained, GenerationMixin):
    """The decoder with its head."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.model = Own(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, logits_to_keep: int = 0, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """Return logits."""
        hidden = self.model(input_ids, **kwargs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]))
