"""The doctor's ranks when it runs as one process. No torch here."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bigsgan.doctor.watch import Watch, last_words


class SingleProcess:
    """The ranks of a job with one process; see ``Job``."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.hosts: Sequence[str] = [socket.gethostname()]
        self._patience = 0.0
        self._watch = Watch(self._speak)

    @contextmanager
    def check(self, name: str, patience: float) -> Iterator[None]:
        """Begin a check."""
        self._patience = patience
        with self._watch.over(name, patience):
            yield

    def gather(self, value: Any) -> list[Any]:
        """Return the value in a list."""
        return [value]

    def collect(self, value: Any) -> list[tuple[int, Any]]:
        """Return the value with its rank."""
        return [(0, value)]

    def share(self, value: Any) -> Any:
        """Return the value."""
        return value

    def is_lost(self, error: Exception) -> bool:
        """Return False: there is no other rank."""
        return False

    def leave(self) -> None:
        """End the watch."""
        self._watch.close()

    def _speak(self, check: str, signal_name: str) -> None:
        sys.stderr.write(last_words(check, f"no answer within {self._patience:.0f} s"))
        sys.stderr.flush()
