"""Parameters as DTensors: what stock tools make of them, and what changes of a split model do."""
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false

import copy
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.utils import prune
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Phi3Config,
    Phi3ForCausalLM,
)

import shardwright
from shardwright.errors import PlanError, UsageError
from shardwright.planner.contract.notation import parse
from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution.reshard import take_local
from shardwright.runtime.tensors.layouts import PlannedShard, placements_of
from shardwright.runtime.tensors.parameters import cut
from shardwright.runtime.tensors.split_tensor import SplitTensor
from tests import planning
from tests.ranks import run_ranks
from tests.six_heads import llama

IDS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(2)).double()


def gpt2() -> Any:
    """A fused weight, and biases."""
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=50))


def phi3(key_heads: int = 1) -> Any:
    """A fused weight, of which ranks have rows of the same key and value heads."""
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        intermediate_size=48,
        vocab_size=50,
        num_hidden_layers=1,
        pad_token_id=0,
    )
    return Phi3ForCausalLM(config)


def made(model: Any) -> Any:
    torch.manual_seed(0)
    model = model().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.1)
    return model


@cache
def planned(model: Any, tp: int = 2) -> Plan:
    """The plan of a made model, for all tests of this process."""
    return planning.plan(made(model), tp=tp)


def backward(model: Any) -> None:
    model.zero_grad()
    (model(IDS).logits * WEIGHTS).sum().backward()


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize(
    ("model", "tp"), [(llama, 2), (llama, 4), (gpt2, 3), (phi3, 2), (partial(phi3, 2), 4)]
)
def test_clipping_takes_the_norm_of_the_whole(model: Any, tp: int) -> None:
    """Parts that are uneven, shared, fused or replicated each count once, on every rank."""
    base = made(model)
    fused = {"model.layers.*.self_attn.qkv_proj.weight": "shard:0"}
    pins = fused if isinstance(base, Phi3ForCausalLM) else None
    plan = planning.plan(copy.deepcopy(base), tp=tp, pins=pins)
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


JOINED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": lambda loss, penalty: loss + 0.1 * penalty,
    "again": lambda loss, penalty: loss + 0.1 * penalty,  # torch has noted how it goes
    "product": lambda loss, penalty: penalty * loss,
    "quotient": lambda loss, penalty: loss / (1 + penalty),
    "in a row": lambda loss, penalty: torch.stack([loss, penalty]).prod(),
    "several times": lambda loss, penalty: (loss.exp() + penalty) * loss + loss,
    "smaller": lambda loss, penalty: torch.minimum(loss, penalty),
}


@pytest.mark.parametrize("model", [llama, phi3])
def test_penalties_join_a_loss(model: Any) -> None:
    """Values, as `item()` gives them, and gradients, of what is plain and of parameters."""
    base = made(model)
    plan = planned(model)

    def loss_of(model: Any, join: Any) -> float:
        model.zero_grad()
        penalty = sum(p.pow(2).sum() + p.norm() for p in model.parameters())
        loss = join((model(IDS).logits * WEIGHTS).tanh().mean(), penalty)
        loss.backward()
        return loss.item()

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        for name, join in JOINED.items():
            want = loss_of(whole_model := copy.deepcopy(base), join)
            assert loss_of(split, join) == pytest.approx(want, rel=1e-9), name
            for parameter, of_whole in zip(
                split.parameters(), whole_model.parameters(), strict=True
            ):
                assert parameter.grad is not None
                torch.testing.assert_close(
                    whole(parameter.grad), of_whole.grad, rtol=1e-9, atol=1e-9, msg=name
                )
        norms = [p.norm().item() for p in split.parameters()]
        assert norms == pytest.approx([p.norm().item() for p in base.parameters()])

    run_ranks(2, work)


COMPUTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "itself": lambda w, v: w,
    "element by element": lambda w, v: w * 2 + v,
    "transposed": lambda w, v: w.T,
    "product": lambda w, v: w @ v.T,
    "norm": lambda w, v: w.norm(),
    "mean": lambda w, v: w.mean(),
    "norms of rows": lambda w, v: w.norm(dim=-1, keepdim=True).square_() + w.norm(dim=0),
    "mean of rows": lambda w, v: w.mean(0),
    "rows of norm 1": lambda w, v: w / w.norm(dim=-1, keepdim=True),
    "some rows": lambda w, v: w[1:4],
    "in a row": lambda w, v: torch.cat([w, v]).flatten(),
    "in order": lambda w, v: w.cumsum(0),
    "triangle": lambda w, v: w.triu(),
    "in place": lambda w, v: w.clone().lerp_(v, 0.25),
    "list": lambda w, v: torch._foreach_mul([v, w], 2.0)[1],
    "norms": lambda w, v: torch._foreach_norm([v, w])[1],
    "transposed twice": lambda w, v: (w.t() * 2 + v.mT).permute(1, 0),
    "transposed, in place": lambda w, v: w.clone().T.add_(v.transpose(0, 1)).sum(1),
    "transposed, product": lambda w, v: w.T @ v,
    "one vector": lambda w, v: torch.cat([w.flatten(), v.sum(0), v[0], v.flatten()]),
    "columns joined": lambda w, v: torch.cat([w, v.sin()], dim=1),
}


SHARED = "2@tp.0*2@tp.1 + 2@tp.0, 4"
"""Four heads of queries over two sub-axes, keys of two over one."""


def sub_axes(layout: str) -> dict[str, list[int]]:
    return {"tp": [2, 2]} if "tp." in layout else {}


@pytest.mark.parametrize(
    "layout", ["3@tp*2, 4", "3*2@tp*2, 4", "4@tp + 4@tp, 8", "8, 3@tp*2", "4@tp + 2, 4", SHARED]
)
def test_torch_computes_of_parts_what_it_does_of_the_whole(layout: str) -> None:
    """Parts that are uneven, fused, or partly shared."""
    placement = parse(layout)
    torch.manual_seed(0)
    w, v = (torch.randn(*placement.shape, dtype=torch.float64) for _ in range(2))  # type: ignore[arg-type]

    def work(mesh: Mesh) -> None:
        mesh = mesh.with_sub_axes(sub_axes(layout))
        device_mesh = mesh.parameter_mesh()
        assert device_mesh is not None
        spec = DTensorSpec(device_mesh, placements_of(placement, mesh))
        assert any(isinstance(p, PlannedShard) for p in spec.placements)
        own = spec.placements
        like = SplitTensor.of(take_local(w, placement, mesh.coords), spec, w.shape)
        mine = [cut(x, like) for x in (w, v)]
        for name, compute in COMPUTED.items():
            got = whole(compute(*mine))
            torch.testing.assert_close(got, compute(w, v), msg=lambda m, n=name: f"{n}: {m}")
        for name in ("element by element", "in place", "list"):  # nothing is gathered for these
            assert COMPUTED[name](*mine).placements == spec.placements, name
        torch_s = DTensor.from_local(v, device_mesh, [Replicate()] * len(own)).redistribute(
            placements=[Shard(0)] * len(own)
        )
        torch.testing.assert_close(whole(mine[0] + torch_s), w + v)
        torch.testing.assert_close(whole(mine[0].clone().add_(torch_s)), w + v)

    run_ranks(4 if sub_axes(layout) else 2, work)


@pytest.mark.parametrize("layout", ["8@tp*2, 4", "16@tp, 4", "4, 2*4@tp*2", "5@tp*3"])
def test_a_whole_is_cut_as_the_parts_lie(layout: str) -> None:
    """Over three ranks, where ours and torch.chunk's parts of 16 differ: 6, 5, 5 and 6, 6, 4."""
    placement = parse(layout)
    w = torch.arange(math.prod(n or 0 for n in placement.shape)).view(placement.shape)  # type: ignore[arg-type]

    def work(mesh: Mesh) -> None:
        device_mesh, local = mesh.parameter_mesh(), take_local(w, placement, mesh.coords)
        assert device_mesh is not None
        like = SplitTensor.of(
            local, DTensorSpec(device_mesh, placements_of(placement, mesh)), w.shape
        )
        assert torch.equal(cut(w, like)._local_tensor, local)

    run_ranks(3, work)


