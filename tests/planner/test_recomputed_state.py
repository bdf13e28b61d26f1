"""Blocks that keep state from call to call are not computed again for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from benchmarks.compare import compare, reference
from shardwright.errors import UsageError
from tests import planning, zoo
from tests.ranks import run_ranks

WIDTH = 24
X = torch.randn(3, 19, WIDTH, generator=torch.Generator().manual_seed(0)).double()
TRAINING: dict[str, Any] = {"tp": 2, "phase": "train", "args": (X,), "batch": 4, "seq": 64}


class Block(GradientCheckpointingLayer):
    """Keeps a tensor for others, which it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        h = self.up(x).sin()
        self.mean = h.mean()
        return x + self.down(h)


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        self.calls += 1
        return super().forward(x, seen) * self.calls


class Replaces(Counts):
    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        self.calls = self.calls + 1
        return Block.forward(self, x, seen) * self.calls


class Numbers(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        self.calls += 1
        return super().forward(x, seen) * (1 + 0.1 * self.calls)


class Remembers(Block):
    last: Tensor | None = None

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        before, self.last = self.last, x.detach().mean()
        return super().forward(x if before is None else x + before, seen)


class Normalizes(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2), seen)


class Appends(Block):
    """Changes what it is given."""

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(self.up(x).mean(-1, keepdim=True))
        return super().forward(x + sum(seen), seen)


class Damped(nn.Module):
    """Its code depends on data, so it is not traced."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        while x.norm().item() > 1e9:
            x = x / 2
        return x * (1 + 0.1 * self.calls)


class CountsUntraced(Block):
    def __init__(self) -> None:
        super().__init__()
        self.damped = Damped()

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        return super().forward(self.damped(x), seen)


class Model(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(block() for _ in range(3)), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        return self.norm(x)


def made(block: type[Block]) -> Any:
    torch.manual_seed(0)
    return Model(block).double()


@pytest.mark.parametrize(
    "block",
    [Counts, Replaces, Numbers, CountsUntraced, Remembers, Normalizes, Appends],
    ids=lambda b: b.__name__,
)
@pytest.mark.parametrize("asked", [True, {"blocks": 2}], ids=["all", "two"])
def test_state_is_kept_once(block: type[Block], asked: Any) -> None:
    with pytest.raises(UsageError, match=r"'blocks\..*may do something else if it runs again"):
        planning.plan(made(block), recompute=asked, **TRAINING)


def test_what_no_call_reads_does_not_count() -> None:
    model = made(Block).train()
    found = planning.plan(model, recompute=True, **TRAINING)
    assert found.workload.recomputed == {"blocks": 3}


def test_caches_given_by_position_are_left_out() -> None:
    torch.manual_seed(0)
    sizes: Any = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=50, **sizes)
    model = AutoModelForCausalLM.from_config(config).double().train()
    how = {name: value for name, value in TRAINING.items() if name != "args"}
    found = planning.plan(model, recompute=True, **how)
    assert found.workload.recomputed == {"transformer.h": 2}
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids}  # the model makes a cache by default
    expected = reference(model, given)
    for one in run_ranks(2, lambda mesh: compare(model, given, found, mesh, expected)):
        assert one.logits <= 1e-9
        assert one.gradients is not None and one.gradients <= 1e-9, one.worst


def test_users_turn_it_on() -> None:
    """Blocks read a parameter of a module within them, in a forward that transformers wraps."""
    config, built = zoo.build("lfm2")
    model: Any = built.double().train()
    found = planning.plan(model, tp=2)
    model.gradient_checkpointing_enable()
    given = zoo.inputs("lfm2", config)
    expected = reference(model, given)
    for one in run_ranks(2, lambda mesh: compare(model, given, found, mesh, expected)):
        assert one.logits <= 1e-9
        assert one.gradients is not None and one.gradients <= 1e-9, one.worst


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def predict(self, x: Tensor) -> Tensor:
        return x @ self.mix.weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Predicts(GradientCheckpointingLayer):
    """Calls a method that reads a parameter two modules further in."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(self.mixer.predict(x).sin())


class Net(PreTrainedModel):
    config_class = PreTrainedConfig
    supports_gradient_checkpointing = True

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList([Predicts(), Predicts()])
        self.post_init()

    def forward(self, x: Tensor) -> BaseModelOutput:
        for block in self.blocks:
            x = x + block(x)
        return BaseModelOutput(last_hidden_state=x)


def test_users_turn_it_on_where_methods_read_parameters() -> None:
    model: Any = Net(PreTrainedConfig()).double().train()
    found = planning.plan(model, tp=2, args=(X,))
    model.gradient_checkpointing_enable()
    expected = reference(model, {"x": X})
    for one in run_ranks(2, lambda mesh: compare(model, {"x": X}, found, mesh, expected)):
        assert one.logits <= 1e-9
        assert one.gradients is not None and one.gradients <= 1e-9, one.worst


def test_recomputation_that_does_nothing_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)).double()
    with pytest.raises(UsageError, match="no list of blocks that can be computed again"):
        planning.plan(model, recompute=True, **TRAINING)
    with pytest.raises(UsageError, match="recompute is for training"):
        planning.plan(model, recompute=True, **{**TRAINING, "phase": "prefill"})


@pytest.mark.parametrize("wrong", [2, {"blocks": "2"}, {"blocks": 1.5}, "all"])
def test_what_is_no_number_of_blocks(wrong: Any) -> None:
    with pytest.raises(UsageError, match="recompute must be True, False or numbers of blocks"):
        planning.plan(made(Block), recompute=wrong, **TRAINING)
