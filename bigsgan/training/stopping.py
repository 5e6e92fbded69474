"""Requests to save and end: signals, and a launcher that is gone."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from bigsgan.signals import STOPPING

_POLL_SECONDS = 0.5
_JOINING_SECONDS = 1800.0
"""Until all ranks have come: large jobs import for minutes from a slow file system."""

LAUNCHER_ENDED = "the end of its launcher"
"""The reason that is a failure: of several hosts' launchers the others have to start the run again."""

_DEEPSPEED = "deepspeed.launcher.launch"


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
        self._chain = _launchers() if launched else []

    @property
    def reason(self) -> str | None:
        """What asked, or None."""
        if self.signal is not None:
            return self.signal
        ended = bool(self._chain) and _launchers(len(self._chain)) != self._chain
        return LAUNCHER_ENDED if ended else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of signals inside the block, and after it, where the process ends in its own time.

        Where the block fails, they end the process again: launchers send them to the ranks of a job that has failed.
        """
        before = {number: signal.signal(number, self._receive) for number in STOPPING}
        try:
            yield
        except BaseException:
            for number, handler in before.items():
                signal.signal(number, handler)
            raise

    @contextmanager
    def joining(self, status: int) -> Iterator[None]:
        """Wait for all ranks inside the block: where this one is asked to stop, its process ends at once.

        There is nothing to save yet, no handler in Python runs while a library waits, and launchers that restart ranks
        after a host was lost would wait half a minute for each. It ends with status 1 where the others do not come.

        Args:
            status: To exit with where it was asked to stop by a signal.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer)  # which gets each signal's number as soon as it comes
        joined = threading.Event()
        thread = threading.Thread(target=self._end_if_asked, args=(reader, joined, status), daemon=True)
        thread.start()
        try:
            yield
        finally:
            joined.set()
            signal.set_wakeup_fd(before)
            os.write(writer, b"\0")
            thread.join()
            os.close(reader)
            os.close(writer)

    def end_undisturbed(self) -> None:
        """Ignore signals from here to the end of the process, whose exit status they would replace.

        `srun --kill-on-bad-exit` sends SIGTERM to all tasks as soon as the first has ended. Python itself restores the
        signals' usual effect when it shuts down, but not that of ignored ones.
        """
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)

    def _end_if_asked(self, reader: int, joined: threading.Event, status: int) -> None:
        until = time.monotonic() + _JOINING_SECONDS
        while not joined.is_set():
            ready = select.select([reader], [], [], _POLL_SECONDS)[0]
            numbers = os.read(reader, 64) if ready else b""
            reason = next((signal.Signals(n).name for n in numbers if n in STOPPING), self.reason)
            if joined.is_set():
                return
            if reason is not None:
                _end(f"stopped by {reason} before all ranks had come", 1 if reason == LAUNCHER_ENDED else status)
            if time.monotonic() > until:
                _end(f"not all ranks came within {_JOINING_SECONDS:.0f} s: the launcher's messages say which ended", 1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number).name


def _end(text: str, status: int) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"bigsgan: {text}", file=sys.stderr, flush=True)
    os._exit(status)


def _launchers(num: int | None = None) -> list[int]:
    """Process numbers of the ``num`` nearest ancestors, or of those that belong to a launcher.

    `deepspeed` starts a second process, which starts the ranks and outlives the first (launcher/launch.py).
    """
    parent = os.getppid()
    if num is None:
        num = 2 if _DEEPSPEED in _read(parent, "cmdline") else 1
    return [parent] if num == 1 else [parent, _parent_of(parent)]  # this is asked in every update


def _parent_of(process: int) -> int:
    found = [line for line in _read(process, "status").splitlines() if line.startswith("PPid:")]
    return int(found[0].split()[1]) if found else 0


def _read(process: int, file: str) -> str:
    try:
        return Path(f"/proc/{process}/{file}").read_text()
    except OSError:  # it has ended, or this is no Linux
        return ""
