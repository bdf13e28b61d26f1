"""Forward hooks on split modules see whole tensors, and give them, in value and gradient."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from shardwright.errors import UsageError
from shardwright.planner.contract.names import cache_argument
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.cli.conftest import tiny
from tests.planner.modules import WIDTH, TorchAttention
from tests.ranks import run_ranks


class Mlp(nn.Module):
    """One split by rows, one by columns; between them what the plan does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.same(self.act(self.up(x))))


def loss_with_hooks(model: Any, x: Tensor, hooked: Any) -> Tensor:
    """What hooks read is in the loss, and one gives something else."""
    seen = hooked(model)
    out = model(x)
    return out.pow(2).sum() + sum(t.pow(3).sum() for t in seen)


def put_hooks(model: Any) -> list[Tensor]:
    seen: list[Tensor] = []

    def behind(_: Any, args: Any, out: Tensor) -> Tensor:
        seen.extend((args[0], out))
        return out * torch.arange(1.0, 25.0, dtype=out.dtype)

    def before(_: Any, args: Any) -> Any:
        return (args[0] - args[0].mean(-1, keepdim=True),)

    def named(_: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        seen.append(out)

    def kept(_: Any, __: Any, out: Tensor) -> None:
        out.retain_grad()
        seen.append(out)

    model.up.register_forward_hook(behind)
    model.act.register_forward_hook(kept)
    model.act.register_forward_hook(behind)
    model.act.register_forward_pre_hook(before)
    model.down.register_forward_pre_hook(before)
    model.down.register_forward_hook(named, with_kwargs=True)
    return seen


def put_gradient_hooks(model: Any) -> list[Tensor]:
    read: list[Tensor] = []

    def behind(_: Any, given: Any, out: Any) -> Any:
        read.extend((*given, *out))
        return tuple(2 * g for g in given)

    def before(_: Any, out: Any) -> Any:
        read.extend(out)
        return (out[0] - out[0].mean(-1, keepdim=True),)

    for part in (model.up, model.act, model.down):
        part.register_full_backward_hook(behind)
        part.register_full_backward_pre_hook(before)
    return read


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("tp", [2, 3])
def test_hooks_see_and_give_whole_tensors(tp: int, early: bool) -> None:
    """Also those that were there before the model was split; and gradients, kept and read."""
    torch.manual_seed(0)
    model, x = Mlp().double(), torch.randn(3, 5, 8).double()
    plan = planning.plan(model, tp=tp, args=(x,))
    assert plan.predicted.collectives
    whole = copy.deepcopy(model)
    x.requires_grad_()
    read, seen = put_gradient_hooks(whole), put_hooks(whole)
    want = loss_with_hooks(whole, x, lambda _: seen)
    want.backward()
    kept = next(t.grad for t in seen if t.retains_grad)
    assert len(read) == 3 * 3

    def work(mesh: Mesh) -> None:
        local: Any = copy.deepcopy(model)
        given = x.detach().clone().requires_grad_()
        found = (put_gradient_hooks(local), put_hooks(local)) if early else None
        local = apply(local, plan, mesh)
        found = found or (put_gradient_hooks(local), put_hooks(local))
        got = loss_with_hooks(local, given, lambda _: found[1])
        same(got, want)
        got.backward()
        same(given.grad, x.grad)
        same(found[0], read)
        same(next(t.grad for t in found[1] if t.retains_grad), kept)
        for name, p in local.named_parameters():
            same(p.grad.full_tensor(), whole.get_parameter(name).grad)

    run_ranks(tp, work)


class Again(Mlp):
    """It keeps nothing of the activation for its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(self.act, self.up(x), use_reentrant=False))  # type: ignore[arg-type]


def test_hooks_in_what_runs_again_for_a_backward_pass() -> None:
    """There, too, they see whole tensors: each twice."""
    torch.manual_seed(0)
    model, x = Again().double(), torch.randn(3, 8).double()
    plan = planning.plan(model, tp=2, args=(x,))
    sizes: list[int] = []

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        local.act.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[-1]))
        local(x).sum().backward()

    run_ranks(2, work)
    assert sizes == [24] * 4


def test_what_hooks_may_not_do_is_refused() -> None:
    """Changes in place of what only the module sees whole; the old kind; on all modules at once."""
    torch.manual_seed(0)
    model, x = Mlp().double(), torch.randn(3, 8).double()
    plan = planning.plan(model, tp=2, args=(x,))
    want, everywhere, barrier = model(x), [], threading.Barrier(2)

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        hook = local.down.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
        with torch.no_grad(), pytest.raises(UsageError, match="'down' changed in place"):
            local(x)
        hook.remove()
        hook = local.act.register_backward_hook(lambda *_: None)
        with pytest.raises(UsageError, match="register_full_backward_hook"):
            local(x)
        hook.remove()
        for ask in (lambda x: x.retain_grad(), lambda x: x.register_hook(abs)):
            hook = local.down.register_forward_pre_hook(lambda _, args, ask=ask: ask(args[0]))
            with pytest.raises(UsageError, match="'down' asks for the gradient of what"):
                local(x)
            hook.remove()
        hook = local.same.register_forward_hook(lambda _, __, out: out.retain_grad())
        with pytest.raises(UsageError, match="'same' asks for the gradient of what"):
            local(x)
        hook.remove()
        barrier.wait()
        if mesh["tp"].rank == 0:  # for all threads
            everywhere.append(register_module_forward_hook(lambda *_: None))
        barrier.wait()
        with pytest.raises(UsageError, match="register_module_forward_hook"):
            local(x)
        barrier.wait()
        everywhere[0].remove()
        barrier.wait()
        same(local.act(want), torch.tanh(want))  # by itself, it takes what it is given
        same(local(x), want)

    run_ranks(2, work)


class Nested(Mlp):
    """Its activation gives more than one tensor, and one within a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Both()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        one, (two, _) = self.act(self.up(x))
        return self.down(one * two)


class Both(nn.Module):
    """Two of one."""

    def forward(self, x: Tensor) -> Any:
        return x.tanh(), (x.cos(), None)


def test_a_hook_sees_whole_what_is_in_a_tuple_in_a_tuple() -> None:
    torch.manual_seed(0)
    model, x = Nested().double(), torch.randn(3, 8).double()
    plan = planning.plan(model, tp=2, args=(x,))
    y = model.up(x)

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        seen: list[Any] = []
        local.act.register_forward_hook(lambda _, __, out: seen.append(out))
        same(local(x), model(x))
        same([*seen[0][1][:1], seen[0][0]], [y.cos(), y.tanh()])

    run_ranks(2, work)


class PerHead(Mlp):
    """Between the two, rows are of one head each."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(self.act(hidden.reshape(-1, 6)).reshape(hidden.shape))


def test_gradients_of_rows_of_which_a_rank_has_some_are_shown_whole() -> None:
    torch.manual_seed(0)
    model, x = PerHead().double(), torch.randn(3, 5, 8).double()
    plan = planning.plan(model, tp=2, args=(x,))
    assert [p.placement for p in plan.modules["act"].takes] == ["?*4@tp, 6"]

    def gradients(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        model.act.register_full_backward_hook(lambda _, given, out: seen.extend((*given, *out)))
        model(x).pow(2).sum().backward()
        return seen

    want = gradients(copy.deepcopy(model))
    run_ranks(2, lambda mesh: same(gradients(apply(copy.deepcopy(model), plan, mesh)), want))


class Peeks(Mlp):
    """Looks at what it computes where no gradients are wanted."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            self.act(hidden)
        return self.down(hidden.sin())


def test_a_hook_in_code_without_gradients_has_those_of_what_was_made_before() -> None:
    torch.manual_seed(0)
    model, x = Peeks().double(), torch.randn(3, 8).double()
    plan = planning.plan(model, tp=2, args=(x,))
    assert plan.modules["act"].layer == "Unchanged"

    def gradient(model: Any) -> Tensor:
        seen: list[Tensor] = []
        model.act.register_forward_hook(lambda _, args, out: seen.extend((*args, out)))
        model(x)
        assert [t.requires_grad for t in seen] == [True, False]
        seen[0].pow(3).sum().backward()
        grad: Any = model.up.weight.grad
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    want = gradient(copy.deepcopy(model))
    run_ranks(2, lambda mesh: same([gradient(apply(copy.deepcopy(model), plan, mesh))], [want]))


def test_a_hook_runs_only_where_that_of_the_whole_model_does() -> None:
    """Torch's attention does not call the layer behind its heads as a module."""
    torch.manual_seed(0)
    model, x = TorchAttention().double(), torch.randn(3, 5, WIDTH).double()
    plan = planning.plan(model, tp=2, args=(x,))
    assert "a.out_proj" in plan.modules
    seen: list[int] = []

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        local.a.out_proj.register_forward_hook(lambda *_: seen.append(1))
        same(local(x), model(x))

    run_ranks(2, work)
    assert not seen


def test_hooks_do_not_take_a_part_of_a_cache_for_the_whole() -> None:
    """What is in it is hidden while a hook runs, and there again for the model's code behind it."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(tiny()).double().eval()  # type: ignore[arg-type]
    ids = torch.arange(10).view(2, 5)
    plan = planning.plan(model, tp=2)
    want = model(ids, use_cache=True)
    step = model(ids[:, :1], past_key_values=want.past_key_values).logits

    def look(_: Any, args: Any, kwargs: Any, out: Any = None) -> None:
        cache = kwargs[cache_argument(kwargs)]
        assert cache.get_seq_length() >= 0
        if cache.get_seq_length():
            with pytest.raises(UsageError, match="take keys, values and states from the unsplit"):
                cache.layers[0].keys.sum()
            seen.append(1)

    seen: list[int] = []

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        attention = local.model.layers[1].self_attn
        attention.register_forward_pre_hook(look, with_kwargs=True)
        attention.register_forward_hook(look, with_kwargs=True)
        got = local(ids, use_cache=True)
        torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-9)
        got = local(ids[:, :1], past_key_values=got.past_key_values)
        torch.testing.assert_close(got.logits, step, rtol=0, atol=1e-9)

    run_ranks(2, work)
    assert len(seen) == 2 * (2 + 2)


def calls_from_a_hook(model: Any, x: Tensor) -> list[Tensor]:
    """A hook that applies modules of the model to what it sees, and reads a parameter."""
    seen: list[Tensor] = []

    def behind(module: Any, args: Any, out: Tensor) -> None:
        if not seen:  # not in the calls that it makes
            seen.append(out)
            seen[:] = [model.down(model.act(module(args[0] - 1))), module.weight.pow(2).sum()]

    model.up.register_forward_hook(behind)
    out = model(x)
    (out.pow(2).sum() + seen[0].pow(3).sum()).backward()
    return [out, *seen, *(p.grad for p in model.parameters())]


def test_what_a_hook_calls_and_reads_of_the_model_is_whole() -> None:
    """A logit lens, say: a hook is no part of the model, and stands outside of it."""
    torch.manual_seed(0)
    model, x = Mlp().double(), torch.randn(3, 8).double()
    plan = planning.plan(model, tp=2, args=(x,))
    want = calls_from_a_hook(copy.deepcopy(model), x)

    def work(mesh: Mesh) -> None:
        got = calls_from_a_hook(apply(copy.deepcopy(model), plan, mesh), x)
        same([t.full_tensor() if isinstance(t, DTensor) else t for t in got], want)

    run_ranks(2, work)


class Compares(nn.Module):
    """It takes truth values and complex numbers, and gives numbers that the model does not take."""

    def forward(self, x: Tensor, mask: Tensor, turned: Tensor) -> Any:
        return x * mask, turned * turned, x.argmax(-1)


class Mixed(nn.Module):
    """Of what is split it makes tensors of other kinds, for modules within."""

    def __init__(self, gives: bool) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 24), Compares(), nn.Linear(24, 8)
        self.same, self.also, self.gives = nn.Identity(), nn.Identity(), gives

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        mask, turned = y > 0, torch.view_as_complex(y.unflatten(-1, (-1, 2)))
        if self.gives:
            y, turned, _ = self.inner(y, mask, turned)
        y = y + torch.view_as_real(self.same(turned)).flatten(-2)
        return self.down(y * self.also(mask))


def reads_of_hooks(model: Any, x: Tensor, names: list[str]) -> list[Tensor]:
    seen: list[Tensor] = []
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args: seen.extend(args))
        module.register_forward_hook(lambda _, __, out: seen.append(out))
    out = model(x)
    (out.pow(2).sum() + sum(t.abs().pow(3).sum() for t in seen if t.requires_grad)).backward()
    return [out, *seen, *(p.grad for p in model.parameters())]


def test_hooks_see_integers_and_complex_numbers_whole() -> None:
    """Truth values, too; what nobody takes, and a rank makes of its part, is refused by name."""
    torch.manual_seed(0)
    x = torch.randn(3, 8).double()
    model = Mixed(gives=False).double()
    plan = planning.plan(model, tp=2, args=(x,))
    assert plan.predicted.collectives
    names = ["up", "same", "also", "down"]
    want = reads_of_hooks(copy.deepcopy(model), x, names)
    assert {t.dtype for t in want} == {torch.float64, torch.complex128, torch.bool}
    given = Mixed(gives=True).double()
    other = planning.plan(given, tp=2, args=(x,))
    assert other.modules["inner"].unknown == ["out 2"]

    def work(mesh: Mesh) -> None:
        got = reads_of_hooks(apply(copy.deepcopy(model), plan, mesh), x, names)
        same([t.full_tensor() if isinstance(t, DTensor) else t for t in got], want)
        local = apply(copy.deepcopy(given), other, mesh)
        same(local(x), given(x))
        with pytest.raises(UsageError, match="output '2' of 'inner'.*its shards of other tensors"):
            reads_of_hooks(local, x, ["inner"])

    run_ranks(2, work)


class InPlace(Mlp):
    """Its activation writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)  # type: ignore[assignment]


