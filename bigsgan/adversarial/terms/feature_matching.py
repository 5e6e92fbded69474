"""Brings D's features of G's images near those of targets (Wang et al. 2018, arXiv 1711.11585, equation 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bigsgan.adversarial.terms.term import FEATURES, Term
from bigsgan.monitor import Statistics


class FeatureMatching(Term):
    """The mean |real - fake| over D's layers, times a weight."""

    def __init__(self, weight: float) -> None:
        super().__init__("feature_matching", "generator", (FEATURES,), factor=weight)

    def loss(self, read: Mapping[str, Any], statistics: Statistics) -> Tensor:
        """Return the distance of the features of real images and of G's, one layer after the other."""
        distances = []
        for feature in read[FEATURES]:
            real, fake = feature.float().chunk(2)  # float32: a mean over many small differences
            distances.append((fake - real.detach()).abs().mean())
        distance = torch.stack(distances).mean()
        statistics.add(self.statistics[0], distance, len(read[FEATURES][0]) // 2)
        return self.factor * distance
