"""Parameters as DTensors: what stock tools make of them, and what changes of a split model do."""
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.errors import UsageError
from shardwright.planner.contract.notation import parse
from shardwright.runtime.arranged import Arranged
from shardwright.runtime.dtensors import placements_of
from shardwright.runtime.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks

IDS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(2)).double()


def llama() -> Any:
    """Heads that 2 and 4 ranks do not divide, or share."""
    config = LlamaConfig(
        hidden_size=36,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=48,
        vocab_size=50,
        num_hidden_layers=1,
    )
    return LlamaForCausalLM(config)


def gpt2() -> Any:
    """A fused weight, and biases."""
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=50))


def made(model: Any) -> Any:
    torch.manual_seed(0)
    model = model().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.1)
    return model


def backward(model: Any) -> None:
    model.zero_grad()
    (model(IDS).logits * WEIGHTS).sum().backward()


def whole(norm: torch.Tensor) -> torch.Tensor:
    assert isinstance(norm, DTensor)
    return norm.full_tensor()


@pytest.mark.parametrize(("model", "tp"), [(llama, 2), (llama, 4), (gpt2, 2), (gpt2, 3)])
def test_clipping_takes_the_norm_of_the_whole(model: Any, tp: int) -> None:
    """Parts that are uneven, shared, fused or replicated each count once, on every rank."""
    base = made(model)
    plan = planning.plan(copy.deepcopy(base), tp=tp)
    backward(unsplit := copy.deepcopy(base))
    want = nn.utils.clip_grad_norm_(unsplit.parameters(), 0.1)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        backward(split)
        grads = [p.grad for p in split.parameters() if p.grad is not None]
        torch.testing.assert_close(whole(nn.utils.get_total_norm(grads)), want, rtol=1e-6, atol=0)
        norm = nn.utils.clip_grad_norm_(split.parameters(), 0.1)
        torch.testing.assert_close(whole(norm), want, rtol=1e-6, atol=0)
        for name, parameter in split.named_parameters():
            assert parameter.shape == parameter.grad.shape == base.get_parameter(name).shape
            norm = parameter.detach().norm()
            torch.testing.assert_close(whole(norm), base.get_parameter(name).detach().norm())

    run_ranks(tp, work)


def test_what_torch_would_show_in_the_wrong_order_raises() -> None:
    def work(mesh: Mesh) -> None:
        found = [placements_of(parse(text), mesh) for text in ("8@tp, 4", "4@tp + 4@tp, 4", "5@tp")]
        assert [isinstance(f[0], Arranged) for f in found if f] == [False, True, False]
        assert placements_of(parse("4@tp + 2, 4"), mesh) is None
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        weight = split.transformer.h[0].attn.c_attn.weight
        with pytest.raises(UsageError, match="full_tensors"):
            weight.full_tensor()
        with pytest.raises(UsageError, match="full_tensors"):
            torch.zeros_like(weight).full_tensor()

    base = made(gpt2)
    plan = planning.plan(copy.deepcopy(base), tp=2)
    run_ranks(2, work)


def test_whole_tensors_load_and_copies_compute() -> None:
    base, other = made(llama), made(llama)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    plan = planning.plan(copy.deepcopy(base), tp=2)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        twin = copy.deepcopy(split)
        for assign in (False, True):
            twin.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
            torch.testing.assert_close(twin(IDS).logits, other(IDS).logits)
            twin.load_state_dict(split.state_dict())
            torch.testing.assert_close(twin(IDS).logits, base(IDS).logits)
        block = split.model.layers[0].mlp  # called by itself
        x = torch.ones(1, 2, 36).double()
        torch.testing.assert_close(block(x), base.model.layers[0].mlp(x))

    run_ranks(2, work)


def new_head(model: Any) -> None:
    model.lm_head = nn.Linear(36, 50, bias=False).double()


def new_parameter(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.zeros(50, 36).double())


def adapter(model: Any) -> None:
    """As LoRA goes in: the layer stays, behind one with weights of its own."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.more = base, nn.Linear(36, 48, bias=False).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.more(x)

    mlp = model.model.layers[0].mlp
    mlp.up_proj = Adapted(mlp.up_proj)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (new_head, "'lm_head"),
        (new_parameter, "'lm_head.weight' came into the model"),
        (adapter, "'model.layers.0.mlp.up_proj.more.weight' came into the model"),
        (lambda model: model.resize_token_embeddings(60), "resize them before"),
        (pickle.dumps, "shardwright.save"),
        (nn.parallel.DistributedDataParallel, "fully_shard"),
        (lambda model: nn.utils.parametrizations.weight_norm(model.lm_head), "before"),
    ],
)
def test_changes_after_splitting_are_refused(change: Any, why: str) -> None:
    base = made(llama)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        with pytest.raises(UsageError, match=why):
            change(split)
            split(IDS)

    plan = planning.plan(copy.deepcopy(base), tp=2)
    run_ranks(2, work)


def test_wrapping_modules_of_the_model_is_not_a_change() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    base = made(llama)
    plan = planning.plan(copy.deepcopy(base), tp=2)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        split.model.layers[0].mlp = Wrapper(split.model.layers[0].mlp)
        torch.testing.assert_close(split(IDS).logits, base(IDS).logits)

    run_ranks(2, work)
