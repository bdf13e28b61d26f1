"""A model for each function of torch.nn.functional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planner.equal import ids
from tests.torch_nn.losses import LOSSES, classes
from tests.torch_nn.models import (
    CLASSES,
    WIDTH,
    Case,
    Function,
    Last,
    Loss,
    function,
    loss,
    random,
    space,
)
from tests.torch_nn.modules import Unpooled

DEFAULTS = """
celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish normalize
relu relu6 rrelu selu sigmoid silu softplus softshrink softsign tanh tanhshrink
""".split()
"""Functions whose defaults will do."""

IN_PLACE = "celu_ elu_ hardtanh_ leaky_relu_ relu_ rrelu_ selu_".split()

DROPOUTS = "alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout".split()

CONVOLUTIONS = [f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)]

POOLS = [
    f"{kind}{n}d{more}"
    for n in (1, 2, 3)
    for kind in ("avg_pool", "adaptive_avg_pool", "max_pool", "adaptive_max_pool")
    for more in ("", "_with_indices")[: 1 + ("max" in kind)]
]


def dims(name: str) -> int:
    """Of space, that a function is for."""
    return int(name.removesuffix("_with_indices")[-2])


def fractional(name: str) -> Case:
    """Windows at random places, which are given: they are the same on each rank."""
    n, call = dims(name), getattr(F, name)

    def places(x: Tensor) -> Tensor:
        return torch.full((*x.shape[:2], n), 0.5, dtype=x.dtype, device=x.device)

    return function(lambda x: call(x, 2, 3, _random_samples=places(x)), n=n)


def with_statistics(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """With a mean and a variance that are given."""
    mean, variance = (torch.full_like(weight, v, requires_grad=False) for v in (0.5, 2.0))
    return F.batch_norm(x, mean, variance, weight, bias)


def bags(b: int, t: int) -> tuple[Tensor, Tensor]:
    """Ids, and a weight for each."""
    return torch.randint(CLASSES, (b, t)), torch.rand(b, t, dtype=torch.float64)


def called(name: str, *rest: Any, scaled: float = 1) -> Callable[[Tensor], Any]:
    """A function of what comes in, and of these."""
    return lambda x: getattr(F, name)(x if scaled == 1 else x * scaled, *rest)


C = WIDTH
FUNCTIONS: dict[str, Case] = {
    **{name: function(getattr(F, name)) for name in DEFAULTS},
    **{name: function(called(name, scaled=2)) for name in IN_PLACE},
    **{name: function(called(name, 0.3, False)) for name in DROPOUTS},
    **{
        name: function(getattr(F, name), (C, C, *[3] * dims(name)), (C,), n=dims(name))
        for name in CONVOLUTIONS
    },
    **{name: function(called(name, 2), n=dims(name)) for name in POOLS},
    **{
        f"lp_pool{n}d": function(lambda x, n=n: getattr(F, f"lp_pool{n}d")(x.abs(), 3.0, 2), n=n)
        for n in (1, 2, 3)
    },
    **{
        f"max_unpool{n}d": space(
            n,
            lambda n=n: Unpooled(n, Function(lambda x, i: getattr(F, f"max_unpool{n}d")(x, i, 2))),
        )
        for n in (1, 2, 3)
    },
    **{
        name: fractional(name)
        for n in (2, 3)
        for name in (f"fractional_max_pool{n}d", f"fractional_max_pool{n}d_with_indices")
    },
    **{
        name: loss(how, lambda name=name: getattr(F, name))
        for (module, name), how in LOSSES.items()
        if module != "NLLLoss2d"
    },
    "affine_grid": function(
        lambda x: F.affine_grid(x.flatten(1)[:, :6].view(-1, 2, 3), [x.shape[0], 1, 4, 4], False)
    ),
    "batch_norm": function(with_statistics, (C,), (C,), n=2),
    "bilinear": function(lambda x, w, b: F.bilinear(x, x.sin(), w, b), (C, C, C), (C,)),
    "channel_shuffle": function(lambda x: F.channel_shuffle(x, 3), n=2),
    "conv_tbc": function(F.conv_tbc, (3, C, C), (C,)),
    "cosine_similarity": function(lambda x: F.cosine_similarity(x, x.sin(), dim=-1)),
    "embedding": Case(lambda: Last(Function(F.embedding, (CLASSES, C))), ids(CLASSES)),
    "embedding_bag": Case(
        lambda: Last(
            Function(
                lambda i, p, w: F.embedding_bag(i, w, per_sample_weights=p, mode="sum"),
                (CLASSES, C),
            )
        ),
        bags,
    ),
    "fold": Case(
        lambda: nn.Sequential(
            nn.Conv1d(C, 4 * C, 1),
            Function(lambda x: F.fold(x, (4, 4), 2, stride=2)),
            nn.Conv2d(C, C, 1),
        ),
        lambda b, t: (random(b, C, 4),),
    ),
    "grid_sample": function(
        lambda x: F.grid_sample(x, x[:, :2].movedim(1, -1).tanh(), align_corners=False), n=2
    ),
    "group_norm": function(lambda x, w, b: F.group_norm(x, 3, w, b), (C,), (C,), n=2),
    "gumbel_softmax": function(F.gumbel_softmax, compared=False),
    "instance_norm": function(
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (C,), (C,), n=2
    ),
    "interpolate": function(lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), n=2),
    "layer_norm": function(lambda x, w, b: F.layer_norm(x, (C,), w, b), (C,), (C,)),
    "linear": function(F.linear, (C, C), (C,)),
    "linear_cross_entropy": loss(
        Loss(target=classes),
        lambda: Function(lambda x, y, w: F.linear_cross_entropy(x, w, y), (CLASSES, CLASSES)),
    ),
    "local_response_norm": function(lambda x: F.local_response_norm(x, 2), n=2),
    "log_softmax": function(lambda x: F.log_softmax(x, -1)),
    "multi_head_attention_forward": function(
        lambda x, *w: F.multi_head_attention_forward(
            x, x, x, C, 4, *w[:2], None, None, False, 0.0, *w[2:], training=False
        )[0],
        (3 * C, C),
        (3 * C,),
        (C, C),
        (C,),
    ),
    "native_channel_shuffle": function(
        lambda x: F.native_channel_shuffle(x, 3), n=2, compared=False
    ),
    "one_hot": Case(
        lambda: Last(Function(lambda i, w: F.one_hot(i, CLASSES).to(w.dtype) @ w, (CLASSES, C))),
        ids(CLASSES),
    ),
    "pad": function(lambda x: F.pad(x, (1, 2))),
    "pairwise_distance": function(lambda x: F.pairwise_distance(x, x.sin())),
    "pdist": function(lambda x: F.pdist(x.flatten(0, 1))),
    "pixel_shuffle": function(lambda x: F.pixel_shuffle(x, 2), n=2),
    "pixel_unshuffle": function(lambda x: F.pixel_unshuffle(x, 2), n=2),
    "prelu": function(F.prelu, (C,), n=1),
    "rms_norm": function(lambda x, w: F.rms_norm(x, (C,), w), (C,)),
    "scaled_dot_product_attention": function(lambda x: F.scaled_dot_product_attention(x, x, x)),
    "softmax": function(lambda x: F.softmax(x, -1)),
    "softmin": function(lambda x: F.softmin(x, -1)),
    "threshold": function(lambda x: F.threshold(x, 0.1, 2.0)),
    "threshold_": function(lambda x: F.threshold_(x * 2, 0.1, 2.0)),
    "unfold": function(lambda x: F.unfold(x, 2), n=2),
    "upsample": function(lambda x: F.upsample(x, scale_factor=2, mode="linear"), n=1),
    "upsample_bilinear": function(lambda x: F.upsample_bilinear(x, scale_factor=2), n=2),
    "upsample_nearest": function(lambda x: F.upsample_nearest(x, scale_factor=2), n=3),
}

NO_FUNCTIONS = set(
    """
assert_int_or_pair boolean_dispatch grouped_mm handle_torch_function has_torch_function
has_torch_function_unary has_torch_function_variadic scaled_grouped_mm scaled_mm
""".split()
)
"""What torch.nn.functional itself uses, and products in dtypes that no CPU computes in."""