@pytest.mark.parametrize("layout", ["4@tp + 4@tp, 8", "8, 3*2@tp*2", "4@tp + 2, 4", SHARED])
def test_redistributed_in_and_out_of_an_order_of_its_own(layout: str) -> None:
    """To and from torch's shards of either dim, and back again in a backward pass."""
    placement = parse(layout)
    torch.manual_seed(0)
    w = torch.randn(*placement.shape, dtype=torch.float64)  # type: ignore[arg-type]

    def work(mesh: Mesh) -> None:
        mesh = mesh.with_sub_axes(sub_axes(layout))
        device_mesh = mesh.parameter_mesh()
        assert device_mesh is not None
        own = placements_of(placement, mesh)
        mine = SplitTensor.of(
            take_local(w, placement, mesh.coords), DTensorSpec(device_mesh, own), w.shape
        ).requires_grad_()
        for other in (Shard(0), Shard(1), Replicate()):
            moved = mine.redistribute(placements=[other] * len(own))
            torch.testing.assert_close(whole(moved), w)
            back = moved.detach().redistribute(placements=own)
            assert back.placements == own
            torch.testing.assert_close(back.to_local(), mine.to_local())
            (grad,) = torch.autograd.grad((moved * moved).sum(), mine)
            torch.testing.assert_close(whole(grad), 2 * w)

    run_ranks(4 if sub_axes(layout) else 2, work)


def test_torch_keeps_nothing_of_its_shards_for_those_in_another_order() -> None:
    """Alike but for the order, in turn, so that each finds what torch has noted for the other."""
    placement = parse("4@tp + 4@tp, 8")
    torch.manual_seed(0)
    w, v = (torch.randn(8, 8, dtype=torch.float64) for _ in range(2))

    def work(mesh: Mesh) -> None:
        device_mesh = mesh.parameter_mesh()
        assert device_mesh is not None
        spec = DTensorSpec(device_mesh, placements_of(placement, mesh))
        like = SplitTensor.of(take_local(w, placement, mesh.coords), spec, w.shape)
        assert spec.placements[0] != Shard(0) and Shard(0) != spec.placements[0]
        ours = [cut(x, like) for x in (w, v)]
        torch_s = [
            DTensor.from_local(x, device_mesh, [Replicate()]).redistribute(placements=[Shard(0)])
            for x in (w, v)
        ]
        assert ours[0].to_local().shape == torch_s[0].to_local().shape
        for first, second in ((ours, torch_s), (torch_s, ours)):
            for name, compute in COMPUTED.items():
                for pair in (first, second, first):
                    got = whole(compute(*pair))
                    torch.testing.assert_close(
                        got, compute(w, v), msg=lambda m, n=name: f"{n}: {m}"
                    )

    run_ranks(2, work)


def test_what_torch_shares_evenly_is_a_plain_shard() -> None:
    def work(mesh: Mesh) -> None:
        for layout in ("8@tp, 4", "5@tp"):
            assert all(type(p) is Shard for p in placements_of(parse(layout), mesh))

    run_ranks(2, work)


def test_whole_tensors_load_and_copies_compute() -> None:
    base, other = made(llama), made(llama)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    plan = planned(llama)

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


@pytest.mark.parametrize(("model", "tp"), [(llama, 4), (gpt2, 3)])
def test_whole_tensors_are_split_as_parameters_are(model: Any, tp: int) -> None:
    """There and back, of any dtype; what is no parameter's is refused."""
    base = made(model)
    plan = planned(model, tp)
    wanted = {n: 2 * p.detach().float() for n, p in base.named_parameters()}

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        mine = shardwright.split_tensors(split, wanted)
        for name, parameter in split.named_parameters():
            assert mine[name].placements == parameter.placements
            assert torch.equal(mine[name].to_local(), 2 * parameter.to_local().float())
        torch.testing.assert_close(shardwright.full_tensors(split, mine), wanted, rtol=0, atol=0)
        with pytest.raises(PlanError, match="no parameter"):
            shardwright.split_tensors(split, {"nobody": torch.zeros(2)})
        with pytest.raises(PlanError, match="the whole has"):
            shardwright.split_tensors(split, {next(iter(wanted)): torch.zeros(1)})

    run_ranks(tp, work)


def test_what_has_parametrizations_is_copied() -> None:
    """torch gives such modules a class that copies in its own way, and refuses to be pickled."""
    up = nn.utils.parametrizations.weight_norm(nn.Linear(8, 32))
    model = nn.Sequential(up, nn.GELU(), nn.Linear(32, 8), nn.Linear(8, 32), nn.Linear(32, 8))
    x = torch.randn(3, 8).double()
    plan = planning.plan(model.double().eval(), 2, args=(x,))
    want = model(x)

    def rank(mesh: Mesh) -> None:
        local = shardwright.apply(copy.deepcopy(model), plan, mesh)
        twin = copy.deepcopy(local)
        with torch.no_grad():
            for parameter in local.parameters():
                parameter.zero_()
        torch.testing.assert_close(twin(x), want, rtol=0, atol=1e-9)

    run_ranks(2, rank)


