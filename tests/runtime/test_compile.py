"""torch.compile(fullgraph=True) follows split layers, forward and backward."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportReturnType=false

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import shardwright
from shardwright.runtime.logits.split_logits import SplitLogits
from tests import planning
from tests.ranks import run_ranks
from tests.runtime.test_layers import F64, Mlp, apply, column, plan, row, vocab
from tests.runtime.test_split_logits import STAY, Model, bert, example, split, t5


def compiled(module: nn.Module):
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager")


def test_mlp():
    model, x = Mlp(), torch.randn(4, 6, dtype=F64)

    def work(mesh):
        mine = apply(model, {"up": column(10, 6), "down": row(6, 10)}, mesh)
        eager, traced = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, got = mine(eager), compiled(mine)(traced)
        torch.testing.assert_close(got, out)
        first = torch.autograd.grad(out.pow(2).sum(), [eager, *mine.parameters()])
        second = torch.autograd.grad(got.pow(2).sum(), [traced, *mine.parameters()])
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b)

    run_ranks(2, work)


def test_embedding_mixed_shards_and_gather():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.qkv = nn.Embedding(11, 4, dtype=F64), nn.Linear(4, 10, dtype=F64)

        def forward(self, ids):
            return self.qkv(self.embed(ids)).tanh()

    dims = "3@tp*2 + 4"
    specs = {
        "embed": vocab("11@tp", 4),
        "qkv": plan(
            parameters={"weight": (f"{dims}, 4", f"{dims}, 4 | grad-partial tp"), "bias": dims},
            inputs=[("input", "?, 4", "?, 4 | grad-partial tp")],
        ),
    }
    model, ids = Model(), torch.tensor([0, 10, 5])

    def work(mesh):
        mine = apply(model, specs, mesh)
        out, got = mine(ids), compiled(mine)(ids)
        torch.testing.assert_close(got, out)
        first = torch.autograd.grad(out.sum(), list(mine.parameters()))
        second = torch.autograd.grad(got.sum(), list(mine.parameters()))
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b)

    run_ranks(2, work)


# The shapes of `masked` depend on data, so it has no whole graph to compile.
TRACEABLE = [f for f in STAY if f.__name__ != "masked"]


@pytest.mark.parametrize("loss", TRACEABLE, ids=lambda f: f.__name__)
def test_losses_of_split_logits(loss):
    x, labels = example()
    model = Model(loss)
    want = model(x, labels).loss

    def work(mesh):
        mine = split(model, mesh)
        if loss in (bert, t5):
            with pytest.raises(Unsupported):
                compiled(mine)(x, labels)
            return
        out = compiled(mine)(x, labels)
        assert isinstance(out.logits, SplitLogits)
        torch.testing.assert_close(out.loss, want)
        out.loss.backward()

    run_ranks(2, work)


def test_a_root_that_makes_its_loss_module_gathers_when_compiled():
    class Bert(Model):
        def forward(self, x, labels=None):  # pyright: ignore
            logits = self.head(self.body(x))
            loss = nn.CrossEntropyLoss()(logits.view(-1, 13), labels.view(-1))
            return loss, logits

    x, labels = example()
    model = Bert(None)

    def work(mesh):
        mine = split(model, mesh)
        loss, logits = compiled(mine)(x, labels)
        torch.testing.assert_close(loss, model(x, labels)[0])
        assert isinstance(logits, torch.Tensor)
        assert isinstance(mine(x, labels)[1], SplitLogits)

    run_ranks(2, work)


def test_a_model_that_was_never_called_is_called_twice():
    """The first call of a thread sets what decides what code sees: the second finds it set."""
    model, x = Mlp().double(), torch.randn(4, 6, dtype=F64)
    whole = planning.plan(copy.deepcopy(model), tp=2, args=(x,))
    want = model(x)

    def work(mesh):
        traced = compiled(shardwright.apply(copy.deepcopy(model), whole, mesh))
        for _ in range(2):
            torch.testing.assert_close(traced(x), want)

    run_ranks(2, work)
