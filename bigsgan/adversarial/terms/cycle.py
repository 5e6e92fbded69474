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

    def differences(input_images: Tensor, **outputs: Tensor) -> Tensor:
        """Return the sum over the domains of the mean absolute difference from one output, (n, A + B, H, W) each."""
        (made,) = outputs.values()
        return torch.stack([each.abs().mean() for each in (made - input_images).split([*channels], dim=1)]).sum()

    terms = ("cycle", objective.cycle, "again"), ("identity", objective.identity, "same")
    return [
        OutputTerm(name, "generator", weight, (output, "input_images"), differences)
        for name, weight, output in terms
        if weight
    ]
