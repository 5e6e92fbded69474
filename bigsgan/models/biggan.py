"""BigGAN (Brock, Donahue and Simonyan 2019, "Large scale GAN training for high fidelity natural image synthesis").

Shapes: N samples, C channels, H x W pixels, Z numbers in a latent, E in the class embedding, K in a chunk of a
hierarchical latent. Carry of the generator: (h (N, C, H, W), condition (N, E + blocks * K), or labels (N,) without a
shared embedding); of the discriminator: (h, labels (N,)).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.base import bottom_of
from bigsgan.config.families.biggan import (
    BIGGAN_DISCRIMINATOR,
    BigGANDiscriminator,
    BigGANGenerator,
    biggan_discriminator_resolutions,
)
from bigsgan.config.families.blocks import BlockSection
from bigsgan.images.size import Size
from bigsgan.models.batch_norm import AffineBatchNorm, ClassBatchNorm, ConditionalBatchNorm
from bigsgan.models.layers import (
    Embedding,
    SelfAttention,
    SpectralConv2d,
    SpectralEmbedding,
    SpectralLinear,
    full,
)
from bigsgan.models.light import STANDARD, Makers, pair
from bigsgan.models.resizing import pool_average, rectify_and_pool_average

_MAKERS = Makers(
    spatial=lambda in_channels, out_channels, groups: SpectralConv2d(in_channels, out_channels, 3, groups=groups),
    pointwise=lambda in_channels, out_channels: SpectralConv2d(in_channels, out_channels, 1),
    linear=SpectralLinear,
)


class GeneratorInput(nn.Module):
    """Latent and label -> the first feature map and the condition that all blocks share, or the label."""

    def __init__(
        self, num_classes: int, embedding_size: int | None, first_chunk: int, channels: int, size: Size
    ) -> None:
        super().__init__()
        self.first_chunk, self.size = first_chunk, size
        # Without classes, all images share one learned vector, so that the condition has a gradient path.
        self.embedding = None if embedding_size is None else Embedding(max(num_classes, 1), embedding_size)
        self.linear = SpectralLinear(first_chunk, channels * size.num_pixels)

    def forward(self, latents: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, Z), (N,) int64 -> (N, C, H, W), and (N, E + Z - first chunk) or (N,) int64."""
        first, rest = latents[:, : self.first_chunk], latents[:, self.first_chunk :]
        h = self.linear(first).view(latents.shape[0], -1, self.size.height, self.size.width)
        if self.embedding is None:
            return h, labels
        embedding = self.embedding(labels)
        return h, torch.cat([embedding, rest.to(embedding.dtype)], dim=1)


class GeneratorBlock(nn.Module):
    """Residual block that doubles the resolution (figure 15b), or keeps it and the channels.

    ``chunk`` holds the bounds of its latent's columns in the condition, equal for none. The last block drops the
    condition from the carry.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_classes: int,
        chunk: tuple[int, int],
        is_last: bool,
        upsample: bool,
        config: BigGANGenerator,
    ) -> None:
        super().__init__()
        self.embedding_size, self.chunk, self.is_last, self.upsample = config.embedding_size, chunk, is_last, upsample
        self.is_shared = config.shared_embedding
        norm: Callable[..., nn.Module] = ConditionalBatchNorm if self.is_shared else ClassBatchNorm
        condition_size = self.embedding_size + chunk[1] - chunk[0] if self.is_shared else num_classes
        conv1, conv2, between = pair(config, _MAKERS, in_channels, out_channels)
        last(conv1).followed_by = "batch norm"
        self.norm1 = norm(in_channels, condition_size, config.norm_eps)
        self.conv1 = conv1
        self.norm2 = norm(between, condition_size, config.norm_eps)
        self.conv2 = conv2
        self.shortcut = SpectralConv2d(in_channels, out_channels, 1) if upsample else None

    def forward(self, h: Tensor, shared: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), (N, E + ...) -> (N, C_out, H or 2H, W or 2W) and, unless this is the last, the condition."""
        condition = shared
        if self.is_shared:
            condition = torch.cat([shared[:, : self.embedding_size], shared[:, self.chunk[0] : self.chunk[1]]], dim=1)
        x = self.conv1(self.norm1(h, condition, upsamples=self.upsample))
        x = self.norm2(x, condition, last(self.conv1).shift)
        # A 1x1 convolution commutes with nearest-neighbour upsampling: convolving first costs a quarter.
        x = self.conv2(x) + h if self.shortcut is None else _beside(self.conv2, x, self.shortcut(h))
        return (x,) if self.is_last else (x, shared)


def last(branch: nn.Module) -> SpectralConv2d:
    """Return the last convolution of a block, which may itself be the convolution."""
    conv = branch[-1] if isinstance(branch, nn.Sequential) else branch
    assert isinstance(conv, SpectralConv2d)
    return conv


