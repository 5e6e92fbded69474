"""Keeps the images of one sample close to each other, where G makes several.

Shapes: n samples in a micro-batch, L images of a sample, from coarse to fine, images (n, L * C, H, W).
"""

from __future__ import annotations

import torch
from torch import Tensor


def consistency(levels: int, images: Tensor) -> Tensor:
    """Return the mean squared distance of each coarser image to the last, divided by its number from the end."""
    of_levels = images.unflatten(1, (levels, -1))
    differences = of_levels[:, :-1] - of_levels[:, -1:]
    shares = 1 / torch.arange(levels - 1, 0, -1, device=images.device, dtype=images.dtype).view(-1, 1, 1, 1)
    return (shares * differences.square()).mean()
