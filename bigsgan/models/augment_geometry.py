"""Geometric augmentations of ADA (Karras et al. 2020, arXiv 2006.06676, appendix B.2), executed as one resampling.

All transformations of a sample form one inverse matrix, which maps a pixel of the result to its source. The image is
enlarged by 2 with the low-pass filter of the sym6 wavelet, sampled bilinearly on a grid twice as fine as the result,
and reduced with the same filter. As the filter is orthogonal, the identity stays the identity.

The published code pads by reflection, by a margin that it computes from the batch, which makes the host wait. Here
images are reflected without end: a reflected image repeats after 2 (W - 1) pixels, so one enlarged period and
coordinates modulo the period suffice. The host never reads the data, and no sample depends on another. Results are
equal where the published margin contains all pixels that are read; beyond it, at most W - 1 pixels, there are zeros.

Shapes: N samples, C channels, H x W pixels; matrices act on (x, y, 1) in pixels from the image's centre.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bigsgan.models.augment_draws import AugmentationDraws
from bigsgan.models.dual import linearly

# Decomposition low-pass filter of the wavelet sym6 (Daubechies 1992, "Ten lectures on wavelets"); adds up to sqrt(2).
SYM6 = (
    *(0.015404109327027373, 0.0034907120842174702, -0.11799011114819057, -0.048311742585633),
    *(0.4910559419267466, 0.787641141030194, 0.3379294217276218, -0.07263752278646252),
    *(-0.021060292512300564, 0.04472490177066578, 0.0017677118642428036, -0.007800708325034148),
)
_CENTER = 5  # number of the tap of SYM6 at the sample itself
_REACH = 3  # input pixels on either side that an enlarged pixel depends on

# Table of strengths, appendix B.1.
_SHIFT_MAX = 0.125
_SCALE_STD = 0.2
_STRETCH_STD = 0.2
_TRANSLATION_STD = 0.125


class Geometry(NamedTuple):
    """Strengths of the transformations of each sample, in the order in which they act."""

    flip: Tensor  # (N,) 1 to mirror left and right, or 0
    quarter_turns: Tensor  # (N,) 0 to 3, anticlockwise as `torch.rot90` counts them
    shift: Tensor  # (N, 2) to the right and down as shares of width and height, rounded to whole pixels
    scale: Tensor  # (N,) factor
    rotation_before: Tensor  # (N,) radians, before the stretch
    stretch: Tensor  # (N,) factor of the width, and divisor of the height
    rotation_after: Tensor  # (N,) radians, after the stretch
    translation: Tensor  # (N, 2) to the right and down as shares of width and height


def draw_geometry(draws: AugmentationDraws, p: Mapping[str, Tensor]) -> Geometry:
    """Draw the strengths; ``p`` gives each transformation's probability (1,)."""
    # At least one of the two rotations acts with probability p.
    rotates = 1 - torch.sqrt((1 - p["rotation"]).clamp(0, 1))

    def angle(name: str) -> Tensor:
        return draws.chosen(name, rotates, (2 * draws.uniform(name) - 1) * math.pi, 0)

    return Geometry(
        flip=draws.chosen("flip", p["flip"], torch.floor(2 * draws.uniform("flip")), 0),
        quarter_turns=draws.chosen(
            "quarter_turns", p["quarter_turns"], torch.floor(4 * draws.uniform("quarter_turns")), 0
        ),
        shift=draws.chosen("shift", p["shift"], (2 * draws.uniform("shift", 2) - 1) * _SHIFT_MAX, 0),
        scale=draws.factor("scale", p["scale"], _SCALE_STD),
        rotation_before=angle("rotation_before"),
        stretch=draws.factor("stretch", p["stretch"], _STRETCH_STD),
        rotation_after=angle("rotation_after"),
        translation=draws.chosen("translation", p["translation"], _TRANSLATION_STD * draws.normal("translation", 2), 0),
    )


def inverse_matrix(geometry: Geometry, height: int, width: int) -> Tensor:
    """Return the matrix (N, 3, 3) from a pixel of the result to its source: the product of inverses, last rightmost.

    Quarter turns are rotations about the centre too, so an image that is not square keeps its shape, and shows its
    reflection outside of the turned image.
    """
    shift_x, shift_y = torch.round(geometry.shift[:, 0] * width), torch.round(geometry.shift[:, 1] * height)
    parts = [
        _scaling(1 - 2 * geometry.flip, torch.ones_like(geometry.flip)),
        _rotation(geometry.quarter_turns * (math.pi / 2)),
        _translation(-shift_x, -shift_y),
        _scaling(1 / geometry.scale, 1 / geometry.scale),
        _rotation(geometry.rotation_before),
        _scaling(1 / geometry.stretch, geometry.stretch),
        _rotation(geometry.rotation_after),
        _translation(-geometry.translation[:, 0] * width, -geometry.translation[:, 1] * height),
    ]
    return reduce(torch.matmul, parts)


def warp(images: Tensor, inverse: Tensor, lowpass: Tensor) -> Tensor:
    """Resample images (N, C, H, W) by inverse matrices (N, 3, 3), with a filter ``lowpass`` (12,) that adds up to 1.

    Differentiable any number of times by the images. H and W are at least 2; all tensors are float32 or float64.
    """
    height, width = images.shape[2:]
    x = reflected(images, 2, -_REACH, 2 * (height - 1) + _REACH + 1)
    x = reflected(x, 3, -_REACH, 2 * (width - 1) + _REACH + 1)
    x = _enlarged(_enlarged(x, lowpass, 3), lowpass, 2)
    grid = _grid(inverse, height, width)
    x = linearly(lambda x: _Sample.apply(x, grid), x)
    return _filtered(_filtered(x, lowpass[None], 3, stride=2), lowpass[None], 2, stride=2)


