"""Adversarial losses: functions of logits and nothing else.

Shapes: every function takes logits of real images (n,) and of fake images (n,), float32, and returns a scalar: the mean
over the samples. A higher logit means 'more real'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LogitLoss = Callable[[Tensor, Tensor], Tensor]


class AdversarialLoss(NamedTuple):
    """The two sides of a game."""

    discriminator: LogitLoss  # minimized by D
    generator: LogitLoss  # minimized by G


def over_maps(loss: AdversarialLoss, sizes: Callable[[], Sequence[int]]) -> AdversarialLoss:
    """Return the sum of a loss over maps of logits (Wang et al. 2018, arXiv 1711.11585, section 3.2).

    Args:
        loss: Of the logits of one map.
        sizes: Returns the numbers of an image's logits in each map, which lie one after the other in logits (n, P);
            none of one map.
    """

    def summed(function: LogitLoss) -> LogitLoss:
        def of_maps(real: Tensor, fake: Tensor) -> Tensor:
            if not (numbers := sizes()):
                return function(real, fake)
            maps = zip(real.split(numbers, 1), fake.split(numbers, 1), strict=True)
            return torch.stack([function(*each) for each in maps]).sum()

        return of_maps

    return AdversarialLoss(summed(loss.discriminator), summed(loss.generator))


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
