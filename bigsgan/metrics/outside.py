"""Metrics of the user's own code: values of each image, on all ranks, and numbers from those of all images.

Shapes: n images (n, C, H, W) in [-1, 1], rounded to 8 bits; N images in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bigsgan import plugins
from bigsgan.config.metrics import Metric
from bigsgan.config.signature import build
from bigsgan.errors import UserError, counted
from bigsgan.images.codec import decode
from bigsgan.models.initial import drawing_from
from bigsgan.runtime import comm


class MetricError(UserError):
    """A metric from outside failed, on all ranks that measure."""


class Meter:
    """Shows images to a metric, which any rank may do for some of them, and keeps what it returns for each.

    The metric is called with images, and returns a tensor (n, ...) of values for each. Its method ``compute(real,
    fake)`` gets those of all images, (N, ...) on the host, in an order that does not depend on the ranks, and returns a
    number, or numbers by name.

    Attributes:
        metric: Name, arguments and number of images.
        has_reals: Whether it has seen the real images, whose values it keeps.
    """

    def __init__(self, metric: Metric, field: str) -> None:
        """Build the metric.

        Raises:
            UserError: ``field`` names code that cannot be built, or is not a metric.
        """
        keys = f"metrics.arguments.{metric.use}"
        with drawing_from(torch.Generator().manual_seed(0)):  # in every run and on every rank the same
            self._own: Any = build(field, metric.use, "metrics", metric.arguments, {}, keys)
        if not (callable(self._own) and callable(getattr(self._own, "compute", None))):
            problem = "must return a metric: an object that is called with images, and has the method compute"
            raise UserError(field, metric.use, problem, "see the guide on metrics of your own")
        if isinstance(self._own, nn.Module):
            self._own.to(comm.device()).eval()
        self.metric, self.has_reals = metric, False
        self._error: UserError | None = None
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._reals = torch.empty(0)  # on rank 0

    @torch.no_grad()
    def add(self, pixels: Tensor, positions: Tensor, num: int) -> None:
        """Show images, (n, C, H, W) uint8 on the device, of these positions (n,) in a set of ``num``."""
        inside = positions < num
        if self._error is None and inside.any():
            try:
                values = plugins.called("metrics", self.metric.use, partial(self._values, decode(pixels[inside])))
                self._parts.append((positions[inside], values))
            except UserError as error:
                self._error = error

    def keep_reals(self) -> None:
        """Take what was added for that of the real images. A collective.

        Raises:
            MetricError: The metric failed on some rank.
        """
        self._reals, self.has_reals = self._gathered(), True

    def compute(self) -> dict[str, float]:
        """Return numbers by name, from the values of the real images and of those that were added since. A collective.

        Raises:
            MetricError: The metric failed on some rank.
        """
        fakes, found, error = self._gathered(), dict[str, float](), None
        if comm.rank() == 0:
            try:
                found = plugins.called("metrics", self.metric.use, lambda: self._numbers(fakes), " in compute")
            except UserError as failed:
                error = failed
        self._raise(error)
        numbers: dict[str, float] = comm.from_rank_zero(found)
        return numbers

    def _values(self, images: Tensor) -> Tensor:
        values = self._own(images)
        if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != len(images):
            shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            wanted = f"has to return a tensor ({len(images)}, ...)"
            raise ValueError(f"it returns {shape} for {counted(len(images), 'image')}, and {wanted}")
        return values.detach().cpu()

    def _numbers(self, fakes: Tensor) -> dict[str, float]:
        found = self._own.compute(self._reals, fakes)
        name = self.metric.name
        named = {f"{name}_{key}": each for key, each in found.items()} if isinstance(found, Mapping) else {name: found}
        return {key: float(each) for key, each in named.items()}

    def _gathered(self) -> Tensor:
        """Return the values of all images by position on rank 0, and forget them."""
        parts, error, self._parts, self._error = self._parts, self._error, [], None
        gathered = comm.gather_objects((parts, error)) or []
        self._raise(next((each for _, each in gathered if each), None))
        found = [part for own, _ in gathered for part in own]
        if not found:
            return torch.empty(0)
        positions, values = (torch.cat(each) for each in zip(*found, strict=True))
        return values[positions.argsort()]

    def _raise(self, error: UserError | None) -> None:
        """Raise on all ranks what rank 0 knows of."""
        if told := comm.from_rank_zero(error):
            raise MetricError(told.field, told.value, told.problem, told.remedy, told.detail)
