"""Measures a generator's samples against the real images: one pass over samples for all metrics.

Shapes: n images (n, C, H, W).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.config.metrics import ENDINGS, FIDELITIES, LEAST_IMAGES, OUTSIDE, Metric
from bigsgan.data.conditions import Conditions, picked
from bigsgan.data.datasets import ImageDataset
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.codec import encode
from bigsgan.metrics.codes import CodeUse
from bigsgan.metrics.features import Features
from bigsgan.metrics.fidelity import MeanFidelity
from bigsgan.metrics.impressions import Impressions
from bigsgan.metrics.moments import Gaussian, Moments, frechet_distance
from bigsgan.metrics.outside import Meter
from bigsgan.metrics.pairwise import Manifold, Shared, Tell, kernel_distance, manifold_metrics, share
from bigsgan.metrics.reals import each_real, num_labels, see_reals
from bigsgan.metrics.reference import Reference
from bigsgan.metrics.scores import jensen_shannon, kullback_leibler
from bigsgan.runtime import comm
from bigsgan.runtime.tf32 import tf32

_BY_ROWS = ("kid", "pr", "dc", "cfid")
_BY_LOGITS = ("is", "labels")


class Made(NamedTuple):
    """Samples, and what they should be."""

    images: Tensor  # (n, C, H, W) in [-1, 1] on the device
    targets: Tensor | None = None  # (n, C, H, W) uint8 on the device; None for samples from latents
    codes: Tensor | None = None  # (n, P) int64, on the rank that computes the quantized latents, if there are any
    num_codes: int = 0  # number of different codes; 0 if latents are not quantized


Generate = Callable[[int, Tensor], Made]
"""Makes samples, given the first one's number and their classes (n,).

