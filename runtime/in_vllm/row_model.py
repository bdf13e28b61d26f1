"""`RowModel`: a split model that takes tokens of several requests in one row."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError, in_one_line
from shardwright.runtime.in_vllm import attention
from shardwright.runtime.in_vllm.attention import ATTENDS, Attends, LayerAttention
from shardwright.runtime.in_vllm.head import Head
from shardwright.runtime.scopes import holding

LENGTHS = [5, 3]
"""The lengths of two requests with which a model is compared with itself."""

KEEP = "logits_to_keep"
"""The argument that says how many logits to compute, from the last."""
OPTIONS = {"use_cache": False, KEEP: 1}
"""How a model is called for its hidden states, as far as it takes these arguments."""


class RowModel:
    """Calls a split causal language model with requests in one row. All ranks make one.

    Its layers tell apart requests in attention alone, which somebody else computes.

    Args:
        split: The split model.
        unsplit: The same model, unsplit and without weights. Its parts are replaced.
        longest: The most tokens of a request.

    Attributes:
        layers: What each layer asks of attention on this rank, by its number.

    Raises:
        UsageError: the model does not attend by functions that can be replaced, or its logits for
            requests in one row are not those for each alone.
    """

    def __init__(self, split: Any, unsplit: Any, longest: int) -> None:
        name, kind = type(unsplit).__name__, split.config._attn_implementation
        if kind != attention.KIND:
            raise UsageError(
                f"{name} has '{kind}' attention; vLLM can replace only '{attention.KIND}'"
            )
        attention.intercept()
        self.split, self.output = split, None
        named = inspect.signature(type(unsplit).forward).parameters
        self.options = {n: v for n, v in OPTIONS.items() if n in named}
        base = _base_of(split, self.options)
        split.get_submodule(base).register_forward_hook(self._keep)
        self.head = Head(unsplit, split, base)
        self.layers = self._seen(name, longest)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.output = output

    def hidden(self, attends: Attends, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return hidden states [tokens, width] of the tokens [tokens] of all requests.

        Args:
            attends: What computes attention.
            tokens: The tokens.
            positions: The place of each token in its request.
        """
        with holding(ATTENDS, attends):
            self.split(input_ids=tokens[None], position_ids=positions[None], **self.options)
        return self.output.last_hidden_state[0]  # pyright: ignore[reportOptionalMemberAccess]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, words] of hidden states [rows, width]."""
        return self.head.logits(hidden, self.output)

    def _seen(self, name: str, longest: int) -> dict[int, LayerAttention]:
        """Return what each layer asks of attention, and compare the model with itself."""
        places = [torch.arange(n, device=self.split.device) for n in LENGTHS]
        requests, seen = [1 + each for each in places], attention.Seen(longest)

        options = {name: value for name, value in self.options.items() if name != KEEP}

        def alone(tokens: Tensor) -> Tensor:
            return self.split(input_ids=tokens[None], **options).logits[0]

        with torch.no_grad():
            own = list(map(alone, requests))
            with holding(ATTENDS, seen):
                first = alone(requests[0])
            if not seen.layers:
                raise UsageError(
                    f"{name} does not call attention through transformers' attention interface, so "
                    "vLLM cannot replace it"
                )
            if not _near(first, own[0]):
                raise UsageError(f"attention as vLLM computes it changes the logits of {name}")
            try:
                both = attention.WithinRequests(seen.layers, LENGTHS)
                row = self.hidden(both, torch.cat(requests), torch.cat(places))
                found = self.logits(row).split(LENGTHS)
            except Exception as error:  # whatever its code raises that was not made for it
                raise UsageError(
                    f"{name} cannot take requests in one row: {in_one_line(error):.200}"
                ) from error
        if not all(map(_near, found, own)):
            raise UsageError(
                f"the logits of {name} change if requests share a row, as in vLLM: its code mixes "
                "tokens outside of attention, or does not use the position_ids that it is given"
            )
        return seen.layers


def _base_of(model: Any, options: dict[str, Any]) -> str:
    """Return the path of the module that gives hidden states: the outermost that is called.

    Args:
        model: A causal language model.
        options: What to call it with beside tokens.

    Raises:
        UsageError: none does.
    """
    from transformers import PreTrainedModel

    paths: list[str] = []

    def note(path: str, output: Any) -> None:
        if hasattr(output, "last_hidden_state"):
            paths.append(path)

    inner = {n: m for n, m in model.named_modules() if n and isinstance(m, PreTrainedModel)}
    hooks = [
        module.register_forward_hook(lambda _, __, output, path=path: note(path, output))
        for path, module in inner.items()
    ]
    with torch.no_grad():
        model(input_ids=torch.ones(1, 1, dtype=torch.int64, device=model.device), **options)
    for hook in hooks:
        hook.remove()
    if not paths:
        raise UsageError(f"no module of {type(model).__name__} gives 'last_hidden_state' to vLLM")
    return paths[-1]


def _near(mine: Tensor, own: Tensor) -> bool:
    """Whether logits [tokens, words] are equal but for rounding."""
    exact = own.dtype in (torch.float32, torch.float64)
    mine, own = mine.float(), own.float()
    bound = (2e-3 if exact else 1e-1) * own.abs().median(-1, keepdim=True).values
    near = ((mine == own) | ((mine - own).abs() <= bound)).all(-1)
    # With fewer digits, a token may be routed to other experts.
    return bool(near.float().mean() >= (1.0 if exact else 0.5))
