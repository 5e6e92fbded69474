"""One log file per rank, so that a failing rank can be found."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import BufferingHandler, WatchedFileHandler
from pathlib import Path
from typing import Protocol

from bigsgan.runtime.paths import check_regular, writing

NOTICE = logging.INFO + 5
"""Level of messages that the user should see on the terminal and that are not warnings."""

logging.addLevelName(NOTICE, "NOTICE")

_FORMAT = "%(asctime)s %(host)s rank %(rank)d [%(phase)s] %(levelname)s %(name)s: %(message)s"


class Computation(Protocol):
    """What computes updates, and tells of it."""

    doing: str
    num_tasks: int

    def awaited(self) -> tuple[str, list[int]] | None:
        """See RankLog."""


class RankLog(logging.Filter):
    """The open log file of one rank. As a filter, it adds host, rank and phase to every record.

    Attributes:
        path: The log file.
        num_phases: Phases that have begun, a sign of progress.
        num_moved: Bytes of checkpoints that were written to the disk or read, another sign of progress.
        has_updated: Whether an update has begun and ended in this process.
        write: Prints a warning on rank 0's terminal. Assign to change it, for example when a progress bar begins.
        detail: Returns what is being computed within the phase, or an empty text.
        num_tasks: Returns how many parts of phases have begun, another sign of progress.
        awaited: Returns the phase that this rank waits for and the ranks that are in it, or None if it does not wait.
    """

    def __init__(self, path: Path, rank: int, write: Callable[[str], None]) -> None:
        super().__init__()
        self.path, self.write = path, write
        self.detail: Callable[[], str] = str
        self.num_tasks: Callable[[], int] = int
        self.awaited: Callable[[], tuple[str, list[int]] | None] = lambda: None
        self.num_phases = self.num_moved = 0
        self.has_updated = False
        self._phase = "start"
        self._rank, self._host = rank, socket.gethostname()
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []

    @property
    def phase(self) -> str:
        """What the rank is doing, with its detail; every line of the log shows it. Assign to change it."""
        detail = self.detail()
        return f"{self._phase}, {detail}" if detail else self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.has_updated |= self._phase.startswith("update ")
        self._phase = phase
        self.num_phases += 1

    def follow(self, computation: Computation) -> None:
        """Show what is being computed as the detail of a phase, and count it as progress."""
        self.detail, self.awaited = lambda: computation.doing, computation.awaited
        self.num_tasks = lambda: computation.num_tasks

    def moved(self, num_bytes: int) -> None:
        """Count moved bytes of checkpoints. Any thread may call this; of two calls at once, one may get lost."""
        self.num_moved += num_bytes

    def filter(self, record: logging.LogRecord) -> bool:
        """Add host, rank and phase to the record; let every record through."""
        record.host, record.rank, record.phase = self._host, self._rank, self.phase
        return True

    def attach(self, logger: logging.Logger, handler: logging.Handler) -> None:
        """Send the records of ``logger`` and its children to ``handler`` until this log is closed."""
        logger.addHandler(handler)
        self._handlers.append((logger, handler))

    def close(self) -> None:
        """Take the handlers off the loggers and close the file."""
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        self._handlers.clear()
        logging.getLogger("bigsgan").propagate = True
        self.detail, self.num_tasks, self.awaited = str, int, lambda: None  # not to hold what it has followed


def current_log() -> RankLog | None:
    """Return this rank's open log, or None."""
    filters = (each for handler in logging.getLogger("bigsgan").handlers for each in handler.filters)
    return next((each for each in filters if isinstance(each, RankLog)), None)


class _Console(logging.Handler):
    """Prints through the rank log's current ``write``."""

    def __init__(self, log: RankLog) -> None:
        super().__init__(NOTICE)
        self._log = log

    def format(self, record: logging.LogRecord) -> str:
        """Put the level in front of a warning."""
        text = super().format(record)
        return text if record.levelno == NOTICE else f"{record.levelname}: {text}"

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record. A closed terminal, or a full disk behind it, does not end the run."""
        with suppress(OSError):
            self._log.write(self.format(record))


@contextmanager
def keeping_notices() -> Iterator[list[logging.LogRecord]]:
    """Yield a list of the notices and warnings that this rank logs inside the block."""
    handler, ours = BufferingHandler(sys.maxsize), logging.getLogger("bigsgan")
    handler.setLevel(NOTICE)
    ours.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        ours.removeHandler(handler)


class _LogFile(WatchedFileHandler):
    """Drops records that the disk has no room for; ``logging`` would print a traceback for each.

    If the file was removed, it is opened again as soon as it has a directory.
    """

    def reopenIfNeeded(self) -> None:  # noqa: N802 - the library's name
        """Open the file again, if its path leads elsewhere."""
        if Path(self.baseFilename).parent.is_dir():
            super().reopenIfNeeded()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        with suppress(OSError):  # of opening the file
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Ignore a record that the system refuses to write; other errors are ours."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Close the file, even if the rest cannot be written."""
        with suppress(OSError):
            super().close()


def open_rank_log(directory: Path, rank: int, write: Callable[[str], None]) -> RankLog:
    """Append this rank's records of "bigsgan" (from INFO on) and "DeepSpeed" to directory/rank00000.log.

    On rank 0, bigsgan's notices and warnings also go to ``write``, which prints a text for the user.

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
    file.addFilter(log)  # added to the handler, as a logger's own filters do not see its children's records
    file.setFormatter(logging.Formatter(_FORMAT))
    ours = logging.getLogger("bigsgan")
    ours.setLevel(logging.INFO)
    ours.propagate = False  # a library that sets up the root logger would print every rank's lines on the terminal
    log.attach(ours, file)
    log.attach(logging.getLogger("DeepSpeed"), file)
    if rank == 0:
        log.attach(ours, _Console(log))
    return log