def _beside(branch: nn.Module, x: Tensor, shortcut: Tensor) -> Tensor:
    """Add a shortcut (N, C_out, H, W) to the output of a branch for x (N, C_in, 2H, 2W), which may pool it."""
    before, conv = (branch[:-1], branch[-1]) if isinstance(branch, nn.Sequential) else ((), branch)
    for part in before:
        x = part(x)
    return conv(x, shortcut)


class CarriedAttention(nn.Module):
    """Self-attention on the first entry of the carry."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = SelfAttention(channels)

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Attend over ``h`` (N, C, H, W) and pass the rest on."""
        return self.attention(h), *rest


class GeneratorOutput(nn.Module):
    """Feature map -> image."""

    def __init__(self, channels: int, image_channels: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = AffineBatchNorm(channels, norm_eps, rectifies=True)
        self.conv = SpectralConv2d(channels, image_channels, 3)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, H, W) -> (N, image channels, H, W) in [-1, 1], float32 whatever the network's type."""
        return (torch.tanh(full(self.conv(self.norm(h)))),)


class DiscriminatorBlock(nn.Module):
    """Residual block (figure 15c), which begins with a ReLU except on images, and downsamples by average pooling.

    The shortcut is from the input, or with ``rectified_shortcut`` from what the ReLU makes of it.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        preactivation: bool,
        downsample: bool,
        form: BlockSection,
        rectified_shortcut: bool,
    ) -> None:
        super().__init__()
        self.preactivation, self.downsample = preactivation, downsample
        self.rectified_shortcut = rectified_shortcut
        self.conv1, self.conv2, _ = pair(form, _MAKERS, in_channels, out_channels)
        last(self.conv1).followed_by = "relu"
        if downsample:
            last(self.conv2).followed_by = "pooling"
        learned = in_channels != out_channels or downsample
        self.shortcut = SpectralConv2d(in_channels, out_channels, 1) if learned else None

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C_in, H, W), (N,) -> (N, C_out, H or H/2, W or W/2), (N,)."""
        # Average pooling commutes with the 1x1 convolution: pooling first costs a quarter.
        if self.preactivation and self.downsample and not self.rectified_shortcut:
            x, h = rectify_and_pool_average(h)
        else:
            x = F.relu(h) if self.preactivation else h
            h = x if self.rectified_shortcut else h
            h = pool_average(h) if self.downsample else h
        x = self.conv1(x)
        shortcut = h if self.shortcut is None else self.shortcut(h)
        return _beside(self.conv2, x, shortcut) if self.downsample else self.conv2(x) + shortcut, labels


class DiscriminatorHead(nn.Module):
    """Feature map and label -> logit (Miyato and Koyama 2018, equation 4)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = SpectralLinear(channels, 1)
        self.embedding = SpectralEmbedding(num_classes, channels) if num_classes else None

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, C, H, W), (N,) -> logits (N,), float32 whatever the network's type."""
        features = F.relu(h).sum(dim=(2, 3))
        logits = self.linear(features).squeeze(1)
        if self.embedding is not None:
            logits = logits + (self.embedding(labels) * features).sum(dim=1)
        return (full(logits),)


def generator_layers(config: BigGANGenerator, size: Size, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,) -> images (N, image channels, H, W)."""
    widths = config.steps(size.nominal)
    num_steps = len(widths) - 1
    chunk = config.latent_size // (num_steps + 1) if config.hierarchical else 0
    first_chunk = chunk or config.latent_size
    embedding_size = config.embedding_size if config.shared_embedding else None
    layers: list[nn.Module] = [GeneratorInput(num_classes, embedding_size, first_chunk, widths[0], bottom_of(size))]
    shorter = bottom_of(size).shorter
    for i in range(num_steps):
        start = config.embedding_size + i * chunk
        for j in range(config.depth):
            is_last = i == num_steps - 1 and j == config.depth - 1
            before, columns = widths[i + 1] if j else widths[i], (start, start + chunk)
            num = max(num_classes, 1)
            layers.append(GeneratorBlock(before, widths[i + 1], num, columns, is_last, j == 0, config))
        shorter *= 2
        if shorter in config.attention:
            layers.append(CarriedAttention(widths[i + 1]))
    layers.append(GeneratorOutput(widths[-1], image_channels, config.output_norm_eps))
    return layers


def discriminator_layers(
    config: BigGANDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, H, W), labels (N,) -> logits (N,)."""
    widths = [image_channels, *config.widths(BIGGAN_DISCRIMINATOR[size.nominal])]
    sizes = [size.shorter, *biggan_discriminator_resolutions(size)]
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        downsample = sizes[i + 1] < sizes[i]
        for j in range(config.depth):
            before, sees_images = widths[i + 1] if j else widths[i], i == j == 0
            form = STANDARD if sees_images else config
            block = before, widths[i + 1], not sees_images, downsample and j == 0, form
            layers.append(DiscriminatorBlock(*block, config.rectified_shortcut))
        # Several blocks may end at one resolution; attention follows the first of them.
        if sizes[i + 1] in config.attention and downsample:
            layers.append(CarriedAttention(widths[i + 1]))
    layers.append(DiscriminatorHead(widths[-1], num_classes))
    return layers