def test_a_state_that_another_rank_saved_is_refused() -> None:
    base = made(llama)
    plan = planned(llama)
    states: dict[int, Any] = {}

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        states[mesh["tp"].rank] = copy.deepcopy(split.state_dict())
        nn.utils.get_total_norm([p.detach() for p in split.parameters()])  # all have come here
        split.load_state_dict(states[mesh["tp"].rank])
        torch.testing.assert_close(split(IDS).logits, base(IDS).logits)
        if mesh["tp"].rank == 1:
            with pytest.raises(UsageError, match="another rank had"):
                split.load_state_dict(states[0])

    run_ranks(2, work)


def test_functional_calls_are_those_of_the_unsplit_model() -> None:
    base = made(llama)
    plan = planned(llama)
    call = torch.func.functional_call
    want = call(base, {n: p.detach() / 2 for n, p in base.named_parameters()}, (IDS,)).logits

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        half = {n: p.detach() / 2 for n, p in split.named_parameters()}
        torch.testing.assert_close(call(split, half, (IDS,)).logits, want)
        full = {n: p.detach() / 2 for n, p in base.named_parameters()}
        with pytest.raises(UsageError, match="to functional_call give tensors of .*split_tensors"):
            call(split, full, (IDS,))
        parts = shardwright.split_tensors(split, full)
        torch.testing.assert_close(call(split, parts, (IDS,)).logits, want)

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda model: model.register_parameter("more", nn.Parameter(torch.zeros(2))),
            "'more' came",
        ),
        (lambda model: model.resize_token_embeddings(60), "resize them before"),
        (nn.parallel.DistributedDataParallel, "SplitTrainer.*SplitAccelerator.*fully_shard"),
        (lambda model: torch.jit.trace(model, (IDS,)), "torch.compile"),
        (lambda model: nn.utils.parametrizations.weight_norm(model.lm_head), "before"),
        (lambda model: prune.identity(model.lm_head, "weight"), "is set to a tensor.*before"),
    ],
)
def test_changes_after_splitting_are_refused(change: Any, why: str) -> None:
    base = made(llama)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        with pytest.raises(UsageError, match=why):
            change(split)
            split(IDS)

    plan = planned(llama)
    run_ranks(2, work)


def test_memory_of_parameters_may_be_shared() -> None:
    base = made(llama)
    plan = planned(llama)
    want = base(IDS).logits

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh).share_memory()
        assert all(p.is_shared() for p in split.parameters())
        torch.testing.assert_close(split(IDS).logits, want)

    run_ranks(2, work)


def test_wrapping_modules_of_the_model_is_not_a_change() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    base = made(llama)
    plan = planned(llama)

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(base), plan, mesh)
        split.model.layers[0].mlp = Wrapper(split.model.layers[0].mlp)
        torch.testing.assert_close(split(IDS).logits, base(IDS).logits)

    run_ranks(2, work)


def test_code_in_the_place_of_a_forward_sees_whole_weights() -> None:
    """As trl's SFTTrainer has it, which multiplies with the head itself; and what hands on."""
    base = made(gpt2)
    plan = planned(gpt2)

    def fused(self: Any, ids: torch.Tensor) -> torch.Tensor:
        head = whole(self.lm_head.weight)
        assert head.shape == (50, 32)
        return self.base_model(ids).last_hidden_state @ head.T

    backward(unsplit := copy.deepcopy(base))

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(base), plan, mesh)
        own, split.forward = split.forward, partial(fused, split)
        logits = split(IDS)
        (logits * WEIGHTS).sum().backward()
        torch.testing.assert_close(logits, unsplit(IDS).logits, rtol=1e-9, atol=0)
        for name, parameter in split.named_parameters():
            got, want = whole(parameter.grad), unsplit.get_parameter(name).grad
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        split.forward = lambda *given: own(*given)
        torch.testing.assert_close(split(IDS).logits, logits)
        norm: Any = split.transformer.ln_f
        with pytest.raises(UsageError, match="put on 'transformer.ln_f' after the model was split"):
            norm.forward = partial(type(norm).forward, norm)
        norm.forward = norm.forward
        assert norm(torch.ones(2, 32).double()).shape == (2, 32)

    run_ranks(2, work)
