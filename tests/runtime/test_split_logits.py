"""Logits stay split through the loss code of transformers, and cannot be used afterwards."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportOptionalOperand=false, reportReturnType=false

import copy
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutput

from shardwright.runtime.boundary.root import wrap_root
from shardwright.runtime.communication.audit import count_collectives, counts
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.logits.split_logits import SealedLogitsError, SplitLogits
from shardwright.runtime.modules.layers import apply_module
from shardwright.runtime.state.gather import full_tensors
from tests.ranks import run_ranks
from tests.runtime.test_layers import F64, plan

V = 13


def bert(logits, labels):
    return nn.CrossEntropyLoss()(logits.view(-1, V), labels.view(-1))


def t5(logits, labels):
    return nn.CrossEntropyLoss(ignore_index=-100)(logits.view(-1, logits.size(-1)), labels.view(-1))


def shifted(logits, labels):
    logits = logits.float().double()
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), label_smoothing=0.1)


def capped(logits, labels):
    logits = logits / 3.0
    logits = torch.tanh(logits) * 3.0
    logits = 2 * logits + 1 - logits.sigmoid()
    return ForCausalLMLoss(logits, labels, V)


def masked(logits, labels):
    keep = labels != -100
    return F.cross_entropy(logits[keep], labels[keep]) + F.cross_entropy(
        logits[:, -1], labels[:, 0].abs() % V
    )


def reshaped(logits, labels):
    b, s, _ = logits.shape
    flat = logits.to(torch.float64).reshape((b * s, -1))
    return F.cross_entropy(
        flat, labels.reshape(b * s), reduction="sum", weight=torch.arange(1.0, V + 1, dtype=F64)
    )


def counted(logits, labels):
    return ForCausalLMLoss(logits, labels, V, num_items_in_batch=torch.tensor(5))


STAY = [
    bert,
    t5,
    shifted,
    capped,
    masked,
    reshaped,
    counted,
    lambda x, y: ForCausalLMLoss(x, y, V),
    lambda x, y: ForMaskedLMLoss(x, y, V),
]


def transposed(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels)


def log_softmax(logits, labels):
    return F.nll_loss(F.log_softmax(logits.view(-1, V), dim=-1), labels.view(-1))


def written(logits, labels):
    logits[:, :, 3] = -5.0
    return bert(logits, labels) + logits.sum() * 1e-3


def other_uses(logits, labels):
    top = logits.max(dim=-1).values + logits.softmax(-1)[..., 2] + logits.flatten().mean()
    scaled = logits * torch.arange(V, dtype=F64) + torch.zeros(V, dtype=F64)
    return top.sum() + scaled.sum() + logits[..., :4].sum() + logits[..., None].mean() + len(logits)


GATHER = [transposed, log_softmax, written, other_uses]


class Model(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.body, self.head, self.loss = (
            nn.Linear(4, 4, dtype=F64),
            nn.Linear(4, V, dtype=F64),
            loss,
        )

    def forward(self, x, labels=None):
        """Logits, and a loss if there are labels."""
        logits = self.head(self.body(x)) * 1.5
        loss = None if labels is None else self.loss(logits, labels)
        return CausalLMOutput(loss=loss, logits=logits)


def head(rank: int = 3, out: str = f"{V}@tp"):
    lead = "?, " * (rank - 1)
    return plan(
        "ColumnParallelLinear",
        {"weight": f"{out}, 4", "bias": out},
        [("input", f"{lead}4", f"{lead}4 | grad-partial tp")],
        [("", f"{lead}{out}", f"{lead}{V}")],
    )


def split(model: nn.Module, mesh: Mesh, spec=None) -> nn.Module:
    model = copy.deepcopy(model)
    apply_module(model.head, spec or head(), mesh, path="head", defer=True)
    wrap_root(model)
    return model


def example():
    torch.manual_seed(0)
    return torch.randn(2, 5, 4, dtype=F64), torch.tensor([[1, 12, -100, 0, 7], [-100, 3, 6, 5, 12]])


@pytest.mark.parametrize("loss", STAY + GATHER, ids=lambda f: f.__name__)
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses(loss, ranks):
    x, labels = example()
    model = Model(loss)
    expected = copy.deepcopy(model)
    out = expected(x, labels=labels)
    out.loss.backward()

    def work(mesh):
        mine = split(model, mesh)
        with count_collectives() as calls:
            got = mine(x, labels=labels)
            got.loss.backward()
        torch.testing.assert_close(got.loss, out.loss)
        grads = full_tensors(mine, {n: p.grad for n, p in mine.named_parameters()})
        for name, p in expected.named_parameters():
            torch.testing.assert_close(grads[name], p.grad, msg=lambda m, n=name: f"{n}: {m}")
        return counts(calls)

    for calls in run_ranks(ranks, work):
        assert ("all_gather" in calls) == (loss in GATHER)


def test_logits_are_sealed_when_the_forward_returns():
    x, labels = example()
    model = Model(bert)
    want = model(x).logits

    def work(mesh):
        mine = split(model, mesh)
        logits = mine(x, labels).logits  # labels by position
        assert isinstance(logits, SplitLogits) and not isinstance(logits, torch.Tensor)
        assert "SplitLogits([2, 5, 13]" in repr(logits) and "sealed" in repr(logits)
        for use in (
            lambda: logits + 1,
            lambda: logits.shape,
            lambda: logits.argmax(-1),
            lambda: logits[0],
            lambda: torch.softmax(logits, -1),
            lambda: logits.detach(),
            lambda: logits.cpu(),
            lambda: 2 * logits,
            lambda: torch.ones(1) * logits,
            lambda: logits.view(-1, V),
            lambda: logits.dtype,
            lambda: len(logits),
            lambda: torch.stack([logits]),
            lambda: numpy.asarray(logits),
            lambda: logits // 1,
            lambda: 3 in logits,
            lambda: pickle.dumps(logits),
            lambda: copy.deepcopy(logits),
        ):
            with pytest.raises(SealedLogitsError, match=r"call `.whole\(\)` on all ranks"):
                use()
        torch.testing.assert_close(logits.whole(), want)
        torch.testing.assert_close(mine(x).logits, want)
        torch.testing.assert_close(mine(x, labels=None).logits, want)
        assert logits.local.shape[-1] < V

    run_ranks(2, work)


def test_sealed_after_an_error_too():
    x, labels = example()
    kept = []

    def bad(logits, labels):
        kept.append(logits)
        raise ValueError("no loss")

    mine = split(Model(bad), Mesh.shape_only({"tp": (0, 2)}))
    with pytest.raises(ValueError, match="no loss"):
        mine(x, labels)
    with pytest.raises(SealedLogitsError):
        kept[0].sum()
    assert isinstance(mine(x).logits, torch.Tensor)


def test_the_root_keeps_its_name_and_signature():
    import inspect

    model = Model(bert)
    mine = split(model, Mesh.shape_only({"tp": (0, 2)}))
    assert type(mine).__name__ == "Model" and isinstance(mine, Model)
    assert inspect.signature(mine.forward) == inspect.signature(model.forward)
    wrap_root(mine)  # once is enough
    assert type(mine).__mro__[1].__name__ == "RootModule"


def test_vocabulary_split_over_two_mesh_dims():
    x, labels = example()
    model = Model(shifted)
    spec = plan(
        "ColumnParallelLinear",
        {"weight": "2@a*6@b, 4", "bias": "2@a*6@b"},
        [("input", "?, ?, 4", "?, ?, 4 | grad-partial a b")],
        [("", "?, ?, 2@a*6@b", "?, ?, 12")],
    )
    model.head = nn.Linear(4, 12, dtype=F64)
    labels = labels.clamp(max=11)
    want = model(x, labels).loss

    def work(mesh):
        out = split(model, mesh, spec)(x, labels)
        assert isinstance(out.logits, SplitLogits)
        torch.testing.assert_close(out.logits.whole(), model(x).logits)
        return out.loss

    for loss in run_ranks(6, work, {"a": 2, "b": 3}):
        torch.testing.assert_close(loss, want)
