"""`flex_attention`: modules that call it with masks and scores of their own, and stock models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, or_masks

from shardwright.errors import ModelError, UsageError
from shardwright.runtime.api import apply
from tests.marks import long
from tests.planner.equal import randomize
from tests.planning import plan
from tests.ranks import run_ranks


class Attention(nn.Module):
    """8 heads of 8; subclasses say what is masked and what is added to scores."""

    kv_heads = 8
    document: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(64, 64), nn.Linear(64, 64)
        self.k, self.v = (nn.Linear(64, 8 * self.kv_heads) for _ in range(2))
        self.slopes = nn.Parameter(torch.rand(8))
        self.register_buffer("document", torch.arange(64) // 4)

    def how(self, x: Tensor) -> dict[str, Any]:
        return {}

    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        how = {"block_mask": more} if more is not None else self.how(x)
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(flex_attention(q, k, v, **how).transpose(1, 2).flatten(2))


class Windowed(Attention):
    """The mask says how many sequences and heads there are."""

    def how(self, x: Tensor) -> dict[str, Any]:
        b, t, _ = x.shape

        def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) & (i - j < 5)

        return {"block_mask": create_block_mask(near, b, 8, t, t, device=x.device)}


class Documents(Attention):
    def how(self, x: Tensor) -> dict[str, Any]:
        def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return self.document[i] == self.document[j]

        t = x.shape[1]
        return {"block_mask": create_block_mask(same, None, None, t, t, device=x.device)}


class OnTheCPU(Attention):
    """The mask is made where the model will run, not where its queries are."""

    def how(self, x: Tensor) -> dict[str, Any]:
        t = x.shape[1]
        causal = lambda b, h, i, j: i >= j  # noqa: E731
        return {"block_mask": create_block_mask(causal, None, None, t, t, device="cpu")}


class Alibi(Attention):
    """Each head has its slope: a rank must not take the first heads' for its own."""

    def how(self, x: Tensor) -> dict[str, Any]:
        return {"score_mod": lambda score, b, h, i, j: score + self.slopes[h] * (j - i)}


class WindowByHead(Attention):
    def how(self, x: Tensor) -> dict[str, Any]:
        t = x.shape[1]
        near = lambda b, h, i, j: (i - j).abs() <= h  # noqa: E731
        return {"block_mask": create_block_mask(near, 1, 8, t, t, device=x.device)}


class Capped(Attention):
    def how(self, x: Tensor) -> dict[str, Any]:
        return {"score_mod": lambda score, b, h, i, j: 5 * torch.tanh(score / 5)}


class Grouped(Attention):
    """Fewer heads of keys and values."""

    kv_heads = 4

    def how(self, x: Tensor) -> dict[str, Any]:
        return {"enable_gqa": True, "scale": 0.3}


class Layers(nn.Module):
    """One mask for all layers, of lengths that are an input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        t = x.shape[1]
        prefix = lambda b, h, i, j: j < lengths[b]  # noqa: E731
        either = or_masks(prefix, lambda b, h, i, j: i >= j)
        mask = create_block_mask(either, x.shape[0], None, t, t, device=x.device)
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


KINDS = [
    long(Attention),
    Windowed,
    Documents,
    OnTheCPU,
    Alibi,
    WindowByHead,
    Capped,
    Grouped,
    Layers,
]
BY_NUMBER = Windowed, Alibi, WindowByHead
"""Their code states how many heads there are, or their functions take the number of a head."""


@pytest.mark.parametrize("kind", KINDS)
def test_own_modules(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    FakeTensorMode.cache_clear()  # what torch itself does for a new entry is no code of the model
    model = kind().requires_grad_(False)  # there is no backward on the CPU
    more = (torch.tensor([3, 4, 5]),) if kind is Layers else ()
    found = plan(model, 2, args=(torch.randn(3, 19, 64), *more))
    assert found.predicted.parameter_bytes[0] < 0.52 * found.predicted.unsharded_bytes
    by_heads = not found.modules["layers.*.q" if kind is Layers else "q"].outputs
    assert by_heads == (kind not in BY_NUMBER), "heads stay on their ranks, or are gathered"
    given = (torch.randn(2, 11, 64), *(m[:2] for m in more))
    want = model(*given)
    for got in run_ranks(2, lambda mesh: apply(copy.deepcopy(model), found, mesh)(*given)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_mask_among_the_arguments_is_refused() -> None:
    """Its function may number heads, and may be another in each call."""
    model, x = Attention().requires_grad_(False), torch.randn(3, 19, 64)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 19, 19, device="cpu")
    with pytest.raises(ModelError, match="call create_block_mask in the model's forward"):
        plan(model, 2, args=(x, mask))
    found = plan(model, 2, args=(x,))

    def rank(mesh: Any) -> None:
        with pytest.raises(UsageError, match="argument 'more' of Attention"):
            apply(copy.deepcopy(model), found, mesh)(x, mask)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("name", "heads", "ranks", "most"),
    [
        long("Llama", 4, 2, 0.52),
        ("Mistral", 4, 2, 0.52),
        long("Gemma", 4, 2, 0.52),
        long("Llama", 8, 4, 0.27),
    ],
)
def test_stock_models(name: str, heads: int, ranks: int, most: float) -> None:
    """With padding, and `generate` with a cache; also with more ranks than kv heads."""
    torch.manual_seed(0)
    more = {"sliding_window": 8} if name == "Mistral" else {}
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=2, head_dim=16, vocab_size=96, **more,
    )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="flex_attention"
    )
    model.eval().requires_grad_(False)
    found = plan(model, ranks)
    assert found.predicted.parameter_bytes[0] < most * found.predicted.unsharded_bytes
    randomize(model)
    ids = torch.randint(0, 96, (2, 13))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0

    def outputs(model: Any) -> tuple[Tensor, Tensor]:
        given: Any = {"input_ids": ids, "attention_mask": mask}
        tokens = model.generate(**given, min_new_tokens=5, max_new_tokens=5, do_sample=False)
        return model(**given).logits, tokens

    with torch.compiler.set_stance("force_eager"):
        want = outputs(model)
        for got in run_ranks(ranks, lambda mesh: outputs(apply(copy.deepcopy(model), found, mesh))):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
