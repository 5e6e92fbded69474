"""DCGAN (Radford, Metz and Chintala 2016, "Unsupervised representation learning with deep convolutional GANs").

Shapes: N samples, C channels, H x W pixels, Z numbers in a latent. Carry of the generator: (h (N, C, H, W),); of the
discriminator: (h, labels (N,)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.dcgan import DCGANDiscriminator, DCGANGenerator
from bigsgan.models.layers import AffineBatchNorm, SpectralConv2d, SpectralEmbedding
from bigsgan.models.plain import Conv2d, ConvTranspose2d, Embedding, LatentWithClass

_STD = 0.02  # section 3.1
_BOTTOM = 4


class GeneratorInput(nn.Module):
    """Latent and label -> the first feature map."""

    def __init__(self, latent_size: int, num_classes: int, embedding_size: int, channels: int) -> None:
        super().__init__()
        self.input = LatentWithClass(latent_size, num_classes, embedding_size)
        self.conv = ConvTranspose2d(self.input.features, channels, _BOTTOM, _STD, stride=1, padding=0, bias=False)
        self.norm = AffineBatchNorm(channels)

    def forward(self, latents: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, Z), (N,) int64 -> (N, C, 4, 4)."""
        return (F.relu(self.norm(self.conv(self.input(latents, labels)[:, :, None, None]))),)


class GeneratorBlock(nn.Module):
    """Transposed convolution that doubles the resolution, batch norm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = ConvTranspose2d(in_channels, out_channels, 4, _STD, stride=2, padding=1, bias=False)
        self.norm = AffineBatchNorm(out_channels)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C_in, H, W) -> (N, C_out, 2H, 2W)."""
        return (F.relu(self.norm(self.conv(h))),)


class GeneratorOutput(nn.Module):
    """Feature map -> image."""

    def __init__(self, channels: int, image_channels: int) -> None:
        super().__init__()
        self.conv = ConvTranspose2d(channels, image_channels, 4, _STD, stride=2, padding=1, bias=False)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, H, W) -> (N, image channels, 2H, 2W) in [-1, 1], float32 whatever the network's type."""
        return (torch.tanh(self.conv(h).float()),)


class DiscriminatorBlock(nn.Module):
    """Convolution that halves the resolution, normalisation as the recipe says, leaky ReLU.

    Args:
        in_channels: C of the input.
        out_channels: C of the output.
        norm: ``batch``, ``spectral`` or ``none``.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str) -> None:
        super().__init__()
        self.conv = _conv(in_channels, out_channels, norm, stride=2, padding=1, bias=norm != "batch")
        self.norm = AffineBatchNorm(out_channels) if norm == "batch" else nn.Identity()

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C_in, H, W), (N,) -> (N, C_out, H/2, W/2), (N,)."""
        return F.leaky_relu(self.norm(self.conv(h)), 0.2), labels


class DiscriminatorHead(nn.Module):
    """Feature map and label -> logit; a projection (Miyato and Koyama 2018) stands beside the published head."""

    def __init__(self, channels: int, num_classes: int, spectral: bool) -> None:
        super().__init__()
        self.conv = _conv(channels, 1, "spectral" if spectral else "none", stride=1, padding=0, bias=False)
        self.embedding: nn.Module | None = None
        if num_classes:
            self.embedding = (
                SpectralEmbedding(num_classes, channels) if spectral else Embedding(num_classes, channels, _STD)
            )

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, C, 4, 4), (N,) -> logits (N,), float32 whatever the network's type."""
        logits = self.conv(h).flatten()
        if self.embedding is not None:
            logits = logits + (self.embedding(labels) * h.sum(dim=(2, 3))).sum(dim=1)
        return (logits.float(),)


def _conv(in_channels: int, out_channels: int, norm: str, stride: int, padding: int, bias: bool) -> nn.Module:
    if norm == "spectral":
        return SpectralConv2d(in_channels, out_channels, 4, bias, stride, padding)
    return Conv2d(in_channels, out_channels, 4, _STD, stride, padding, bias)


def generator_layers(config: DCGANGenerator, resolution: int, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,) -> images (N, image channels, resolution, resolution)."""
    widths = _widths(config.channels, resolution)
    layers: list[nn.Module] = [GeneratorInput(config.latent_size, num_classes, config.embedding_size, widths[-1])]
    layers += [GeneratorBlock(widths[i], widths[i - 1]) for i in range(len(widths) - 1, 0, -1)]
    return [*layers, GeneratorOutput(widths[0], image_channels)]


def discriminator_layers(
    config: DCGANDiscriminator, resolution: int, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, resolution, resolution), labels (N,) -> logits (N,)."""
    widths = _widths(config.channels, resolution)
    # Section 3: no batch norm on D's input layer.
    first = DiscriminatorBlock(image_channels, widths[0], "none" if config.norm == "batch" else config.norm)
    blocks = [DiscriminatorBlock(widths[i], widths[i + 1], config.norm) for i in range(len(widths) - 1)]
    return [first, *blocks, DiscriminatorHead(widths[-1], num_classes, config.norm == "spectral")]


def _widths(channels: int, resolution: int) -> list[int]:
    """Channels of the feature maps, fine to coarse: of half the image's resolution down to 4x4."""
    return [channels * 2**i for i in range((resolution // _BOTTOM).bit_length() - 1)]
