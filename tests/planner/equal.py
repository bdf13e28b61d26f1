"""Plan a module, split it over thread ranks, and compare it with the whole one in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.planner.contract.plan_file import Plan
from shardwright.runtime.api import apply
from shardwright.runtime.communication.audit import count_collectives
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.predicted import Tally, counted, predicted
from tests.ranks import run_ranks

TRACED, RUN = (3, 19), (2, 7)
"""Batch and sequence of the trace, and those that the split module is priced for and run with."""

Inputs = Callable[[int, int], tuple[Any, ...]]
TOLERANCE = 1e-10


def features(width: int) -> Inputs:
    """A maker of inputs [batch, sequence, width]."""
    return lambda b, t: (torch.randn(b, t, width, dtype=torch.float64),)


def ids(vocabulary: int) -> Inputs:
    """A maker of token ids [batch, sequence]."""
    return lambda b, t: (torch.randint(vocabulary, (b, t)),)


def planned(module: nn.Module, inputs: Inputs, tp: int, **options: Any) -> Plan:
    """The plan of `module`, traced with the sizes that the planner wants."""
    batch, seq = RUN
    return planning.plan(module, tp, args=inputs(*TRACED), batch=batch, seq=seq, **options)


def weigh(output: Any) -> Tensor:
    """A sum of all numbers in `output`, each with a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            weights = torch.cos(torch.arange(leaf.numel(), dtype=torch.float64)).view(leaf.shape)
            total = total + (leaf * weights).sum()
    return total


def randomize(module: nn.Module, spread: float = 0.5) -> None:
    """Give every parameter, biases and norms too, values that no rank could guess."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * spread)


def assert_equal(
    module: nn.Module, inputs: Inputs, plan: Plan, collectives: bool = True, spread: float = 0.5
) -> None:
    """Compare outputs, all gradients and, if asked, the predicted collectives on every rank.

    Inputs of floating point get a gradient too: the module may stand within a larger one. Where
    it is deep, parameters of a smaller `spread` keep softmax from saturating.
    """
    module = module.double()
    torch.manual_seed(0)
    randomize(module, spread)
    given = inputs(*RUN)

    def run(local: nn.Module) -> tuple[Any, list[Tensor | None], list[Tally]]:
        args = [
            x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in given
        ]
        with count_collectives() as ahead:
            output = local(*args)
        with count_collectives() as back:
            weigh(output).backward()
        grads = [x.grad for x in args if isinstance(x, Tensor) and x.requires_grad]
        return output, grads, [counted(ahead), counted(back)]

    whole = copy.deepcopy(module)
    want, want_inputs, _ = run(whole)
    want_grads = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}

    def rank(
        mesh: Mesh,
    ) -> tuple[Any, list[Tensor | None], dict[str, Tensor], list[Tally]]:
        local = apply(copy.deepcopy(module), plan, mesh)
        output, inputs_grads, tallies = run(local)
        grads = {n: p.grad for n, p in local.named_parameters() if p.grad is not None}
        return output, inputs_grads, full_tensors(local, grads), tallies

    tallies = [predicted(plan, phase) for phase in ("forward", "backward")]
    for got, got_inputs, got_grads, got_tallies in run_ranks(plan.world_size, rank):
        assert got_tallies == tallies or not collectives
        for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
            close(a, b, "output")
        assert got_grads.keys() == want_grads.keys()
        for name, grad in want_grads.items():
            close(got_grads[name], grad, name)
        for a, b in zip(got_inputs, want_inputs, strict=True):
            close(a, b, "gradient of an input")


def close(found: Any, wanted: Any, what: str) -> None:
    if isinstance(wanted, Tensor):
        assert found.shape == wanted.shape, f"{what}: {found.shape} instead of {wanted.shape}"
        scale = max(float(wanted.detach().abs().max()), 1.0) if wanted.numel() else 1.0
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=TOLERANCE * scale, msg=lambda m: f"{what}: {m}"
        )
    else:
        assert found == wanted
