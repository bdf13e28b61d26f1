"""A model for each module of torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.planner.equal import features, ids
from tests.torch_nn.losses import LOSSES, classes
from tests.torch_nn.models import (
    CLASSES,
    SPACE,
    WIDTH,
    Case,
    Last,
    Loss,
    loss,
    random,
    rows,
    space,
    states,
    two,
)

DEFAULTS = """
AlphaDropout CELU Dropout Dropout1d Dropout2d Dropout3d ELU FeatureAlphaDropout GELU GLU Hardshrink
Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish PReLU RReLU ReLU ReLU6 SELU SiLU
Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink
""".split()
"""Modules whose defaults will do."""

OVER_SPACE: dict[str, tuple[Any, ...]] = {
    "AdaptiveAvgPool": (2,),
    "AdaptiveMaxPool": (2,),
    "AvgPool": (2,),
    "BatchNorm": (WIDTH,),
    "CircularPad": (2,),
    "ConstantPad": (2, 1.5),
    "Conv": (WIDTH, WIDTH, 3),
    "ConvTranspose": (WIDTH, WIDTH, 3),
    "InstanceNorm": (WIDTH, 1e-5, 0.1, True),
    "LPPool": (2, 2),
    "MaxPool": (2,),
    "ReflectionPad": (2,),
    "ReplicationPad": (2,),
    "ZeroPad": (2,),
}
"""Modules that there are for one, two and three dims of space, and what they are made with."""


def over(n: int, name: str, *given: Any) -> Callable[[], nn.Module]:
    """Makes such a module."""
    return lambda: getattr(nn, f"{name}{n}d")(*given)


class Unpooled(nn.Module):
    """A maximum of windows, put back to where it was."""

    def __init__(self, n: int, back: Callable[..., Tensor]) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{n}d")(2, return_indices=True)
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        return self.back(*self.pool(x))


def recurrent(make: Callable[..., nn.Module]) -> Case:
    """All that a recurrent module gives out."""
    made = {"num_layers": 2, "batch_first": True, "bidirectional": True}
    return Case(lambda: Last(make(WIDTH, WIDTH, **made), 2 * WIDTH), features(WIDTH))


class Adaptive(nn.Module):
    """A loss with a head of its own, and labels or none."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, 16)
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10], div_value=2.0)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return tuple(self.loss(self.before(x), y))


class Three(nn.Module):
    """Queries, keys and values."""

    def __init__(self, made: nn.Module) -> None:
        super().__init__()
        self.made, self.before = made, nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Any:
        y = self.before(x)
        return self.made(y, y, y)


SETTINGS = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}


def block(kind: Any) -> nn.Module:
    """A layer of a transformer."""
    return kind(16, 4, **SETTINGS)


