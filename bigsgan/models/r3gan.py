"""R3GAN (Huang et al. 2024, "The GAN is dead; long live the GAN! A modern GAN baseline", arXiv 2501.05441).

Residual stages, one for each resolution from 4x4 on, without normalization: weights start by fix-up initialization
(Zhang, Dauphin and Ma 2019, arXiv 1901.09321), so that a block begins as the identity.

A stage in bf16 computes with float32 weights, cast where they are used. In an engine whose weights are bf16 or fp16,
every stage computes in their type.

Shapes: N samples, C channels, H x W pixels, Z numbers in a latent, E in the class embedding. Carry of the generator:
(h (N, C, H, W),); of the discriminator: (h, labels (N,)).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.base import bottom_of
from bigsgan.config.families.r3gan import R3GANDiscriminator, R3GANGenerator, R3GANNetwork
from bigsgan.images.size import Size
from bigsgan.models import fir, fused
from bigsgan.models.convolutions import convolve, laid_out, rectify_biased
from bigsgan.models.dual import linearly
from bigsgan.models.initial import Generators, draw_normal
from bigsgan.models.plain import Embedding, Linear, Weighted
from bigsgan.models.precision import full

_SLOPE = 0.2
_RELU_GAIN = math.sqrt(2 / (1 + _SLOPE**2))
"""Keeps the variance through a leaky ReLU (He et al. 2015, arXiv 1502.01852, equation 15)."""
_CONVOLUTIONS = 3
"""Number of convolutions in a residual block."""


class Convolution(Weighted):
    """Convolution without bias: (N, C_in, H, W) -> (N, C_out, H, W), or one pixel for an unpadded kernel of H x W.

    The initial weights' standard deviation is gain / sqrt(fan-in). A ``padding`` of None keeps the size. With ``bf16``
    it computes in bf16 if the weight is float32.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | Size,
        gain: float = 1.0,
        groups: int = 1,
        padding: int | None = None,
        bf16: bool = False,
    ) -> None:
        size = Size.of(kernel)
        shape = (out_channels, in_channels // groups, *size)
        super().__init__(shape, gain / math.sqrt(math.prod(shape[1:])), None)
        self.groups, self.padding, self.bf16 = groups, size.height // 2 if padding is None else padding, bf16

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, in bf16 or in the weight's type."""
        weight = _narrowed(self.weight, self.bf16)
        return convolve(laid_out(x, weight.dtype), weight, padding=self.padding, groups=self.groups)


class BiasedActivation(nn.Module):
    """Bias of each channel, then a leaky ReLU; the weights' initialization compensates for its gain."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(channels))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Clear the bias."""
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> the same, in x's type."""
        return rectify_biased(x, self.bias.to(x.dtype), _SLOPE)


class ResidualBlock(nn.Module):
    """Inverted bottleneck: expand, grouped 3x3 convolution, contract (section 3.4 of the paper).

    ``cardinality`` is the number of groups of the middle convolution, ``expansion`` its channels in units of C, and
    ``num_blocks`` the number of the network's blocks, which scales the initial variance.
    """

    def __init__(self, channels: int, cardinality: int, expansion: int, num_blocks: int, bf16: bool) -> None:
        super().__init__()
        inside = channels * expansion
        gain = _RELU_GAIN * num_blocks ** (-1 / (2 * _CONVOLUTIONS - 2))  # Zhang et al. 2019, section 3
        self.expand = Convolution(channels, inside, 1, gain, bf16=bf16)
        self.activation1 = BiasedActivation(inside)
        self.conv = Convolution(inside, inside, 3, gain, cardinality, bf16=bf16)
        self.activation2 = BiasedActivation(inside)
        self.contract = Convolution(inside, channels, 1, 0.0, bf16=bf16)
        self.bf16 = bf16

    def forward(self, h: Tensor, *labels: Tensor) -> tuple[Tensor, ...]:
        """(N, C, H, W) and, in the discriminator, (N,) -> the same."""
        x = self.activation1(self.expand(h))
        x = self.contract(self.activation2(self.conv(x)))
        # In a float32 stage after a bf16 one, the sum is float32.
        return _narrowed(h, self.bf16) + x, *labels


class GeneratorInput(nn.Module):
    """Latent and label -> the smallest feature map: a learned basis, each map scaled by a linear function of both."""

    def __init__(self, config: R3GANGenerator, num_classes: int, size: Size, bf16: bool) -> None:
        channels, embedding_size, latent_size = config.widths[0], config.embedding_size, config.latent_size
        super().__init__()
        features = latent_size + (embedding_size if num_classes else 0)
        self.embedding = Embedding(num_classes, embedding_size, num_classes**-0.5) if num_classes else None
        self.linear = Linear(features, channels, features**-0.5, bias=False)
        self.basis = nn.Parameter(torch.empty(channels, *size))
        self.bf16 = bf16

    def initialize(self, generators: Generators) -> None:
        """Draw the basis from a standard normal distribution."""
        draw_normal(self.basis, generators("basis"))

    def forward(self, latents: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, Z), (N,) int64 -> (N, C, H, W)."""
        if self.embedding is not None:
            latents = torch.cat([latents, self.embedding(labels).to(latents.dtype)], dim=1)
        scales = self.linear(latents)
        return (_narrowed(self.basis * scales[:, :, None, None], self.bf16),)


class _Transition(nn.Module):
    """Layer between two stages, with a 1x1 convolution if the width changes."""

    def __init__(self, in_channels: int, out_channels: int, bf16: bool) -> None:
        super().__init__()
        self.conv = Convolution(in_channels, out_channels, 1, bf16=bf16) if in_channels != out_channels else None
        self.bf16 = bf16


class Upsample(_Transition):
    """Transition to the next finer stage."""

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C_in, H, W) -> (N, C_out, 2H, 2W)."""
        return (upsample(_narrowed(h, self.bf16) if self.conv is None else self.conv(h)),)


class GeneratorOutput(nn.Module):
    """Feature map -> image."""

    def __init__(self, channels: int, image_channels: int, bf16: bool) -> None:
        super().__init__()
        self.conv = Convolution(channels, image_channels, 1, bf16=bf16)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, H, W) -> (N, image channels, H, W), not bounded, float32 whatever the network's type."""
        return (full(self.conv(h)),)


