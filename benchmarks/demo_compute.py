"""The computations of the demo, with the same code for split and unsharded models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

NEW_TOKENS = 32


@torch.no_grad()
def generate(model: Any, prompt: Tensor) -> Tensor:
    """Generate `NEW_TOKENS` more tokens [batch, tokens] greedily, with the KV cache."""
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
    return out[:, prompt.shape[1] :]


@torch.no_grad()
def embed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the mean of each sentence's token states, of length 1: [sentence, width]."""
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
