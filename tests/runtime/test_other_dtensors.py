"""A split model changes nothing of torch: DTensors of others are computed with by torch's rules."""
# pyright: reportAttributeAccessIssue=false

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _redistribute as redistribution
from torch.nn.modules import module as torch_modules
from torch.nn.utils import parametrize
from torch.optim import optimizer as torch_optimizers

import shardwright
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks

X = torch.randn(3, 12, generator=torch.Generator().manual_seed(1)).double()


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12)).double()


MODEL = made()
"""Ranks are threads, which draw from one generator: each copies this instead of drawing."""


planned = planning.Once(lambda: planning.plan(made(), 2, args=(X,)))


def parts_of_torch() -> dict[str, dict[str, Any]]:
    """What others read of torch, by name."""
    dispatcher: Any = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    kinds: dict[str, Any] = {
        "DTensor": DTensor,
        "Tensor": torch.Tensor,
        "Parameter": nn.Parameter,
        "Module": nn.Module,
        "Optimizer": torch.optim.Optimizer,
        "Shard": Shard,
        "parametrize": parametrize,
        "redistribution": redistribution,
    }
    found = {name: dict(vars(kind)) for name, kind in kinds.items()}
    found["dispatcher"] = {"own": DTensor._op_dispatcher, **vars(dispatcher)}
    found["handlers"] = dict(dispatcher._custom_op_handlers)
    found["propagator"] = dict(vars(propagator))
    found["rules"] = {str(op): rule for op, rule in propagator.op_strategy_funcs.items()}
    found["optimizer hooks"] = {
        str(key): hook
        for hooks in (
            torch_optimizers._global_optimizer_pre_hooks,
            torch_optimizers._global_optimizer_post_hooks,
        )
        for key, hook in hooks.items()
    }
    return found


def test_nothing_of_torch_is_another_object() -> None:
    before = parts_of_torch()

    def work(mesh: Mesh) -> None:
        split = shardwright.apply(copy.deepcopy(MODEL), planned(), mesh)
        optimizer = torch.optim.AdamW(split.parameters(), lr=1e-2)
        split(X).sum().backward()
        nn.utils.clip_grad_norm_(split.parameters(), 0.1)
        optimizer.step()
        split.load_state_dict(copy.deepcopy(split.state_dict()))

    run_ranks(2, work)
    after = parts_of_torch()
    for name, was in before.items():
        changed = [key for key in was if after[name].get(key) is not was[key]]
        assert not changed and not after[name].keys() - was.keys(), (name, changed)
    for function in (parametrize.register_parametrization, parametrize.remove_parametrizations):
        assert function.__module__ == parametrize.__name__  # after planning, too


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda w: w,
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(0),
    "norm": lambda w: w.norm(),
    "product": lambda w: w @ w.t(),
    "row": lambda w: w[0],
    "argmax": lambda w: w.argmax(),
    "in place": lambda w: w.clone().mul_(2),
    "list": lambda w: torch._foreach_norm([w, w])[0],
}


def test_ops_on_plain_dtensors_take_the_path_of_torch() -> None:
    """The results have torch's classes and placements, of the same local tensors."""

    def computed(device_mesh: Any) -> list[tuple[Any, ...]]:
        w = torch.arange(60.0).view(10, 6)
        out = []
        for placement in (Shard(0), Shard(1), Replicate()):
            given = distribute_tensor(w, device_mesh, [placement])
            for compute in COMPUTED.values():
                result: Any = compute(given)
                assert type(result) is DTensor
                out.append((result.placements, result.to_local().clone()))
        partial = DTensor.from_local(w, device_mesh, [Partial()])
        out.append(((partial * 2).placements, (partial * 2).to_local()))
        module = nn.Linear(6, 10, bias=False)
        module.weight = nn.Parameter(distribute_tensor(w, device_mesh, [Shard(0)]))
        x = distribute_tensor(torch.ones(3, 6), device_mesh, [Replicate()])
        module(x).sum().backward()
        assert type(module.weight.grad) is DTensor
        out.append((module.weight.grad.placements, module.weight.grad.to_local()))
        return out

    def work(mesh: Mesh) -> None:
        want = computed(mesh.device_mesh)
        split: Any = shardwright.apply(copy.deepcopy(MODEL), planned(), mesh)
        split(X).sum().backward()
        for found, wanted in zip(computed(mesh.device_mesh), want, strict=True):
            assert found[0] == wanted[0]
            torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)
        theirs = distribute_tensor(torch.ones(24, 12).double(), mesh.device_mesh, [Shard(1)])
        weight = split[0].weight.detach()
        torch.testing.assert_close((theirs + weight).full_tensor(), 1 + weight.full_tensor())
        torch.testing.assert_close(theirs @ weight.t(), (theirs.full_tensor() @ weight.t()))

    run_ranks(2, work)


def test_nothing_is_registered_for_all_modules() -> None:
    """Hooks of torch on all parameters and buffers; those on modules are the guard's."""
    run_ranks(2, lambda mesh: shardwright.apply(copy.deepcopy(MODEL), planned(), mesh) and None)
    assert not torch_modules._global_buffer_registration_hooks
