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


LOSSES: dict[str, AdversarialLoss] = {
    "hinge": AdversarialLoss(  # Lim and Ye 2017, arXiv 1705.02894
        discriminator=lambda real, fake: F.relu(1 - real).mean() + F.relu(1 + fake).mean(),
        generator=lambda real, fake: -fake.mean(),
    ),
    "non_saturating": AdversarialLoss(  # Goodfellow et al. 2014, arXiv 1406.2661
        discriminator=lambda real, fake: F.softplus(-real).mean() + F.softplus(fake).mean(),
        generator=lambda real, fake: F.softplus(-fake).mean(),
    ),
    "least_squares": AdversarialLoss(  # Mao et al. 2017, arXiv 1611.04076, equation 9
        discriminator=lambda real, fake: 0.5 * ((real - 1).square().mean() + fake.square().mean()),
        generator=lambda real, fake: 0.5 * (fake - 1).square().mean(),
    ),
    "wasserstein": AdversarialLoss(  # Arjovsky et al. 2017, arXiv 1701.07875
        discriminator=lambda real, fake: fake.mean() - real.mean(),
        generator=lambda real, fake: -fake.mean(),
    ),
    # Jolicoeur-Martineau 2018, arXiv 1807.00734, as Huang et al. 2024, arXiv 2501.05441, equation 2
    "relativistic": AdversarialLoss(
        discriminator=lambda real, fake: F.softplus(fake - real).mean(),
        generator=lambda real, fake: F.softplus(real - fake).mean(),
    ),
}
