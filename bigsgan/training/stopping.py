"""Requests to save and exit: signals, and the exit of the launcher. Imports little, because it has to start first."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from bigsgan.errors import rank_from_environment
from bigsgan.runtime.signals import STOPPING, Noted, heeded

_POLL_SECONDS = 0.5
_JOINING_SECONDS = 1800.0
"""Limit until all ranks have started: large jobs import for minutes from a slow file system."""

_SAVING_SECONDS = 45.0
"""Limit for a rank after its launcher has exited: it may be saving, building, or waiting for lost ranks."""

_REPEATED_SECONDS = 2.0
"""A SIGINT this much later than the first signal is of a user who does not want to wait. An earlier one may be of a
launcher that passes on what the terminal has sent to all processes."""

LAUNCHER_ENDED = "the end of its launcher"
"""The only reason that counts as a failure: the launchers of the other hosts have to restart the run."""

_DEEPSPEED = "deepspeed.launcher.launch"
_PYTHON_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")
"""Variables that torchrun and deepspeed, both Python programs, set for their ranks."""

_ADOPTERS = ("systemd", "slurmstepd:")
"""Processes, besides process 1, that adopt orphaned processes."""


class StopRequests:
    """Knows whether this process was asked to save and exit. The caller makes the ranks agree on it."""

    def __init__(
        self, launched: bool, signals: Sequence[signal.Signals] = STOPPING, noted: Noted | None = None
    ) -> None:
        """Note the launcher. Build this before anything that takes time, as the launcher may end meanwhile.

        A ``launched`` process is the child of a launcher, and has to end with it: `deepspeed` leaves its ranks
        behind when it is ended (seen in 0.19.8, launcher/runner.py). ``signals`` ask the process to stop; some may
        have been ``noted`` already.
        """
        self.signal: str | None = None  # name of the first signal received
        self._signals, self._noted = heeded(signals), noted
        self._chain = _launchers() if launched else []
        self._came_late = _ended_before(self._chain) and any(map(os.environ.get, _PYTHON_LAUNCHERS))
        self._listening = False
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup: int | None = None
        self._status: int | None = None
        self._over = threading.Event()

    @property
    def reason(self) -> str | None:
        """The signal or event that asked the process to stop, or None."""
        if self.signal is not None:
            return self.signal
        return LAUNCHER_ENDED if self._launcher_ended else None

    @property
    def _launcher_ended(self) -> bool:
        return self._came_late or (bool(self._chain) and _launchers(len(self._chain)) != self._chain)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of signals inside the block, and of the launcher's end. Of nested blocks the first to end ends all.

        Signals end the process again as soon as the block fails: launchers send them to the ranks of a job that has
        failed. A launched process ends at most 45 s after its launcher, also after the block.
        """
        if not self._listening:
            self._listen()
        try:
            yield
        finally:
            self._let_go()

    def end_at_once(self, status: int) -> None:
        """Until ``joined``, end the process as soon as it is, or was, asked to stop: there is nothing to save.

        Libraries are imported then, and ranks wait for each other, during which no Python handler runs. Launchers that
        restart ranks after the loss of a host would wait half a minute for each. The process ends with ``status``
        after a signal, and with status 1 if the launcher ends or the other ranks do not come.
        """
        self._status = status

    def joined(self) -> None:
        """Let the process end in its own time again: all ranks have come."""
        self._status = None

    def end_undisturbed(self) -> None:
        """Ignore signals until the process ends, as they would replace its exit status.

        `srun --kill-on-bad-exit` sends SIGTERM to all tasks as soon as the first has ended. Python restores the
        default effect of signals when it shuts down, but not of ignored ones.
        """
        self._close_wakeup()
        self._before = {}
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self) -> None:
        self._listening = True
        if not (self._signals or self._chain):
            return
        reader, self._wakeup = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(self._wakeup, False)
        if self._signals:
            signal.set_wakeup_fd(self._wakeup)  # each signal's number is written there as soon as it comes
        self._over.clear()
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        self._before = {number: signal.signal(number, self._receive) for number in self._signals}
        if self._noted is not None:
            self._before |= self._noted.before
            for number in self._noted.received:
                self._receive(number, None)

    def _let_go(self) -> None:
        self._close_wakeup()
        self._status = None
        if not self._chain:
            self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before, self._listening = {}, False

    def _close_wakeup(self) -> None:
        if self._wakeup is not None:
            if self._signals:
                signal.set_wakeup_fd(-1)
            os.close(self._wakeup)
            self._wakeup = None

    def _watch(self, reader: int) -> None:
        since, lost = time.monotonic(), None  # when the watch began, and when the launcher ended
        first = None  # when it saw the first signal
        while not self._over.wait(_POLL_SECONDS):
            with suppress(BlockingIOError):
                for number in os.read(reader, 64):
                    if number in self._signals:
                        self._receive(number, None)
                        first = first or time.monotonic()
                        if number == signal.SIGINT and time.monotonic() - first > _REPEATED_SECONDS:
                            text = f"stopped by SIGINT after {self.signal}, without saving; the same command resumes"
                            _end(text, 128 + number)
            reason, status, now = self.reason, self._status, time.monotonic()
            lost = (lost or now) if self._launcher_ended else None
            if status is not None and reason is not None:
                text = f"stopped by {reason} before training started; the same command resumes"
                _end(text, 1 if reason == LAUNCHER_ENDED else status)
            if status is not None and now - since > _JOINING_SECONDS:
                limit = f"{_JOINING_SECONDS:.0f} s"
                _end(f"not all ranks started within {limit}; see the launcher's messages for the rank that failed", 1)
            if lost is not None and now - lost > _SAVING_SECONDS:
                _end(f"stopped {_SAVING_SECONDS:.0f} s after {LAUNCHER_ENDED}", 1)
        os.close(reader)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number).name


