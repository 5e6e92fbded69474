"""Autoencoders of residual blocks (Esser et al. 2021, arXiv 2012.09841; Rombach et al. 2022, arXiv 2112.10752).

Shapes: N samples, C channels, H x W pixels, P = H' * W' pixels of the latents, Z channels of the latents, K codes. The
carry is (h (N, C, H, W),), before a bottleneck that draws with seeds (N,) int64, and after it with its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.autoencoder import AutoencoderDiscriminator, AutoencoderGenerator
from bigsgan.images.size import Size
from bigsgan.models import noise, pix2pix
from bigsgan.models.attention import attend
from bigsgan.models.convolutions import convolve, laid_out
from bigsgan.models.frozen import freeze_all
from bigsgan.models.precision import full
from bigsgan.models.quantizers import FiniteScalarQuantizer, SignQuantizer, VectorQuantizer

_EPSILON = 1e-6
_LEAST, _LARGEST = -30.0, 20.0
"""Limits of a log variance, as in the public code."""


class Convolution(nn.Conv2d):
    """torch's convolution in the weight's type: (N, C_in, H, W) -> (N, C_out, H / stride, W / stride)."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve; a stride of 2 pads the right and the lower side alone."""
        if self.stride[0] == 2:
            x = F.pad(x, (0, 1, 0, 1))
        x = laid_out(x, self.weight.dtype)
        return convolve(x, self.weight, self.bias, self.stride[0], int(self.padding[0]))


class Attention(nn.Module):
    """Self-attention over pixels, of one head: (N, C, H, W) -> (N, C, H, W)."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, _EPSILON)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Add what each pixel takes from all."""
        pixels = self.norm(x).flatten(2).mT
        heads = (linear(pixels)[:, None] for linear in (self.query, self.key, self.value))
        return x + self.out(attend(*heads)[:, 0]).mT.reshape(x.shape)


class ResidualBlock(nn.Module):
    """Two convolutions after norm and SiLU, whose result is added to the input; then maybe attention."""

    def __init__(self, in_channels: int, out_channels: int, groups: int, attends: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_channels, _EPSILON)
        self.conv1 = Convolution(in_channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out_channels, _EPSILON)
        self.conv2 = Convolution(out_channels, out_channels, 3, padding=1)
        self.shortcut = Convolution(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()
        self.attention = Attention(out_channels, groups) if attends else nn.Identity()

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), ... -> (N, C_out, H, W), ...."""
        x = self.conv1(F.silu(self.norm1(h)))
        x = self.conv2(F.silu(self.norm2(x)))
        return self.attention(self.shortcut(h) + x), *rest


class EncoderInput(nn.Module):
    """Image -> the finest feature map."""

    def __init__(self, image_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = Convolution(image_channels, channels, 3, padding=1)

    def forward(self, images: Tensor, labels: Tensor, *seeds: Tensor) -> tuple[Tensor, ...]:
        """Images (N, C_in, H, W) in [-1, 1], (N,), [(N,)] -> (N, C, H, W), [(N,)]."""
        return self.conv(images), *seeds


class Down(nn.Module):
    """Halves the sides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Convolution(channels, channels, 3, stride=2)

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """(N, C, H, W), ... -> (N, C, H / 2, W / 2), ...."""
        return self.conv(h), *rest


class Up(nn.Module):
    """Doubles the sides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Convolution(channels, channels, 3, padding=1)

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """(N, C, H, W), ... -> (N, C, 2H, 2W), ...."""
        return self.conv(F.interpolate(h, scale_factor=2.0, mode="nearest")), *rest


class EncoderOutput(nn.Module):
    """Feature map -> what the bottleneck reads."""

    def __init__(self, channels: int, encoded: int, latents: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, _EPSILON)
        self.conv = Convolution(channels, encoded, 3, padding=1)
        self.to_latents = Convolution(encoded, latents, 1)

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """(N, C, H, W), ... -> (N, Z, H, W), ..., or (N, 2 * Z, H, W), ...."""
        return self.to_latents(self.conv(F.silu(self.norm(h)))), *rest


class Gaussian(nn.Module):
    """Draws latents of normal distributions; in evaluation mode they are the means."""

    def forward(self, h: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 2 * Z, H, W), (N,) -> latents (N, Z, H, W), and means and log variances (N, 2 * Z, H, W), float32."""
        mean, log_variance = full(h).chunk(2, dim=1)
        log_variance = log_variance.clamp(_LEAST, _LARGEST)
        latents = mean
        if self.training:
            latents = mean + (0.5 * log_variance).exp() * noise.normal(seeds, 0, tuple(mean.shape[1:]))
        return latents.to(h.dtype), torch.cat([mean, log_variance], dim=1)


