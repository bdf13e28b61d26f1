"""Losses: the module, the function that it calls, and how both are called."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.torch_nn.models import CLASSES, Loss, random

TIMES = 5
"""Of a sequence of which a loss takes all alignments."""


def classes(n: int) -> Tensor:
    return torch.randint(CLASSES, (n,))


def signs(n: int) -> Tensor:
    return torch.randint(2, (n, CLASSES)) * 2.0 - 1


def shares(n: int) -> Tensor:
    return torch.rand(n, CLASSES, dtype=torch.float64)


def _images(loss, x: Tensor, y: Tensor) -> Tensor:
    return loss(x.log_softmax(-1)[:, :, None, None].expand(-1, -1, 4, 4), y)


def _aligned(loss, x: Tensor, y: Tensor) -> Tensor:
    n = x.shape[0] // TIMES
    lengths = (torch.full((n,), k, device=x.device) for k in (TIMES, 2))
    return loss(x.view(TIMES, -1, CLASSES).log_softmax(-1), y, *lengths)


LOSSES: dict[tuple[str, str], Loss] = {
    ("BCELoss", "binary_cross_entropy"): Loss(lambda f, x, y: f(x.sigmoid(), y), shares),
    ("BCEWithLogitsLoss", "binary_cross_entropy_with_logits"): Loss(target=shares),
    ("CTCLoss", "ctc_loss"): Loss(
        _aligned, lambda n: torch.randint(1, CLASSES, (n // TIMES, 2)), lambda b, t: TIMES * b
    ),
    ("CosineEmbeddingLoss", "cosine_embedding_loss"): Loss(
        lambda f, x, y: f(x, x.sin(), y), lambda n: signs(n)[:, 0]
    ),
    ("CrossEntropyLoss", "cross_entropy"): Loss(target=classes),
    ("GaussianNLLLoss", "gaussian_nll_loss"): Loss(lambda f, x, y: f(x, y, x.exp())),
    ("HingeEmbeddingLoss", "hinge_embedding_loss"): Loss(target=signs),
    ("HuberLoss", "huber_loss"): Loss(),
    ("KLDivLoss", "kl_div"): Loss(lambda f, x, y: f(x.log_softmax(-1), y), shares),
    ("L1Loss", "l1_loss"): Loss(),
    ("MSELoss", "mse_loss"): Loss(),
    ("MarginRankingLoss", "margin_ranking_loss"): Loss(lambda f, x, y: f(x, x.sin(), y), signs),
    ("MultiLabelMarginLoss", "multilabel_margin_loss"): Loss(
        target=lambda n: torch.randint(-1, CLASSES, (n, CLASSES))
    ),
    ("MultiLabelSoftMarginLoss", "multilabel_soft_margin_loss"): Loss(target=shares),
    ("MultiMarginLoss", "multi_margin_loss"): Loss(target=classes),
    ("NLLLoss", "nll_loss"): Loss(lambda f, x, y: f(x.log_softmax(-1), y), classes),
    ("NLLLoss2d", "nll_loss"): Loss(_images, lambda n: torch.randint(CLASSES, (n, 4, 4))),
    ("PoissonNLLLoss", "poisson_nll_loss"): Loss(target=shares),
    ("SmoothL1Loss", "smooth_l1_loss"): Loss(),
    ("SoftMarginLoss", "soft_margin_loss"): Loss(lambda f, x, y: f(x, y.detach()), signs),
    ("TripletMarginLoss", "triplet_margin_loss"): Loss(lambda f, x, y: f(x, x.sin(), y)),
    ("TripletMarginWithDistanceLoss", "triplet_margin_with_distance_loss"): Loss(
        lambda f, x, y: f(x, x.sin(), y), lambda n: random(n, CLASSES)
    ),
}
