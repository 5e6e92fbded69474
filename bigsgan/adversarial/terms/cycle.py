"""Keeps generators between two domains near the images that they read (Zhu et al. 2017, arXiv 1703.10593).

Shapes: n samples of a micro-batch on one replica, A and B channels of the images of each domain, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigsgan.adversarial.terms.outputs import OutputTerm
from bigsgan.config.objective import Objective


def cycle_terms(objective: Objective, channels: Sequence[int]) -> list[OutputTerm]:
    """Return those of equation 2 and of section 5.2 that a recipe gives; ``channels`` are A and B."""

    def differences(made: Tensor, images: Tensor) -> Tensor:
        """Return the sum over the domains of the mean absolute difference, given two times (n, A + B, H, W)."""
        return torch.stack([each.abs().mean() for each in (made - images).split([*channels], dim=1)]).sum()

    weights = {"cycle": ("again", objective.cycle), "identity": ("same", objective.identity)}
    values = {
        "again": lambda again, input_images: differences(again, input_images),
        "same": lambda same, input_images: differences(same, input_images),
    }
    return [
        OutputTerm(name, "generator", weight, (output, "input_images"), values[output])
        for name, (output, weight) in weights.items()
        if weight
    ]
