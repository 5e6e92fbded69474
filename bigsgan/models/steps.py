"""Images in several steps from noise, by a generator that estimates the image from an image with noise.

Shapes: n samples, Z = C * H * W numbers in a latent and in an image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bigsgan.models.network import LayerStack


def in_steps(make: Callable[..., Tensor], num: int, guidance: float = 1.0) -> Callable[..., Tensor]:
    """Return a function of latents (n, Z), labels and what else ``make`` reads, except times, that makes images.

    Each of ``num`` equal steps goes along the velocity that the estimate gives (Euler's method).

    Args:
        make: Returns estimates of images (n, C, H, W) from images with noise (n, Z), labels, and times (n,), float32.
        num: Number of steps.
        guidance: Factor on the distance of estimates from those of null labels, all 0 (Ho and Salimans 2022, arXiv
            2207.12598).
    """

    def estimate(noisy: Tensor, labels: Tensor, *rest: Tensor) -> Tensor:
        found = make(noisy, labels, *rest)
        return found if guidance == 1 else make(noisy, torch.zeros_like(labels), *rest).lerp(found, guidance)

    def made(latents: Tensor, labels: Tensor, *rest: Tensor) -> Tensor:
        noisy, images = latents, latents
        for step in range(num):
            time = 1 - step / num
            images = estimate(noisy, labels, torch.full_like(latents[:, 0], time), *rest)
            if step < num - 1:
                flat = images.flatten(1)
                noisy = flat + (time - 1 / num) / time * (noisy - flat)
        return images

    return made


class InSteps(nn.Module):
    """A layer that makes images with a whole generator, in steps."""

    def __init__(self, generator: LayerStack, num: int, guidance: float) -> None:
        super().__init__()
        self.generator, self.num, self.guidance = generator, num, guidance

    def forward(self, latents: Tensor, labels: Tensor, *rest: Tensor) -> tuple[Tensor]:
        """(n, Z), labels (n,) or (n, K), maybe seeds (n,) -> images (n, C, H, W)."""
        return (in_steps(self.generator, self.num, self.guidance)(latents, labels, *rest),)
