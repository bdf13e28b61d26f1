"""Examples of several calls: a plan holds for each, with a cache of the model's own for example."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import ModelError, UsageError
from shardwright.runtime.api import apply
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning
from tests.ranks import run_ranks

WIDTH, HEADS, WORDS = 24, 6, 53
Past = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, past: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (f(x).unflatten(-1, (HEADS, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        new, known = x.shape[1], k.shape[2]
        mask = torch.ones(new, known, dtype=torch.bool).tril(known - new)
        out = F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.o(out.transpose(1, 2).flatten(2)), (k, v)


class Decoder(nn.Module):
    """Takes and returns a list of keys and values, as code without a cache class does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        x, kept = self.embed(ids), []
        for i, layer in enumerate(self.layers):
            x, pair = layer(x, None if past is None else past[i])
            kept.append(pair)
        return self.head(x), kept


class Sorts(Decoder):
    """Its step cannot be traced: it decides by the data of the cache."""

    def forward(self, ids: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        if past is not None and past[0][0].sum() > 0:
            raise ValueError("never")
        return super().forward(ids, past)


def ids(length: int, rows: int = 3) -> Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(length))


def both_calls(model: nn.Module) -> list[dict[str, Any]]:
    past = [(k.detach(), v.detach()) for k, v in model(ids(19))[1]]
    return [{"ids": ids(19)}, {"ids": ids(1), "past": past}]


def decoded(model: nn.Module) -> list[Tensor]:
    """Logits of a prompt and of three steps, with other sizes than those of the examples."""
    out, past = model(ids(7, 2))
    found = [out]
    for n in (1, 2, 1):
        out, past = model(ids(n, 2), past)
        found.append(out)
    return found


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 3}, {"cp": 2, "tp": 1}], ids=str)
def test_with_a_cache_and_without(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    plan = planning.plan(model, mesh=sizes, kwargs=both_calls(model))
    assert [call.inputs for call in plan.calls] == [["ids"], ["ids", "past"]]
    held, every = plan.predicted.parameter_bytes, sum(p.nbytes for p in model.parameters())
    assert max(held) < 1.1 / sizes["tp"] * every
    want = decoded(model)
    torch.stack([out.square().mean() for out in want]).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}

    def work(mesh: Mesh) -> None:
        split: Any = apply(copy.deepcopy(model), plan, mesh)
        split.zero_grad()
        found = decoded(split)
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)
        torch.stack([out.square().mean() for out in found]).sum().backward()
        mine = full_tensors(split, {n: p.grad for n, p in split.named_parameters()})
        torch.testing.assert_close(mine, grads, rtol=1e-9, atol=1e-9)

    run_ranks(plan.world_size, work, sizes)


def test_of_one_call_the_other_is_refused() -> None:
    model = Decoder().double()
    calls = both_calls(model)
    plan = planning.plan(model, tp=2, kwargs=calls[0])

    def work(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match="past"):
            apply(copy.deepcopy(model), plan, mesh)(**calls[1])

    run_ranks(2, work)


def test_a_call_that_cannot_be_traced_is_an_error() -> None:
    model = Sorts().double()
    with pytest.raises(ModelError, match="the call with ids, past: cannot trace Sorts"):
        planning.plan(model, tp=2, kwargs=both_calls(model))


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from shardwright.planner.cli.main import main

    monkeypatch.setattr("tests.planner.test_several_calls.EXAMPLES", both_calls(Decoder()))
    home, out = "tests.planner.test_several_calls", str(tmp_path / "p.json")
    given = ("--tp", "2", "--inputs", f"{home}:examples", "--objective", "memory", "-o", out)
    result = CliRunner().invoke(main, ["plan", f"{home}:Decoder", *given])
    assert result.exit_code == 0, result.output


EXAMPLES: list[dict[str, Any]] = []


def examples() -> list[dict[str, Any]]:
    return EXAMPLES
