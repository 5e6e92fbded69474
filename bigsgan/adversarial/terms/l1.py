"""Compares G's images with the targets of pairs (Isola et al. 2017, arXiv 1611.07004, equation 3)."""

from __future__ import annotations

from torch import Tensor


def l1(images: Tensor, real_images: Tensor) -> Tensor:
    """Return the mean of |image - target| over images and targets (n, C, H, W)."""
    return (images - real_images).abs().mean()
