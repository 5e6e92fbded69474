"""StyleGAN2 (Karras et al. 2020, "Analyzing and improving the image quality of StyleGAN", arXiv 1912.04958).

With the changes of StyleGAN2-ADA (arXiv 2006.06676): half precision at the highest resolutions, clamped activations,
and a discriminator that reads the class.

Shapes: N samples, C channels, H x W pixels, Z numbers in a latent, W in a style vector. The generator's first layer
returns (ws (N, num_ws, W), seeds (N,)), its other layers (x (N, C, H, W), image (N, image channels, H, W), ws, seeds);
the discriminator's carry is (x, labels (N,)). Only the architecture ``skip`` carries images. D carries them as further
channels of x, as they have no gradient path of their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bigsgan.config.families.base import BOTTOM, bottom_of
from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.images.size import Size
from bigsgan.models import fir, noise
from bigsgan.models.initial import Generators, draw_normal
from bigsgan.models.layers import RankAverages
from bigsgan.models.stylegan2_layers import (
    SLOPE,
    Conv2d,
    Doubled,
    FullyConnected,
    MappingNetwork,
    MinibatchDeviation,
    Resampling,
    SynthesisLayer,
    ToRGB,
    adapt,
)

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Streams of a sample's seed; layers with noise use those from _FIRST_NOISE on.
_SECOND_LATENT, _CROSSOVER, _FIRST_NOISE = range(3)

_RESIDUAL_GAIN = math.sqrt(0.5)
"""Keeps the variance in a sum of two."""


class Mapping(RankAverages):
    """Latent and label -> the style vectors of all layers.

    In training, a share ``style_mixing`` of the samples takes a second latent's vectors from a random layer on (Karras
    et al. 2019, arXiv 1812.04948, section 3.1). In evaluation mode the vectors move towards their mean unless
    ``truncation_psi`` is 1 (the truncation trick, appendix B there).

    Attributes:
        num_ws: Number of style vectors of a sample.
        w_avg: Buffer (W,), float32: moving average of the style vectors over the global micro-batches.
        truncation_psi: Factor on the distance to the mean, in evaluation mode.
        truncation_cutoff: Number of first style vectors that are truncated; None for all.
    """

    w_avg: Tensor

    def __init__(self, config: StyleGAN2Generator, num_classes: int, num_ws: int) -> None:
        super().__init__()
        self.latent_size, self.num_ws, self.style_mixing = config.latent_size, num_ws, config.style_mixing
        self.beta = config.w_avg_beta
        self.truncation_psi = 1.0
        self.truncation_cutoff: int | None = None
        self.network = MappingNetwork(
            config.latent_size, num_classes, config.w_size, config.mapping_layers, config.mapping_lr_multiplier
        )
        self.register_buffer("w_avg", torch.empty(config.w_size, dtype=torch.float32))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Start the average at 0."""
        self.w_avg.zero_()

    def forward(self, latents: Tensor, labels: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """(N, Z), (N,) int64, (N,) int64 -> ws (N, num_ws, W), float32 whatever the network's type, and the seeds."""
        if self.training and self.style_mixing:
            second = noise.normal(seeds, _SECOND_LATENT, (self.latent_size,)).to(latents.dtype)
            w, other = self.network(torch.cat([latents, second]), torch.cat([labels, labels])).chunk(2)
            ws = torch.where(self._takes_second(seeds)[:, :, None], other[:, None], w[:, None])
        else:
            w = self.network(latents, labels)
            ws = w[:, None].repeat(1, self.num_ws, 1)
        if self.moving:
            self._move(w.detach())
        if not self.training and self.truncation_psi != 1:
            cutoff = self.num_ws if self.truncation_cutoff is None else self.truncation_cutoff
            drawn_in = self.w_avg.lerp(ws[:, :cutoff], self.truncation_psi)
            ws = torch.cat([drawn_in, ws[:, cutoff:]], dim=1)
        return ws, seeds

    def _takes_second(self, seeds: Tensor) -> Tensor:
        """Choose the layers that take the second latent's vector: (N,) -> (N, num_ws) bool; never the first layer."""
        whether, where = noise.uniform(seeds, _CROSSOVER, (2,)).unbind(1)
        crossover = 1 + (where * (self.num_ws - 1)).to(torch.int64)
        crossover = torch.where(whether < self.style_mixing, crossover, self.num_ws)
        return torch.arange(self.num_ws, device=seeds.device) >= crossover[:, None]

    @torch.no_grad()
    def _move(self, w: Tensor) -> None:
        mean = w.mean(dim=0)
        if self.average_over_ranks is not None:
            mean = self.average_over_ranks(mean)
        self.w_avg.copy_(mean.lerp(self.w_avg, self.beta))


class SynthesisInput(nn.Module):
    """Style vectors -> the first feature map, from a learned constant, and the first image.

    Attributes:
        const: Parameter (C, H, W).
        torgb: None if only the last block makes the image.
    """

    def __init__(self, config: StyleGAN2Generator, size: Size, image_channels: int) -> None:
        super().__init__()
        channels, bottom = config.channels(size.nominal)[BOTTOM], bottom_of(size)
        w_size, clamp = config.w_size, config.conv_clamp
        stream = _FIRST_NOISE if config.noise else None
        self.const = nn.Parameter(torch.empty(channels, *bottom))
        self.conv1 = SynthesisLayer(channels, channels, w_size, bottom, up=False, stream=stream, clamp=clamp, half=None)
        has_image = config.architecture == "skip"
        self.torgb = ToRGB(channels, image_channels, w_size, clamp, half=None) if has_image else None

    def initialize(self, generators: Generators) -> None:
        """Draw the constant from a standard normal distribution."""
        draw_normal(self.const, generators("const"))

    def forward(self, ws: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
        """(N, num_ws, W), (N,) -> x (N, C, H, W), [image (N, image channels, H, W)], ws, seeds."""
        x = self.const.expand(ws.shape[0], -1, -1, -1)
        x = self.conv1(x, ws[:, 0], seeds)
        return (x, ws, seeds) if self.torgb is None else (x, self.torgb(x, ws[:, 1]), ws, seeds)


class _Block(Resampling):
    """Has a filter if the carry has an image."""

    def initialize(self, generators: Generators) -> None:
        """Fill the filter."""
        self.fill_filter()


class SynthesisBlock(_Block):
    """Doubles the resolution of feature map and image, and adds to the image.

    ``nominal`` is the side of the output in a network for squares; the block that reaches ``size`` returns only the
    image.

    Attributes:
        first: Number of this block's first style vector; the last of its three is the next block's first.
        torgb: None if only the last block makes the image.
        resample_filter: Buffer (4, 4), or None if the carry has no image.
    """

    def __init__(self, config: StyleGAN2Generator, nominal: int, size: Size, image_channels: int) -> None:
        super().__init__()
        channels, w_size, clamp = config.channels(size.nominal), config.w_size, config.conv_clamp
        half, before, after = _half(config, nominal, size), channels[nominal // 2], channels[nominal]
        self.first, self.is_last = 2 * (nominal // BOTTOM).bit_length() - 3, nominal == size.nominal
        made = bottom_of(size).times(nominal // BOTTOM)
        streams = [_FIRST_NOISE + self.first + i if config.noise else None for i in range(2)]
        self.conv0 = SynthesisLayer(before, after, w_size, made, True, streams[0], clamp, half)
        self.conv1 = SynthesisLayer(after, after, w_size, made, False, streams[1], clamp, half)
        has_image, adds = self.is_last or config.architecture == "skip", config.architecture == "skip"
        self.torgb = ToRGB(after, image_channels, w_size, clamp, half) if has_image else None
        self.skip = Doubled(before, after, half) if config.architecture == "resnet" else None
        self.make_filter(adds)

    def forward(self, x: Tensor, *carry: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), [(N, image channels, H, W)], ws, seeds -> both twice as large, ws, seeds; at last the image.

        The image has no bound; it is float32 whatever the network's type.
        """
        *images, ws, seeds = carry
        if self.skip is None:
            x = self.conv0(x, ws[:, self.first], seeds)
            x = self.conv1(x, ws[:, self.first + 1], seeds)
        else:
            y = self.conv0(x, ws[:, self.first], seeds)
            x = self.skip(x, _RESIDUAL_GAIN) + self.conv1(y, ws[:, self.first + 1], seeds, _RESIDUAL_GAIN)
        if self.torgb is not None:
            image = self.torgb(x, ws[:, self.first + 2])
            images = [image if self.resample_filter is None else fir.upsample(images[0], self.resample_filter) + image]
        return tuple(images) if self.is_last else (x, *images, ws, seeds)


class DiscriminatorBlock(_Block):
    """Two convolutions, the second of which halves the resolution, and a residual connection.

    ``nominal`` is the side of the input in a network for squares; the block that sees ``size`` begins with the image.

    Attributes:
        fromrgb: None if the block does not read the image.
        resample_filter: Buffer (4, 4), or None if the carry has no image.
    """

    def __init__(self, config: StyleGAN2Discriminator, nominal: int, size: Size, image_channels: int) -> None:
        super().__init__()
        channels, clamp, half = config.channels(size.nominal), config.conv_clamp, _half(config, nominal, size)
        before, after = channels[nominal], channels[nominal // 2]
        self.is_first, self.image_channels = nominal == size.nominal, image_channels
        sees_all = config.architecture == "skip"
        sees = self.is_first or sees_all
        self.fromrgb = Conv2d(image_channels, before, 1, clamp=clamp, half=half) if sees else None
        self.conv0 = Conv2d(before, before, 3, clamp=clamp, half=half)
        self.conv1 = Conv2d(before, after, 3, resamples=True, clamp=clamp, half=half)
        residual = config.architecture == "resnet"
        self.skip = Conv2d(before, after, 1, activated=False, resamples=True, half=half) if residual else None
        self.make_filter(sees_all)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C_in, H, W), (N,) -> (N, C_out, H/2, W/2), (N,); with ``skip``, the image's channels come after x's.

        The first block takes the image as x.
        """
        image = x
        if self.fromrgb is not None:
            if self.is_first:
                x = self.fromrgb(image)
            else:
                x, image = x.split((x.shape[1] - self.image_channels, self.image_channels), dim=1)
                x = x + self.fromrgb(image)
        if self.skip is None:
            x = self.conv1(self.conv0(x))
        else:
            x = self.skip(x, _RESIDUAL_GAIN) + self.conv1(self.conv0(x), _RESIDUAL_GAIN)
        if self.resample_filter is not None:
            x = torch.cat([x, fir.downsample(image.to(x.dtype), self.resample_filter)], dim=1)
        return x, labels


class DiscriminatorHead(nn.Module):
    """Feature map and label -> logit; without classes it does not read the label."""

    def __init__(self, config: StyleGAN2Discriminator, size: Size, image_channels: int, num_classes: int) -> None:
        super().__init__()
        channels, num_maps = config.channels(size.nominal)[BOTTOM], config.mbstd_channels
        self.image_channels = image_channels
        # Without a clamp, unlike those of the blocks, as in the original code.
        self.fromrgb = Conv2d(image_channels, channels, 1) if config.architecture == "skip" else None
        self.deviation = MinibatchDeviation(config.mbstd_group, num_maps) if num_maps else None
        self.conv = Conv2d(channels + num_maps, channels, 3, clamp=config.conv_clamp)
        self.fc = FullyConnected(channels * bottom_of(size).num_pixels, channels, activated=True)
        features = config.projection_size or channels
        self.out = FullyConnected(channels, features if num_classes else 1)
        mapping = (0, num_classes, features, config.mapping_layers, config.mapping_lr_multiplier)
        self.mapping = MappingNetwork(*mapping) if num_classes else None
        adapt(self, config.filter, _slope(config, "head"))
        if self.mapping is not None:
            adapt(self.mapping, config.filter, _slope(config, "mapping"))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, C, H, W), (N,) -> logits (N,), float32 whatever the network's type; with ``skip``, x ends in an image."""
        if self.fromrgb is not None:
            x, image = x.split((x.shape[1] - self.image_channels, self.image_channels), dim=1)
            x = x + self.fromrgb(image)
        if self.deviation is not None:
            x = self.deviation(x)
        x = self.out(self.fc(self.conv(x).flatten(1)))
        if self.mapping is None:
            return (x.squeeze(1),)
        return ((x * self.mapping(None, labels)).sum(dim=1) / math.sqrt(x.shape[1]),)


def _slope(config: StyleGAN2Generator | StyleGAN2Discriminator, part: str) -> float:
    """Return the slope below 0 of the activation of ``mapping``, ``blocks`` or ``head``."""
    return 0.0 if part in config.relu else SLOPE


def _half(config: StyleGAN2Generator | StyleGAN2Discriminator, nominal: int, size: Size) -> torch.dtype | None:
    """Return the type in which the block of a square's side computes, or None for the weights' type."""
    return HALF_TYPES[config.half_type] if config.is_half(nominal, size.nominal) else None


def generator_layers(config: StyleGAN2Generator, size: Size, image_channels: int, num_classes: int) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,), seeds (N,) -> images (N, image channels, H, W).

    The first entry of the first layer's carry is the style vectors; the other layers are a function of them.
    """
    sides = list(config.channels(size.nominal))
    mapping = Mapping(config, num_classes, num_ws=2 * len(sides))
    blocks: list[nn.Module] = [SynthesisInput(config, size, image_channels)]
    blocks += [SynthesisBlock(config, side, size, image_channels) for side in sides[1:]]
    for part, layers in (("mapping", [mapping]), ("blocks", blocks)):
        for layer in layers:
            adapt(layer, config.filter, _slope(config, part))
    return [mapping, *blocks]


def discriminator_layers(
    config: StyleGAN2Discriminator, size: Size, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, H, W), labels (N,) -> logits (N,)."""
    sides = sorted(config.channels(size.nominal), reverse=True)[:-1]
    blocks = [DiscriminatorBlock(config, side, size, image_channels) for side in sides]
    for block in blocks:
        adapt(block, config.filter, _slope(config, "blocks"))
    return [*blocks, DiscriminatorHead(config, size, image_channels, num_classes)]
