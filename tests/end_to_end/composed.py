"""What each rank of `test_composed` does: tools of others on a split model, as on the whole one."""
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel

import shardwright
from shardwright.errors import UsageError
from tests import planning, six_heads

IDS = torch.randint(3, 50, (4, 7), generator=torch.Generator().manual_seed(1))
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def llama() -> Any:
    torch.manual_seed(0)
    options = {"num_hidden_layers": 2, "initializer_range": 0.2, "eos_token_id": None}
    return six_heads.llama(**options).eval()


def split() -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return shardwright.apply(llama(), planning.plan(llama(), tp=2), mesh)


def close(got: Any, want: Any, by: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=by)


def exported() -> None:
    program = torch.export.export(split(), (IDS,), {"use_cache": False}, strict=False)
    close(program.module()(IDS, use_cache=False).logits, llama()(IDS).logits)


def autocast() -> None:
    """As far off as it is itself, which computes in 8 bits."""
    with torch.autocast("cpu", torch.bfloat16):
        close(split()(IDS).logits.float(), llama()(IDS).logits.float(), 0.05)


def changed_when_compiled() -> None:
    """An attribute that code asks for is refused until it is what it was."""
    local, want = split(), llama()(IDS).logits
    attention = local.model.layers[0].self_attn
    before, compiled = attention.scaling, torch.compile(local, backend="eager")
    close(compiled(IDS).logits, want)
    attention.scaling = 2.0
    for _ in range(2):
        with pytest.raises(UsageError, match=r"'model.layers.0.self_attn.scaling' is 2.0"):
            compiled(IDS)
    attention.scaling = before
    close(compiled(IDS).logits, want)
    whole = torch.compile(local, backend="eager", fullgraph=True)
    close(whole(IDS, use_cache=False).logits, want)
    attention.scaling = 2.0
    with pytest.raises((UsageError, Unsupported), match=r"was changed|scaling' is 2.0"):
        whole(IDS, use_cache=False)
    torch._dynamo.reset()


class Keeps(nn.Module):
    """What it computes over the features hangs on an object, a list, and its class."""

    over = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.args, self.windows = SimpleNamespace(power=2), [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).pow(self.args.power)
        return self.down(h.softmax(-1) if self.over or len(self.windows) > 2 else h)


KEPT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "args.power": (lambda m: setattr(m.args, "power", 3), lambda m: setattr(m.args, "power", 2)),
    "windows": (lambda m: m.windows.append(3), lambda m: m.windows.pop()),
    "over": (lambda m: setattr(Keeps, "over", True), lambda m: setattr(Keeps, "over", False)),
}
"""What changes, and is as it was."""


def kept_things_changed_when_compiled() -> None:
    """They are refused until they are what they were; so is a config, of one compiled whole."""
    torch.manual_seed(0)
    x, whole = torch.randn(2, 5, 8), Keeps().eval()
    plan, want = planning.plan(whole, tp=2, args=(x,)), whole(x)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    local = shardwright.apply(whole, plan, mesh)
    compiled = torch.compile(local, backend="eager")
    for path, (change, undo) in KEPT.items():
        close(compiled(x), want)
        change(local)
        for _ in range(2):
            with pytest.raises(UsageError, match=f"'{path}' "):
                compiled(x)
        undo(local)
    close(compiled(x), want)
    llama = split()
    compiled = torch.compile(llama, backend="eager", fullgraph=True)
    compiled(IDS, use_cache=False)
    llama.config._attn_implementation = "eager"
    with pytest.raises((UsageError, Unsupported), match=r"was changed|attn_implementation' is "):
        compiled(IDS, use_cache=False)
    torch._dynamo.reset()


def averaged() -> None:
    model = split()
    average = AveragedModel(model)
    average.update_parameters(model)
    close(average(IDS).logits, llama()(IDS).logits)


def generated() -> None:
    """Padding on the left, beams, a static cache, tokens that are guessed from the prompt."""
    model, whole = split(), llama()
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for options in (
        {"attention_mask": mask},
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
    ):
        ids = IDS[:1] if "prompt_lookup_num_tokens" in options else IDS
        asked: Any = {**GREEDY, **options}
        assert torch.equal(model.generate(ids, **asked), whole.generate(ids, **asked)), options


CASES: dict[str, Callable[[], None]] = {
    "torch.export": exported,
    "autocast": autocast,
    "changed when compiled": changed_when_compiled,
    "kept things changed when compiled": kept_things_changed_when_compiled,
    "averaged weights": averaged,
    "generate": generated,
}


def main() -> None:
    dist.init_process_group("gloo")
    for name, case in CASES.items():
        print(name, flush=True)
        case()
    dist.barrier()
    dist.destroy_process_group()
