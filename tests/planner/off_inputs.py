"""Models as people write them, whose attention reads sizes off its input.

A GPT, a ViT, a DiT, a Swin, a RetNet; each with a twin whose attention takes the same sizes from
attributes of its own.
"""
# pyright: reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 96, 6


def mlp(width: int = WIDTH) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class CausalAttention(nn.Module):
    """Of nanoGPT: sizes off the input, one projection for q, k and v, one method for each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.n_head, self.n_embd = heads, width
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class CausalAttentionTwin(CausalAttention):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.head_dim = width // heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, self.head_dim).transpose(1, 2)
        q = q.view(B, T, self.n_head, self.head_dim).transpose(1, 2)
        v = v.view(B, T, self.n_head, self.head_dim).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(self.head_dim))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, -1)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    """Attention and an MLP, each with a norm before and a residual around."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH), mlp()
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Token and position embeddings, blocks, a head tied to the embedding."""

    def __init__(self, attention: Any = CausalAttention) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(96, WIDTH), nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList(Block(attention(WIDTH, HEADS)) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        _, t = idx.size()
        x = self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Attention(nn.Module):
    """Of vision transformers: q, k and v by one reshape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, width * 3), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class AttentionTwin(Attention):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.head_dim = width // heads

    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, self.num_heads * self.head_dim))


