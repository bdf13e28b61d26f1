"""What computes attention in a call of a split model: transformers' own function, or vLLM.

Modules of transformers look up by name a function for attention, and one for masks. `intercept`
puts ours in front of both. They do what transformers' do unless `ATTENDS` names something else.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.errors import UsageError

KIND = "sdpa"
"""The name of the functions of transformers that stand for attention in vLLM."""

UNKNOWN = ("position_bias", "softcap", "s_aux")
"""Arguments of attention that we do not give to vLLM."""


class Attends(ABC):
    """What computes attention in a call."""

    @abstractmethod
    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, how: Any) -> Tensor:
        """Return the output [batch, tokens, heads, width] for three [batch, heads, tokens, width].

        Args:
            module: The module that attends.
            query: Queries.
            key: Keys, of fewer heads if several query heads share one.
            value: Values.
            how: The other arguments by name.
        """

    def mask(self, own: Callable[..., Tensor | None], how: dict[str, Any]) -> Tensor | None:
        """Return the mask that modules are given, which `own` makes of the arguments `how`.

        By default there is none: `attend` knows which tokens are of which request.
        """
        return None


ATTENDS: ContextVar[Attends | None] = ContextVar("ATTENDS", default=None)
"""What computes attention now; None for transformers' own function."""


@functools.cache
def intercept() -> None:
    """Put our functions in front of transformers', in this process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **how: Any,
    ) -> tuple[Tensor, None]:
        attends = ATTENDS.get()
        if attends is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
        how["attention_mask"] = attention_mask
        return attends.attend(module, query, key, value, how), None

    def mask(**how: Any) -> Tensor | None:
        attends, own = ATTENDS.get(), sdpa_mask
        return own(**how) if attends is None else attends.mask(own, how)

    AttentionInterface.register(KIND, attend)
    AttentionMaskInterface.register(KIND, mask)


class LayerAttention(NamedTuple):
    """What a module asks of attention.

    Attributes:
        heads: The number of query heads of this rank.
        key_heads: The number of key heads of this rank.
        width: The width of a head.
        scale: The factor of queries times keys.
        window: How many tokens a token sees, itself among them; None for all before it.
    """

    heads: int
    key_heads: int
    width: int
    scale: float
    window: int | None


@dataclass
class Seen(Attends):
    """Computes attention of one request, and notes what each layer asks.

    Attributes:
        longest: The most tokens of a request.
        layers: What each layer asks, by its number.
        masks: The masks that were made, and what says whether one token sees another.
    """

    longest: int
    layers: dict[int, LayerAttention] = field(default_factory=dict)
    masks: list[tuple[Tensor, Callable[..., Any]]] = field(default_factory=list)

    def mask(self, own: Callable[..., Tensor | None], how: dict[str, Any]) -> Tensor | None:
        """Make a mask, also where attention could do without."""
        always = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made = own(**how | always)
        assert made is not None
        self.masks.append((made, how["mask_function"]))
        return made

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, how: Any) -> Tensor:
        """Attend to the tokens that the module sees.

        Raises:
            UsageError: vLLM would attend otherwise.
        """
        name, layer, width = type(module).__name__, module.layer_idx, query.shape[-1]
        if layer in self.layers:
            raise UsageError(
                f"{name} computes attention twice for layer {layer}, and vLLM has one cache for it"
            )
        more = [n for n in UNKNOWN if how.get(n) is not None]
        if more or how.get("dropout"):
            argument = (*more, "dropout")[0]
            raise UsageError(f"{name} calls attention with '{argument}', which vLLM does not have")
        if key.shape[-1] != width or value.shape[-1] > width:
            raise UsageError(
                f"{name} has keys of width {width} and values of {value.shape[-1]}: vLLM's cache "
                "has one width for both"
            )
        scale = how.get("scaling")
        scale = float(width**-0.5 if scale is None else scale)
        causal = how.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        window = self._window(name, how["attention_mask"], causal)
        asked = LayerAttention(query.shape[1], key.shape[1], width, scale, window)
        self.layers[layer] = asked
        return within_requests(asked, [query.shape[2]], query, key, value)

    def _window(self, name: str, mask: Tensor | None, causal: bool) -> int | None:
        """Return the window of a mask, or None if a token sees all before it.

        Raises:
            UsageError: it is neither causal nor a causal window, or not of transformers' making.
        """
        if mask is None and causal:
            return None
        sees = next((sees for made, sees in self.masks if mask is made), None)
        if sees is None:
            raise UsageError(f"{name} makes its own attention mask, which vLLM would ignore")
        places, zero = torch.arange(self.longest), torch.zeros((), dtype=torch.int64)

        def seen_by(place: int) -> Tensor:
            return torch.as_tensor(sees(zero, zero, places[place], places)).expand(len(places))

        def fits(place: int) -> bool:
            return torch.equal(seen_by(place), (places <= place) & (places > place - window))

        last = window = len(places) - 1
        try:
            window = int(seen_by(last).sum())
            same = all(fits(min(p, last)) for p in (0, 1, window, window + 1, last // 2, last - 1))
        except IndexError:  # it looks something up that is there for the tokens at hand alone
            same = False
        if not same:
            raise UsageError(f"the mask of {name} is neither causal nor a causal window")
        return window if window <= last else None


def within_requests(
    asked: LayerAttention, lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return attention [1, tokens, heads, width] of requests that share a row.

    Args:
        asked: What the layer asks.
        lengths: The lengths of the requests.
        query: Queries [1, heads, tokens, width].
        key: Keys, of fewer heads if several query heads share one.
        value: Values.
    """
    outputs = []
    for q, k, v in zip(*(x.split(list(lengths), 2) for x in (query, key, value)), strict=True):
        back = torch.arange(q.shape[2], device=q.device)
        back = back[:, None] - back
        sees = back >= 0 if asked.window is None else (back >= 0) & (back < asked.window)
        times = q.shape[1] // max(k.shape[1], 1)
        k, v = (x.repeat_interleave(times, 1) for x in (k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, sees, scale=asked.scale))
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


@dataclass
class WithinRequests(Attends):
    """Computes attention of several requests that share a row.

    Attributes:
        layers: What each layer asks, by its number.
        lengths: The lengths of the requests.
    """

    layers: Mapping[int, LayerAttention]
    lengths: Sequence[int]

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, how: Any) -> Tensor:
        """Attend within each request."""
        return within_requests(self.layers[module.layer_idx], self.lengths, query, key, value)


@dataclass
class InVllm(Attends):
    """Computes attention with layers of vLLM, which have the KV cache.

    Attributes:
        layers: vLLM's layers, by number. They may have more heads than this rank, and wider values:
            the rest is zeros.
    """

    layers: Mapping[int, Any]

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, how: Any) -> Tensor:
        """Let the layer of the module attend."""
        layer, tokens, heads = self.layers[module.layer_idx], query.shape[2], query.shape[1]
        width, own = query.shape[-1], value.shape[-1]
        sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        rows = (
            F.pad(x[0].transpose(0, 1), (0, width - x.shape[-1], 0, size - x.shape[1])).flatten(1)
            for x, size in zip((query, key, value), sizes, strict=True)
        )
        return layer(*rows).view(1, tokens, layer.num_heads, width)[:, :, :heads, :own].contiguous()
