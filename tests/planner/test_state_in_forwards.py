"""Code of forwards that changes parameters and buffers past the usual ways."""
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ModelError, UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests.planner.equal import assert_equal, close, features, planned, weigh
from tests.ranks import run_ranks

WIDTH, INNER = 24, 48


class Net(nn.Module):
    """Two layers; `do` changes state between them."""

    mean: Tensor
    first: Tensor
    empty: Tensor | None

    def __init__(self, do: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.do = do
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.register_buffer("mean", torch.zeros(INNER))
        self.register_buffer("empty", None)
        self.down.register_buffer("mean_input", torch.zeros(INNER))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.do(self, self.up(x).relu()))


def _adds(net: Net, h: Tensor) -> Tensor:
    net.mean += h.detach().mean((0, 1))
    return h - net.mean


def _sets_itself(net: Net, h: Tensor) -> Tensor:
    net.mean = net.mean.mul_(0.9).add_(h.detach().mean((0, 1)))
    return h - net.mean


def _scales_weights(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.down.weight *= 0.9
        net.down.bias += 0.1
    return h


def _hooks_once(net: Net, h: Tensor) -> Tensor:
    for weight in (net.up.weight, net.down.weight):
        if not weight._backward_hooks:
            weight.register_hook(lambda grad: grad * 0.5)
    return h


def _clears_gradients(net: Net, h: Tensor) -> Tensor:
    if net.up.weight.grad is not None:
        net.up.weight.grad.zero_()
    net.down.weight.grad = None
    return h


def _learns(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        for p in (net.up.weight, *net.down.parameters()):
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)
    return h


def _freezes(net: Net, h: Tensor) -> Tensor:
    net.up.weight.requires_grad_(False)
    net.down.bias.requires_grad = False
    return h


def _asks_for_leaves(net: Net, h: Tensor) -> Tensor:
    return h * (2 if net.up.weight.is_leaf and net.down.weight.grad_fn is None else 3)


def _remembers(net: Net, h: Tensor) -> Tensor:
    """The mean of the call before: what is set is read by the next call alone."""
    before, net.mean = net.mean, h.detach().mean((0, 1))
    return h - before


def _leaves_for_users(net: Net, h: Tensor) -> Tensor:
    net.down.mean_input = h.detach().mean((0, 1))
    return h


def _leaves_a_sum(net: Net, h: Tensor) -> Tensor:
    """A matrix product over the features, of which each rank has one term."""
    net.mean = (h.detach() @ net.down.weight.detach().T).mean((0, 1)).repeat(2)
    return h


def _remembers_a_sum(net: Net, h: Tensor) -> Tensor:
    return h - net.mean.sum() + _leaves_a_sum(net, h) * 0


def _registers(net: Net, h: Tensor) -> Tensor:
    if not hasattr(net, "first"):
        net.register_buffer("first", h.detach().mean((0, 1)))
    return h - net.first


def _fills(net: Net, h: Tensor) -> Tensor:
    net.empty = h.detach().mean((0, 1)) + (0 if net.empty is None else net.empty)
    return h - net.empty


SPLIT = (
    _adds,
    _sets_itself,
    _scales_weights,
    _hooks_once,
    _clears_gradients,
    _learns,
    _freezes,
    _asks_for_leaves,
    _remembers,
    _leaves_for_users,
    _leaves_a_sum,
    _remembers_a_sum,
    _registers,
    _fills,
)


@pytest.mark.parametrize("do", SPLIT)
@pytest.mark.parametrize("tp", [2, 3])
def test_equals_the_whole_model(do: Callable[[Net, Tensor], Tensor], tp: int) -> None:
    """In several calls, and in what is left: gradients, parameters and buffers."""
    torch.manual_seed(0)
    net = Net(do).double()
    plan = planned(net, features(WIDTH), tp)
    assert any("@" in p.placement for m in plan.modules.values() for p in m.parameters.values())
    inputs = [features(WIDTH)(2, 7)[0] for _ in range(3)]

    def use(model: nn.Module) -> dict[str, Tensor]:
        outputs = []
        for x in inputs:
            outputs.append(model(x))
            weigh(outputs[-1]).backward()
        held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        named = {f"grad {n}": g for n, g in full_tensors(model, grads).items()}
        named |= {f"output {i}": y.detach() for i, y in enumerate(outputs)}
        return named | full_tensors(model, held)

    wanted = use(copy.deepcopy(net))

    def rank(mesh: Mesh) -> dict[str, Tensor]:
        return use(apply(copy.deepcopy(net), plan, mesh))

    for found in run_ranks(tp, rank):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            close(found[name], value, name)


class InList(Net):
    """Has its weight in a list besides."""

    def __init__(self) -> None:
        super().__init__(lambda net, h: h * self.kept[0].sum())
        self.kept = [self.down.weight]


class View(Net):
    """Has a view of its weight besides."""

    def __init__(self) -> None:
        super().__init__(lambda net, h: h)
        self.flat = self.down.weight.detach().view(-1)

    def forward(self, x: Tensor) -> Tensor:
        self.flat.mul_(0.9)
        return super().forward(x)


class SharedBuffer(View):
    """The view is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        flat = self.flat
        del self.flat
        self.register_buffer("flat", flat)


@pytest.mark.parametrize("make", [InList, View, SharedBuffer])
def test_a_weight_from_elsewhere_than_its_attribute_is_refused(make: type[Net]) -> None:
    with pytest.raises(ModelError, match=r"has 'down.weight' .*only as the attribute 'weight'"):
        planned(make(), features(WIDTH), 2)


def _puts_a_parameter(net: Net, h: Tensor) -> Tensor:
    net.up.weight = nn.Parameter(net.up.weight.detach() * 0.9)
    return h


def _makes_a_parameter(net: Net, h: Tensor) -> Tensor:
    if not hasattr(net.up, "scale"):
        net.up.register_parameter("scale", nn.Parameter(torch.ones(INNER, dtype=h.dtype)))
    return h * net.up.scale


def _adds_a_layer(net: Net, h: Tensor) -> Tensor:
    if not hasattr(net.up, "more"):
        net.up.more = nn.Linear(INNER, INNER, dtype=h.dtype)
    return net.up.more(h)


def _draws(net: Net, h: Tensor) -> Tensor:
    nn.init.normal_(net.down.weight, std=0.1)
    net.mean = 0.1 * torch.randn_like(net.mean)
    return h + net.mean


@pytest.mark.parametrize("tp", [2, 3])
def test_what_is_drawn_into_weights_is_drawn_in_full(tp: int) -> None:
    """Each rank would draw the same numbers for its part, which are not those of the whole."""
    plan = planned(Net(_draws).double(), features(WIDTH), tp)
    placed = {
        f"{path}.{name}": entry.placement
        for path, module in plan.modules.items()
        for name, entry in module.parameters.items()
    }
    assert "@" not in placed.get("down.weight", "") + placed.get(".mean", "")


def _ties(net: Net, h: Tensor) -> Tensor:
    net.up.bias = net.down.bias
    return h


def _swaps(net: Net, h: Tensor) -> Tensor:
    torch.utils.swap_tensors(net.up.weight, nn.Parameter(net.up.weight.detach() * 0.9))
    return h


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (_puts_a_parameter, "new parameter in 'up.weight'.*self.weight.data ="),
        (_makes_a_parameter, "new parameter in 'up.scale'"),
        (_adds_a_layer, "new parameter in 'up.more.weight'"),
        (_ties, "sets the parameter 'bias' of a Linear: tie weights before"),
        (_swaps, "swaps tensors: set the data of parameters"),
    ],
)
def test_new_parameters_are_refused(do: Callable[[Net, Tensor], Tensor], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        planned(Net(do), features(WIDTH), 2)


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(ModelError, match="has lazy modules .*call it once"):
        planned(nn.Sequential(nn.LazyLinear(INNER)), features(WIDTH), 2)


class Renormed(nn.Module):
    """An embedding writes into its table before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, WIDTH, max_norm=1.0)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x + self.table(x.argmax(-1))).relu())


