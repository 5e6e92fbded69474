"""Augmentations of ADA that leave pixels where they are: colour, filtering, noise and cutout.

Karras et al. 2020, arXiv 2006.06676, appendix B. Strengths are those of its table.

Shapes: N samples, C channels, H x W pixels, B = 4 frequency bands, T = 43 taps of their filters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.models.augment_draws import AugmentationDraws
from bigsgan.models.augment_geometry import reflected
from bigsgan.models.dual import linearly

_BRIGHTNESS_STD = 0.2
_CONTRAST_STD = 0.5
_SATURATION_STD = 1.0
_AMPLIFICATION_STD = 1.0
_NOISE_STD = 0.1
_CUTOUT_SIZE = 0.5

NUM_BANDS = 4
NUM_TAPS = 43
_POWER = (10 / 13, 1 / 13, 1 / 13, 1 / 13)  # bands' power in natural images, whose spectrum falls as 1 / frequency
# Decomposition low-pass filter of the wavelet sym2.
_SYM2 = np.array([-0.12940952255092145, 0.22414386804185735, 0.836516303737469, 0.48296291314469025])


class Colour(NamedTuple):
    """Strengths of the transformations of each sample (N,), in the order in which they act."""

    brightness: Tensor  # added to all channels
    contrast: Tensor  # factor of all channels
    luma_flip: Tensor  # 1 to mirror at the plane of luma 0, which keeps hue and saturation; or 0
    hue: Tensor  # radians of the rotation about the luma axis
    saturation: Tensor  # factor of the distance from the luma axis


def draw_colour(draws: AugmentationDraws, p: Mapping[str, Tensor]) -> Colour:
    """Draw the strengths; ``p`` gives each transformation's probability (1,)."""
    return Colour(
        brightness=draws.chosen("brightness", p["brightness"], _BRIGHTNESS_STD * draws.normal("brightness"), 0),
        contrast=draws.factor("contrast", p["contrast"], _CONTRAST_STD),
        luma_flip=draws.chosen("luma_flip", p["luma_flip"], torch.floor(2 * draws.uniform("luma_flip")), 0),
        hue=draws.chosen("hue", p["hue"], (2 * draws.uniform("hue") - 1) * math.pi, 0),
        saturation=draws.factor("saturation", p["saturation"], _SATURATION_STD),
    )


def colour_matrix(colour: Colour) -> Tensor:
    """Return the matrix (N, 4, 4) that maps a pixel (red, green, blue, 1) to its new colour: the product of all five.

    With the luma axis v = (1, 1, 1) / sqrt(3), the luma flip is the Householder reflection 1 - 2 v v^T, the hue a
    rotation about v, and the saturation v v^T + s (1 - v v^T).
    """
    brightness, contrast, luma_flip, hue, saturation = (strength[:, None, None] for strength in colour)
    one = torch.eye(3, dtype=hue.dtype, device=hue.device)
    luma = torch.full_like(one, 1 / 3)  # v v^T
    # The matrix of u -> v x u.
    cross = (one.roll(1, 0) - one.roll(-1, 0)) / math.sqrt(3)
    flip = one - 2 * luma_flip * luma
    rotation = luma + hue.cos() * (one - luma) + hue.sin() * cross
    saturate = luma + saturation * (one - luma)
    linear = saturate @ rotation @ flip * contrast
    offset = linear @ (brightness.expand(-1, 3, 1))
    bottom = torch.zeros_like(offset).mT
    return torch.cat([torch.cat([linear, offset], dim=2), torch.cat([bottom, torch.ones_like(hue)], dim=2)], dim=1)


def recolour(images: Tensor, matrix: Tensor) -> Tensor:
    """Apply colour matrices (N, 4, 4) to images (N, C, H, W) with 3 channels, or to grey ones with 1.

    A grey pixel counts as a colour with three equal parts; the mean of the result's parts is its new value.
    """
    linear, offset = matrix[:, :3, :3], matrix[:, :3, 3:]
    if images.shape[1] == 1:
        linear, offset = linear.sum(dim=2, keepdim=True).mean(dim=1, keepdim=True), offset.mean(dim=1, keepdim=True)
    return (linear @ images.flatten(2) + offset).view_as(images)


