"""The signals that ask a run to save and end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Schedulers send SIGTERM before they kill, and SIGUSR1 as Slurm's warning (``--signal``). Ctrl-C is SIGINT."""


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Keep these signals, which launchers and Slurm send to all processes, from those started inside the block.

    A child inherits which signals are blocked. Signals to this process arrive after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
