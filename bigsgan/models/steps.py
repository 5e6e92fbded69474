"""Images in several steps from noise, by a generator that estimates the image from an image with noise.

Shapes: n samples, Z = C * H * W numbers in a latent and in an image.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bigsgan.config.families.base import TimedGenerator
from bigsgan.models import noise
from bigsgan.models.network import LayerStack

_FIRST_STREAM = 2**33
"""Of the noise of steps, behind those of a network's own noise."""


def with_less_noise(images: Tensor, noisy: Tensor, time: float, later: float, drawn: Tensor | None = None) -> Tensor:
    """Go on from estimates of images (n, Z) to a later time, with the noise in ``noisy``, or ``drawn``: (n, Z)."""
    return images + later / time * (noisy - images) if drawn is None else images.lerp(drawn, later)


def in_steps(make: Callable[..., Tensor], section: TimedGenerator) -> Callable[..., Tensor]:
    """Return a function of latents (n, Z), labels and, if samples have some, seeds (n,), that makes images.

    Args:
        make: Returns estimates of images (n, C, H, W) from images with noise (n, Z), labels, times (n,) float32, and
            seeds, if the network draws noise.
        section: The generator's section, with times, sampler and guidance.
    """
    guidance, times = section.guidance, section.step_times

    def estimate(noisy: Tensor, labels: Tensor, *rest: Tensor) -> Tensor:
        found = make(noisy, labels, *rest)
        return found if guidance == 1 else make(noisy, torch.zeros_like(labels), *rest).lerp(found, guidance)

    def made(latents: Tensor, labels: Tensor, *seeds: Tensor) -> Tensor:
        noisy, images = latents, latents
        for step, time in enumerate(times):
            images = estimate(noisy, labels, torch.full_like(latents[:, 0], time), *(seeds if section.draws else ()))
            if step == len(times) - 1:
                break
            flat, drawn = images.flatten(1), None
            if section.renoises:
                drawn = noise.normal(seeds[0], _FIRST_STREAM + step, (flat.shape[1],))
            noisy = with_less_noise(flat, noisy, time, times[step + 1], drawn)
        return images

    return made


class InSteps(nn.Module):
    """A layer that makes images with a whole generator, in steps."""

    def __init__(self, generator: LayerStack, section: TimedGenerator) -> None:
        super().__init__()
        self.generator, self.section = generator, section

    def forward(self, latents: Tensor, labels: Tensor, *seeds: Tensor) -> tuple[Tensor]:
        """(n, Z), labels (n,) or (n, K), maybe seeds (n,), else 0, 1, ... -> images (n, C, H, W)."""
        if self.section.seeds_samples and not seeds:
            seeds = (torch.arange(latents.shape[0], device=latents.device),)  # `len` would fix the number in a graph
        return (in_steps(self.generator, self.section)(latents, labels, *seeds),)
