"""Images with noise, as discriminators see them that begin as a diffusion transformer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bigsgan.config.families.noisy import NoisyDiscriminator
from bigsgan.models import noise


class AddedNoise:
    """Adds noise to images as each sample's seed draws it. D's layers do so wherever they need them."""

    def __init__(self, config: NoisyDiscriminator, shares: Callable[[Tensor], Tensor]) -> None:
        """Take the drawing of times: seeds (N,) to shares (N, 1, 1, 1) of the way from the first time to the last."""
        self._first, self._last, self._shares = config.first_time, config.last_time, shares

    @torch.compiler.disable  # inductor would write the draws out for each of their uses (2.14)
    def __call__(self, images: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Return (1 - t) images + t z, (N, C, H, W), and t (N, 1, 1, 1); z is standard normal."""
        times = self._first + (self._last - self._first) * self._shares(seeds)
        return torch.lerp(images, noise.normal(seeds, 1, tuple(images.shape[1:])), times), times
