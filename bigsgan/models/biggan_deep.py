"""BigGAN-deep (Brock, Donahue and Simonyan 2019, appendix B, figure 16): bottleneck blocks on identity shortcuts.

Shapes: N samples, C channels, H x W pixels, Z numbers in a latent, E in the class embedding. Carry of the generator:
(h (N, C, H, W), condition (N, E + Z)); of the discriminator: (h, labels (N,)).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.base import bottom_of
from bigsgan.config.families.biggan import BIGGAN_DISCRIMINATOR, BIGGAN_GENERATOR
from bigsgan.config.families.biggan_deep import (
    BOTTLENECK,
    BigGANDeepDiscriminator,
    BigGANDeepGenerator,
    deep_discriminator_resolutions,
)
from bigsgan.images.size import Size
from bigsgan.models.batch_norm import ConditionalBatchNorm
from bigsgan.models.biggan import CarriedAttention, DiscriminatorHead, GeneratorOutput
from bigsgan.models.layers import Embedding, SpectralConv2d, SpectralLinear
from bigsgan.models.resizing import pool_average, upsample_nearest


class GeneratorInput(nn.Module):
    """Latent and label -> the first feature map and the condition that all blocks share."""

    def __init__(self, num_classes: int, embedding_size: int, latent_size: int, channels: int, size: Size) -> None:
        super().__init__()
        self.size = size
        # Without classes, all images share one learned vector, so that the condition has a gradient path.
        self.embedding = Embedding(max(num_classes, 1), embedding_size)
        self.linear = SpectralLinear(embedding_size + latent_size, channels * size.num_pixels)

    def forward(self, latents: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, Z), (N,) int64 -> (N, C, H, W), (N, E + Z)."""
        embedding = self.embedding(labels)
        # Latents arrive in float32; the condition has the network's type.
        condition = torch.cat([embedding, latents.to(embedding.dtype)], dim=1)
        made = self.linear(condition).view(latents.shape[0], -1, self.size.height, self.size.width)
        return made, condition


class GeneratorBlock(nn.Module):
    """Bottleneck block (figure 16b) whose shortcut drops the channels beyond the output's.

    The last block drops the condition, of size E + Z, from the carry.
    """

    def __init__(
        self, in_channels: int, out_channels: int, condition_size: int, upsample: bool, is_last: bool, norm_eps: float
    ) -> None:
        super().__init__()
        self.out_channels, self.upsample, self.is_last = out_channels, upsample, is_last
        inner = in_channels // BOTTLENECK
        self.norm1 = ConditionalBatchNorm(in_channels, condition_size, norm_eps)
        self.conv1 = SpectralConv2d(in_channels, inner, 1)
        self.norm2 = ConditionalBatchNorm(inner, condition_size, norm_eps)
        self.conv2 = SpectralConv2d(inner, inner, 3)
        self.norm3 = ConditionalBatchNorm(inner, condition_size, norm_eps)
        self.conv3 = SpectralConv2d(inner, inner, 3)
        self.norm4 = ConditionalBatchNorm(inner, condition_size, norm_eps)
        self.conv4 = SpectralConv2d(inner, out_channels, 1)
        for conv in (self.conv1, self.conv2, self.conv3):
            conv.followed_by = "batch norm"

    def forward(self, h: Tensor, condition: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), (N, E + Z) -> (N, C_out, H or 2H, W or 2W) and, unless this is the last, the condition."""
        x = self.conv1(self.norm1(h, condition))
        x = self.norm2(x, condition, self.conv1.shift, upsamples=self.upsample)
        shortcut = h[:, : self.out_channels]
        if self.upsample:
            shortcut = upsample_nearest(shortcut)
        x = self.conv2(x)
        x = self.conv3(self.norm3(x, condition, self.conv2.shift))
        x = self.conv4(self.norm4(x, condition, self.conv3.shift)) + shortcut
        return (x,) if self.is_last else (x, condition)


class DiscriminatorInput(nn.Module):
    """Image -> the first feature map."""

    def __init__(self, image_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = SpectralConv2d(image_channels, channels, 3)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, image channels, H, W) in [-1, 1], (N,) -> (N, C, H, W), (N,)."""
        return self.conv(images), labels


class DiscriminatorBlock(nn.Module):
    """Bottleneck block (figure 16c) whose shortcut adds the channels that the input lacks by a convolution."""

    def __init__(self, in_channels: int, out_channels: int, downsample: bool) -> None:
        super().__init__()
        self.downsample = downsample
        inner = out_channels // BOTTLENECK
        self.conv1 = SpectralConv2d(in_channels, inner, 1)
        self.conv2 = SpectralConv2d(inner, inner, 3)
        self.conv3 = SpectralConv2d(inner, inner, 3)
        self.conv4 = SpectralConv2d(inner, out_channels, 1)
        for conv in (self.conv1, self.conv2, self.conv3):
            conv.followed_by = "relu"
        more = out_channels - in_channels
        self.shortcut = SpectralConv2d(in_channels, more, 1) if more else None

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C_in, H, W), (N,) -> (N, C_out, H or H/2, W or W/2), (N,)."""
        x = self.conv3(self.conv2(self.conv1(F.relu(h))))
        if self.downsample:
            x, h = pool_average(x), pool_average(h)
        if self.shortcut is not None:
            h = torch.cat([h, self.shortcut(h)], dim=1)
        return self.conv4(x) + h, labels


def generator_layers(config: BigGANDeepGenerator, size: Size, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,) -> images (N, image channels, H, W)."""
    widths = [config.channels * m for m in BIGGAN_GENERATOR[size.nominal]]
    bottom = bottom_of(size)
    layers: list[nn.Module] = [
        GeneratorInput(num_classes, config.embedding_size, config.latent_size, widths[0], bottom)
    ]
    condition_size = config.embedding_size + config.latent_size
    num_steps, shorter = len(widths) - 1, bottom.shorter
    for i in range(num_steps):
        for j in range(config.depth):
            resizes = j == config.depth - 1
            after = widths[i + 1] if resizes else widths[i]
            is_last = resizes and i == num_steps - 1
            layers.append(GeneratorBlock(widths[i], after, condition_size, resizes, is_last, config.norm_eps))
        shorter *= 2
        if shorter in config.attention:
            layers.append(CarriedAttention(widths[i + 1]))
    layers.append(GeneratorOutput(widths[-1], image_channels, config.output_norm_eps))
    return layers


def discriminator_layers(
    config: BigGANDeepDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, H, W), labels (N,) -> logits (N,)."""
    widths = [config.channels * m for m in BIGGAN_DISCRIMINATOR[size.nominal]]
    sizes = [size.shorter, *deep_discriminator_resolutions(size)]
    layers: list[nn.Module] = [DiscriminatorInput(image_channels, widths[0])]
    for i in range(len(widths) - 1):
        downsample = sizes[i + 1] < sizes[i]
        for j in range(config.depth):
            before = widths[i + 1] if j else widths[i]
            layers.append(DiscriminatorBlock(before, widths[i + 1], downsample and j == 0))
        # Two steps may end at one resolution; attention follows the first of them.
        if sizes[i + 1] in config.attention and downsample:
            layers.append(CarriedAttention(widths[i + 1]))
    layers.append(DiscriminatorHead(widths[-1], num_classes))
    return layers
