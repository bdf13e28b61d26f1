"""Sums of gradients that are under way while gradients of weights are computed."""
# pyright: reportAttributeAccessIssue=false

import copy
import threading
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import shardwright
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.redistribution import overlap
from tests import planning, six_heads
from tests.ranks import run_ranks

IDS = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(2)).double()


def whole() -> Any:
    """A model with biases, and activations that write into what layers give."""
    torch.manual_seed(0)
    model = six_heads.llama(num_hidden_layers=2, attention_bias=True, mlp_bias=True)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.SiLU(inplace=True)
    return model.double().eval()


def split(model: Any, mesh: Mesh) -> Any:
    """A split copy; ranks are threads, which draw from one generator."""
    return shardwright.apply(copy.deepcopy(model), planned(), mesh)


planned = planning.Once(lambda: planning.plan(whole(), tp=2))


def loss_of(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """In float64; that of transformers is in float32."""
    return (model(ids).logits * WEIGHTS).sum()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The whole gradient of each parameter that has one."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def once(model: Any) -> None:
    loss_of(model).backward()


def twice_through_one_graph(model: Any) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def after_a_pass_for_activations_only(model: Any) -> None:
    """What that pass computed for weights and gave nobody is not kept."""
    seen = []
    handle = model.model.layers[0].register_forward_hook(lambda m, a, out: seen.append(out))
    loss = loss_of(model)
    handle.remove()
    hidden = seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]
    torch.autograd.grad(3 * loss, hidden, retain_graph=True)
    loss.backward()


def with_frozen_weights(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name and "down" not in name)
    once(model)


def accumulated(model: Any) -> None:
    losses = [loss_of(model, ids) for ids in (IDS, IDS.flip(0), IDS.flip(1))]
    for loss in losses:
        loss.backward()


def checkpointed(model: Any) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    once(model)


def checkpointed_by_going_back_in(model: Any) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    once(model)


def around_one_block(model: Any) -> None:
    block = model.model.layers[1].mlp
    x = torch.linspace(-1, 1, 2 * 3 * 36).double().view(2, 3, 36).requires_grad_()
    checkpoint(block, x, use_reentrant=False).pow(2).sum().backward()


WAYS = (
    once,
    twice_through_one_graph,
    after_a_pass_for_activations_only,
    with_frozen_weights,
    accumulated,
    checkpointed,
    checkpointed_by_going_back_in,
    around_one_block,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_those_of_the_whole(way: Any) -> None:
    original = whole()

    def rank(mesh: Mesh) -> dict[str, torch.Tensor]:
        model = split(original, mesh)
        way(model)
        return gradients(model)

    with sdpa_kernel(SDPBackend.MATH):
        found = run_ranks(2, rank)
        way(original)
        want = gradients(original)
        for got in found:
            assert got.keys() == want.keys()
            for name in want:
                torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)


def test_weights_get_their_gradients_while_a_sum_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, original, events = overlap.begin_all_reduce, whole(), threading.local()

    def told(x: torch.Tensor, group: Any) -> Any:
        out, wait = begin(x, group)
        events.seen.append("begin")
        return out, lambda: (events.seen.append("end"), wait())

    def rank(mesh: Mesh) -> list[str]:
        model, events.seen = split(original, mesh), []
        for name, p in model.model.layers[1].named_parameters():
            kind = ".".join(name.split(".")[-2:])
            p.register_hook(lambda grad, kind=kind: events.seen.append(kind))
        once(model)
        return events.seen

    monkeypatch.setattr(overlap, "begin_all_reduce", told)
    for seen in run_ranks(2, rank):
        assert seen.count("begin") == seen.count("end") == 5  # two a block, and the head's
        weights = [event for event in seen if event.endswith("proj.weight")]
        assert len(weights) == 7
        for weight in weights:
            before = seen[: seen.index(weight)]
            assert before.count("begin") == before.count("end") + 1, weight
