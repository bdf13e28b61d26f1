"""Flags with another value than was traced, and attributes that change after splitting: refused."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_dtensors import IDS, llama, made, planned

WIDTH = 8


class Power(Enum):
    ONE = "one"
    TWO = "two"


class Act(nn.Module):
    """Computes over the features of what may be a part, where it is asked to."""

    over = False

    def __init__(self) -> None:
        super().__init__()
        self.mode = "relu"

    def forward(self, h: Tensor) -> Tensor:
        if self.over or self.mode == "softmax" or getattr(self, "hidden", False):
            return h.softmax(-1)
        return h.relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 24), Act(), nn.Linear(24, WIDTH)
        self.calls = 0

    def forward(
        self,
        x: Tensor,
        scale: Any = False,
        mode: str | None = "a",
        power: Power = Power.ONE,
        skip: int = 0,
    ) -> Tensor:
        self.calls += 1  # its own business
        h = self.act(self.up(x))
        if skip > 2 or scale is True or mode != "b" or power is Power.ONE:
            return self.down(h)
        return self.down(h / (1 + h.sum(-1, keepdim=True)))


FLAGS = {"scale": True, "mode": "b", "power": Power.TWO, "skip": 1}


@pytest.fixture(scope="module")
def net() -> tuple[Net, Tensor, Any]:
    torch.manual_seed(0)
    model, x = Net().double().eval(), torch.randn(2, 5, WIDTH).double()
    plan = planning.plan(model, tp=2, args=(x,), kwargs=FLAGS)
    assert plan.modules["up"].parameters
    assert plan.calls[0].values == {**FLAGS, "power": "Power.TWO"}
    return model, x, plan


def on_ranks(model: nn.Module, plan: Any, check: Callable[[Any], None]) -> None:
    def work(mesh: Mesh) -> None:
        check(apply(copy.deepcopy(model), plan, mesh))

    run_ranks(2, work)


def test_flags_of_another_value_are_refused(net: Any) -> None:
    model, x, plan = net
    want = model(x, **FLAGS)

    def check(local: Any) -> None:
        torch.testing.assert_close(local(x, **FLAGS), want, rtol=0, atol=1e-9)
        torch.testing.assert_close(local(x, *FLAGS.values()), want, rtol=0, atol=1e-9)
        for name, other in {"scale": 2, "mode": None, "power": Power.ONE, "skip": 0}.items():
            with pytest.raises(UsageError, match=f"argument '{name}' of Net is "):
                local(x, **{**FLAGS, name: other})
        without = {name: value for name, value in FLAGS.items() if name != "scale"}
        with pytest.raises(UsageError, match=r"'scale' of Net is False \(left out\), and was True"):
            local(x, **without)
        with pytest.raises(UsageError, match="'skip' of Net is a Tensor, and was 1"):
            local(x, **{**FLAGS, "skip": torch.tensor(1)})

    on_ranks(model, plan, check)


class Numbers(Net):
    """Of its numbers the last two decide what is done."""

    def forward(self, x: Tensor, shift: int, factor: float, first: int, least: float) -> Tensor:
        blocks = [self.up, self.act, self.down][:first]
        y = x * factor + shift * 2
        for block in blocks:
            y = block(y)
        return y / (1 + y.sum(-1, keepdim=True)) if math.sqrt(least) > 3 else y


def test_numbers_that_decide_nothing_may_be_others() -> None:
    torch.manual_seed(0)
    model, x = Numbers().double().eval(), torch.randn(2, 5, WIDTH).double()
    plan = planning.plan(model, tp=2, args=(x, 1, 0.5), kwargs={"first": 3, "least": 1.0})
    assert plan.calls[0].numbers == ["factor", "shift"]
    assert plan.calls[0].values == {"first": 3, "least": 1.0}

    def check(local: Any) -> None:
        found = local(x, 2, factor=-3, first=3, least=1.0)
        torch.testing.assert_close(found, model(x, 2, -3, 3, 1.0), rtol=0, atol=1e-9)
        for name, numbers in {"first": (2, 1.0), "least": (3, 100.0)}.items():
            with pytest.raises(UsageError, match=f"argument '{name}' of Numbers"):
                local(x, 1, 0.5, *numbers)

    on_ranks(model, plan, check)


class Options(Net):
    """Its flag is in a dict, which is in a list; and it does something else without its mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None, options: Any = None) -> Tensor:
        h = self.act(self.up(x))
        least = options[0]["mode"] != "sums" and "more" not in options[0]
        h = h if mask is not None and least else h / (1 + h.sum(-1, keepdim=True))
        return self.down(h) if mask is None else self.down(h) * mask


