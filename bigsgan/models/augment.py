"""The discriminator's first layer, which augments its images.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bigsgan.config.augmentation import ADA_PIPELINES, Augmentation
from bigsgan.models import augment_pixels as pixels
from bigsgan.models.augment_draws import AugmentationDraws
from bigsgan.models.augment_geometry import SYM6, draw_geometry, inverse_matrix, warp
from bigsgan.models.diff_augment import DiffAugment, SampleAugmentation
from bigsgan.models.initial import Generators


class AdaptiveAugment(SampleAugmentation):
    """ADA's pipeline (Karras et al. 2020, arXiv 2006.06676, appendix B): each transformation acts with a probability.

    The host never reads p or an image; transformations that are not in the pipeline cost nothing.
    """

    # buffer (1,), float32: the current probability. It only moves between two updates, as a recomputation must find it
    # unchanged.
    p: Tensor
    lowpass: Tensor  # buffer (12,), float32: the filter of geometric transformations
    bands: Tensor  # buffer (4, 43), float32: the filters of frequency bands

    def __init__(self, multipliers: Mapping[str, float], p: float, keeps_seeds: bool = False) -> None:
        """Take each transformation's probability as a multiple of p, 0 if left out, and the initial p.

        With ``keeps_seeds`` the seeds stay in the carry.
        """
        super().__init__(keeps_seeds)
        self._initial_p = p
        self._multipliers = {name: multipliers.get(name, 0.0) for name in ADA_PIPELINES["bgcfnc"]}
        self.register_buffer("p", torch.empty(1, dtype=torch.float32))
        self.register_buffer("lowpass", torch.empty(len(SYM6), dtype=torch.float32))
        self.register_buffer("bands", torch.empty(pixels.NUM_BANDS, pixels.NUM_TAPS, dtype=torch.float32))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Set the probability to its start and the filters to their coefficients."""
        self.p.fill_(self._initial_p)
        lowpass = torch.tensor(SYM6, dtype=torch.float64)
        self.lowpass.copy_(lowpass / lowpass.sum())
        self.bands.copy_(torch.from_numpy(pixels.band_filters()))

    def augment(self, images: Tensor, draws: AugmentationDraws) -> Tensor:
        """Augment images by given draws: (N, C, H, W) -> the same shape. C is 1 or 3, H and W are at least 4."""
        p = {name: multiplier * self.p for name, multiplier in self._multipliers.items()}
        # Filters are applied in the images' type: float32 in training.
        if self._has(*ADA_PIPELINES["bg"]):
            inverse = inverse_matrix(draw_geometry(draws, p), *images.shape[2:])
            images = warp(images, inverse, self.lowpass.to(images.dtype))
        if self._has(*ADA_PIPELINES["color"]):
            images = pixels.recolour(images, pixels.colour_matrix(pixels.draw_colour(draws, p)))
        if self._has("filter"):
            gains = pixels.gains(pixels.draw_amplifications(draws, p["filter"]))
            images = pixels.amplify(images, gains, self.bands.to(images.dtype))
        if self._has("noise"):
            images = images + pixels.draw_noise(draws, p["noise"], tuple(images.shape[1:]))
        if self._has("cutout"):
            images = pixels.cut_out(images, *pixels.draw_cutout(draws, p["cutout"]))
        return images

    def _has(self, *names: str) -> bool:
        return any(self._multipliers[name] for name in names)


def augmentation_layer(section: Augmentation, channels: int, keeps_seeds: bool) -> nn.Module:
    """Build the layer of a section: images (N, L * C, H, W), labels (N,), seeds (N,) -> images, labels.

    Args:
        section: The recipe's section.
        channels: C, the channels of one image of a sample.
        keeps_seeds: Whether the layer also returns the seeds, for a discriminator that draws numbers itself.
    """
    if section.kind == "diffaugment":
        return DiffAugment(section.policy, channels, keeps_seeds)
    return AdaptiveAugment(ADA_PIPELINES[section.pipeline], section.p, keeps_seeds)
