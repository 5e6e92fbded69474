"""Requests to save and end: signals, and a launcher that is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send: SIGTERM before they kill, SIGUSR1 as Slurm's warning (``--signal``)."""


class StopRequests:
    """Whether this process was asked to save and end. What it was asked is the ranks' to share.

    Attributes:
        signal: Name of the first signal received, or None.
    """

    def __init__(self, launched: bool) -> None:
        """Watch over this process.

        Args:
            launched: Its parent is a launcher, whose end is to be its own. `deepspeed` leaves its ranks behind when
                it is ended (seen in 0.19.8, launcher/runner.py).
        """
        self.signal: str | None = None
        self._parent = os.getppid() if launched else None

    @property
    def reason(self) -> str | None:
        """What asked, or None."""
        if self.signal is not None:
            return self.signal
        if self._parent is not None and os.getppid() != self._parent:
            return "the end of its launcher"
        return None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of signals inside the block, where they would end the process outside."""
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number).name
