"""Loops over what data selects: experts that are split, and loops that are left whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.planner.trace.data_queries.conditional_code import Refused, loop_over_rows
from tests.planner.equal import assert_equal, features, planned
from tests.planner.mlps import WIDTH, Mlp
from tests.planner.test_data_numbers import Around, split
from tests.planning import trace

EXPERTS, HIDDEN, CHOSEN = 5, 24, 2


class Looped(nn.Module):
    """Experts in one tensor each for up and down, and a loop over those that are hit."""

    asks = True  # whether a row is an expert
    number = 3  # of those that a token may choose from: the others are never hit

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.hidden = EXPERTS, HIDDEN
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows)[:, : self.number].softmax(-1).topk(CHOSEN, -1)
        mask = F.one_hot(chosen, num_classes=self.experts + 1).permute(2, 1, 0)
        return self.loop(rows, weights, mask).view(x.shape)

    def expert(self, x: Tensor, number: Tensor | int) -> Tensor:
        return F.linear(F.linear(x, self.up[number]).relu(), self.down[number])

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            hit = hit[0]
            if self.asks and hit == self.experts:
                continue
            place, token = torch.where(mask[hit])
            up = F.linear(x[token], self.up[hit]).relu()
            down = F.linear(up, self.down[hit]) * weights[token, place, None]
            out.index_add_(0, token, down)
        return out


class OfZeros(Looped):
    """What is added to has no gradient before, and rows are a vector."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        tokens, width = x.shape
        out = torch.zeros((tokens, width), dtype=x.dtype, device=x.device)
        for hit in torch.where(mask[: self.experts].sum(dim=(-1, -2)) > 0)[0]:
            place, token = torch.where(mask[hit])
            if not token.shape[0] > 0:
                continue
            done = self.expert(x[token].view(-1, x.shape[-1]), hit)
            out[token] += done * weights[token, place, None]
        return out


class OutOfBounds(Looped):
    """The mask has a row more than there are experts; it is never hit."""

    asks = False


class NeverHit(Looped):
    """No pass is made."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        return super().loop(x, weights, mask * 0) + self.same(x)


class WithTheSame(Looped):
    """As integers, and the last expert hands on what it is given."""

    number = EXPERTS

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for hit in mask.sum(dim=(-1, -2)).nonzero().squeeze(-1):
            number = int(hit.item())
            place, token = torch.where(mask[number])
            if token.numel() == 0:
                continue
            if number >= self.experts - 1:
                done = self.same(x[token])
            else:
                done = self.expert(x[token], number)
            out.index_add_(0, token, done * weights[token, place, None])
        return out


class Fused(Looped):
    """All experts' rows in one matrix, of which a pass takes some: no two passes are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS * HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS * HIDDEN, WIDTH))

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for hit in mask[: self.experts].sum(dim=(-1, -2)).nonzero(as_tuple=True)[0]:
            number = int(hit)
            place, token = torch.where(mask[number])
            start, stop = number * self.hidden, (number + 1) * self.hidden
            up = F.linear(x[token], self.up[start:stop]).relu()
            out.index_add_(0, token, up @ self.down[start:stop] * weights[token, place, None])
        return out


class Listed(Looped):
    """A module for each expert, found by name."""

    def __init__(self) -> None:
        super().__init__()
        del self.up, self.down
        self.each = nn.ModuleDict({f"expert_{i}": Mlp() for i in range(EXPERTS)})

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for hit in mask[: self.experts].sum(dim=(-1, -2)).nonzero():
            place, token = torch.where(mask[hit].squeeze(0))
            out[token] += self.each[f"expert_{hit[0]}"](x[token]) * weights[token, place, None]
        return out


class OfRange(Looped):
    """A loop over all experts, which skips those that are not hit."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            place, token = torch.where(mask[number])
            if token.shape[0] == 0:
                continue
            done = self.expert(x[token], number)
            out.index_add_(0, token, done * weights[token, place, None])
        return out


class OfList(Looped):
    """The rows as plain numbers."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in mask[: self.experts].sum(dim=(-1, -2)).nonzero().flatten().tolist():
            place, token = torch.where(mask[number])
            out[token] += self.expert(x[token], number) * weights[token, place, None]
        return out


class OfNamedList(Looped):
    """The same made before, and compared with a number of the model."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        hits = torch.where(mask.sum(dim=(-1, -2)) > 0)[0].tolist()
        for number in hits:
            if number == self.experts:
                continue
            place, token = torch.where(mask[number])
            up = F.linear(x[token], self.up[number]).relu()
            down = F.linear(up, self.down[number]) * weights[token, place, None]
            out.index_add_(0, token, down)
        return out


class Handed(Looped):
    """A pass reads what the one before it made."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out, before = torch.zeros_like(x), x
        for hit in mask.sum(dim=(-1, -2)).nonzero():
            before = self.expert(before, hit[0] % EXPERTS)
            out.add_(before)
        return out