@pytest.mark.parametrize("tp", [2, 3])
def test_an_embedding_with_max_norm(tp: int) -> None:
    model = Renormed().double()
    plan = planned(model, features(WIDTH), tp)
    assert_equal(model, features(WIDTH), plan, collectives=False)


class Hooked(nn.Module):
    """Reads what hooks of layers keep."""

    def __init__(self, clears: bool) -> None:
        super().__init__()
        self.clears, self.kept = clears, dict[str, Tensor]()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        self.head, self.other = nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body[1].register_forward_hook(self.keep)
        self.body[3].register_forward_pre_hook(self.keep_input)

    def keep(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.kept["output"] = output

    def keep_input(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.kept["input"] = args[0]

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = y + self.head(self.kept["output"]) + self.other(self.kept["input"])
        if self.clears:
            self.kept.clear()
        return y


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("tp", [2, 3])
def test_what_hooks_keep_has_its_gradient(clears: bool, tp: int) -> None:
    """Forwards of outer modules read what hooks, which see full tensors, have put into a dict."""
    model = Hooked(clears).double()
    plan = planned(model, features(WIDTH), tp)
    assert_equal(model, features(WIDTH), plan, collectives=False)


def _sets_by_hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    module.weight = module.v / module.v.norm(dim=1, keepdim=True)  # type: ignore[operator]


def test_a_hook_does_not_set_what_code_reads() -> None:
    model = Net(lambda net, h: h).double()
    weight = model.up.weight.detach()
    del model.up.weight
    model.up.v, model.up.weight = nn.Parameter(weight), weight  # type: ignore[assignment]
    model.up.register_forward_pre_hook(_sets_by_hook)
    plan = planned(model, features(WIDTH), 2)
    (x,) = features(WIDTH)(2, 7)

    def rank(mesh: Mesh) -> Tensor:
        return apply(copy.deepcopy(model), plan, mesh)(x)

    with pytest.raises(UsageError, match="a hook sets 'weight' of a Linear.*parametrize"):
        run_ranks(2, rank)