class DiscriminatorInput(nn.Module):
    """Image -> feature map of its resolution."""

    def __init__(self, image_channels: int, channels: int, bf16: bool) -> None:
        super().__init__()
        self.conv = Convolution(image_channels, channels, 1, bf16=bf16)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, image channels, H, W) in [-1, 1], (N,) -> (N, C, H, W), (N,)."""
        return self.conv(images), labels


class Downsample(_Transition):
    """Transition to the next coarser stage."""

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C_in, H, W), (N,) -> (N, C_out, H/2, W/2), (N,)."""
        x = downsample(_narrowed(h, self.bf16))
        return x if self.conv is None else self.conv(x), labels


class DiscriminatorHead(nn.Module):
    """Feature map and label -> logit: a learned basis of maps, and a projection (Miyato and Koyama 2018)."""

    def __init__(self, channels: int, size: Size, num_classes: int, embedding_size: int, bf16: bool) -> None:
        super().__init__()
        self.basis = Convolution(channels, channels, size, groups=channels, padding=0, bf16=bf16)
        self.linear = Linear(channels, embedding_size if num_classes else 1, channels**-0.5, bias=False)
        std = (num_classes * embedding_size) ** -0.5 if num_classes else 0.0
        self.embedding = Embedding(num_classes, embedding_size, std) if num_classes else None

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, C, H, W), (N,) -> logits (N,), float32 whatever the network's type."""
        features = self.linear(self.basis(h).flatten(1))
        if self.embedding is not None:
            # A sum of many small terms, each of which 8 or 11 bits would round.
            return ((full(features) * full(self.embedding(labels))).sum(dim=1),)
        return (full(features.squeeze(1)),)


def upsample(x: Tensor) -> Tensor:
    """Double the resolution by bilinear interpolation, 0 outside: (N, C, H, W) -> (N, C, 2H, 2W)."""
    kernel = fir.filter_like(x)
    if _filters(x):
        return fir.upsample(x, kernel)
    n, c, h, w = x.shape
    planes, kernel = x.reshape(n * c, 1, h, w), 4 * kernel[None, None]
    return linearly(lambda x: F.conv_transpose2d(x, kernel, stride=2, padding=1), planes).view(n, c, 2 * h, 2 * w)


def downsample(x: Tensor) -> Tensor:
    """Halve the resolution by the transpose of ``upsample``, over 4: (N, C, H, W) -> (N, C, H/2, W/2)."""
    kernel = fir.filter_like(x)
    if _filters(x):
        return fir.downsample(x, kernel)
    n, c, h, w = x.shape
    planes, kernel = x.reshape(n * c, 1, h, w), kernel[None, None]
    return linearly(lambda x: F.conv2d(x, kernel, stride=2, padding=1), planes).view(n, c, h // 2, w // 2)


def _filters(x: Tensor) -> bool:
    """Whether to use the kernel of StyleGAN2's filter, which is the same filter, and keeps the memory order."""
    return not torch.compiler.is_compiling() and fused.used_for(x)


def _narrowed(tensor: Tensor, bf16: bool) -> Tensor:
    """Cast a float32 tensor to bf16 if a stage computes in ``bf16``: half the memory, and tensor cores."""
    return tensor.to(torch.bfloat16) if bf16 and tensor.dtype == torch.float32 else tensor


def generator_layers(config: R3GANGenerator, size: Size, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,) -> images (N, image channels, H, W)."""
    widths, bf16 = config.widths, _bf16_stages(config)
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        if i == 0:
            layers.append(GeneratorInput(config, num_classes, bottom_of(size), bf16[0]))
        else:
            layers.append(Upsample(widths[i - 1], width, bf16[i]))
        layers += _stage(config, i, bf16[i])
    return [*layers, GeneratorOutput(widths[-1], image_channels, bf16[-1])]


def discriminator_layers(
    config: R3GANDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, H, W), labels (N,) -> logits (N,)."""
    widths, bf16 = config.widths, _bf16_stages(config)
    layers: list[nn.Module] = [DiscriminatorInput(image_channels, widths[-1], bf16[-1])]
    for i in range(len(widths) - 1, -1, -1):
        layers += _stage(config, i, bf16[i])
        if i > 0:
            layers.append(Downsample(widths[i], widths[i - 1], bf16[i]))
    head = DiscriminatorHead(widths[0], bottom_of(size), num_classes, config.embedding_size, bf16[0])
    return [*layers, head]


def _stage(config: R3GANNetwork, i: int, bf16: bool) -> list[ResidualBlock]:
    """Make the blocks of stage ``i``, counted from 4x4."""
    width, cardinality = config.widths[i], config.cardinalities[i]
    num_blocks = sum(config.blocks)
    return [ResidualBlock(width, cardinality, config.expansion, num_blocks, bf16) for _ in range(config.blocks[i])]


def _bf16_stages(config: R3GANNetwork) -> list[bool]:
    """Return whether each stage, from 4x4 on, computes in bf16."""
    num = len(config.widths)
    return [i >= num - config.bf16_stages for i in range(num)]
