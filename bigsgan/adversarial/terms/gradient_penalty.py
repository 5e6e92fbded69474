"""WGAN-GP's penalty on D's gradient between real and fake images (Gulrajani et al. 2017, arXiv 1704.00028)."""

from __future__ import annotations

import torch
from torch import Tensor

from bigsgan.adversarial.latents import SampleDraws
from bigsgan.adversarial.terms.gradient_norm import squared_norms
from bigsgan.adversarial.terms.term import Term
from bigsgan.config import objective
from bigsgan.engines import MicroBatch

_NAME = "gradient_penalty"


class GradientPenalty(Term):
    """weight * E[(|grad| - 1)^2] at a random point between a real and a fake image."""

    segments = ("between",)

    def __init__(self, section: objective.GradientPenalty) -> None:
        super().__init__(_NAME, "discriminator", ("between_gradients",))
        self._weight, self.shrink, self.statistics = section.weight, section.batch_shrink, (f"penalty/{_NAME}",)

    def noise(
        self, draws: SampleDraws, counters: tuple[int, ...], samples: range, real: Tensor, fake: Tensor
    ) -> Tensor:
        """Draw the share of each real image, (n, 1, 1, 1) in (0, 1)."""
        return draws.uniform(_NAME, counters, samples, (1, 1, 1))

    def added(self, real: MicroBatch, fake: MicroBatch, noise: Tensor | None) -> list[MicroBatch]:
        """Return the points between the images, with the real ones' other inputs."""
        assert noise is not None, "it draws the shares"
        images, *rest = real
        copies = fake[0].shape[1] // images.shape[1]
        return [(torch.lerp(fake[0], images.repeat(1, copies, 1, 1), noise), *rest)]

    def value(self, between_gradients: Tensor) -> Tensor:
        """Return weight times the mean squared distance of the norm from 1."""
        norm = (squared_norms(between_gradients) + 1e-12).sqrt()  # the square root has no gradient at 0
        return self._weight * (norm - 1).square().mean()
