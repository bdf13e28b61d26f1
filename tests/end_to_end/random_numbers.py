"""What each rank of `test_random_numbers` does: a split model draws what the whole one draws."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
)

import shardwright
from tests import planning, six_heads

IDS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1))


def bart() -> Any:
    """Its blocks drop of what is whole and of what is split, in turn; three heads."""
    sizes = {f"{c}_{n}": v for c in ("encoder", "decoder") for n, v in LAYERS.items()}
    drops = {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
    config = BartConfig(d_model=24, vocab_size=50, **sizes, **drops)
    return BartForConditionalGeneration(config)


LAYERS = {"layers": 1, "attention_heads": 3, "ffn_dim": 32, "layerdrop": 0.0}


def gpt2() -> Any:
    config = GPT2Config(n_embd=24, n_head=4, n_layer=2, vocab_size=50, n_positions=16)
    config.eos_token_id = config.bos_token_id = None
    return GPT2LMHeadModel(config)


def llama() -> Any:
    """Dropped in memory efficient attention."""
    return six_heads.llama(attention_dropout=0.3, eos_token_id=None)


def drops(model: Any, **options: Any) -> None:
    """One step, from another seed on each rank: that of the unsplit model from rank 0's."""
    checkpointing = options.pop("checkpointing", False)
    asked: Any = {"tp": 2, "phase": "train", "batch": 2, "seq": 7, **options}
    plan = planning.plan(copy.deepcopy(model), **asked)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    split: Any = shardwright.apply(copy.deepcopy(model), plan, mesh)
    if checkpointing:
        split.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(5)
    want = model(input_ids=IDS, labels=IDS).loss
    want.backward()
    after = torch.rand(3)
    torch.manual_seed(5 + dist.get_rank())
    got = split(input_ids=IDS, labels=IDS).loss
    got.backward()
    torch.testing.assert_close(torch.rand(3), after, rtol=0, atol=0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    grads = shardwright.full_tensors(split, {n: p.grad for n, p in split.named_parameters()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            grads[name], parameter.grad, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


class Always(nn.Module):
    """Drops in eval mode, too: of parts that are not equal, and then of what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 25), nn.Linear(25, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(F.dropout(F.gelu(self.up(x)), 0.3, True))
        return F.dropout(x, 0.3, True)


class Noise(nn.Module):
    """Draws noise for what ranks have parts of, in each way that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(8, 30) for _ in DRAWN)
        self.downs = nn.ModuleList(nn.Linear(30, 8) for _ in DRAWN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down, draw in zip(self.ups, self.downs, DRAWN, strict=True):
            x = x + down(draw(F.dropout(up(x), 0.1, True)))
        return x


DRAWN = (
    lambda h: h + torch.randn_like(h) * torch.rand_like(h),
    lambda h: h * torch.randint_like(h, 3) * torch.bernoulli(h, 0.5),
    lambda h: h + torch.empty_like(h).uniform_() + torch.zeros_like(h).normal_(0, 2),
    lambda h: F.gumbel_softmax(h.unflatten(-1, (10, 3)), dim=-1).flatten(-2),
    lambda h: F.dropout1d(h.transpose(1, 2), 0.3, True).transpose(1, 2),
    lambda h: F.alpha_dropout(h, 0.3, True) * torch.bernoulli(h.sigmoid()),
    lambda h: F.rrelu(h, training=True) + torch.normal(h, h.exp()),
    lambda h: h * torch.rand(h.shape, dtype=h.dtype),
)


class Sometimes(nn.Module):
    """Draws more while it trains, before and behind what it always draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 30), nn.Linear(30, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.up(x), 0.3, self.training)
        h = h + torch.randn_like(h)
        if self.training:
            h = h * torch.rand_like(h)
        return F.dropout(self.down(h), 0.3, self.training) + torch.randn_like(x)


def drops_always(model: Any) -> None:
    """In the mode of the model, from another seed on each rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(2)).double()
    phase = "train" if model.training else "prefill"
    plan = planning.plan(copy.deepcopy(model), tp=2, args=(x,), phase=phase)
    split: Any = shardwright.apply(copy.deepcopy(model), plan, mesh)
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    torch.manual_seed(5)
    want = model(x), model(x)
    torch.manual_seed(5 + dist.get_rank())
    torch.testing.assert_close((split(x), split(x)), want, rtol=0, atol=1e-9)


class LeavesOut(nn.Module):
    """Leaves out blocks at random while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = x + layer(x)
        return x


def leaves_out(model: Any) -> None:
    """Steps from another seed on each rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(3, 19, 8, generator=torch.Generator().manual_seed(2)).double()
    plan = planning.plan(copy.deepcopy(model), tp=2, args=(x,), phase="train")
    split: Any = shardwright.apply(copy.deepcopy(model), plan, mesh)
    for seed in range(5, 9):
        torch.manual_seed(seed)
        want = model(x)
        want.sum().backward()
        torch.manual_seed(seed + dist.get_rank())
        got = split(x)
        got.sum().backward()
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    grads = shardwright.full_tensors(split, {n: p.grad for n, p in split.named_parameters()})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-9)


def parts(model: Any) -> None:
    """Parts of a model called by themselves, and one that trains in a model that does not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = planning.plan(copy.deepcopy(model), tp=2)
    split: Any = shardwright.apply(copy.deepcopy(model), plan, mesh)
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(2)).double()
    for of in (model, split):
        of.eval().transformer.h[1].train()

    def found(of: Any, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        out = [of(IDS).logits]
        out += [of.train().transformer(IDS).last_hidden_state, of.transformer.h[0](x)[0]]
        return out + [of.transformer.h[0].mlp(x)]

    got = found(split, 5 + dist.get_rank())
    torch.testing.assert_close(got, found(model, 5), rtol=0, atol=1e-9)


def samples(model: Any) -> None:
    """Tokens that are drawn, from another seed on each rank: those of the unsplit model."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = planning.plan(copy.deepcopy(model), tp=2)
    split: Any = shardwright.apply(copy.deepcopy(model), plan, mesh)
    for options in ({}, {"num_beams": 2}):
        asked: Any = {"max_new_tokens": 8, "do_sample": True, "pad_token_id": 0, **options}
        torch.manual_seed(7)
        want = model.generate(IDS, **asked)
        torch.manual_seed(7 + dist.get_rank())
        assert torch.equal(split.generate(IDS, **asked), want), options


CASES = {
    "blocks that drop of parts and of wholes": lambda: drops(made(bart)),
    "sequence parallel": lambda: drops(made(gpt2), sequence_parallel=True),
    "gradient checkpointing": lambda: drops(made(llama), checkpointing=True),
    "eval mode": lambda: drops_always(made(Always).eval()),
    "noise": lambda: drops_always(made(Noise).eval()),
    "noise while it trains": lambda: drops_always(made(Noise)),
    "more noise while it trains": lambda: drops_always(made(Sometimes)),
    "less noise in eval mode": lambda: drops_always(made(Sometimes).eval()),
    "blocks that are left out": lambda: leaves_out(made(LeavesOut)),
    "parts": lambda: parts(made(gpt2)),
    "sampling": lambda: samples(made(llama).eval()),
}


def made(model: Any) -> Any:
    torch.manual_seed(0)
    return model().double().train()


def main() -> None:
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        print(name, flush=True)
        case()
    dist.barrier()
    dist.destroy_process_group()
