"""DCGAN (Radford, Metz and Chintala 2016, "Unsupervised representation learning with deep convolutional GANs").

Shapes: N samples, C channels, H x W pixels, Z numbers in a latent. Carry of the generator: (h (N, C, H, W),); of the
discriminator: (h, labels (N,)).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.base import BOTTOM, bottom_of
from bigsgan.config.families.blocks import BlockSection
from bigsgan.config.families.dcgan import DCGANDiscriminator, DCGANGenerator
from bigsgan.images.size import Size
from bigsgan.models.batch_norm import AffineBatchNorm
from bigsgan.models.layers import SpectralConv2d, SpectralEmbedding, SpectralLinear
from bigsgan.models.light import STANDARD, Makers, single
from bigsgan.models.plain import Conv2d, ConvTranspose2d, Embedding, LatentWithClass, Linear
from bigsgan.models.precision import full

_STD = 0.02  # section 3.1


class GeneratorInput(nn.Module):
    """Latent and label -> the first feature map."""

    def __init__(self, latent_size: int, num_classes: int, embedding_size: int, channels: int, size: Size) -> None:
        super().__init__()
        self.input = LatentWithClass(latent_size, num_classes, embedding_size)
        self.conv = ConvTranspose2d(self.input.features, channels, size, _STD, stride=1, padding=0, bias=False)
        self.norm = AffineBatchNorm(channels, rectifies=True)

    def forward(self, latents: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, Z), (N,) int64 -> (N, C, H, W)."""
        return (self.norm(self.conv(self.input(latents, labels)[:, :, None, None])),)


class GeneratorBlock(nn.Module):
    """Transposed convolution that doubles the resolution, batch norm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, form: BlockSection) -> None:
        super().__init__()
        self.conv = single(form, Makers(_transposed, _pointwise, _linear), in_channels, out_channels)
        self.norm = AffineBatchNorm(out_channels, rectifies=True)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C_in, H, W) -> (N, C_out, 2H, 2W)."""
        return (self.norm(self.conv(h)),)


class GeneratorOutput(nn.Module):
    """Feature map -> image."""

    def __init__(self, channels: int, image_channels: int) -> None:
        super().__init__()
        self.conv = ConvTranspose2d(channels, image_channels, 4, _STD, stride=2, padding=1, bias=False)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, H, W) -> (N, image channels, 2H, 2W) in [-1, 1], float32 whatever the network's type."""
        return (torch.tanh(full(self.conv(h))),)


class DiscriminatorBlock(nn.Module):
    """Convolution that halves the resolution, normalization (``batch``, ``spectral`` or ``none``), leaky ReLU."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, form: BlockSection) -> None:
        super().__init__()
        self.conv = single(form, _discriminator_makers(norm), in_channels, out_channels)
        self.norm = AffineBatchNorm(out_channels) if norm == "batch" else nn.Identity()

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C_in, H, W), (N,) -> (N, C_out, H/2, W/2), (N,)."""
        return F.leaky_relu(self.norm(self.conv(h)), 0.2), labels


class DiscriminatorHead(nn.Module):
    """Feature map and label -> logit; adds a projection (Miyato and Koyama 2018) to the published head."""

    def __init__(self, channels: int, size: Size, num_classes: int, spectral: bool) -> None:
        super().__init__()
        norm = "spectral" if spectral else "none"
        self.conv = _conv(channels, 1, norm, stride=1, padding=0, bias=False, kernel=size)
        self.embedding: nn.Module | None = None
        if num_classes:
            self.embedding = (
                SpectralEmbedding(num_classes, channels) if spectral else Embedding(num_classes, channels, _STD)
            )

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, C, H, W), (N,) -> logits (N,), float32 whatever the network's type."""
        logits = self.conv(h).flatten()
        if self.embedding is not None:
            logits = logits + (self.embedding(labels) * h.sum(dim=(2, 3))).sum(dim=1)
        return (full(logits),)


def _conv(
    in_channels: int,
    out_channels: int,
    norm: str,
    stride: int,
    padding: int,
    bias: bool,
    groups: int = 1,
    kernel: int | Size = 4,
) -> nn.Module:
    if norm == "spectral":
        return SpectralConv2d(in_channels, out_channels, kernel, bias, stride, padding, groups)
    std = _STD if groups == 1 else _he(16 * in_channels // groups)
    return Conv2d(in_channels, out_channels, kernel, std, stride, padding, bias, groups)


def _discriminator_makers(norm: str) -> Makers:
    def spatial(in_channels: int, out_channels: int, groups: int) -> nn.Module:
        return _conv(in_channels, out_channels, norm, stride=2, padding=1, bias=norm != "batch", groups=groups)

    if norm == "spectral":
        return Makers(spatial, lambda before, after: SpectralConv2d(before, after, 1), SpectralLinear)
    return Makers(spatial, _pointwise, _linear)


def _transposed(in_channels: int, out_channels: int, groups: int) -> nn.Module:
    std = _STD if groups == 1 else _he(4 * in_channels // groups)  # at stride 2 a pixel sees 4 of the 16 taps
    return ConvTranspose2d(in_channels, out_channels, 4, std, stride=2, padding=1, bias=False, groups=groups)


def _pointwise(in_channels: int, out_channels: int) -> nn.Module:
    return Conv2d(in_channels, out_channels, 1, _he(in_channels), stride=1, padding=0)


def _linear(in_features: int, out_features: int) -> nn.Module:
    return Linear(in_features, out_features, _he(in_features))


def _he(fan_in: int) -> float:
    """Return the standard deviation that keeps the size of activations (He et al. 2015, arXiv 1502.01852, equation 10).

    The published 0.02 suits sums over thousands of inputs; sums over a few inputs would vanish.
    """
    return math.sqrt(2 / fan_in)


def generator_layers(config: DCGANGenerator, size: Size, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,) -> images (N, image channels, H, W)."""
    widths = _widths(config.channels, size)
    first = config.latent_size, num_classes, config.embedding_size, widths[-1], bottom_of(size)
    layers: list[nn.Module] = [GeneratorInput(*first)]
    layers += [GeneratorBlock(widths[i], widths[i - 1], config) for i in range(len(widths) - 1, 0, -1)]
    return [*layers, GeneratorOutput(widths[0], image_channels)]


def discriminator_layers(
    config: DCGANDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, H, W), labels (N,) -> logits (N,)."""
    widths = _widths(config.channels, size)
    # Section 3: no batch norm on D's input layer.
    first = DiscriminatorBlock(image_channels, widths[0], "none" if config.norm == "batch" else config.norm, STANDARD)
    blocks = [DiscriminatorBlock(widths[i], widths[i + 1], config.norm, config) for i in range(len(widths) - 1)]
    return [first, *blocks, DiscriminatorHead(widths[-1], bottom_of(size), num_classes, config.norm == "spectral")]


def _widths(channels: int, size: Size) -> list[int]:
    """Return the channels of the feature maps, fine to coarse: from half the image's size down to the smallest."""
    return [channels * 2**i for i in range((size.nominal // BOTTOM).bit_length() - 1)]