class ViT(nn.Module):
    """Patches, a class token, blocks, and a head on that token."""

    def __init__(self, attention: Any = Attention) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.ModuleList(Block(attention(WIDTH, HEADS)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, image: Tensor) -> Tensor:
        B = image.shape[0]
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(B, -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """Attention and an MLP, with shifts, scales and gates of what the model is conditioned on."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn, self.mlp = attention, mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift_2, scale_2, gate_2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift, scale))
        return x + gate_2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_2, scale_2))


class DiT(nn.Module):
    """Patches of an image, a step of time as a condition, and the image put together again."""

    def __init__(self, attention: Any = Attention) -> None:
        super().__init__()
        self.x_embedder, self.t_embedder = nn.Conv2d(4, WIDTH, 2, 2), nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock(attention(WIDTH, HEADS)) for _ in range(2))
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * 2 * 4)

    def unpatchify(self, x: Tensor) -> Tensor:
        c, p = 4, 2
        h = w = int(x.shape[1] ** 0.5)
        x = x.reshape(x.shape[0], h, w, p, p, c)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], c, h * p, w * p)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, c = self.x_embedder(x).flatten(2).transpose(1, 2), self.t_embedder(t)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.linear(self.norm(x)))


class WindowAttention(nn.Module):
    """Of Swin: with a bias for each two places of a window, and a mask where it was shifted."""

    def __init__(self, width: int, window: int, heads: int) -> None:
        super().__init__()
        self.dim, self.window_size, self.num_heads = width, (window, window), heads
        self.scale = (width // heads) ** -0.5
        count = (2 * window - 1) ** 2
        self.relative_position_bias_table = nn.Parameter(torch.zeros(count, heads))
        at = torch.stack(torch.meshgrid(*[torch.arange(window)] * 2, indexing="ij")).flatten(1)
        between = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + window - 1
        index = between[..., 0] * (2 * window - 1) + between[..., 1]
        self.register_buffer("relative_position_index", index)
        self.qkv, self.proj = nn.Linear(width, width * 3), nn.Linear(width, width)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = self.biased((q * self.scale) @ k.transpose(-2, -1), mask)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))

    def biased(self, attn: Tensor, mask: Tensor | None) -> Tensor:
        area, N = self.window_size[0] * self.window_size[1], attn.shape[-1]
        table = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        attn = attn + table.view(area, area, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is None:
            return self.softmax(attn)
        nW = mask.shape[0]
        attn = attn.view(attn.shape[0] // nW, nW, self.num_heads, N, N)
        attn = attn + mask.unsqueeze(1).unsqueeze(0)
        return self.softmax(attn.view(-1, self.num_heads, N, N))


class WindowAttentionTwin(WindowAttention):
    def __init__(self, width: int, window: int, heads: int) -> None:
        super().__init__(width, window, heads)
        self.head_dim = width // heads

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B_, N, _ = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = self.biased((q * self.scale) @ k.transpose(-2, -1), mask)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, -1))


def window_partition(x: Tensor, size: int) -> Tensor:
    B, H, W, C = x.shape
    x = x.view(B, H // size, size, W // size, size, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, C)


def window_reverse(windows: Tensor, size: int, H: int, W: int) -> Tensor:
    B = int(windows.shape[0] / (H * W / size / size))
    x = windows.view(B, H // size, W // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class SwinBlock(nn.Module):
    """Attention within windows, which every other block shifts."""

    def __init__(self, attention: Any, width: int, resolution: int, heads: int, shift: int) -> None:
        super().__init__()
        self.window_size, self.shift_size, self.input_resolution = 4, shift, resolution
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = attention(width, 4, heads), mlp(width)
        image = torch.zeros(1, resolution, resolution, 1)
        parts = (slice(0, -4), slice(-4, -shift), slice(-shift, None))
        for i, (a, b) in enumerate((a, b) for a in parts for b in parts):
            image[:, a, b] = i
        windows = window_partition(image, 4).view(-1, 16)
        apart = (windows.unsqueeze(1) - windows.unsqueeze(2)).ne(0).float() * -100.0
        self.register_buffer("attn_mask", apart if shift else None)

    def forward(self, x: Tensor) -> Tensor:
        H = W = self.input_resolution
        B, L, C = x.shape
        shortcut = x
        x = self.norm1(x).view(B, H, W, C)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        windows = window_partition(x, self.window_size)
        windows = self.attn(windows.view(-1, self.window_size**2, C), mask=self.attn_mask)
        x = window_reverse(windows.view(-1, self.window_size, self.window_size, C), 4, H, W)
        if self.shift_size > 0:
            x = torch.roll(x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        x = shortcut + x.view(B, H * W, C)
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    """Four patches become one of twice the width."""

    def __init__(self, width: int, resolution: int) -> None:
        super().__init__()
        self.input_resolution = resolution
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        H = W = self.input_resolution
        B, L, C = x.shape
        x = x.view(B, H, W, C)
        x = torch.cat([x[:, a::2, b::2, :] for b in (0, 1) for a in (0, 1)], -1)
        return self.reduction(self.norm(x.view(B, -1, 4 * C)))


class Swin(nn.Module):
    """Two stages, of two blocks each."""

    def __init__(self, attention: Any = WindowAttention) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 48, 2, 2)
        stages = ((48, 16, 6), (96, 8, 6))
        self.layers = nn.ModuleList(
            nn.ModuleList(SwinBlock(attention, w, r, h, shift) for shift in (0, 2))
            for w, r, h in stages
        )
        self.downsample = PatchMerging(48, 16)
        self.norm, self.head = nn.LayerNorm(96), nn.Linear(96, 12)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        for block in self.layers[0]:
            x = block(x)
        x = self.downsample(x)
        for block in self.layers[1]:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Retention(nn.Module):
    """Attention without a softmax, each head with a decay; heads by a helper, sizes off inputs."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.g_proj = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.out_proj, self.norm = nn.Linear(2 * width, width), nn.LayerNorm(2 * width // heads)
        self.register_buffer("decay", torch.log(1 - 2.0 ** (-5 - torch.arange(heads))))

    def heads_of(self, x: Tensor, width: int) -> Tensor:
        b, t, _ = x.shape
        return x.view(b, t, self.num_heads, width // self.num_heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        bsz, tgt_len, embed_dim = x.size()
        q = self.heads_of(self.q_proj(x), embed_dim)
        k = self.heads_of(self.k_proj(x) * (embed_dim // self.num_heads) ** -0.5, embed_dim)
        v = self.heads_of(self.v_proj(x), 2 * embed_dim)
        at = torch.arange(tgt_len, device=x.device)
        apart = (at[:, None] - at[None, :]).tril().to(x.dtype)
        decay = torch.exp(apart * self.decay[:, None, None]).tril()
        out = ((q @ k.transpose(-1, -2)) * decay) @ v
        out = self.norm(out.transpose(1, 2)).reshape(bsz, tgt_len, 2 * embed_dim)
        return self.out_proj(F.silu(self.g_proj(x)) * out)


class RetentionTwin(Retention):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.key_dim, self.head_dim = width // heads, 2 * width // heads

    def forward(self, x: Tensor) -> Tensor:
        bsz, tgt_len, _ = x.size()
        split = (bsz, tgt_len, self.num_heads)
        q = self.q_proj(x).view(*split, self.key_dim).transpose(1, 2)
        k = (self.k_proj(x) * self.key_dim**-0.5).view(*split, self.key_dim).transpose(1, 2)
        v = self.v_proj(x).view(*split, self.head_dim).transpose(1, 2)
        at = torch.arange(tgt_len, device=x.device)
        apart = (at[:, None] - at[None, :]).tril().to(x.dtype)
        decay = torch.exp(apart * self.decay[:, None, None]).tril()
        out = ((q @ k.transpose(-1, -2)) * decay) @ v
        out = self.norm(out.transpose(1, 2)).reshape(bsz, tgt_len, self.num_heads * self.head_dim)
        return self.out_proj(F.silu(self.g_proj(x)) * out)


class RetNet(NanoGPT):
    """The same around retention."""

    def __init__(self, attention: Any = Retention) -> None:
        super().__init__(attention)


def image(channels: int, size: int) -> Any:
    """A maker of images: their size is the model's."""
    return lambda b, _: (torch.randn(b, channels, size, size, dtype=torch.float64),)


def noisy(b: int, _: int) -> tuple[Tensor, ...]:
    """Images and steps of time."""
    return torch.randn(b, 4, 8, 8, dtype=torch.float64), torch.randint(50, (b,))


def ids(b: int, t: int) -> tuple[Tensor, ...]:
    """Token ids."""
    return (torch.randint(96, (b, t)),)


MODELS = {
    "nanoGPT": (NanoGPT, CausalAttentionTwin, ids),
    "ViT": (ViT, AttentionTwin, image(3, 16)),
    "DiT": (DiT, AttentionTwin, noisy),
    "Swin": (Swin, WindowAttentionTwin, image(3, 32)),
    "RetNet": (RetNet, RetentionTwin, ids),
}
"""The model, the attention of its twin, and what makes inputs."""
