"""DiffAugment (Zhao et al. 2020, "Differentiable augmentation for data-efficient GAN training", arXiv 2006.10738).

Every sample, real or fake, is augmented by a few transformations with strengths drawn for it. If a sample has several
images, stacked along the channels, all are augmented alike.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.models.augment_draws import AugmentationDraws

_TRANSLATION = 1 / 8  # largest shift, as a share of the image's size
_CUTOUT = 1 / 2  # share of the image's size
_RECOLOURED, _FLIPPED = 0.5, 0.4  # shares of the samples


class SampleAugmentation(nn.Module):
    """Augments each sample by numbers drawn from its seed; with ``keeps_seeds`` the seeds stay in the carry."""

    def __init__(self, keeps_seeds: bool) -> None:
        super().__init__()
        self._keeps_seeds = keeps_seeds

    def forward(self, images: Tensor, labels: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Images (N, C, H, W) in [-1, 1], labels (N,), maybe latents, seeds (N,) -> augmented images, and the others.

        Images are not bounded then. The type is float32 or, for tests, float64.
        """
        *latents, seeds = others
        images = self.augment(images, AugmentationDraws(seeds, images.dtype))
        return (images, labels, *latents, seeds) if self._keeps_seeds else (images, labels, *latents)

    def augment(self, images: Tensor, draws: AugmentationDraws) -> Tensor:
        """Augment images by given draws: (N, C, H, W) -> the same shape."""
        raise NotImplementedError


class DiffAugment(SampleAugmentation):
    """Groups of transformations, one after the other.

    ``color``, ``translation`` and ``cutout`` are Zhao's, ``latent_color`` and ``flip`` GAT's (arXiv 2509.24935).
    """

    def __init__(self, policy: Sequence[str], channels: int, keeps_seeds: bool = False) -> None:
        """Take the groups and the channels of one image; with ``keeps_seeds`` the seeds stay in the carry."""
        super().__init__(keeps_seeds)
        self._groups = [_GROUPS[name] for name in policy]
        self._channels = channels

    def augment(self, images: Tensor, draws: AugmentationDraws) -> Tensor:
        """Augment images by given draws: (N, C, H, W) -> the same shape."""
        for group in self._groups:
            images = group(images, draws, self._channels)
        return images


def _color(images: Tensor, draws: AugmentationDraws, channels: int) -> Tensor:
    """Change brightness by +- 0.5, then saturation by 0 to 2, then contrast by 0.5 to 1.5; of one image a sample."""
    images = images + (_of_samples(draws.uniform("diff_brightness")) - 0.5)
    grey = images.mean(dim=1, keepdim=True)
    images = grey + (images - grey) * (2 * _of_samples(draws.uniform("diff_saturation")))
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return mean + (images - mean) * (_of_samples(draws.uniform("diff_contrast")) + 0.5)


def _latent_color(images: Tensor, draws: AugmentationDraws, channels: int) -> Tensor:
    """Use the same strengths for half of the samples, around means of the sample's last image before any change."""
    last = images[:, -channels:]
    grey, mean = last.mean(dim=1, keepdim=True), last.mean(dim=(1, 2, 3), keepdim=True)
    changed = images + (_of_samples(draws.uniform("diff_brightness")) - 0.5)
    changed = grey + (changed - grey) * (2 * _of_samples(draws.uniform("diff_saturation")))
    changed = mean + (changed - mean) * (_of_samples(draws.uniform("diff_contrast")) + 0.5)
    return torch.where(_of_samples(draws.gate("diff_brightness")) < _RECOLOURED, changed, images)


def _flip(images: Tensor, draws: AugmentationDraws, channels: int) -> Tensor:
    """Mirror left and right, four of ten samples."""
    return torch.where(_of_samples(draws.uniform("diff_flip")) < _FLIPPED, images.flip(3), images)


def _translate(images: Tensor, draws: AugmentationDraws, channels: int, side: int | None = None) -> Tensor:
    """Shift by whole pixels, uniform up to an eighth of the size along each axis; zeros come in.

    With ``side``, shift by the same share of the size as images of ``side`` pixels.
    """
    drawn = draws.uniform("diff_translation", 2)
    for axis, dim in enumerate((2, 3)):
        size = side or images.shape[dim]
        farthest = _rounded(size * _TRANSLATION)
        source = torch.floor(drawn[:, axis] * (2 * farthest + 1)).to(torch.int64) - farthest
        if side is not None:
            source = torch.floor(source * (images.shape[dim] / side) + 0.5).to(torch.int64)
        images = _read_from(images, source, dim)
    return images


def moved_as(images: Tensor, seeds: Tensor, policy: Sequence[str], side: int) -> Tensor:
    """Shift and mirror larger images (N, C, H, W) of samples as a policy does images of ``side`` pixels."""
    draws = AugmentationDraws(seeds, images.dtype)
    for name in policy:
        if name == "translation":
            images = _translate(images, draws, images.shape[1], side)
        elif name == "flip":
            images = _flip(images, draws, images.shape[1])
    return images


def _read_from(images: Tensor, source: Tensor, dim: int) -> Tensor:
    """Move images along ``dim``: pixel i becomes the pixel at i + source (N,), or 0 outside of the image."""
    size = images.shape[dim]
    padded = F.pad(images, (0, 0, 1, 1) if dim == 2 else (1, 1))
    index = (torch.arange(size, device=images.device) + source[:, None] + 1).clamp(0, size + 1)
    index = index[:, None, :, None] if dim == 2 else index[:, None, None, :]
    return padded.gather(dim, index.expand_as(images))


def _cut_out(images: Tensor, draws: AugmentationDraws, channels: int) -> Tensor:
    """Set a rectangle of half the size to 0; its middle may be any pixel, so it may reach over the border."""
    drawn = draws.uniform("diff_cutout", 2)
    inside = []
    for axis, dim in enumerate((2, 3)):
        size = images.shape[dim]
        length = _rounded(size * _CUTOUT)
        middle = torch.floor(drawn[:, axis] * (size + 1 - length % 2)).to(torch.int64)
        offset = torch.arange(size, device=images.device) - (middle - length // 2)[:, None]
        inside.append((offset >= 0) & (offset < length))
    return images * (~(inside[0][:, None, :, None] & inside[1][:, None, None, :])).to(images.dtype)


def _rounded(size: float) -> int:
    """Round half a pixel up, as published."""
    return int(size + 0.5)


def _of_samples(x: Tensor) -> Tensor:
    return x.view(-1, 1, 1, 1)


_GROUPS = {"color": _color, "latent_color": _latent_color, "translation": _translate, "cutout": _cut_out, "flip": _flip}
