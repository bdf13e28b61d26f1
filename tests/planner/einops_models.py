"""Vision transformers as people write them with einops: every layer rearranges by its own sizes."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange, repeat
from einops.layers.torch import Rearrange
from torch import Tensor, einsum, nn

SIDE, PATCH, CLASSES = 12, 4, 24


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Attention(nn.Module):
    """Self-attention, or attention to a context; heads may be mixed before and after softmax."""

    def __init__(self, dim: int, heads: int, dim_head: int = 8, talking: bool = False) -> None:
        super().__init__()
        self.heads, self.scale, inner = heads, dim_head**-0.5, heads * dim_head
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, dim)
        self.before = nn.Parameter(torch.randn(heads, heads)) if talking else None
        self.after = nn.Parameter(torch.randn(heads, heads)) if talking else None

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h, x = self.heads, self.norm(x)
        context = x if context is None else torch.cat((x, context), dim=1)
        qkv = (self.to_q(x), *self.to_kv(context).chunk(2, dim=-1))
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=h) for t in qkv)
        dots = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        if self.before is not None:
            dots = einsum("b h i j, h g -> b g i j", dots, self.before)
        attention = dots.softmax(dim=-1)
        if self.after is not None:
            attention = einsum("b h i j, h g -> b g i j", attention, self.after)
        out = einsum("b h i j, b h j d -> b h i d", attention, v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class Transformer(nn.Module):
    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        talking: bool = False,
        each: int = 8,
        hidden: int = 0,
    ) -> None:
        super().__init__()
        wide = hidden or 2 * dim
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(dim, heads, each, talking), FeedForward(dim, wide)])
            for _ in range(depth)
        )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        for attention, feed_forward in self.layers:  # type: ignore[misc]
            x = attention(x, context) + x
            x = feed_forward(x) + x
        return x


def patches(dim: int, size: int) -> nn.Sequential:
    """Embeds the patches of an image."""
    width = 3 * size * size
    return nn.Sequential(
        Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=size, p2=size),
        nn.LayerNorm(width),
        nn.Linear(width, dim),
    )


class ViT(nn.Module):
    def __init__(self, dim: int = 48, depth: int = 2, heads: int = 6, pool: str = "cls") -> None:
        super().__init__()
        self.embed = patches(dim, PATCH)
        self.positions = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2 + 1, dim))
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.transformer, self.pool = Transformer(dim, depth, heads), pool
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, CLASSES))

    def tokens(self, image: Tensor) -> Tensor:
        x = self.embed(image)
        b, n, _ = x.shape
        x = torch.cat((repeat(self.token, "1 1 d -> b 1 d", b=b), x), dim=1)
        return self.transformer(x + self.positions[:, : n + 1])

    def forward(self, image: Tensor) -> Tensor:
        x = self.tokens(image)
        return self.head(x.mean(dim=1) if self.pool == "mean" else x[:, 0])


class View(ViT):
    """One of the views of vit-pytorch's CrossViT, of the sizes in its README: of 256 x 256 dots."""

    def __init__(self, dim: int, depth: int, patch: int) -> None:
        super().__init__(dim, depth=0)
        self.embed = patches(dim, patch)
        self.positions = nn.Parameter(torch.randn(1, (256 // patch) ** 2 + 1, dim))
        self.transformer = Transformer(dim, depth, 8, each=64, hidden=2048)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 1000))


class CaiT(nn.Module):
    """Tokens attend to each other first, then the class token attends to them."""

    def __init__(self, dim: int = 48, heads: int = 6) -> None:
        super().__init__()
        self.embed = patches(dim, PATCH)
        self.positions = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2, dim))
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.tokens = Transformer(dim, 2, heads, talking=True)
        self.classes = Transformer(dim, 2, heads, talking=True)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image)
        x = self.tokens(x + self.positions[:, : x.shape[1]])
        token = repeat(self.token, "1 1 d -> b 1 d", b=x.shape[0])
        return self.head(self.classes(token, context=x)[:, 0])


class CrossAttention(nn.Module):
    """A class token attends to the patches of another width."""

    def __init__(self, dim: int, other: int, heads: int = 6, each: int = 8) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(dim, other), nn.Linear(other, dim)
        self.attention = Attention(other, heads, each)

    def forward(self, token: Tensor, context: Tensor) -> Tensor:
        return token + self.leave(self.attention(self.enter(token), context))


class CrossViT(nn.Module):
    """Two views of an image, of two widths, whose class tokens attend to each other's patches."""

    def __init__(self, small: int = 48, large: int = 72) -> None:
        super().__init__()
        self.views = nn.ModuleList([ViT(small, 1), ViT(large, 2)])
        self.cross = nn.ModuleList(
            nn.ModuleList([CrossAttention(small, large), CrossAttention(large, small)])
            for _ in range(2)
        )

    def forward(self, image: Tensor) -> Tensor:
        views: list[Any] = [*self.views]
        a, b = (view.tokens(image) for view in views)
        for of_a, of_b in self.cross:  # type: ignore[misc]
            (a0, a1), (b0, b1) = ((x[:, :1], x[:, 1:]) for x in (a, b))
            a0, b0 = of_a(a0, b1), of_b(b0, a1)
            a, b = torch.cat((a0, a1), dim=1), torch.cat((b0, b1), dim=1)
        return views[0].head(a[:, 0]) + views[1].head(b[:, 0])


class UsualCrossViT(CrossViT):
    """Of the sizes in vit-pytorch's README: 18 million parameters, patches of 16 and of 64 dots."""

    def __init__(self) -> None:
        super().__init__()
        self.views = nn.ModuleList([View(192, 2, 16), View(384, 3, 64)])
        self.cross = nn.ModuleList(
            nn.ModuleList([CrossAttention(192, 384, 8, 64), CrossAttention(384, 192, 8, 64)])
            for _ in range(2)
        )