def test_flags_in_dicts_and_what_is_left_out_are_refused() -> None:
    torch.manual_seed(0)
    model, x = Options().double().eval(), torch.randn(2, 5, WIDTH).double()
    mask, options = torch.rand(2, 5, 1).double(), [{"mode": "least", "factor": 1.0}]
    plan = planning.plan(model, tp=2, args=(x, mask), kwargs={"options": options})
    assert plan.calls[0].values == {"options.0.mode": "least", "options.0.factor": 1.0}

    def check(local: Any) -> None:
        found = local(x, mask, options=[{**options[0], "none": None}])
        torch.testing.assert_close(found, model(x, mask, options), rtol=0, atol=1e-9)
        for other in ({"mode": "sums"}, {"mode": None}, {"factor": 2.0}, {"more": 1}):
            with pytest.raises(UsageError, match="argument 'options.0.(mode|factor|more)' of"):
                local(x, mask, [{**options[0], **other}])
        with pytest.raises(UsageError, match="argument 'options.0.factor' of"):
            local(x, mask)
        for without in ((x, None, options), (x,)):
            with pytest.raises(UsageError, match="argument '(mask|options.0.factor)' of Options"):
                local(*without)
        with pytest.raises(UsageError, match="argument 'mask' of Options is left out"):
            local(x, options=options)

    on_ranks(model, plan, check)


class Around(nn.Module):
    """Hands on what it is given, as wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = (*args, *kwargs.values())
        return self.net(x)


def test_what_was_given_by_name_is_to_be_given_so() -> None:
    torch.manual_seed(0)
    model, x = Around().double(), torch.randn(2, 5, WIDTH).double()
    plan = planning.plan(model, tp=2, kwargs={"x": x})

    def check(local: Any) -> None:
        torch.testing.assert_close(local(x=x), model(x=x), rtol=0, atol=1e-9)
        with pytest.raises(UsageError, match="'x' of Around is left out, .*: give it by name"):
            local(x)

    on_ranks(model, plan, check)


class Flagged(Act):
    def forward(
        self, h: Tensor, mode: str | None = None, over: bool = False, by: Tensor | None = None
    ) -> Tensor:
        if mode == "b" or over or by is None:
            return h.softmax(-1)
        return h.relu() * by


class Inner(nn.Module):
    """Gives its flag on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 24), Flagged(), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, mode: str = "b", more: bool = True, **other: Any) -> Tensor:
        h = self.act(self.up(x), mode=mode, by=x.sum())
        return self.down(h if more and not other else h.cumsum(-1))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, "a") + self.inner(x, mode="c", more=True)


def test_flags_of_a_module_that_is_called_by_itself() -> None:
    torch.manual_seed(0)
    model, x = Outer().double().eval(), torch.randn(2, 5, WIDTH).double()
    plan = planning.plan(model, tp=2, args=(x,))
    spec = plan.modules["inner"]
    assert spec.flags == {"mode": ["a", "c"], "more": [True]}

    def check(local: Any) -> None:
        for flags in ({"mode": "a"}, {"mode": "c", "more": True}):
            found = local.inner(x, **flags)
            torch.testing.assert_close(found, model.inner(x, mode="a"), rtol=0, atol=1e-9)
        for flags in ({}, {"mode": "b"}, {"mode": "a", "more": False}, {"mode": "a", "odd": True}):
            with pytest.raises(UsageError, match="'(mode|more|odd)' of 'inner' .called directly"):
                local.inner(x, **flags)

    on_ranks(model, plan, check)


