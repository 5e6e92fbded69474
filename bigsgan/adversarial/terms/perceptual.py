"""A perceptual distance of G's images to targets, as a term.

Shapes: n images of a micro-batch, C channels of H x W pixels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigsgan.adversarial.terms.reconstruction import COMPARED
from bigsgan.adversarial.terms.term import Term
from bigsgan.config import Recipe
from bigsgan.config.reconstruction import Perceptual
from bigsgan.data.perceptual import Features, Fields, distances, open_features

FIELDS = Fields("objective.perceptual.path", "objective.perceptual.heads")


class PerceptualDistance(Term):
    """weight * the sum over layers of the mean over pixels of |difference of features|^2, with weights of channels."""

    def __init__(self, section: Perceptual, features: Features | None) -> None:
        """Take the features, which only a rank with D's first layers needs."""
        super().__init__("perceptual", "generator", COMPARED, factor=section.weight)
        self._features = features

    def value(self, images: Tensor, real_images: Tensor) -> Tensor:
        """Return the distance of images to targets (n, C, H, W) in [-1, 1], the mean over samples."""
        assert self._features is not None, "ranks with D's first layers have it"
        return torch.stack([each.mean() for each in distances(self._features, images, real_images)]).sum()


def build_features(recipe: Recipe, device: torch.device) -> Features | None:
    """Load the network of the recipe's perceptual distance, if there is one.

    Raises:
        UserError: See ``open_features``.
    """
    section = recipe.objective.perceptual
    return None if section is None else open_features(section, recipe.data.network_size, FIELDS, device)
