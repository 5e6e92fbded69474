"""One log file per rank, so that a failing rank can be found."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bigsgan.runtime.paths import check_regular, writing

NOTICE = logging.INFO + 5
"""Level of what the user is to see on the terminal and that warns of nothing."""

_FORMAT = "%(asctime)s %(host)s rank %(rank)d [%(phase)s] %(levelname)s %(name)s: %(message)s"


class RankLog(logging.Filter):
    """The open log file of one rank; as a filter it gives every record its host, rank and phase.

    Attributes:
        path: The log file.
        num_phases: Phases that were begun, a sign of life.
        num_moved: Bytes of checkpoints that were brought to the disk or read, another.
        has_updated: Whether an update has begun and ended in this process.
        write: Prints a warning on rank 0's terminal; assign to change it, as when a progress bar begins.
        detail: Gives what is being computed within the phase, or nothing.
        awaited: Gives what this rank waits for, if it does: a phase of other ranks, and which.
    """

    def __init__(self, path: Path, rank: int, write: Callable[[str], None]) -> None:
        super().__init__()
        self.path, self.write = path, write
        self.detail: Callable[[], str] = str
        self.awaited: Callable[[], tuple[str, list[int]] | None] = lambda: None
        self.num_phases = self.num_moved = 0
        self.has_updated = False
        self._phase = "start"
        self._rank, self._host = rank, socket.gethostname()
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []

    @property
    def phase(self) -> str:
        """What the rank is doing, shown on every line, with its detail; assign to change it."""
        detail = self.detail()
        return f"{self._phase}, {detail}" if detail else self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.has_updated |= self._phase.startswith("update ")
        self._phase = phase
        self.num_phases += 1

    def moved(self, num_bytes: int) -> None:
        """Count bytes of checkpoints, in any thread: of two at once, one may get lost."""
        self.num_moved += num_bytes

    def filter(self, record: logging.LogRecord) -> bool:
        """Add host, rank and phase to the record; let every record through."""
        record.host, record.rank, record.phase = self._host, self._rank, self.phase
        return True

    def attach(self, logger: logging.Logger, handler: logging.Handler) -> None:
        """Send what ``logger`` and its children log to ``handler``, until this log is closed."""
        logger.addHandler(handler)
        self._handlers.append((logger, handler))

    def close(self) -> None:
        """Take the handlers off the loggers and close the file."""
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        self._handlers.clear()
        logging.getLogger("bigsgan").propagate = True


def current_log() -> RankLog | None:
    """This rank's open log."""
    filters = (each for handler in logging.getLogger("bigsgan").handlers for each in handler.filters)
    return next((each for each in filters if isinstance(each, RankLog)), None)


class _Console(logging.Handler):
    """Prints through the rank log's current ``write``."""

    def __init__(self, log: RankLog) -> None:
        super().__init__(NOTICE)
        self._log = log

    def format(self, record: logging.LogRecord) -> str:
        """Put the level before a warning."""
        text = super().format(record)
        return text if record.levelno == NOTICE else f"{record.levelname}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; a terminal that is gone, or a full disk behind it, ends no run."""
        with suppress(OSError):
            self._log.write(self.format(record))


class _Kept(logging.Handler):
    """Keeps what rank 0's terminal would show."""

    def __init__(self) -> None:
        super().__init__(NOTICE)
        self.notices: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        self.notices.append((record.levelno, record.getMessage()))


@contextmanager
def keeping_notices() -> Iterator[list[tuple[int, str]]]:
    """Give the notices and warnings that this rank logs inside the block, by level and text, beside logging them."""
    handler, ours = _Kept(), logging.getLogger("bigsgan")
    ours.addHandler(handler)
    try:
        yield handler.notices
    finally:
        ours.removeHandler(handler)


class _LogFile(logging.FileHandler):
    """Leaves out what the disk has no room for, where ``logging`` would print a traceback for each record."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Pass over what the system refuses to write; other errors are ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file, whether the rest can be written or not."""
        with suppress(OSError):
            super().close()


def open_rank_log(directory: Path, rank: int, write: Callable[[str], None]) -> RankLog:
    """Append what this rank logs under "bigsgan" (from INFO on) and "DeepSpeed" to directory/rank00000.log.

    On rank 0 bigsgan's notices and warnings go through ``write`` too, which prints a text for the user.

    Raises:
        UserError: The file cannot be written.
    """
    path = directory / f"rank{rank:05d}.log"
    with writing(path):
        directory.mkdir(parents=True, exist_ok=True)
        if path.exists():
            check_regular(path)
        file = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    log = RankLog(path, rank, write)
    file.addFilter(log)  # on the handler, as a logger's own filters do not see what its children log
    file.setFormatter(logging.Formatter(_FORMAT))
    ours = logging.getLogger("bigsgan")
    ours.setLevel(logging.INFO)
    ours.propagate = False  # a library that sets up the root logger would print every rank's lines on the terminal
    log.attach(ours, file)
    log.attach(logging.getLogger("DeepSpeed"), file)
    if rank == 0:
        log.attach(ours, _Console(log))
    return log
