"""The signals that ask a run to save and end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send: SIGTERM before they kill, SIGUSR1 as Slurm's warning (``--signal``)."""


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Start processes inside the block that these signals never reach, as launchers and Slurm send them to all.

    A child inherits which signals are blocked. What this process is sent meanwhile arrives after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