def reflected(x: Tensor, dim: int, begin: int, end: int) -> Tensor:
    """Return pixels ``begin`` up to ``end`` along ``dim`` of the endlessly reflected image, borders not repeated."""
    period = 2 * (x.shape[dim] - 1)
    index = torch.arange(begin, end, device=x.device) % period
    return x.index_select(dim, torch.minimum(index, period - index))


def _enlarged(x: Tensor, lowpass: Tensor, dim: int) -> Tensor:
    """Double the pixels along ``dim``: pixel i of the input, from ``_REACH`` on, goes to 2 (i - _REACH).

    Textbooks insert zeros between pixels, and every second tap only meets zeros; here each phase has its own filter.
    """
    backwards = 2 * lowpass.flip(0)  # twice, as half of the taps add up to 1/2
    phases = torch.stack([F.pad(backwards[0::2], (0, 1)), F.pad(backwards[1::2], (1, 0))])
    phased = _filtered(x, phases, dim).unflatten(1, (-1, 2))  # (N, C, phases, ...)
    return phased.movedim(2, dim + 1).flatten(dim, dim + 1)


def _filtered(x: Tensor, kernels: Tensor, dim: int, stride: int = 1) -> Tensor:
    """Correlate each channel (N, C, ...) with each of ``kernels`` (K, taps) along ``dim``: (N, C * K, ...).

    Samples become channels, as torch computes depthwise convolutions in full float32, and others maybe in TF32.
    """
    n, c, h, w = x.shape
    k, taps = kernels.shape
    weight = kernels.view(k, 1, taps, 1) if dim == 2 else kernels.view(k, 1, 1, taps)
    strides = (stride, 1) if dim == 2 else (1, stride)
    repeated = weight.repeat(n * c, 1, 1, 1)
    y = linearly(lambda x: F.conv2d(x, repeated, stride=strides, groups=n * c), x.reshape(1, n * c, h, w))
    return y.view(n, c * k, *y.shape[2:])


def _grid(inverse: Tensor, height: int, width: int) -> Tensor:
    """Return the places in the enlarged period that the twice finer result reads: (N, 2H + 10, 2W + 10, 2)."""
    y, x = (_half_pixels(size, inverse) for size in (height, width))
    points = [
        row[:, 0, None, None] * x[None, None, :] + row[:, 1, None, None] * y[None, :, None] + row[:, 2, None, None]
        for row in inverse[:, :2].unbind(1)
    ]
    scaled = []
    for point, size in zip(points, (width, height), strict=True):
        period = 4 * (size - 1)
        # An enlarged period has two more pixels; one of them is the right neighbour of the last coordinate.
        wrapped = torch.remainder(2 * (point + (size - 1) / 2), period)
        scaled.append(wrapped * (2 / (period + 1)) - 1)
    return torch.stack(scaled, dim=-1)


def _half_pixels(size: int, like: Tensor) -> Tensor:
    """Return the coordinates, from the centre, that the reducing filter reads: half-pixel steps, ``_CENTER`` ahead."""
    steps = torch.arange(2 * size + len(SYM6) - 2, device=like.device, dtype=like.dtype)
    return (steps - _CENTER) / 2 - (size - 1) / 2


class _Sample(torch.autograd.Function):
    """Bilinear sampling of (N, C, H, W) at a grid that has no gradient.

    It is linear in the images, so its gradient is the adjoint, whose gradient is the sampling again. torch's own
    sampling has no second derivative.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, grid: Tensor) -> Tensor:
        ctx.save_for_backward(grid)
        ctx.shape = images.shape
        return F.grid_sample(images, grid, align_corners=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (grid,) = ctx.saved_tensors
        return _SampleAdjoint.apply(grad, grid, ctx.shape), None


class _SampleAdjoint(torch.autograd.Function):
    """Adjoint of ``_Sample``: adds each gradient, weighted, to the four pixels that were read."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, grid: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(grid)
        # Without the grid's gradient, only the shape of the images matters.
        bilinear, zeros, align_corners = 0, 0, True
        needed = [True, False]
        return torch.ops.aten.grid_sampler_2d_backward(
            grad, grad.new_empty(shape), grid, bilinear, zeros, align_corners, needed
        )[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (grid,) = ctx.saved_tensors
        return _Sample.apply(grad, grid), None, None


def _matrix(rows: list[list[Tensor]]) -> Tensor:
    """Stack tensors (N,), given row by row -> (N, rows, columns)."""
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def _scaling(x: Tensor, y: Tensor) -> Tensor:
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    return _matrix([[x, zero, zero], [zero, y, zero], [zero, zero, one]])


def _rotation(angle: Tensor) -> Tensor:
    zero, one = torch.zeros_like(angle), torch.ones_like(angle)
    sin, cos = angle.sin(), angle.cos()
    return _matrix([[cos, -sin, zero], [sin, cos, zero], [zero, zero, one]])


def _translation(x: Tensor, y: Tensor) -> Tensor:
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    return _matrix([[one, zero, x], [zero, one, y], [zero, zero, one]])
