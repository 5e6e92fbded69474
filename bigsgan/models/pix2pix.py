"""pix2pix (Isola, Zhu, Zhou and Efros 2017, "Image-to-image translation with conditional adversarial networks").

Shapes: N samples, C channels, H x W pixels, P patches. The carry of the generator grows on the way down and shrinks on
the way up: (h (N, C, H, W), seeds (N,) while dropout follows, skipped feature maps fine to coarse); of the
discriminator: (h,).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.pix2pix import Pix2PixDiscriminator, Pix2PixGenerator, pix2pix_levels
from bigsgan.models import noise
from bigsgan.models.batch_norm import AffineBatchNorm
from bigsgan.models.layers import full
from bigsgan.models.plain import Conv2d, ConvTranspose2d

_STD = 0.02
_SLOPE = 0.2
_DROPPED = 0.5
_NUM_DROPOUTS = 3


class GeneratorInput(nn.Module):
    """The first halving, without normalisation."""

    def __init__(self, in_channels: int, out_channels: int, keeps_seeds: bool) -> None:
        super().__init__()
        self.keeps_seeds = keeps_seeds
        self.conv = Conv2d(in_channels, out_channels, 4, _STD, stride=2, padding=1)

    def forward(self, images: Tensor, labels: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
        """Images (N, C_in, H, W) in [-1, 1], (N,), (N,) -> (N, C, H/2, W/2), seeds."""
        h = self.conv(images)
        return (h, seeds) if self.keeps_seeds else (h,)


class Down(nn.Module):
    """Leaky ReLU, halving, normalisation; what comes in is carried on beside what goes out.

    Args:
        in_channels: C of the input.
        out_channels: C of the result.
        norm: ``batch`` or ``instance``.
        is_coarsest: Leave the normalisation out: of a single pixel nothing would be left.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str, is_coarsest: bool) -> None:
        super().__init__()
        self.conv = Conv2d(in_channels, out_channels, 4, _STD, stride=2, padding=1, bias=norm != "batch")
        self.norm = nn.Identity() if is_coarsest else _norm(norm, out_channels)

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), ... -> (N, C_out, H/2, W/2), ..., (N, C_in, H, W)."""
        return self.norm(self.conv(F.leaky_relu(h, _SLOPE))), *rest, h


class Up(nn.Module):
    """ReLU, doubling, normalisation, dropout; the last skipped feature map is laid beside the result.

    Args:
        in_channels: C of the input.
        out_channels: C of the result, and of the skipped map.
        norm: ``batch`` or ``instance``.
        stream: Of the dropout's draws; None for no dropout.
        keeps_seeds: Whether dropout follows later.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str, stream: int | None, keeps_seeds: bool) -> None:
        super().__init__()
        self.stream, self.keeps_seeds = stream, keeps_seeds
        self.conv = ConvTranspose2d(in_channels, out_channels, 4, _STD, stride=2, padding=1, bias=norm != "batch")
        self.norm = _norm(norm, out_channels)

    def forward(self, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """(N, C_in, H, W), [seeds,] ..., (N, C_out, 2H, 2W) -> (N, 2 * C_out, 2H, 2W), [seeds,] ...."""
        *rest_before, skipped = rest
        x = self.norm(self.conv(F.relu(h)))
        if self.stream is not None:
            seeds = rest_before[0]
            if self.training:
                kept = noise.uniform(seeds, self.stream, tuple(x.shape[1:])) >= _DROPPED
                x = x * kept.to(x.dtype) / (1 - _DROPPED)
            if not self.keeps_seeds:
                rest_before = rest_before[1:]
        return torch.cat([skipped, x], dim=1), *rest_before


class GeneratorOutput(nn.Module):
    """The last doubling -> image."""

    def __init__(self, channels: int, image_channels: int) -> None:
        super().__init__()
        self.conv = ConvTranspose2d(channels, image_channels, 4, _STD, stride=2, padding=1)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, H, W) -> (N, image channels, 2H, 2W) in [-1, 1], float32 whatever the network's type."""
        return (torch.tanh(full(self.conv(F.relu(h)))),)


