"""The representation of images in networks: float32 in [-1, 1], -1 black and 1 white; grey has one channel, RGB three.

Shapes: any; networks take and give (n, C, H, W).
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode(pixels: Tensor) -> Tensor:
    """Turn bytes into images: float32 in [-1, 1], on the same device.

    Args:
        pixels: uint8, or another type with values 0 to 255; not changed.
    """
    # 127.5 maps 0 .. 255 onto -1 .. 1, both ends exact.
    return pixels.to(torch.float32, copy=True).div_(127.5).sub_(1.0)


def images_of(pixels: Tensor) -> Tensor:
    """Return what a data set holds as images, float32 in [-1, 1]: bytes, or images already."""
    return pixels if pixels.is_floating_point() else decode(pixels)


def encode(images: Tensor) -> Tensor:
    """Turn images into bytes: uint8, rounded, on the same device.

    Args:
        images: Any float type. Values outside [-1, 1] are clipped; NaN, which has no uint8, becomes black.
    """
    return byte_range(images.detach().nan_to_num(nan=-1.0).clamp(-1, 1)).round().to(torch.uint8)


def byte_range(images: Tensor) -> Tensor:
    """Map images in [-1, 1] to 0 to 255 in float32, neither rounded nor clipped.

    bfloat16, with 8 bits of mantissa, would be off by up to one grey level.
    """
    return (images.float() + 1) * 127.5
