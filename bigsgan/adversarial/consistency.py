"""Keeps the images of one sample close to each other, where G makes several.

Shapes: n samples in a micro-batch, L images of a sample, from coarse to fine, images (n, L * C, H, W).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigsgan.config import objective
from bigsgan.monitor import Statistics


def consistency_grads(section: objective.Consistency, levels: int, images: Tensor, statistics: Statistics) -> Tensor:
    """Return d(loss)/d(images) of one micro-batch, (n, L * C, H, W), as the section defines this part of G's loss.

    It keeps the coarser images of a sample near its last image.
    """
    of_levels = images.detach().unflatten(1, (levels, -1))
    differences = of_levels[:, :-1] - of_levels[:, -1:]
    shares = 1 / torch.arange(levels - 1, 0, -1, device=images.device, dtype=images.dtype).view(-1, 1, 1, 1)
    statistics.add("loss/consistency", shares * differences.square())
    of_coarser = shares * differences * (2 * section.weight / differences.numel())
    return torch.cat([of_coarser, -of_coarser.sum(dim=1, keepdim=True)], dim=1).flatten(1, 2)
