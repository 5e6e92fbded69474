"""The adaptive weight of the adversarial loss (Esser et al. 2021, arXiv 2012.09841, equation 7).

    G's loss = R + w * A,    w = factor * min(|dR/dW| / (|dA/dW| + 1e-4), largest)

A is what D's logits add to G's loss, and R what terms of images add; W is one parameter of G, its last in the
public trainers. These take both norms on each rank by itself, so that w depends on how ranks share a batch.
Here both gradients are means over the batch before their norms are taken, so that it does not. No gradient flows
through w.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigsgan.adversarial.terms import Sum
from bigsgan.adversarial.terms.gradient_normalization import STATISTIC
from bigsgan.config.adversarial_weight import Adaptive
from bigsgan.monitor import Statistics

_LEAST = 1e-4
"""What the denominator has at least, as in the public code."""


class AdaptiveWeight:
    """Weighs the two parts of G's gradient at its images in an update.

    Attributes:
        parameter: The end of W's name.
    """

    def __init__(
        self, section: Adaptive, factor: float, num_passes: int, sum_over_replicas: Sum, statistics: Statistics
    ) -> None:
        """Begin an update.

        Args:
            section: The recipe's.
            factor: Factor of the weight.
            num_passes: Number of the update's micro-batches, over all replicas of G.
            sum_over_replicas: Sums a vector, in place, over the ranks that hold the same layers of G.
            statistics: Collects the weight.
        """
        self.parameter = section.parameter
        self._section, self._factor, self._num_passes = section, factor, num_passes
        self._sum_over_replicas, self._statistics = sum_over_replicas, statistics
        self._seen: dict[int, Tensor] = {}  # by micro-batch, (2, numel), or their sum at 0
        self._weight: Tensor | None = None

    def weigh(self, index: int, grads: Sequence[Tensor]) -> None:
        """Take the gradients of A and R by W, the means over this rank's samples of a micro-batch."""
        own = torch.stack([each.flatten() for each in grads])
        if self._section.over == "micro_batch":
            self._seen[index] = own
        else:
            self._seen[0] = self._seen[0] + own if self._seen else own

    def weighted(self, index: int, grads: Tensor) -> Tensor:
        """Return the gradient at the images of a micro-batch, (n, C, H, W), after all have been weighed.

        On the first call all ranks that hold G meet.

        Args:
            index: Number of the micro-batch.
            grads: Those of A and R, side by side, (n, 2 * C, H, W).
        """
        adversarial, rest = grads.chunk(2, dim=1)
        return self._of(index) * adversarial + rest

    def _of(self, index: int) -> Tensor:
        if self._section.over == "micro_batch":
            return self._ratio(self._seen.pop(index))
        if self._weight is None:
            self._weight = self._ratio(self._sum_over_replicas(self._seen.pop(0)) / self._num_passes)
        return self._weight

    def _ratio(self, grads: Tensor) -> Tensor:
        adversarial, rest = grads.norm(dim=1)
        weight = self._factor * (rest / (adversarial + _LEAST)).clamp(max=self._section.largest)
        # The update is skipped if one overflows, as if the gradient did: no ratio of such norms means anything.
        weight = torch.where(torch.isfinite(adversarial + rest), weight, torch.nan)
        self._statistics.add(STATISTIC, weight)
        return weight
