"""Resampling of feature maps with a short FIR filter, as StyleGAN2 does (Karras et al. 2020, arXiv 1912.04958).

Zhang 2019, "Making convolutional networks shift-invariant again" (arXiv 1904.11486) gives the reason: downsampling
without a low-pass filter aliases. Everything consists of convolutions with a fixed filter, or of the kernel in
``fused`` where that works, so gradients of any order exist.

Shapes: N samples, C channels, H x W pixels, K x K a filter, K even; pixels outside of a map are 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.models import fused
from bigsgan.models.dual import linearly

BINOMIAL = (1.0, 3.0, 3.0, 1.0)


def filter_like(x: Tensor, taps: Sequence[float] = BINOMIAL) -> Tensor:
    """Make the outer product of taps with themselves, whose sum is 1, in x's type on its device: (K, K), K even.

    That of (1, 3, 3, 1) is exact in every type. An odd number of taps gets a 0 in front, which keeps places and sizes.
    """
    if tuple(taps) == BINOMIAL:  # R3GAN makes it in each pass: on the device, so that no update waits for a copy
        row = (4 - 2 * (torch.arange(4, dtype=x.dtype, device=x.device) - 1.5).abs()) / 8
    else:
        row = torch.tensor([0.0] * (len(taps) % 2) + [tap / sum(taps) for tap in taps], dtype=x.dtype, device=x.device)
    return torch.outer(row, row)


def filter_size(taps: Sequence[float]) -> int:
    """K of ``filter_like``."""
    return len(taps) + len(taps) % 2


def upsample(x: Tensor, kernel: Tensor) -> Tensor:
    """Double the resolution: (N, C, H, W), (K, K) -> (N, C, 2H, 2W), in x's type.

    A zero is inserted after each pixel in both directions, and the result is filtered, times 4 to make up for zeros.
    """
    size, (channels, height, width) = kernel.shape[0], x.shape[1:]
    if fused.used_for(x):
        return fused.resample(x, kernel, fused.Geometry(2, 1, size // 2, 2 * height, 2 * width, gain=4.0))
    # A transposed convolution computes this, without the multiplications by zero.
    weight, padding = _per_channel(4 * kernel, x), size // 2 - 1
    return linearly(lambda x: F.conv_transpose2d(x, weight, stride=2, padding=padding, groups=channels), x)


def downsample(x: Tensor, kernel: Tensor) -> Tensor:
    """Halve the resolution: (N, C, H, W), (K, K) -> (N, C, H/2, W/2), in x's type, by a filter of stride 2."""
    padding = kernel.shape[0] // 2 - 1
    if fused.used_for(x):
        height, width = x.shape[2] // 2, x.shape[3] // 2
        return fused.resample(x, kernel, fused.Geometry(1, 2, padding, height, width))
    weight = _per_channel(kernel.flip(0, 1), x)
    return linearly(lambda x: F.conv2d(x, weight, stride=2, padding=padding, groups=x.shape[1]), x)


def blur(x: Tensor, kernel: Tensor, padding: int, gain: float = 1.0) -> Tensor:
    """Filter: (N, C, H, W), (K, K) -> (N, C, H + 2 * padding - K + 1, W + ...), in x's type, times ``gain``."""
    if fused.used_for(x):
        height, width = (side + 2 * padding - kernel.shape[0] + 1 for side in x.shape[2:])
        return fused.resample(x, kernel, fused.Geometry(1, 1, padding, height, width, gain))
    weight = _per_channel((gain * kernel).flip(0, 1), x)
    return linearly(lambda x: F.conv2d(x, weight, padding=padding, groups=x.shape[1]), x)


def _per_channel(kernel: Tensor, x: Tensor) -> Tensor:
    """(K, K) -> (C, 1, K, K) in x's type; half types hold these taps exactly too."""
    return kernel.to(x.dtype).expand(x.shape[1], 1, *kernel.shape)
