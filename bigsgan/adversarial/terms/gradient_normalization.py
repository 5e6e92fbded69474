"""Gives the gradient of the loss on logits at G's images a size of its own (Lin et al. 2025, arXiv 2511.22475).

The loss on logits and what terms of images add to G's loss keep the ratio of their weights then, however steep D is.

Shapes: n samples of a micro-batch on one replica, N of a batch, C channels of H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bigsgan.adversarial.terms.term import Sum, Term
from bigsgan.checkpoint import SharedState
from bigsgan.config.adversarial_weight import Normalize
from bigsgan.engines import Outcome, chosen
from bigsgan.monitor import Statistics

STATISTIC = "adversarial_weight"
"""Name of the weight of the loss on logits, where it follows from gradients."""

_LEAST = 1e-8
"""What is added to the average, as in the public code."""


class GradientNormalization(Term, SharedState):
    """Divides by sqrt(v), where v is a moving average of C * H * W * E[|g|^2] over updates, this one included.

    g is the gradient of one sample's loss at its images, and the mean is over the batch, in any layout. The public code
    moves v by each micro-batch, which is the same if an update has one. A named entry of a run's state.

    Attributes:
        parameter: Empty, as it weighs gradients at images; see ``adaptive_weight.AdaptiveWeight``.
    """

    entry = "gradient_normalization"
    parameter = ""

    def __init__(
        self,
        section: Normalize,
        statistics: Statistics,
        device: torch.device,
        sum_over_ranks: Sum,
        sum_over_replicas: Sum,
    ) -> None:
        """Begin with v = 0.

        Args:
            section: The recipe's section.
            statistics: Collects the weight.
            device: This rank's device.
            sum_over_ranks: Sums a vector on the device elementwise over the ranks; the identity on one rank.
            sum_over_replicas: The same over the ranks that hold G's last layers.
        """
        super().__init__("normalization", "generator")
        self.statistics = (STATISTIC,)
        self._statistics = statistics
        self._decay, self._sum_over_ranks, self._sum_over_replicas = section.decay, sum_over_ranks, sum_over_replicas
        self._average = torch.zeros(1, device=device)
        # the sum of C * H * W * |g|^2 of this rank's samples, and their number
        self._own = torch.zeros(2, device=device)
        self._weight: Tensor | None = None
        self._factor = 1.0

    def begin_update(self, weights: Mapping[str, float]) -> None:
        """Take the factor of the loss on logits."""
        self._factor, self._weight = weights[self.name], None

    def weigh(self, index: int, grads: Sequence[Tensor]) -> None:
        """Take the gradient of the loss on logits, the first, at the images of micro-batch ``index``.

        Args:
            index: Number of the micro-batch, which does not matter.
            grads: Gradients of means over the micro-batch, (n, C, H, W) float32 each.
        """
        own, num = grads[0], len(grads[0])
        squares = own.square().sum() * (num * own.numel())  # n^2 for the mean, and C * H * W
        self._own += torch.stack([squares, squares.new_full((), float(num))])

    def weighted(self, index: int, grads: Tensor) -> Tensor:
        """Return the gradient at the images of a micro-batch, (n, C, H, W), after all have been weighed.

        On the first call all ranks that hold G's last layers meet.

        Args:
            index: Number of the micro-batch.
            grads: Those of the loss on logits and of terms of images, side by side, (n, 2 * C, H, W).
        """
        if self._weight is None:
            moved = self._moved(self._sum_over_replicas(self._own.clone()))
            # The update is skipped if v overflows, as if the gradient did: applied, it would leave G no gradient ever.
            self._weight = (self._factor / (moved.sqrt() + _LEAST)).where(torch.isfinite(moved), torch.nan)
            self._statistics.add(STATISTIC, self._weight[0])
        adversarial, rest = grads.chunk(2, dim=1)
        return self._weight * adversarial + rest

    @torch.no_grad()
    def finish_update(self, update: int, applied: Outcome) -> None:
        """Keep the average that the update moved, if it was applied. All ranks call this, even those without images."""
        moved = self._moved(self._sum_over_ranks(self._own.clone()))
        self._average.copy_(chosen(applied, moved, self._average))
        self._own.zero_()

    def state(self) -> dict[str, Tensor]:
        """Return v, (1,)."""
        return {"average": self._average}

    def _moved(self, sums: Tensor) -> Tensor:
        return torch.lerp(sums[:1] / sums[1], self._average, self._decay)