MODULES: dict[str, Case] = {
    **{name: states(getattr(nn, name)) for name in DEFAULTS},
    **{f"{k}{n}d": space(n, over(n, k, *a)) for k, a in OVER_SPACE.items() for n in (1, 2, 3)},
    **{
        f"MaxUnpool{n}d": space(n, lambda n=n: Unpooled(n, over(n, "MaxUnpool", 2)()))
        for n in (1, 2, 3)
    },
    **{
        f"FractionalMaxPool{n}d": space(n, over(n, "FractionalMaxPool", 2, 3), compared=False)
        for n in (2, 3)
    },
    **{name: loss(how, getattr(nn, name)) for (name, _), how in LOSSES.items()},
    "AdaptiveLogSoftmaxWithLoss": Case(
        Adaptive, lambda b, t: (*rows(b, t), torch.randint(20, (b * t,)))
    ),
    "Bilinear": two(lambda: nn.Bilinear(24, 24, CLASSES), 24),
    "ChannelShuffle": space(2, lambda: nn.ChannelShuffle(3)),
    "CosineSimilarity": two(lambda: nn.CosineSimilarity(-1), 24),
    "CrossMapLRN2d": space(2, lambda: nn.CrossMapLRN2d(2)),
    "Embedding": Case(lambda: Last(nn.Embedding(CLASSES, WIDTH)), ids(CLASSES)),
    "EmbeddingBag": Case(lambda: Last(nn.EmbeddingBag(CLASSES, WIDTH)), ids(CLASSES)),
    "Flatten": space(2, nn.Flatten),
    "Fold": Case(
        lambda: nn.Sequential(
            nn.Conv1d(WIDTH, 4 * WIDTH, 1), nn.Fold((4, 4), 2, stride=2), nn.Conv2d(WIDTH, WIDTH, 1)
        ),
        lambda b, t: (random(b, WIDTH, 4),),
    ),
    "GRU": recurrent(nn.GRU),
    "GRUCell": Case(lambda: nn.Sequential(nn.Linear(WIDTH, 16), Last(nn.GRUCell(16, WIDTH))), rows),
    "GroupNorm": space(2, lambda: nn.GroupNorm(3, WIDTH)),
    "LSTM": recurrent(nn.LSTM),
    "LSTMCell": Case(
        lambda: nn.Sequential(nn.Linear(WIDTH, 16), Last(nn.LSTMCell(16, WIDTH))), rows
    ),
    "LayerNorm": states(lambda: nn.LayerNorm(WIDTH)),
    "Linear": states(lambda: nn.Linear(WIDTH, WIDTH)),
    "LinearCrossEntropyLoss": loss(
        Loss(target=classes), lambda: nn.LinearCrossEntropyLoss(CLASSES, CLASSES)
    ),
    "LocalResponseNorm": space(2, lambda: nn.LocalResponseNorm(2)),
    "LogSoftmax": states(lambda: nn.LogSoftmax(-1)),
    "MultiheadAttention": Case(
        lambda: Three(nn.MultiheadAttention(16, 4, batch_first=True)), features(WIDTH)
    ),
    "PairwiseDistance": two(nn.PairwiseDistance, 24),
    "PixelShuffle": space(2, lambda: nn.PixelShuffle(2)),
    "PixelUnshuffle": space(2, lambda: nn.PixelUnshuffle(2)),
    "RMSNorm": states(lambda: nn.RMSNorm(WIDTH)),
    "RNN": recurrent(nn.RNN),
    "RNNCell": Case(lambda: nn.Sequential(nn.Linear(WIDTH, 16), Last(nn.RNNCell(16, WIDTH))), rows),
    "Softmax": states(lambda: nn.Softmax(-1)),
    "Softmax2d": space(2, nn.Softmax2d),
    "Softmin": states(lambda: nn.Softmin(-1)),
    "SyncBatchNorm": space(2, lambda: nn.SyncBatchNorm(WIDTH)),
    "Threshold": states(lambda: nn.Threshold(0.1, 2.0)),
    "Transformer": two(lambda: nn.Transformer(16, 4, 1, 1, **SETTINGS), 16),
    "TransformerDecoder": two(
        lambda: nn.TransformerDecoder(block(nn.TransformerDecoderLayer), 2), 16
    ),
    "TransformerDecoderLayer": two(lambda: block(nn.TransformerDecoderLayer), 16),
    "TransformerEncoder": Case(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 16), nn.TransformerEncoder(block(nn.TransformerEncoderLayer), 2)
        ),
        features(WIDTH),
    ),
    "TransformerEncoderLayer": Case(
        lambda: nn.Sequential(nn.Linear(WIDTH, 16), block(nn.TransformerEncoderLayer)),
        features(WIDTH),
    ),
    "Unflatten": states(lambda: nn.Unflatten(-1, (3, 4))),
    "Unfold": space(2, lambda: nn.Unfold(2)),
    "Upsample": space(2, lambda: nn.Upsample(scale_factor=2, mode="bicubic")),
    "UpsamplingBilinear2d": space(2, lambda: nn.UpsamplingBilinear2d(scale_factor=2)),
    "UpsamplingNearest2d": space(2, lambda: nn.UpsamplingNearest2d(2 * SPACE)),
}

NO_MODULES = set(
    """
Container DataParallel Module ModuleDict ModuleList ParameterDict ParameterList RNNBase RNNCellBase
Sequential
""".split()
)
"""They hold others, or are there to be derived from. (Lazy ones are others once they have run.)"""
