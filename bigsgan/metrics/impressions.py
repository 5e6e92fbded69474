"""Features of a set of images: sums for each number of images that a metric needs, and rows.

Shapes: n images of one call, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bigsgan.metrics.features import Seen
from bigsgan.metrics.moments import Moments, Sum
from bigsgan.metrics.scores import SPLITS, ClassScores

COUNTED_TOGETHER = 1024
"""Images: sums of outer products cost as much for a few features as for many."""


class Rows:
    """Features that are kept one by one, on the host.

    Attributes:
        features: (n, D) float32.
        positions: Of their images in the set, (n,) int64.
        labels: Classes, (n,) int64.
    """

    def __init__(self, width: int) -> None:
        self.features = torch.empty(0, width)
        self.positions = torch.empty(0, dtype=torch.int64)
        self.labels = torch.empty(0, dtype=torch.int64)
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, features: Tensor, positions: Tensor, labels: Tensor) -> None:
        """Keep features (n, D) of any device."""
        self._pending.append((features.float().cpu(), positions, labels))

    def close(self) -> None:
        """Make one block of all that was added."""
        if self._pending:
            parts = zip((self.features, self.positions, self.labels), *self._pending, strict=True)
            self.features, self.positions, self.labels = (torch.cat(part) for part in parts)
            self._pending.clear()


class Impressions:
    """Of one rank's share of a set of images; images count by their position in the set.

    Attributes:
        num_images: In the whole set.
        moments: By limit: of the images at positions below it.
        scores: Likewise; empty where the network gives no logits.
        labels: Images of each class, (classes,) float64.
        rows: Of the images at positions below ``rows_limit``.
        rows_limit: See ``rows``.
    """

    def __init__(
        self,
        num_images: int,
        width: int,
        num_classes: int | None,
        num_labels: int,
        limits: Iterable[int],
        rows_limit: int,
    ) -> None:
        """Begin with nothing.

        Args:
            num_images: In the whole set.
            width: D.
            num_classes: K; None without logits.
            num_labels: Classes of the images; 1 where they have none.
            limits: See ``moments``.
            rows_limit: See ``rows``; 0 to keep none.
        """
        self.num_images, self.rows_limit, self.rows = num_images, rows_limit, Rows(width)
        self._pending: list[tuple[Seen, Tensor, Tensor]] = []
        self.labels = torch.zeros(num_labels, dtype=torch.float64)
        self.moments = {limit: Moments(width) for limit in limits}
        self.scores = {} if num_classes is None else {limit: ClassScores(num_classes) for limit in self.moments}

    def add(self, seen: Seen, positions: Tensor, labels: Tensor) -> None:
        """Count what was seen of n images, sooner or later.

        Args:
            seen: Of the images.
            positions: In the set, (n,); those at or behind ``num_images`` count for nothing.
            labels: Classes, (n,); of generated images those that were asked for.
        """
        self._pending.append((seen, positions, labels))
        if sum(len(positions) for _, positions, _ in self._pending) >= COUNTED_TOGETHER:
            self._count()

    def _count(self) -> None:
        if not self._pending:
            return
        logits = [seen.logits for seen, _, _ in self._pending if seen.logits is not None]
        features = torch.cat([seen.features for seen, _, _ in self._pending])
        seen = Seen(features, torch.cat(logits) if logits else None)
        positions = torch.cat([positions for _, positions, _ in self._pending])
        labels = torch.cat([labels for _, _, labels in self._pending])
        self._pending.clear()
        known = labels[positions < self.num_images]
        self.labels += torch.bincount(known, minlength=len(self.labels))
        for limit, moments in self.moments.items():
            num = min(limit, self.num_images)
            inside = positions < num
            moments.add(seen.features[inside])
            if seen.logits is not None:
                self.scores[limit].add(seen.logits[inside], positions[inside] * SPLITS // num)
        kept = positions < min(self.rows_limit, self.num_images)
        if kept.any():
            self.rows.add(seen.features[kept], positions[kept], labels[kept])

    def over_ranks(self, sum_over_ranks: Sum, device: torch.device) -> None:
        """End the collection: make the sums those of all ranks. A collective."""
        self._count()
        self.rows.close()
        self.labels = sum_over_ranks(self.labels.to(device)).cpu()
        self.moments = {limit: sums.over_ranks(sum_over_ranks, device) for limit, sums in self.moments.items()}
        self.scores = {limit: sums.over_ranks(sum_over_ranks, device) for limit, sums in self.scores.items()}