class DecoderInput(nn.Module):
    """Latents -> the coarsest feature map."""

    def __init__(self, latents: int, encoded: int, channels: int) -> None:
        super().__init__()
        self.from_latents = Convolution(latents, encoded, 1)
        self.conv = Convolution(encoded, channels, 3, padding=1)

    def forward(self, h: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        """(N, Z, H, W), ... -> (N, C, H, W), ...."""
        return self.conv(self.from_latents(h)), *outputs


class DecoderOutput(nn.Module):
    """Feature map -> image."""

    def __init__(self, channels: int, image_channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, _EPSILON)
        self.conv_out = Convolution(channels, image_channels, 3, padding=1)

    def forward(self, h: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        """(N, C, H, W), ... -> (N, image channels, H, W) of any range, float32 whatever the network's type, ...."""
        return full(self.conv_out(F.silu(self.norm(h)))), *outputs


def generator_layers(
    config: AutoencoderGenerator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, C, H, W), labels (N,), [seeds (N,)] -> images, and the bottleneck's outputs."""
    widths = [config.channels * multiplier for multiplier in config.multipliers]
    encoder: list[nn.Module] = [EncoderInput(image_channels, widths[0])]
    for level, (before, width) in enumerate(pairwise([widths[0], *widths])):
        encoder += [Down(before)] if level else []
        encoder += _blocks(config, level, before, width, config.num_blocks)
    encoder += _middle(config, widths[-1])
    latents, kind = config.latent_channels, config.bottleneck.kind
    encoded = config.encoder_channels or latents
    ways = 2 if kind == "kl" else 1  # means and log variances
    encoder.append(EncoderOutput(widths[-1], ways * encoded, ways * latents, config.norm_groups))
    bottleneck = _bottleneck(config)
    decoder: list[nn.Module] = [DecoderInput(latents, encoded, widths[-1]), *_middle(config, widths[-1])]
    for level, (width, before) in reversed(list(enumerate(pairwise([*widths, widths[-1]])))):
        decoder += _blocks(config, level, before, width, config.num_blocks + 1)
        decoder += [Up(width)] if level else []
    decoder.append(DecoderOutput(widths[0], image_channels, config.norm_groups))
    frozen = {"none": [], "encoder": [*encoder, *bottleneck], "decoder": [*bottleneck, *decoder]}
    for layer in frozen[config.frozen]:
        freeze_all(layer)
    return [*encoder, *bottleneck, *decoder]


def _blocks(
    config: AutoencoderGenerator, level: int, in_channels: int, channels: int, num: int
) -> Iterator[ResidualBlock]:
    for i in range(num):
        attends = level in config.attention
        yield ResidualBlock(channels if i else in_channels, channels, config.norm_groups, attends)


def _middle(config: AutoencoderGenerator, channels: int) -> list[nn.Module]:
    return [ResidualBlock(channels, channels, config.norm_groups, attends) for attends in (True, False)]


def _bottleneck(config: AutoencoderGenerator) -> list[nn.Module]:
    section = config.bottleneck
    if section.kind == "kl":
        return [Gaussian()]
    if section.kind == "vq":
        return [VectorQuantizer(config)]
    if section.kind == "lfq":
        return [SignQuantizer(section.temperature)]
    return [FiniteScalarQuantizer(section.levels)] if section.kind == "fsq" else []


def discriminator_layers(
    config: AutoencoderDiscriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, H, W), labels (N,) -> (N, P)."""
    return pix2pix.discriminator_layers(config, size, image_channels, 0)