def _end(text: str, status: int) -> None:
    try:
        if rank_from_environment() == 0:
            print(f"bigsgan: {text}", file=sys.stderr, flush=True)
    finally:  # also if nobody reads standard error any more
        os._exit(status)


def _launchers(num: int | None = None) -> list[int]:
    """Return the process numbers of the ``num`` nearest ancestors, 1 or 2; by default of those that are the launcher.

    `deepspeed` starts a second process, which starts the ranks and outlives the first (launcher/launch.py).
    """
    parent = os.getppid()
    if num is None:
        num = 2 if _DEEPSPEED in _read(parent, "cmdline") else 1
    return [parent] if num == 1 else [parent, _parent_of(parent)]  # reads no file for 1: every update calls this


def _ended_before(chain: Sequence[int]) -> bool:
    """Return whether an adopter is in the place of one of these launchers.

    An adopter may have started the launcher itself, in a process group of its own or in the adopter's. The second
    process of `deepspeed` is in the group of the first. An end in the adopter's own group cannot be told from that.
    """
    if not chain or _is_adopter(chain[0]):
        return bool(chain)
    with suppress(ProcessLookupError):
        return any(map(_is_adopter, chain[1:])) and os.getpgid(chain[0]) not in chain
    return True


def _is_adopter(process: int) -> bool:
    """Return whether a process adopts orphans; process 1 of a container may be the launcher itself."""
    name = Path(_read(process, "cmdline").partition("\0")[0]).name
    return name.startswith(_ADOPTERS) or (process == 1 and not name.startswith("python"))


def _parent_of(process: int) -> int:
    found = [line for line in _read(process, "status").splitlines() if line.startswith("PPid:")]
    return int(found[0].split()[1]) if found else 0


def _read(process: int, file: str) -> str:
    try:
        return Path(f"/proc/{process}/{file}").read_text()
    except OSError:  # the process has exited, or this is not Linux
        return ""