class Large(Looped):
    """It branches on how many rows data selects."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for hit in mask[: self.experts].sum(dim=(-1, -2)).nonzero():
            _, token = torch.where(mask[hit[0]])
            if token.shape[0] > 4:
                out.index_add_(0, token, self.expert(x[token], hit[0]))
        return out


SPLIT = dict.fromkeys([Looped, OfZeros, NeverHit, WithTheSame, Fused, OfRange], "up down")
SPLIT |= dict.fromkeys([OfList, OfNamedList, Large, OutOfBounds], "up down")
SPLIT[Listed] = "up.weight down.weight"


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("make", SPLIT)
def test_experts_of_a_loop_are_split(make: Callable[[], nn.Module], tp: int) -> None:
    """Whichever of them are hit; and what they add up to is summed over ranks once."""
    model = Around(make).double()
    plan = planned(model, features(WIDTH), tp)
    assert split(plan) >= set(SPLIT[make].split())  # type: ignore[index]
    assert not plan.opaque
    within = {name for name in plan.modules if name.startswith("inner.each")}
    assert not any("tp" in c.target for n in within for c in plan.modules[n].outputs)
    # Where no pass is made, nothing has a gradient that would be summed over ranks; and new zeros
    # are priced at the size that they have in the trace.
    assert_equal(model, features(WIDTH), plan, collectives=make not in (NeverHit, OfZeros))


def test_what_passes_hand_on_is_in_one_state() -> None:
    """So each can be made or not, and none needs to send anything."""
    model = Around(lambda: nn.Sequential(Handed(), Mlp())).double()
    plan = planned(model, features(WIDTH), 2)
    assert not plan.opaque
    assert_equal(model, features(WIDTH), plan)


class Kept(Looped):
    """What passes made is put together after the loop."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        parts = [x]
        for hit in mask[: self.experts].sum(dim=(-1, -2)).nonzero():
            parts.append(self.expert(x, hit[0]))
        return torch.stack(parts).sum(0)


class KeptByAnother(Looped):
    """The same by a method, so that the code of the loop does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def keep_(self, part: Tensor) -> None:
        self.last = part if self.last is None else self.last + part

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        self.last = None
        for hit in mask[: self.experts].sum(dim=(-1, -2)).nonzero():
            self.keep_(self.expert(x, hit[0]))
        total, self.last = self.last, None
        assert total is not None
        return total


class Counted(Looped):
    """Passes are counted by a tensor, and code branches on it."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out, count = torch.zeros_like(x), torch.tensor(0)
        for hit in mask[: self.experts].sum(dim=(-1, -2)).nonzero():
            out.add_(self.expert(x, hit[0]))
            count += 1
        return out if count > 3 else out * 2


class Flagged(Looped):
    """Passes set elements of a tensor, and a size is how many are set."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out, flags = torch.zeros_like(x), torch.zeros(EXPERTS, device=x.device)
        for hit in mask[: self.experts].sum(dim=(-1, -2)).nonzero():
            out.add_(self.expert(x, hit[0]))
            flags[hit] = 1
        return out * flags.nonzero().shape[0]


class OfTokens(Looped):
    """There may be more rows than in the trace."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for token in mask[0].sum(0).nonzero():
            number = int(token)
            out[token] += self.expert(x[token], 1 if number > 30 else 0)
        return out


class LengthOfList(Looped):
    """How many rows there are counts, too."""

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        hits = mask[: self.experts].sum(dim=(-1, -2)).nonzero().flatten().tolist()
        for number in hits:
            out.add_(self.expert(x, number))
        return out / len(hits)


OTHERS = [Kept, KeptByAnother, Counted, Flagged, OfTokens, LengthOfList]


@pytest.mark.parametrize("make", OTHERS)
def test_other_loops_are_left_whole(make: Callable[[], nn.Module]) -> None:
    model = Around(lambda: nn.Sequential(make(), Mlp())).double()
    plan = planned(model, features(WIDTH), 2)
    assert plan.opaque == {f"module {make.__name__}": 1}  # type: ignore[attr-defined]
    assert_equal(model, features(WIDTH), plan)


def test_a_part_of_a_tensor_that_passes_change() -> None:
    """What is changed is another tensor than what is read after the loop."""
    model = Around(lambda: nn.Sequential(Part(), Mlp())).double()
    plan = planned(model, features(WIDTH), 2)
    assert plan.opaque == {"module Part": 1}
    assert_equal(model, features(WIDTH), plan)


