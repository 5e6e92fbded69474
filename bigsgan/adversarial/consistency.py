"""Keeps the images of one sample close to each other, where G makes several.

Shapes: n samples in a micro-batch, L images of a sample, from coarse to fine, images (n, L * C, H, W).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigsgan.config import objective
from bigsgan.monitor import Statistics


class Consistency:
    """The part of G's loss that keeps the coarser images of a sample near its last image, as the section defines it."""

    def __init__(self, section: objective.Consistency, levels: int, statistics: Statistics) -> None:
        self._weight, self._levels, self._statistics = section.weight, levels, statistics

    def grads(self, images: Tensor) -> Tensor:
        """Return d(loss)/d(images) of one micro-batch, (n, L * C, H, W)."""
        levels = images.detach().unflatten(1, (self._levels, -1))
        differences = levels[:, :-1] - levels[:, -1:]
        shares = 1 / torch.arange(self._levels - 1, 0, -1, device=images.device, dtype=images.dtype).view(-1, 1, 1, 1)
        self._statistics.add("loss/consistency", shares * differences.square())
        of_coarser = shares * differences * (2 * self._weight / differences.numel())
        return torch.cat([of_coarser, -of_coarser.sum(dim=1, keepdim=True)], dim=1).flatten(1, 2)