Every rank of a replica calls it and gets the same samples.
"""


class Replica(NamedTuple):
    """The samples that this rank makes, and the part of them that it measures."""

    number: int  # number of this rank's replica of the generator
    num: int  # number of replicas
    part: int = 0  # number of this rank in its replica
    num_parts: int = 1  # number of ranks of a replica


class Measured(NamedTuple):
    """The result of one metric."""

    metric: Metric
    values: dict[str, float]  # by name, such as fid50k, or pr50k_precision and pr50k_recall
    num_real: int  # number of real images that it compares with; 0 if it compares with statistics
    num_fake: int  # number of samples
    seconds: float = 0.0  # time of all metrics that were measured together
    about: Mapping[str, str] = {}  # what else it depends on, for records
    direction: str = ""  # of translations between two domains, that of these

    def towards(self, direction: str) -> Measured:
        """Return the result as that of a direction, if there are two."""
        ending = f"_{direction}" if direction else ""
        values = {f"{name}{ending}": value for name, value in self.values.items()}
        return self._replace(values=values, direction=direction)


class Evaluation:
    """Measures some metrics of samples against one set of real images, whose features are computed once.

    Attributes:
        features: The feature network; on the host between measurements.
    """

    def __init__(
        self,
        asked: Sequence[Metric],
        features: Features,
        reals: ImageDataset | Reference,
        data: Data,
        batch: int,
        cache: Path,
        tell: Tell = lambda _: None,
        conditions: Conditions = range(1),
    ) -> None:
        """Prepare metrics of images, which ``ppl`` is not; this reads no image yet.

        ``reals`` are the images to compare with, or their statistics. The directory ``cache`` keeps statistics of
        images. ``tell`` is called with texts about progress. ``conditions`` are those of samples, where labels are
        vectors. Metrics of the user's own code are built.

        Raises:
            UserError: A metric does not fit the network or the data.
        """
        self._asked, self.features, self._data = asked, features, data
        self._against = reals if isinstance(reals, Reference) else Reference(reals)
        self._batch, self._cache, self._tell, self._conditions = batch, cache, tell, conditions
        self._reals: Impressions | None = None
        self._meters = [Meter(metric, "metrics.names") for metric in asked if metric.kind == OUTSIDE]
        if self._against.images is not None and len(self._against.images) < LEAST_IMAGES:
            problem = f"must contain at least {LEAST_IMAGES} images for metrics"
            raise UserError("data.root", data.root, problem, "use a larger data set")
        for metric in asked:
            if metric.kind in _BY_LOGITS and features.num_classes is None:
                problem = f"needs class logits, which {features.name} does not compute"
                raise UserError("metrics", metric.name, problem, "choose a network that classifies, such as inception")
            if metric.kind == "cfid" and (data.has_vectors or not (data.num_classes and self._against.labelled)):
                raise UserError("metrics", metric.name, "needs data with one class for each image", "use fid instead")
            if self._against.images is None and metric.kind not in ("fid", "is"):
                raise UserError("metrics", metric.name, "needs real images, not their statistics", "remove it")

    def measure(
        self, generate: Generate, replica: Replica, stopped: Callable[[], bool] = lambda: False
    ) -> list[Measured]:
        """Make samples and compare their features with the real images'. A collective.

        ``stopped`` is called with each batch on all ranks of the generator, with the same answer: whether to give up.
        The result is the same on all of them, and empty if it was stopped.

        Raises:
            MetricError: A metric from outside failed.
        """
        start = time.perf_counter()
        with tf32(False):  # its ten bits would change features visibly
            self.features.network.to(comm.device())
            try:
                reals = self._see_reals(stopped) if self._show_reals(stopped) else None
                means = [MeanFidelity(each, self.features.lpips) for each in self._asked if each.kind in FIDELITIES]
                uses = [CodeUse(metric) for metric in self._asked if metric.kind == "codebook"]
                fakes = None if reals is None else self._see_fakes(generate, replica, reals, means, uses, stopped)
            finally:
                self.features.network.cpu()  # the memory is for training
            if reals is None or fakes is None:
                return []
            comparison = _Comparison(reals, fakes, self._tell, self._against.gaussian)
            found = [comparison.measure(metric, metric.num) for metric in self._asked if metric.needs_features]
            found += [Measured(m.metric, m.values(), m.metric.num, m.metric.num, about=m.about) for m in means]
            found += [Measured(use.metric, use.values(), use.metric.num, use.metric.num) for use in uses]
            found += [self._read(meter) for meter in self._meters]
        seconds = time.perf_counter() - start
        return [measured._replace(seconds=seconds) for measured in comm.from_rank_zero(found)]

    def _see_reals(self, stopped: Callable[[], bool]) -> Impressions | None:
        dataset = self._against.images
        if dataset is None or all(metric.kind in (*FIDELITIES, "codebook") for metric in self._asked):
            return Impressions(self.features, 0, num_labels(self._data), [0], 0)
        if self._reals is None:
            kept = [len(dataset) if m.kind == "cfid" else m.num for m in self._asked if m.kind in _BY_ROWS]
            size = max(kept, default=0), self._batch
            self._reals = see_reals(dataset, self._data, self.features, *size, self._cache, self._tell, stopped)
        return self._reals

    def _show_reals(self, stopped: Callable[[], bool]) -> bool:
        """Show real images to the metrics from outside that have not seen them; False if stopped."""
        meters, dataset = [meter for meter in self._meters if not meter.has_reals], self._against.images
        if not meters or dataset is None:
            return True
        nums = [min(meter.metric.num, len(dataset)) for meter in meters]
        for read in each_real(dataset, self._data, max(nums), self._batch, self._tell, stopped):
            if read is None:
                return False
            for meter, num in zip(meters, nums, strict=True):
                meter.add(*read[:2], num)
        for meter in meters:
            meter.keep_reals()
        return True

    def _read(self, meter: Meter) -> Measured:
        self._tell(meter.metric.name)
        assert self._against.images is not None
        num_real = min(meter.metric.num, len(self._against.images))
        return Measured(meter.metric, meter.compute(), num_real, meter.metric.num)

    def _see_fakes(
        self,
        generate: Generate,
        replica: Replica,
        reals: Impressions,
        means: Sequence[MeanFidelity],
        uses: Sequence[CodeUse],
        stopped: Callable[[], bool],
    ) -> Impressions | None:
        """Make samples; None if stopped. Replicas take equally many batches, in turn, as engines compute together."""
        labels = reals.labels if self._against.labelled and reals.num_images else torch.ones_like(reals.labels)
        nums = {metric.num for metric in self._asked}
        kept = max((metric.num for metric in self._asked if metric.kind in _BY_ROWS), default=0)
        found = Impressions(self.features, max(nums), num_labels(self._data), nums, kept)
        step = self._batch * replica.num
        for start in range(0, max(nums), step):
            self._tell(f"sample {start} of {max(nums)}")
            first = start + self._batch * replica.number
            classes = drawn_labels(first, self._batch, labels)
            made = generate(first, self._drawn_vectors(first) if self._data.has_vectors else classes)
            positions = torch.arange(first, first + self._batch)
            own = slice(replica.part, None, replica.num_parts)
            if stopped():
                return None
            for use in uses:
                use.add(made.codes, made.num_codes, positions)
            if len(positions[own]):
                pixels = encode(made.images[own])
                found.add(self.features(pixels), positions[own], classes[own])
                for meter in self._meters:
                    meter.add(pixels, positions[own], meter.metric.num)
                for mean in means:
                    assert made.targets is not None, "the recipe's check asks for targets"
                    mean.add(pixels, made.targets[own], positions[own])
        found.over_ranks()
        return found

    def _drawn_vectors(self, first: int) -> Tensor:
        """Draw labels (batch, K) of the samples from number ``first`` on, from those of the data."""
        places = Draws(seed=0).integers("metrics/labels", (), first, self._batch, len(self._conditions))
        return picked(self._conditions, places)


class _Comparison:
    """Metrics of the features of real images and of samples."""

    def __init__(self, reals: Impressions, fakes: Impressions, tell: Tell, gaussian: Gaussian | None) -> None:
        self._reals, self._fakes, self._tell, self._gaussian = reals, fakes, tell, gaussian
        self._manifolds: dict[int, Manifold] = {}

    def measure(self, metric: Metric, num: int) -> Measured:
        """Compute a metric. A collective; only rank 0 has all values."""
        self._tell(metric.name)
        whole = metric.kind in ("fid", "cfid", "labels", "is")
        named = {f"{metric.name}{ending}": value for ending, value in self._values(metric.kind, num).items()}
        num_real = self._reals.num_images if whole else min(num, self._reals.num_images)
        if metric.kind == "fid" and self._gaussian is not None:
            num_real = 0
        return Measured(metric, named, num_real, num)

    def _values(self, kind: str, num: int) -> dict[str, float]:
        """Values by the ending of their names."""
        num_real = self._reals.num_images
        if kind == "fid":
            if comm.rank() != 0:  # this takes seconds on the host, and other ranks need no result
                return {}
            return {"": frechet_distance(self._gaussian or self._reals.moments[num_real], self._fakes.moments[num])}
        if kind == "cfid":
            return {"": self._class_fid(num)}
        if kind == "kid":
            return {"": kernel_distance(*self._shared(num))}
        if kind == "is":
            return dict(zip(ENDINGS[kind], self._fakes.scores[num].inception_score(), strict=True))
        if kind == "labels":
            real, fake = self._reals.scores[num_real].histogram, self._fakes.scores[num].histogram
            return dict(zip(ENDINGS[kind], (kullback_leibler(fake, real), jensen_shannon(fake, real)), strict=True))
        if num not in self._manifolds:
            self._manifolds[num] = manifold_metrics(*self._shared(num))
        return {ending: getattr(self._manifolds[num], ending[1:]) for ending in ENDINGS[kind]}

    def _class_fid(self, num: int) -> float:
        """Mean FID over classes with at least two images on both sides; ranks share the classes."""
        own, num_own, num_ranks = 0.0, 0, comm.world_size()
        for first in range(0, len(self._reals.labels), num_ranks):
            self._tell(f"classes from {first} on")
            mine: list[Moments] = []
            for label in range(first, min(first + num_ranks, len(self._reals.labels))):
                limits = ((self._reals, self._reals.num_images), (self._fakes, num))
                sides = [self._class_moments(seen, label, limit) for seen, limit in limits]
                mine = sides if label == first + comm.rank() else mine
            if mine and min(side.num for side in mine) > 1:  # all ranks compute at the same time, each for one class
                own, num_own = own + frechet_distance(*mine), num_own + 1
        total, num_classes = comm.total(own), comm.total(num_own)
        return total / num_classes if num_classes else float("nan")

    def _class_moments(self, seen: Impressions, label: int, limit: int) -> Moments:
        moments = Moments(seen.rows.features.shape[1])
        moments.add(seen.rows.features[(seen.rows.labels == label) & (seen.rows.positions < limit)])
        return moments.over_ranks()

    def _shared(self, num: int) -> tuple[Shared, Shared]:
        own = [seen.rows.features[seen.rows.positions < num] for seen in (self._reals, self._fakes)]
        return share(own[0], self._tell), share(own[1], self._tell)


def drawn_labels(first: int, num: int, counts: Tensor) -> Tensor:
    """Draw classes (num,) of the samples from number ``first`` on, as frequent as in ``counts`` of real images.

    A sample's class depends only on its number, not on the ranks.
    """
    shares = torch.from_numpy(Draws(seed=0).uniform("metrics/labels", (), first, num, 1)[:, 0]).double()
    bounds = counts.cumsum(0) / counts.sum()
    return torch.searchsorted(bounds, shares, right=True).clamp(max=len(counts) - 1)
