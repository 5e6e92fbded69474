"""Adversarial losses: functions of logits and nothing else.

Shapes: every function takes logits of real images (n,) and of fake images (n,), float32, and returns a scalar: the mean
over the samples. A higher logit means 'more real'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

LogitLoss = Callable[[Tensor, Tensor], Tensor]


class AdversarialLoss(NamedTuple):
    """The two sides of a game."""

    discriminator: LogitLoss  # minimized by D
    generator: LogitLoss  # minimized by G
    pairs: bool = False  # whether the generator's side reads real logits too


def _hinge_d(real: Tensor, fake: Tensor) -> Tensor:
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def _minus_fake(real: Tensor, fake: Tensor) -> Tensor:
    return -fake.mean()


def _logistic_d(real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def _non_saturating_g(real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(-fake).mean()


def _least_squares_d(real: Tensor, fake: Tensor) -> Tensor:
    return 0.5 * ((real - 1).square().mean() + fake.square().mean())


def _least_squares_g(real: Tensor, fake: Tensor) -> Tensor:
    return 0.5 * (fake - 1).square().mean()


def _wasserstein_d(real: Tensor, fake: Tensor) -> Tensor:
    return fake.mean() - real.mean()


def _relativistic_d(real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(fake - real).mean()


def _relativistic_g(real: Tensor, fake: Tensor) -> Tensor:
    return F.softplus(real - fake).mean()


LOSSES: dict[str, AdversarialLoss] = {
    # Lim and Ye 2017, arXiv 1705.02894
    "hinge": AdversarialLoss(_hinge_d, _minus_fake),
    # Goodfellow et al. 2014, arXiv 1406.2661
    "non_saturating": AdversarialLoss(_logistic_d, _non_saturating_g),
    # Mao et al. 2017, arXiv 1611.04076, equation 9
    "least_squares": AdversarialLoss(_least_squares_d, _least_squares_g),
    # Arjovsky et al. 2017, arXiv 1701.07875
    "wasserstein": AdversarialLoss(_wasserstein_d, _minus_fake),
    # Jolicoeur-Martineau 2018, arXiv 1807.00734, as Huang et al. 2024, arXiv 2501.05441, equation 2
    "relativistic": AdversarialLoss(_relativistic_d, _relativistic_g, pairs=True),
}
