"""The signals that ask a run to save and end. Imports little, as these come at any time."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Schedulers send SIGTERM before they kill, and SIGUSR1 as Slurm's warning (``--signal``). Ctrl-C is SIGINT, the end of
a terminal or of its connection SIGHUP."""

_OFTEN_IGNORED = (signal.SIGINT, signal.SIGHUP)
"""A shell has a job in the background ignore Ctrl-C; `nohup` has its command ignore SIGHUP."""

_CHECKING = ("--dry-run", "--print", "--list", "--help")
"""Options with which `bigsgan train` does not train."""


class Noted:
    """Takes note of signals until a command listens to them.

    Attributes:
        received: Their numbers, in the order in which they came.
        before: The handlers before.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._receive) for number in heeded(STOPPING)
        }

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)


def heeded(signals: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals without those that this process was started to ignore."""
    return [n for n in signals if n not in _OFTEN_IGNORED or signal.getsignal(n) is not signal.SIG_IGN]


def is_training(words: Sequence[str]) -> bool:
    """Return whether a command line trains, and does not only check or print a recipe.

    `deepspeed --no_python bigsgan train` puts a word in front.
    """
    command = [word for word in words[:2] if not word.startswith("--local_rank=")][:1]
    return command == ["train"] and not any(map(_only_checks, words))


def _only_checks(word: str) -> bool:
    name = word.partition("=")[0]  # argparse takes beginnings of options too
    return name == "-h" or (len(name) > len("--") and any(option.startswith(name) for option in _CHECKING))


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
