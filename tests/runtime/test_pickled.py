"""Split models are not pickled: their state is saved, and read again."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.errors import UsageError
from shardwright.runtime.communication.mesh import Mesh
from shardwright.runtime.state.gather import full_tensors
from tests import planning, zoo
from tests.ranks import run_ranks

X = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(2)).double()


class Normed(nn.Module):
    """A buffer of sharded features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 48), nn.BatchNorm1d(48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, rows, 32] -> the same."""
        return self.down(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2).relu())


torch.manual_seed(0)
BASE: Any = Normed().double().eval()
PLANNED = planning.Once(lambda: planning.plan(copy.deepcopy(BASE), tp=2, args=(X,), phase="train"))


def test_what_the_refusal_says_to_do_works() -> None:
    want = BASE(X)

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(BASE), PLANNED(), mesh)
        for part in (split, split.up):
            with pytest.raises(UsageError, match=r"cannot be pickled.*model.state_dict"):
                pickle.dumps(part)
            with pytest.raises(UsageError, match=r"shardwright.save"):
                torch.save(part, io.BytesIO())
        torch.save(split.state_dict(), file := io.BytesIO())
        file.seek(0)
        again: Any = shardwright.apply(copy.deepcopy(BASE), PLANNED(), mesh)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        again.load_state_dict(torch.load(file, weights_only=False))
        torch.testing.assert_close(again(X), want, rtol=0, atol=1e-9)

    run_ranks(2, work)


def test_all_of_a_state_dict_can_be_saved_whole() -> None:
    """Buffers of which a state dict shows parts, too."""

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(BASE), PLANNED(), mesh)
        assert split.norm.running_mean.to_local().shape[0] < BASE.norm.running_mean.shape[0]
        torch.testing.assert_close(full_tensors(split, split.state_dict()), {**BASE.state_dict()})

    run_ranks(2, work)


def test_caches_are_copied_and_not_pickled() -> None:
    """A rank has keys of its own heads: read by another model they would be another's."""
    model: Any = zoo.build("llama")[1].double().eval()
    plan = planning.plan(copy.deepcopy(model), tp=2)
    ids = torch.arange(3, 9)[None]
    want = model(ids).logits[:, 4:]

    def work(mesh: Mesh) -> None:
        split: Any = shardwright.apply(copy.deepcopy(model), plan, mesh)
        with torch.no_grad():
            cache = split(ids[:, :4], use_cache=True).past_key_values
            for part in (cache, cache.layers[0], {"prefix": cache}):
                with pytest.raises(UsageError, match="cannot be pickled or sent"):
                    pickle.dumps(part)
                with pytest.raises(UsageError, match="cannot be pickled or sent"):
                    torch.save(part, io.BytesIO())
            twin = copy.deepcopy(cache)
            for each in (twin, copy.copy(cache)):
                got = split(ids[:, 4:], past_key_values=each).logits
                torch.testing.assert_close(got, want, rtol=0, atol=1e-9)

    run_ranks(2, work)
