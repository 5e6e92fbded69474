"""Measures how fast a run trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bigsgan.data import RealImages


class Clock:
    """Measures speed between two reports, without the time that samples and checkpoints take."""

    def __init__(self, nimg: int, reals: RealImages) -> None:
        self._reals = reals
        self.restart(nimg)

    def data_wait(self) -> float:
        """Return the share of the time since the last report that this rank waited for images."""
        waited = self._reals.waited_seconds - self._waited
        return waited / max(time.perf_counter() - self._since, 1e-9)

    def images_per_second(self, nimg: int) -> float:
        """Return the speed since the last report, and begin to measure anew."""
        now = time.perf_counter()
        speed = (nimg - self._nimg) / max(now - self._since, 1e-9)
        self.restart(nimg)
        return speed

    def restart(self, nimg: int) -> None:
        """Begin to measure anew, at ``nimg`` images."""
        self._nimg, self._since, self._waited = nimg, time.perf_counter(), self._reals.waited_seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the block."""
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start