class Numbered(nn.Module):
    """One number that it is given decides, one is a size; of the last two one is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, depth: int, size: int, of: float = 0.5, at: int = 3) -> Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if depth > 1 or at != 3 else h.relu() * size * of)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.depth = Numbered(), 1

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.depth, x.shape[1], of=0.25)


def test_numbers_of_a_module_that_is_called_by_itself() -> None:
    torch.manual_seed(0)
    model, x = Deep().double().eval(), torch.randn(2, 5, WIDTH).double()
    plan = planning.plan(model, tp=2, args=(x,))
    assert plan.modules["inner"].flags == {"depth": [1], "of": [0.25], "at": [3]}

    def check(local: Any) -> None:
        found = local.inner(x, 1, 7, of=0.25)
        torch.testing.assert_close(found, model.inner(x, 1, 7, of=0.25), rtol=0, atol=1e-9)
        for arguments in ((2, 7, 0.25), (1, 7, 0.5), (1, 7, 0.25, 4), (1, 7)):
            with pytest.raises(UsageError, match="'(depth|of|at)' of 'inner' .called directly"):
                local.inner(x, *arguments)

    on_ranks(model, plan, check)


def change(path: str, value: Any) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return put


@pytest.mark.parametrize(
    ("path", "value"),
    [("act.mode", "softmax"), ("act.over", True), ("act.hidden", True), ("calls", None)],
)
def test_an_attribute_that_changes_is_refused(net: Any, path: str, value: Any) -> None:
    model, x, plan = net

    def check(local: Any) -> None:
        local(x, **FLAGS)
        for one in (local, copy.deepcopy(local)):
            before = getattr(one.get_submodule(path.rpartition(".")[0]), path.split(".")[-1], None)
            change(path, value)(one)
            for _ in range(2):
                with pytest.raises(UsageError, match=f"'{path}' is .* when the model was split"):
                    one(x, **FLAGS)
            change(path, before)(one)
            one(x, **FLAGS)
        for value_of_it in (1, 2):
            setattr(local, f"number_{len(path)}", value_of_it)  # that no code asks for
            local(x, **FLAGS)

    on_ranks(model, plan, check)


def test_what_may_change_goes_on_working() -> None:
    """Switches of what is given out, checkpointing, tokens; not the way to attend."""
    model, plan = made(llama), planned(llama)

    def check(local: Any) -> None:
        with torch.no_grad():
            want = local(IDS).logits
            local.config.use_cache, local.config.pad_token_id = False, 3
            local.config.output_hidden_states = True
            local.gradient_checkpointing_enable()
            local.model.layers[0].self_attn.attention_dropout = 0.0
            assert local.train()(IDS).hidden_states
            torch.testing.assert_close(local.eval()(IDS).logits, want)
            local.config._attn_implementation = "eager"
            for one in (local, copy.deepcopy(local)):
                with pytest.raises(UsageError, match="'config._attn_implementation' is 'eager'"):
                    one(IDS)
                one.config._attn_implementation = "sdpa"
                one(IDS)

    on_ranks(model, plan, check)


@pytest.mark.parametrize("batches", [False, True])
def test_paged_attention_is_for_plans_of_continuous_batching(batches: bool) -> None:
    """Without a paged cache, transformers raises (5.23), or each token sees all (5.24)."""
    model = made(llama)
    model.config._attn_implementation = "eager"
    plan = planning.plan(model, tp=2, continuous_batching=batches)
    says = "has no paged cache" if batches else "when the model was"

    def check(local: Any) -> None:
        want = local(IDS).logits
        local.config._attn_implementation = "paged|eager"
        with pytest.raises(UsageError, match=says):
            local(IDS)
        local.config._attn_implementation = "eager"
        torch.testing.assert_close(local(IDS).logits, want)

    on_ranks(model, plan, check)


class Kinds(nn.Module):
    """Has a function, a list, a method, layers in turn, and a module that it may do without."""

    over = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.function: Any = torch.relu
        self.powers = [1, 2]
        self.rest = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))
        self.last: Any = nn.ReLU()

    def mixed(self, h: Tensor) -> Tensor:
        return h.tanh() if not self.over else h.softmax(-1)

    def shown(self) -> str:
        return f"{self.powers}"

    def forward(self, x: Tensor) -> Tensor:
        h = self.mixed(self.function(self.up(x)))
        for power in self.powers:
            h = h + h.pow(power)
        if (more := getattr(self, "more", None)) is not None:
            h = more(h)
        y = self.rest(self.down(h))
        return y if self.last is None else self.last(y)


def soft(h: Tensor) -> Tensor:
    return h.softmax(-1)


REPLACED: dict[str, Callable[[Any], Any]] = {
    "function": lambda m: setattr(m, "function", soft),
    "mixed": lambda m: setattr(m, "mixed", soft),
    "powers": lambda m: setattr(m, "powers", [1]),
    "more": lambda m: setattr(m, "more", nn.Softmax(-1)),
    "last": lambda m: setattr(m, "last", None),
    "rest.1": lambda m: delattr(m.rest, "1"),
    "rest.3": lambda m: m.rest.append(nn.Softmax(-1)),
}
ON_CLASS: dict[str, Callable[[Any], Any]] = {
    "over": lambda m: setattr(type(m), "over", True),
    "mixed": lambda m: setattr(type(m), "mixed", lambda self, h: h.softmax(-1)),
    "forward": lambda m: setattr(Kinds, "forward", lambda self, x: x),
}


@pytest.fixture(scope="module")
def kinds() -> tuple[Kinds, Tensor, Any]:
    torch.manual_seed(0)
    model, x = Kinds().double().eval(), torch.randn(2, 5, WIDTH).double()
    return model, x, planning.plan(model, tp=2, args=(x,))


def test_what_is_not_plain_and_is_replaced_is_refused(kinds: Any) -> None:
    model, x, plan = kinds

    def check(local: Any) -> None:
        for path, put in REPLACED.items():
            one = copy.deepcopy(local)
            one(x)
            put(one)
            for _ in range(2):
                with pytest.raises(UsageError, match=f"'{path}' (is|was|of) "):
                    one(x)
        local.function, local.powers = torch.relu, [1, 2]
        local.shown, local.notes, local.up.notes = print, [1], soft  # that no forward asks for
        torch.testing.assert_close(local(x), model(x), rtol=0, atol=1e-9)

    on_ranks(model, plan, check)


def test_what_is_gone_is_told(kinds: Any) -> None:
    model, x, plan = kinds

    def check(local: Any) -> None:
        local(x)
        del local.powers
        with pytest.raises(UsageError, match=r"'powers' is not there, and was \["):
            local(x)

    on_ranks(model, plan, check)


@pytest.mark.parametrize("name", ON_CLASS)
def test_what_changes_on_a_class_is_refused(kinds: Any, name: str) -> None:
    model, x, plan = kinds

    def check(local: Any) -> None:
        local(x)
        dist.barrier()
        before = vars(Kinds).get(name)
        if dist.get_rank() == 0:
            ON_CLASS[name](local)
            setattr(type(local), f"number_{len(name)}", 1)  # that no code asks for
        dist.barrier()
        try:
            for _ in range(2):
                with pytest.raises(UsageError, match=f"'{name}' of the class 'Kinds' is "):
                    local(x)
        finally:
            dist.barrier()
            if dist.get_rank() == 0:
                delattr(Kinds, name) if before is None else setattr(Kinds, name, before)
        dist.barrier()
        local(x)

    on_ranks(model, plan, check)
