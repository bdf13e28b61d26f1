"""Optimizers of torch on a split model: steps with clipping are those of the unsplit model."""
# pyright: reportAttributeAccessIssue=false

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn, optim
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.marks import long
from tests.ranks import run_ranks

IDS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(2)).double()
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "AdamW": partial(optim.AdamW, lr=1e-2, eps=1e-3),
    "AdamW, foreach": partial(optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "AdamW, fused": partial(optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adagrad": partial(optim.Adagrad, lr=1e-2),
    "RMSprop": partial(optim.RMSprop, lr=1e-3, eps=1e-3),
    "Muon": partial(optim.Muon, lr=1e-2),
    # eps: gradients of biases of keys are 0 but for rounding, which it would make as large as any.
    "Adafactor": partial(optim.Adafactor, lr=1e-2, eps=(1e-6, 1e-3)),
    "transformers' Adafactor": partial(transformers.Adafactor, lr=1e-2, relative_step=False),
    "Adafactor, foreach": partial(optim.Adafactor, lr=1e-2, eps=(1e-6, 1e-3), foreach=True),
}


def train(model: Any, make: Callable[..., optim.Optimizer], steps: int) -> None:
    matrices = make is OPTIMIZERS["Muon"]
    optimizer = make([p for p in model.parameters() if p.dim() == 2 or not matrices])
    for _ in range(steps):
        optimizer.zero_grad()
        (model(IDS).logits * WEIGHTS).tanh().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def gpt2() -> Any:
    """Three heads on two ranks, in a fused weight that lies in the order of the ranks."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=50, n_positions=16)
    return GPT2LMHeadModel(config).double().eval()


@pytest.mark.parametrize("steps", [3, long(10)])
def test_steps_are_those_of_the_unsplit_model(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Muon rounds to bfloat16 on its way, where sums in another order differ by 1e-3.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)
    base = gpt2()
    plan = planning.plan(copy.deepcopy(base), tp=2)
    want = {}
    for name, make in OPTIMIZERS.items():
        train(whole := copy.deepcopy(base), make, steps)
        want[name] = {n: p.detach() for n, p in whole.named_parameters()}

    def work(mesh: Mesh) -> None:
        for name, make in OPTIMIZERS.items():
            split = shardwright.apply(copy.deepcopy(base), plan, mesh)
            train(split, make, steps)
            got = shardwright.full_tensors(split, dict(split.named_parameters()))
            for n, p in want[name].items():
                torch.testing.assert_close(
                    got[n], p, rtol=0, atol=1e-9, msg=lambda m, at=(name, n): f"{at}: {m}"
                )

    run_ranks(2, work)


@pytest.mark.parametrize("overflows", [False, True])
def test_a_scaler_skips_a_step_on_all_ranks_alike(overflows: bool) -> None:
    """One rank alone holds the number that is not finite."""
    base = gpt2()
    plan = planning.plan(copy.deepcopy(base), tp=2)

    def step(model: Any, first: bool) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler.scale((model(IDS).logits * WEIGHTS).tanh().mean()).backward()
        if overflows and first:
            grad = model.transformer.h[0].mlp.c_fc.weight.grad
            getattr(grad, "_local_tensor", grad)[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        return dict(model.named_parameters())

    want = step(copy.deepcopy(base), True)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        for name, p in shardwright.full_tensors(split, step(split, mesh["tp"].rank == 1)).items():
            torch.testing.assert_close(p, want[name], rtol=0, atol=1e-9, msg=name)

    run_ranks(2, work)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "transformers' Adafactor"])
def test_full_states_go_into_another_optimizer(name: str) -> None:
    """Those of Adafactor have no shape of a parameter: each rank keeps them in full."""
    base, make = gpt2(), OPTIMIZERS[name]
    plan = planning.plan(copy.deepcopy(base), tp=2)

    def twice(model: Any, whole_state: Callable[..., Any], load: Callable[..., Any]) -> Any:
        for optimizer in (first := make(model.parameters()), make(model.parameters())):
            if optimizer is not first:
                load(optimizer, copy.deepcopy(whole_state(first)))
            optimizer.zero_grad()
            (model(IDS).logits * WEIGHTS).tanh().mean().backward()
            optimizer.step()
        return model

    whole: Any = optim.Optimizer
    want = twice(copy.deepcopy(base), whole.state_dict, whole.load_state_dict)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        ours = shardwright.full_optimizer_state, shardwright.load_full_optimizer_state
        got = shardwright.full_tensors(split, dict(twice(split, *ours).named_parameters()))
        for n, p in want.named_parameters():
            torch.testing.assert_close(got[n], p.detach(), rtol=0, atol=1e-9)

    run_ranks(2, work)
