"""A split model that is pickled, or saved by torch: each rank gets its part again."""
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

import copy
import io
import pickle
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Phi3Config,
    Phi3ForCausalLM,
)

import shardwright
from shardwright.errors import UsageError
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_dtensors import IDS, gpt2
from tests.six_heads import llama

X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2)).double()
SMALL: dict[str, Any] = {"vocab_size": 50, "num_hidden_layers": 1, "pad_token_id": 0}


class Odd(nn.Module):
    """A buffer on split features, torch's own attention, and a module that knows the one around."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up, self.norm, self.down = nn.Linear(32, 48), nn.BatchNorm1d(48), nn.Linear(48, 32)
        vars(self.down)["around"] = (self,)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, rows, 32] -> the same."""
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.down(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2).relu())


def phi3() -> Any:
    """A fused weight, of which ranks share rows, over two sub-axes of four ranks."""
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    return Phi3ForCausalLM(Phi3Config(**heads, intermediate_size=48, **SMALL))


def made(model: Any) -> Any:
    """With weights of its own, and one that is frozen."""
    for i, p in enumerate(model.parameters()):
        nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(i))
    next(model.parameters()).requires_grad_(False)
    return model.double().eval()


def planned(model: Any, **how: Any) -> Any:
    """Its plan."""
    given = {"args": (X,), "phase": "train"} if isinstance(model, Odd) else {}
    return planning.plan(copy.deepcopy(model), **{**given, **how})


@cache
def of_llama() -> Any:
    return planned(made(llama()), tp=2)


def used(model: Any) -> list[Tensor]:
    """What it gives, and all gradients."""
    out = model(X) if hasattr(model, "attention") else model(IDS).logits
    (out * torch.sin(torch.arange(out.numel()).double()).view(out.shape)).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [out.detach(), *full_tensors(model, grads).values()]


def by_torch(model: Any) -> Any:
    """Through a file as torch writes it."""
    torch.save({"model": model}, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)["model"]


def by_pickle(model: Any) -> Any:
    """Through bytes."""
    return pickle.loads(pickle.dumps(model))


def twice(model: Any) -> Any:
    """What was read can be written."""
    return by_pickle(by_torch(model))


@pytest.mark.parametrize(
    ("make", "through", "sizes"),
    [
        (llama, by_pickle, {"tp": 2}),
        (gpt2, by_torch, {"tp": 3}),
        (phi3, twice, {"tp": 4}),
        (Odd, twice, {"tp": 2}),
        (Odd, by_pickle, {"dp": 2, "tp": 2}),
    ],
)
def test_it_comes_back_as_it_was(make: Any, through: Any, sizes: dict[str, int]) -> None:
    """Values that changed since it was split, gradients, modes, ties; and nothing is shared."""
    base = made(make())
    plan = planned(base, mesh=sizes)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        split.train(make is Odd)
        with torch.no_grad():
            for parameter in split.parameters():
                parameter.mul_(1.5)
        again = through(split)
        assert [type(m) for m in again.modules()] == [type(m) for m in split.modules()]
        assert again.training == split.training
        want = used(split)
        torch.testing.assert_close(used(again), want, rtol=0, atol=1e-9)
        with torch.no_grad():
            next(again.parameters()).zero_()
        assert next(split.parameters()).to_local().any()

    run_ranks(4 if "dp" in sizes else sizes["tp"], work, sizes)


def test_all_of_a_state_dict_can_be_saved_whole() -> None:
    """Buffers of which a state dict shows parts, too."""
    base = made(Odd())
    plan = planned(base, tp=2)

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        assert split.norm.running_mean.to_local().shape[0] < base.norm.running_mean.shape[0]
        state = split.state_dict()
        torch.testing.assert_close(full_tensors(split, state), {**base.state_dict()})

    run_ranks(2, work)


def test_it_is_read_where_there_is_no_such_mesh() -> None:
    base, plan = made(llama()), of_llama()
    with torch.no_grad():
        want = base(IDS).logits

    def write(mesh: Mesh) -> bytes:
        return pickle.dumps(shardwright.apply(copy.deepcopy(base), plan, mesh))

    written = run_ranks(2, write)

    def read(mesh: Mesh) -> None:
        again = pickle.loads(written[mesh["tp"].rank])
        torch.testing.assert_close(again(IDS).logits.detach(), want, rtol=0, atol=1e-9)
        with pytest.raises(UsageError, match="let each rank read its own file"):
            pickle.loads(written[1 - mesh["tp"].rank])

    run_ranks(2, read)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m.lm_head.register_forward_hook(print), "'lm_head' has hooks"),
        (lambda m: m.set_submodule("lm_head", nn.Linear(36, 50).double()), "changed after it"),
        (lambda m: m.lm_head, "a part of a model"),
    ],
)
def test_what_it_cannot_bring_back_is_refused(change: Any, why: str) -> None:
    base, plan = made(llama()), of_llama()

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        part = change(split)
        with pytest.raises(UsageError, match=why):
            pickle.dumps(part if isinstance(part, nn.Module) else split)

    run_ranks(2, work)