def band_filters() -> np.ndarray:
    """Return filters (B, T), coarse to fine, that split an image into octaves and sum to the identity (appendix B.3).

    Each level stretches the bank by 2, low-passes it, and adds a new high-pass band as the finest.
    """
    backwards = _SYM2[::-1]
    low = np.convolve(_SYM2, backwards) / 2  # H(z) H(1/z) / 2
    alternating = (-1.0) ** np.arange(len(_SYM2))
    high = np.convolve(_SYM2 * alternating, backwards * alternating[::-1]) / 2  # H(-z) H(-1/z) / 2
    bank = np.zeros((NUM_BANDS, 1))
    bank[0] = 1
    for band in range(1, NUM_BANDS):
        stretched = np.zeros((NUM_BANDS, 2 * bank.shape[1] - 1))
        stretched[:, ::2] = bank
        bank = np.stack([np.convolve(row, low) for row in stretched])
        start = (bank.shape[1] - len(high)) // 2
        bank[band, start : start + len(high)] += high
    return bank


def draw_amplifications(draws: AugmentationDraws, p: Tensor) -> Tensor:
    """Draw each band's amplification: (N, B), each with probability ``p`` (1,)."""
    return torch.stack([draws.factor(f"band{i}", p, _AMPLIFICATION_STD) for i in range(NUM_BANDS)], dim=1)


def gains(amplifications: Tensor) -> Tensor:
    """Return the gain (N, B) of each band: each amplification in turn, followed by restoring the expected power."""
    gain = torch.ones_like(amplifications)
    for band, power in enumerate(_POWER):
        amplification = amplifications[:, band : band + 1]
        # Root of the sum over the bands of power * t^2, where t is 1 in all bands but this one.
        norm = torch.sqrt(1 - power + power * amplification.square())
        mask = torch.arange(NUM_BANDS, device=gain.device) == band
        gain = gain * torch.where(mask, amplification, 1) / norm
    return gain


def amplify(images: Tensor, gain: Tensor, bands: Tensor) -> Tensor:
    """Amplify frequency bands along columns and rows: images (N, C, H, W), gain (N, B), ``band_filters()`` (B, T)."""
    n, c, h, w = images.shape
    reach = NUM_TAPS // 2
    kernels = (gain @ bands).repeat_interleave(c, dim=0)
    x = reflected(reflected(images, 2, -reach, h + reach), 3, -reach, w + reach)
    x = x.reshape(1, n * c, h + 2 * reach, w + 2 * reach)
    for kernel in (kernels[:, None, None, :], kernels[:, None, :, None]):
        x = linearly(partial(F.conv2d, weight=kernel, groups=n * c), x)
    return x.view(n, c, h, w)


def draw_noise(draws: AugmentationDraws, p: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw the noise that is added to each image: (N, *shape), with a standard deviation for each sample, often 0."""
    sigma = draws.chosen("noise", p, _NOISE_STD * draws.normal("noise").abs(), 0)
    return sigma.view(-1, *(1 for _ in shape)) * draws.normal("grain", *shape)


def draw_cutout(draws: AugmentationDraws, p: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a rectangle for each sample, as shares of the image: its size (N,), and its centre (N, 2) as (x, y).

    The size is 0 except for a share ``p`` (1,) of the samples.
    """
    center = draws.uniform("cutout", 2)
    return draws.chosen("cutout", p, torch.full_like(center[:, 0], _CUTOUT_SIZE), 0), center


def cut_out(images: Tensor, size: Tensor, center: Tensor) -> Tensor:
    """Set the pixels of (N, C, H, W) whose centres lie within rectangles, as ``draw_cutout`` returns them, to 0."""
    inside_x, inside_y = (
        (_centers(pixels, center) - center[:, axis, None]).abs() < size[:, None] / 2
        for axis, pixels in enumerate((images.shape[3], images.shape[2]))
    )
    inside = inside_y[:, None, :, None] & inside_x[:, None, None, :]
    return images * (~inside).to(images.dtype)


def _centers(size: int, like: Tensor) -> Tensor:
    return (torch.arange(size, dtype=like.dtype, device=like.device) + 0.5) / size
