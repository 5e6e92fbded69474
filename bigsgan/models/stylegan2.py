"""StyleGAN2 (Karras et al. 2020, "Analyzing and improving the image quality of StyleGAN", arXiv 1912.04958).

With the changes of StyleGAN2-ADA (arXiv 2006.06676): half precision at the highest resolutions, clamped activations,
and a discriminator that is told the class.

Shapes: N samples, C channels, H x W pixels, Z numbers in a latent, W in a style vector. The generator's first layer
leaves (ws (N, num_ws, W), seeds (N,)), and its other ones (x (N, C, H, W), image (N, image channels, H, W), ws, seeds);
the discriminator's carry is (x, labels (N,)).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bigsgan.config.families.stylegan2 import BOTTOM_RESOLUTION, StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.models import fir, noise
from bigsgan.models.layers import Generators, RankAverages
from bigsgan.models.stylegan2_layers import (
    Conv2d,
    FullyConnected,
    MappingNetwork,
    MinibatchDeviation,
    SynthesisLayer,
    ToRGB,
)

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Streams of a sample's seed; the layers with noise have those from _FIRST_NOISE on.
_SECOND_LATENT, _CROSSOVER, _FIRST_NOISE = range(3)


class Mapping(RankAverages):
    """Latent and label -> the style vectors of all layers.

    In training, a share ``style_mixing`` of the samples takes the vectors from a random layer on from a second latent
    (Karras et al. 2019, arXiv 1812.04948, section 3.1). In evaluation mode the vectors are drawn towards their mean if
    ``truncation_psi`` is not 1 (the truncation trick, appendix B there).

    Attributes:
        w_avg: Buffer (W,), float32: moving average of the style vectors over the global micro-batches.
        truncation_psi: What is left of the distance to the mean, in evaluation mode.
        truncation_cutoff: How many of the first layers that holds for; None for all.
    """

    w_avg: Tensor
    beta = 0.995
    """What an update leaves of the moving average; StyleGAN2-ADA's."""

    def __init__(
        self, latent_size: int, num_classes: int, w_size: int, num_layers: int, num_ws: int, style_mixing: float
    ) -> None:
        super().__init__()
        self.latent_size, self.num_ws, self.style_mixing = latent_size, num_ws, style_mixing
        self.truncation_psi = 1.0
        self.truncation_cutoff: int | None = None
        self.network = MappingNetwork(latent_size, num_classes, w_size, num_layers)
        self.register_buffer("w_avg", torch.empty(w_size, dtype=torch.float32))

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
        """Which layers take the second latent's vector: (N,) -> (N, num_ws) bool; the first layer never does."""
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
        const: Parameter (C, 4, 4).
    """

    def __init__(self, channels: int, image_channels: int, w_size: int, clamp: float | None) -> None:
        super().__init__()
        self.const = nn.Parameter(torch.empty(channels, BOTTOM_RESOLUTION, BOTTOM_RESOLUTION))
        self.conv1 = SynthesisLayer(
            channels, channels, w_size, BOTTOM_RESOLUTION, up=False, stream=_FIRST_NOISE, clamp=clamp, half=None
        )
        self.torgb = ToRGB(channels, image_channels, w_size, clamp, half=None)

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Draw the constant from a standard normal distribution, in float32 whatever its type."""
        drawn = torch.empty(self.const.shape, dtype=torch.float32)
        self.const.copy_(drawn.normal_(generator=generators("const")))

    def forward(self, ws: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(N, num_ws, W), (N,) -> x (N, C, 4, 4), image (N, image channels, 4, 4), ws, seeds."""
        x = self.const.expand(len(ws), -1, -1, -1)
        x = self.conv1(x, ws[:, 0], seeds)
        return x, self.torgb(x, ws[:, 1]), ws, seeds


class SynthesisBlock(nn.Module):
    """Doubles the resolution of feature map and image, and adds to the image.

    Args:
        in_channels: C of the input.
        out_channels: C of the output.
        image_channels: 1 for grey, 3 for colour.
        w_size: W.
        resolution: Of the output.
        first: Number of the first style vector that is this block's; the last of its three is the next block's first.
        is_last: Leave the image alone in the carry.
        clamp: Keep activations within plus or minus this.
        half: Type to compute in, or None for the weights'.
    """

    resample_filter: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        image_channels: int,
        w_size: int,
        resolution: int,
        first: int,
        is_last: bool,
        clamp: float | None,
        half: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.first, self.is_last = first, is_last
        stream = _FIRST_NOISE + first
        self.conv0 = SynthesisLayer(in_channels, out_channels, w_size, resolution, True, stream, clamp, half)
        self.conv1 = SynthesisLayer(out_channels, out_channels, w_size, resolution, False, stream + 1, clamp, half)
        self.torgb = ToRGB(out_channels, image_channels, w_size, clamp, half)
        self.register_buffer("resample_filter", torch.empty(4, 4, dtype=torch.float32))

    @torch.no_grad()
    def initialize(self, generators: Generators) -> None:
        """Fill the filter."""
        fir.fill_filter(self.resample_filter)

    def forward(self, x: Tensor, image: Tensor, ws: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), (N, image channels, H, W), ws, seeds -> both twice as large, ws, seeds, or the image alone.

        The image has no bound; it is float32 whatever the network's type.
        """
        x = self.conv0(x, ws[:, self.first], seeds)
        x = self.conv1(x, ws[:, self.first + 1], seeds)
        image = fir.upsample(image, self.resample_filter) + self.torgb(x, ws[:, self.first + 2])
        return (image,) if self.is_last else (x, image, ws, seeds)


class DiscriminatorBlock(nn.Module):
    """Two convolutions, the second of which halves the resolution, and a residual connection.

    Args:
        image_channels: 1 or 3 where the block begins with the image, 0 elsewhere.
        in_channels: C of the input, or what the image is first turned into.
        out_channels: C of the output.
        residual: Whether there is a residual connection.
        clamp: Keep activations within plus or minus this.
        half: Type to compute in, or None for the weights'.
    """

    def __init__(
        self,
        image_channels: int,
        in_channels: int,
        out_channels: int,
        residual: bool,
        clamp: float | None,
        half: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.fromrgb = Conv2d(image_channels, in_channels, 1, clamp=clamp, half=half) if image_channels else None
        self.conv0 = Conv2d(in_channels, in_channels, 3, clamp=clamp, half=half)
        self.conv1 = Conv2d(in_channels, out_channels, 3, down=True, clamp=clamp, half=half)
        self.skip = Conv2d(in_channels, out_channels, 1, activated=False, down=True, half=half) if residual else None

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C_in, H, W), (N,) -> (N, C_out, H/2, W/2), (N,)."""
        if self.fromrgb is not None:
            x = self.fromrgb(x)
        if self.skip is None:
            return self.conv1(self.conv0(x)), labels
        gain = math.sqrt(0.5)  # the variance of a sum of two
        return self.skip(x, gain) + self.conv1(self.conv0(x), gain), labels


class DiscriminatorHead(nn.Module):
    """Feature map and label -> logit.

    Args:
        channels: C.
        num_classes: 0 for a head that is not told the class.
        mapping_layers: Of the label's mapping network.
        group: Images that a minibatch standard deviation is taken over.
        deviation_channels: How many feature maps show it; 0 leaves it out.
        clamp: Keep activations within plus or minus this.
    """

    def __init__(
        self,
        channels: int,
        num_classes: int,
        mapping_layers: int,
        group: int,
        deviation_channels: int,
        clamp: float | None,
    ) -> None:
        super().__init__()
        self.deviation = MinibatchDeviation(group, deviation_channels) if deviation_channels else None
        self.conv = Conv2d(channels + deviation_channels, channels, 3, clamp=clamp)
        self.fc = FullyConnected(channels * BOTTOM_RESOLUTION**2, channels, activated=True)
        self.out = FullyConnected(channels, channels if num_classes else 1)
        self.mapping = MappingNetwork(0, num_classes, channels, mapping_layers) if num_classes else None

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
        """(N, C, 4, 4), (N,) -> logits (N,), float32 whatever the network's type."""
        if self.deviation is not None:
            x = self.deviation(x)
        x = self.out(self.fc(self.conv(x).flatten(1)))
        if self.mapping is None:
            return (x.squeeze(1),)
        return ((x * self.mapping(None, labels)).sum(dim=1) / math.sqrt(x.shape[1]),)


def generator_layers(
    config: StyleGAN2Generator, resolution: int, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: latents (N, Z), labels (N,), seeds (N,) -> images (N, image channels, resolution, resolution).

    The first layer leaves the style vectors as the first entry of its carry; the rest is a function of them.
    """
    channels = config.channels(resolution)
    sizes = list(channels)
    num_ws = 2 * len(sizes)
    layers: list[nn.Module] = [
        Mapping(config.latent_size, num_classes, config.w_size, config.mapping_layers, num_ws, config.style_mixing),
        SynthesisInput(channels[BOTTOM_RESOLUTION], image_channels, config.w_size, config.conv_clamp),
    ]
    for i, size in enumerate(sizes[1:]):
        layers.append(
            SynthesisBlock(
                channels[size // 2],
                channels[size],
                image_channels,
                config.w_size,
                size,
                first=2 * i + 1,
                is_last=size == resolution,
                clamp=config.conv_clamp,
                half=HALF_TYPES[config.half_type] if config.is_half(size, resolution) else None,
            )
        )
    return layers


def discriminator_layers(
    config: StyleGAN2Discriminator, resolution: int, image_channels: int, num_classes: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, resolution, resolution), labels (N,) -> logits (N,)."""
    channels = config.channels(resolution)
    layers: list[nn.Module] = []
    for size in sorted(channels, reverse=True)[:-1]:
        layers.append(
            DiscriminatorBlock(
                image_channels if size == resolution else 0,
                channels[size],
                channels[size // 2],
                residual=config.architecture == "resnet",
                clamp=config.conv_clamp,
                half=HALF_TYPES[config.half_type] if config.is_half(size, resolution) else None,
            )
        )
    head = DiscriminatorHead(
        channels[BOTTOM_RESOLUTION],
        num_classes,
        config.mapping_layers,
        config.mbstd_group,
        config.mbstd_channels,
        config.conv_clamp,
    )
    return [*layers, head]