class DiscriminatorInput(nn.Module):
    """Input and image side by side in the channels -> the first halving, without normalisation."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(in_channels, out_channels, 4, _STD, stride=2, padding=1)

    def forward(self, images: Tensor, labels: Tensor, inputs: Tensor) -> tuple[Tensor]:
        """(N, C, H, W), (N,), (N, C_in, H, W) -> (N, C_out, H/2, W/2)."""
        return (F.leaky_relu(self.conv(torch.cat([inputs, images], dim=1)), _SLOPE),)


class DiscriminatorBlock(nn.Module):
    """Convolution, normalisation, leaky ReLU."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, stride: int) -> None:
        super().__init__()
        self.conv = Conv2d(in_channels, out_channels, 4, _STD, stride, padding=1, bias=norm != "batch")
        self.norm = _norm(norm, out_channels)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C_in, H, W) -> (N, C_out, H / stride, W / stride), one pixel less each way with stride 1."""
        return (F.leaky_relu(self.norm(self.conv(h)), _SLOPE),)


class DiscriminatorHead(nn.Module):
    """Feature map -> a logit for each patch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = Conv2d(channels, 1, 4, _STD, stride=1, padding=1)

    def forward(self, h: Tensor) -> tuple[Tensor]:
        """(N, C, H, W) -> logits (N, P), float32 whatever the network's type."""
        return (full(self.conv(h).flatten(1)),)


class InstanceNorm(nn.Module):
    """Normalises each channel of each sample over its pixels (Ulyanov et al. 2016, arXiv 1607.08022)."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return F.instance_norm(full(x)).to(x.dtype)  # float32: sums over H * W values


def _norm(norm: str, channels: int) -> nn.Module:
    return AffineBatchNorm(channels) if norm == "batch" else InstanceNorm()


def generator_layers(
    config: Pix2PixGenerator, resolution: int, image_channels: int, input_channels: int
) -> list[nn.Module]:
    """Flat layer list: images (N, input channels, R, R), labels (N,), seeds (N,) -> (N, image channels, R, R)."""
    levels = pix2pix_levels(resolution)
    widths = [config.channels * min(2**i, 8) for i in range(levels)]
    # Dropout follows the coarsest doublings but the first, where there are three levels of full width below them.
    num_dropouts = min(_NUM_DROPOUTS, max(levels - 5, 0)) if config.dropout else 0
    layers: list[nn.Module] = [GeneratorInput(input_channels, widths[0], num_dropouts > 0)]
    for i in range(1, levels):
        layers.append(Down(widths[i - 1], widths[i], config.norm, is_coarsest=i == levels - 1))
    for i in range(levels - 1, 0, -1):
        dropout = levels - 1 - i  # 0 for the coarsest, which has none
        stream = dropout if 1 <= dropout <= num_dropouts else None
        in_channels = widths[i] if i == levels - 1 else 2 * widths[i]
        layers.append(Up(in_channels, widths[i - 1], config.norm, stream, dropout < num_dropouts))
    return [*layers, GeneratorOutput(2 * widths[0], image_channels)]


def discriminator_layers(
    config: Pix2PixDiscriminator, resolution: int, image_channels: int, input_channels: int
) -> list[nn.Module]:
    """Flat layer list: images (N, image channels, R, R), labels (N,), inputs (N, input channels, R, R) -> (N, P)."""
    widths = [config.channels * min(2**i, 8) for i in range(config.depth + 1)]
    layers: list[nn.Module] = [DiscriminatorInput(image_channels + input_channels, widths[0])]
    for i in range(1, config.depth + 1):
        layers.append(DiscriminatorBlock(widths[i - 1], widths[i], config.norm, stride=2 if i < config.depth else 1))
    return [*layers, DiscriminatorHead(widths[-1])]
