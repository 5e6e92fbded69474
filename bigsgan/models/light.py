"""Blocks of convolutions with fewer parameters than full convolutions.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.config.families.blocks import BlockSection

STANDARD = BlockSection()
"""Full convolutions, which every network uses at its images."""

_REDUCTION = 16  # Hu et al. 2018, section 6.4


@dataclass(frozen=True)
class Makers:
    """Functions that make the parts of a network's convolutions."""

    # (C_in, C_out, groups) -> the convolution with the network's kernel and stride
    spatial: Callable[[int, int, int], nn.Module]
    pointwise: Callable[[int, int], nn.Module]  # (C_in, C_out) -> a 1x1 convolution
    linear: Callable[[int, int], nn.Module]  # (F_in, F_out) -> a linear map


class SqueezeAndExcitation(nn.Module):
    """Scales channels by numbers in (0, 1), computed from all channels' means (Hu et al. 2018, arXiv 1709.01507)."""

    def __init__(self, channels: int, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        squeezed = max(channels // _REDUCTION, 1)
        self.squeeze = linear(channels, squeezed)
        self.excite = linear(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W); treats each sample separately, and is differentiable twice."""
        # A sum over H * W pixels needs more than the 8 or 11 bits of a half type.
        means = x.mean(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(means))))
        return x * scale.to(x.dtype)[:, :, None, None]


def single(form: BlockSection, makers: Makers, in_channels: int, out_channels: int) -> nn.Module:
    """Make the block that replaces one convolution: (N, C_in, H, W) -> (N, C_out, H', W')."""
    if form.block == "inverted_residual":
        inside = form.expansion * out_channels
        return nn.Sequential(
            makers.pointwise(in_channels, inside), nn.ReLU(), *_narrowing(makers, inside, out_channels)
        )
    if form.block == "depthwise_separable":
        depthwise = makers.spatial(in_channels, in_channels, in_channels)
        return nn.Sequential(depthwise, makers.pointwise(in_channels, out_channels))
    return makers.spatial(in_channels, out_channels, form.groups if form.block == "grouped" else 1)


def pair(form: BlockSection, makers: Makers, in_channels: int, out_channels: int) -> tuple[nn.Module, nn.Module, int]:
    """Make the blocks that replace a residual block's two convolutions, and return the channels between them too.

    An inverted residual is one bottleneck for the pair: two of them would have more parameters than two full
    convolutions. Its width follows the output, because the input may be much narrower.
    """
    if form.block == "inverted_residual":
        inside = form.expansion * out_channels
        return makers.pointwise(in_channels, inside), nn.Sequential(*_narrowing(makers, inside, out_channels)), inside
    first = single(form, makers, in_channels, out_channels)
    return first, single(form, makers, out_channels, out_channels), out_channels


def _narrowing(makers: Makers, inside: int, out_channels: int) -> list[nn.Module]:
    """Make the second half of an inverted residual: filter each channel, weigh the channels, mix them."""
    return [
        makers.spatial(inside, inside, inside),
        nn.ReLU(),
        SqueezeAndExcitation(inside, makers.linear),
        makers.pointwise(inside, out_channels),
    ]
