"""Collects features of a set of images: sums for each number of images that a metric needs, and rows.

Shapes: n images of one call, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.metrics.features import Features, Seen
from bigsgan.metrics.moments import Moments
from bigsgan.metrics.scores import SPLITS, ClassScores
from bigsgan.runtime import comm

COUNTED_TOGETHER = 1024
"""Number of images to count at a time: sums of outer products cost as much for few features as for many."""


class Rows(NamedTuple):
    """Features that are kept one by one, on the host."""

    features: Tensor  # (n, D) float32
    positions: Tensor  # positions of their images in the set, (n,) int64
    labels: Tensor  # classes, (n,) int64


def join_rows(parts: Iterable[Rows], width: int) -> Rows:
    """Join several blocks of rows into one; features (n, D) have D = ``width``."""
    none = Rows(torch.empty(0, width), *torch.empty(2, 0, dtype=torch.int64))
    return Rows(*(torch.cat(part) for part in zip(none, *parts, strict=True)))


class Impressions:
    """Sums and rows of one rank's share of a set of images; an image counts by its position in the set.

    Attributes:
        num_images: Number of images in the whole set.
        moments: Moments by limit, of the images at positions below the limit.
        scores: Class scores by limit, likewise; empty if the network gives no logits.
        labels: Number of images of each class, (classes,) float64.
        rows: Rows of the images at positions below ``rows_limit``, after the collection has ended.
        rows_limit: See ``rows``.
    """

    def __init__(
        self, features: Features, num_images: int, num_labels: int, limits: Iterable[int], rows_limit: int
    ) -> None:
        """Begin empty, for outputs of ``features`` on images of ``num_labels`` classes.

        ``limits`` are the keys of ``moments``.
        """
        width, num_classes = features.width, features.num_classes
        self.num_images, self.rows_limit, self.rows = num_images, rows_limit, join_rows([], width)
        self._parts: list[Rows] = []
        self._pending: list[tuple[Seen, Tensor, Tensor]] = []
        self.labels = torch.zeros(num_labels, dtype=torch.float64)
        self.moments = {limit: Moments(width) for limit in limits}
        self.scores = {} if num_classes is None else {limit: ClassScores(num_classes) for limit in self.moments}

    def add(self, seen: Seen, positions: Tensor, labels: Tensor) -> None:
        """Count the features of n images, now or in a later call.

        Args:
            seen: Features and logits of the images.
            positions: Positions in the set, (n,); positions from ``num_images`` on do not count.
            labels: Classes, (n,); for generated images the requested ones.
        """
        self._pending.append((seen, positions, labels))
        if sum(len(positions) for _, positions, _ in self._pending) >= COUNTED_TOGETHER:
            self._count()

    def _count(self) -> None:
        if not self._pending:
            return
        seen, *others = zip(*self._pending, strict=True)
        positions, labels = map(torch.cat, others)
        features = torch.cat([each.features for each in seen])
        logits = torch.cat([each.logits for each in seen]) if self.scores else None
        self._pending.clear()
        known = labels[positions < self.num_images]
        self.labels += torch.bincount(known, minlength=len(self.labels))
        for limit, moments in self.moments.items():
            num = min(limit, self.num_images)
            inside = positions < num
            moments.add(features[inside])
            if logits is not None:
                self.scores[limit].add(logits[inside], positions[inside] * SPLITS // num)
        kept = positions < min(self.rows_limit, self.num_images)
        if kept.any():
            self._parts.append(Rows(features[kept].float().cpu(), positions[kept], labels[kept]))

    def over_ranks(self) -> None:
        """End the collection, and add up the sums of all ranks. A collective."""
        self._count()
        self.rows = join_rows(self._parts, self.rows.features.shape[1])
        self._parts.clear()
        self.labels = comm.sum_over_ranks(self.labels.to(comm.device())).cpu()
        self.moments = {limit: sums.over_ranks() for limit, sums in self.moments.items()}
        self.scores = {limit: sums.over_ranks() for limit, sums in self.scores.items()}
