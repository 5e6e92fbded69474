"""Ends the process if a check takes too long, or if the launcher ends the process during a check."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from bigsgan.errors import EXIT_FAILED

_POLL_SECONDS = 0.2
_ASKING_SECONDS = 0.8


def last_words(check: str, text: str) -> str:
    """The line with which the doctor ends in a check, or in the meeting of the ranks before the first."""
    command = f"; `--only {check}` runs this check alone" if "." in check else ""
    return f"bigsgan doctor: {check}: {text}; the doctor ends here{command}\n"


class Watch:
    """A thread that watches the clock and signals while the main thread may be stuck in a library."""

    def __init__(
        self,
        speak: Callable[[str, str], None],
        signals: tuple[signal.Signals, ...] = (),
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to watch. Called on the main thread.

        Args:
            speak: Prints the doctor's last line, given the check's name and a signal's name, empty if time is over.
            signals: Signals that end the process in this way.
            is_over: Called about once a second: whether another rank has printed the last line, so that this one ends.
        """
        self._speak, self._signals, self._is_over = speak, signals, is_over
        self._lock = threading.Lock()
        self._check, self._until = "", float("inf")
        self._over = threading.Event()
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in signals}
        if signals:
            signal.set_wakeup_fd(self._writer)  # gets a signal's number even while Python can run no handler
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @contextmanager
    def over(self, check: str, patience: float) -> Iterator[None]:
        """Watch over a check that may take ``patience`` seconds, with its communication between ranks."""
        with self._lock:
            self._check, self._until = check, time.monotonic() + patience
        try:
            yield
        finally:
            with self._lock:
                self._until = float("inf")

    def close(self) -> None:
        """End the watch."""
        if self._signals:
            signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._over.set()
        self._thread.join()
        for end in (self._reader, self._writer):
            os.close(end)

    def _look(self) -> None:
        asked = time.monotonic()
        while not self._over.is_set():
            ready, _, _ = select.select([self._reader], [], [], _POLL_SECONDS)
            came = []
            with suppress(BlockingIOError):
                came = [number for number in os.read(self._reader, 64) if number in self._signals] if ready else []
            with self._lock:
                check, is_late = self._check, time.monotonic() > self._until
            if came or is_late:
                try:
                    self._speak(check, signal.Signals(came[0]).name if came else "")
                finally:
                    os._exit(EXIT_FAILED)
            if time.monotonic() > asked + _ASKING_SECONDS:
                asked = time.monotonic()
                if self._is_over():
                    os._exit(EXIT_FAILED)