class Part(Looped):
    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros(2, *x.shape, dtype=x.dtype, device=x.device)
        for hit in mask[: self.experts].sum(dim=(-1, -2)).nonzero():
            _, token = torch.where(mask[hit[0]])
            out[1].index_add_(0, token, self.expert(x[token], hit[0]))
        return out.sum(0)


class Uses(Looped):
    """A pass uses the number of its row in some way."""

    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.use = use

    def loop(self, x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row in torch.where(mask[: self.experts].sum(dim=(-1, -2)) > 0)[0]:
            _, token = torch.where(mask[row])
            out.index_add_(0, token, x[token] * self.use(self.up, row).sum())
        return out


USES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "selects": lambda w, row: w[row],
    "selects by an integer": lambda w, row: w[int(row.item())],
    "is compared with a number": lambda w, row: w[row] if row == 2 else w[row] * 2,
    "is compared as an integer": lambda w, row: w[row] * (1 if int(row.item()) >= 3 else 2),
    "is computed with": lambda w, row: w[row % 2],
    "is looked up in a list": lambda w, row: w[row] * [1, 2, 3, 4, 5][row.item()],
    "is written": lambda w, row: w[int(f"{row}")],
    "selects from known values": lambda w, row: w[row] * torch.arange(EXPERTS)[row],
}


@pytest.mark.parametrize("how", USES)
def test_each_row_has_a_pass(how: str) -> None:
    """Code may do with the number of a row what it likes."""
    graph = trace(Uses(USES[how]).to("meta"), (torch.empty(3, 19, WIDTH, device="meta"),), {})
    assert not graph.untraced
    assert sum(op.call.op == "index_put" for op in graph.ops) == EXPERTS


LOOPS = {
    "y = f(e)\nx.add_(y)": True,
    "x[e] += f(e)": True,
    "x += f(e)": True,
    "if e > 1:\n    continue\nx.add_(f(e))": True,
    "if e > 1:\n    y = f(e)\nelse:\n    y = x[e]\nx.add_(y)": True,
    "with g():\n    y = f(e)\nx.add_(y)": True,
    "for y in e:\n    x.add_(y)": True,
    "x.add_(sum(z for z in e))": True,
    "if e > 1:\n    y = f(e)\nx.add_(y)": False,
    "for y in e:\n    pass\nx.add_(y)": False,
    "x = x + f(e)": True,
    "n += 1": False,
    "parts.append(f(e))": False,
    "parts[e] = f(e)": False,
    "self.last = f(e)": False,
    "g(e)": False,
    "after = f(e)": False,
    "x.add_(f(e))\nbreak": False,
    "return f(e)": False,
    "yield e": False,
    "x.add_(y := f(e))": False,
    "while e > 1:\n    x.add_(e)": False,
    "try:\n    x.add_(e)\nexcept e:\n    pass": False,
    "del x": False,
    "x.add_(lambda: e)": False,
}


def _loop(body: str, before: str = "for e in hits:") -> str:
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"def f(self, x, hits, parts, n):\n    {before}\n{lines}    return x, after\n"


@pytest.mark.parametrize("body", LOOPS)
def test_passes_that_are_independent(body: str, tmp_path: Path) -> None:
    assert _is_independent(_loop(body), tmp_path) is LOOPS[body]


@pytest.mark.parametrize(
    "head",
    [
        "for i, e in enumerate(hits):",
        "for e in list(hits):",
        "for e, y in zip(hits, parts):",
        "for e, y in itertools.product(hits, parts):",
        "for e in [f(e) for e in hits]:",
        "for e in self.order(hits):",
        "for e in reversed(hits):",
        "for e in f(hits).tolist():",
        "for i, e in enumerate(hits.tolist()):",
    ],
)
def test_rows_taken_with_something_else(head: str, tmp_path: Path) -> None:
    assert not _is_independent(_loop("x.add_(f(e))", head), tmp_path)


@pytest.mark.parametrize(
    "code",
    [
        "def f(x, hits):\n    for e in hits: x.add_(sum(e for e in hits))\n    return x\n",
        "def f(x, hits):\n    for e in hits:\n        x.add_(e)\n    else:\n        g(e)\n",
    ],
)
def test_loops_of_other_forms(code: str, tmp_path: Path) -> None:
    assert not _is_independent(code, tmp_path)


def test_a_loop_in_a_loop_hands_on_names(tmp_path: Path) -> None:
    code = "def f(x, hits):\n    for a in x:\n        for e in hits:\n"
    code += "            y = e\n        g(y)\n"
    assert not _is_independent(code, tmp_path, line=3)


def _is_independent(code: str, folder: Path, line: int = 2) -> bool:
    file = folder / "code.py"
    file.write_text(code)
    try:
        loop_over_rows(str(file), line, {"x"})
    except Refused:
        return False
    return True