@pytest.mark.parametrize("grads", [True, False])
def test_what_a_hook_keeps_and_the_model_then_changes_is_refused(grads: bool) -> None:
    """The unsplit model would show it changed; a copy of it is as it was."""
    torch.manual_seed(0)
    model, x = InPlace().double(), torch.randn(3, 8).double()
    plan = planning.plan(model, tp=2, args=(x,))
    want = model.up(x)

    def work(mesh: Mesh) -> None:
        local: Any = apply(copy.deepcopy(model), plan, mesh)
        seen: list[Tensor] = []
        with torch.set_grad_enabled(grads):
            hook = local.up.register_forward_hook(lambda _, __, out: seen.append(out.clone()))
            same(local(x), model(x))
            same(seen[0], want)
            hook.remove()
            local.up.register_forward_hook(lambda _, __, out: seen.append(out))
            with pytest.raises(UsageError, match="'up' keeps what it was shown.*clone"):
                local(x)

    run_ranks(2, work)


class Tapped(Mlp):
    """Takes what its own hook kept, by way of a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

        def keep(_: Any, __: Any, out: Tensor) -> None:
            self.seen["up"] = out

        self.up.register_forward_hook(keep)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.seen["up"].softmax(-1).amax(-1, keepdim=True)


def test_hooks_that_hold_the_model() -> None:
    model, x = Tapped().double(), torch.randn(3, 5, 8).double()
    plan, want = planning.plan(model, 2, args=(x,)), model(x)
    assert "up" in plan.modules

    def work(mesh: Mesh) -> None:
        mine = Tapped().double()
        mine.load_state_dict(model.state_dict())
        same(apply(mine, plan, mesh)(x), want)

    run_ranks(2, work)
