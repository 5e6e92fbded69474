"""Compares G's images with targets (n, C, H, W), pixel by pixel; ``l1`` as in pix2pix (arXiv 1611.07004)."""

from __future__ import annotations

import torch.nn.functional as F

from bigsgan.adversarial.terms.term import FunctionTerm
from bigsgan.config.objective import Objective

COMPARED = ("images", "real_images")
"""What terms read that compare G's images with targets."""


def reconstruction_terms(objective: Objective) -> list[FunctionTerm]:
    """Return the terms of pixels that a recipe gives."""
    weights, delta = objective.of_targets, objective.huber.delta if objective.huber else 1.0
    values = {
        "l1": lambda images, real_images: (images - real_images).abs().mean(),
        "l2": lambda images, real_images: (images - real_images).square().mean(),
        "huber": lambda images, real_images: F.huber_loss(images, real_images, delta=delta),
    }
    return [FunctionTerm(n, "generator", weights[n], COMPARED, value) for n, value in values.items() if n in weights]
