"""The exception whose text is written for the user, and how ranks exit after one of them has printed it."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
FORWARDING_SECONDS = 0.5
"""How long a rank keeps running after it has printed a message, so that its launcher can forward it."""

_SILENT_RANKS_WAIT_SECONDS = 30.0
_LONGEST_VALUE, _LONGEST_FIELD, _LONGEST_TEXT = 120, 400, 1000
_MOST_DIGITS = 9
_at_end: list[Callable[[], Any]] = []


class UserError(Exception):
    """A problem that the user can fix: bad input, a missing file, a full disk.

    The command exits with status 2 and prints the text of this exception: one line, no traceback.

    Attributes:
        said: The text without the remedy.
    """

    def __init__(self, field: str, value: object, problem: str, remedy: str, detail: str = "") -> None:
        """Build the message. The two forms are::

            field: must be 1 or 3, got 4 (detail); remedy
            field: 'run/x' cannot be read: Permission denied (detail); remedy

        Args:
            field: The thing to fix: a dotted recipe key, a path, or a command-line option.
            value: The value that was found. ``None`` leaves it out of the text.
            problem: A predicate in the present tense. One that begins with "must" says which values are allowed, and
                the value follows it; the value is the subject of any other.
            remedy: What the user can do, as an imperative sentence.
            detail: The reason, if the problem does not explain itself.
        """
        self.field, self.value, self.problem, self.remedy, self.detail = field, value, problem, remedy, detail
        problem, remedy, detail = (_shorten(part, _LONGEST_TEXT) for part in (problem, remedy, detail))
        if value is not None:
            problem = f"{problem}, got {shown(value)}" if problem.startswith("must ") else f"{shown(value)} {problem}"
        reason = f" ({detail})" if detail else ""
        self.said = _line(f"{_shorten(field, _LONGEST_FIELD)}: {problem}{reason}")
        super().__init__(f"{self.said}; {_line(remedy)}")

    def __reduce__(self) -> tuple[type[UserError], tuple[str, object, str, str, str]]:
        """Pickle the arguments, for the transfer between ranks; the default would keep only the text."""
        return UserError, (self.field, self.value, self.problem, self.remedy, self.detail)


def print_error(error: UserError) -> None:
    """Print the message; on several ranks, wait until the launcher has forwarded it: srun drops late output."""
    with suppress(OSError):  # standard error may be on a full disk; the exit status still shows the failure
        print(f"bigsgan: {error}", file=sys.stderr, flush=True)
    if (os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        time.sleep(FORWARDING_SECONDS)


def reason(error: BaseException, path: object = "") -> str:
    """Return why the system or a library failed, in one line; it names the file only if that is not ``path``."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        other = "" if error.filename is None or str(error.filename) == str(path) else f": {error.filename}"
        text = error.strerror + other
        if error.errno == errno.ENOSPC and _is_out_of_inodes(error.filename or path):
            text += ": its file system has no inode left for another file; remove files there"
    return " ".join(text.split()) or type(error).__name__


def _is_out_of_inodes(path: object) -> bool:
    """Return whether the file system of a path, which may not exist yet, has no inode left."""
    directory = os.path.abspath(str(path))
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    with suppress(OSError):
        found = os.statvfs(directory)
        return found.f_files > 0 and found.f_favail == 0
    return False


def shown(value: object) -> str:
    """Return a value as recipes and JSON files write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    # Shorten before repr, which may be many times as long.
    return _shorten(repr(value[: _LONGEST_VALUE + 1] if isinstance(value, str | bytes) else value))


def counted(num: int, what: str) -> str:
    """Return a number of things in words; ``what`` is one of them, such as image, class, batch or entry."""
    several = re.sub("(ch|ss)$", r"\1e", re.sub("ry$", "rie", what)) + "s"
    return f"{num} {what if num == 1 else several}"


def number_from_environment(name: str, default: int = 0) -> int:
    """Return a launcher's number, which may not have been checked yet; ``default`` if it is none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else default


def rank_from_environment() -> int:
    """Return this process's rank; srun sets only its own variables at first."""
    return number_from_environment("RANK" if os.environ.get("RANK") else "SLURM_PROCID")


def wait_for_termination(status: int = EXIT_BAD_INPUT) -> None:
    """Sleep while another rank prints the message: launchers terminate all ranks as soon as one has exited.

    SIGTERM, SIGINT and SIGHUP end this rank with the same exit status: Slurm records the highest status of its tasks,
    which would otherwise be 143.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os._exit(status))
    time.sleep(_SILENT_RANKS_WAIT_SECONDS)


def at_end(function: Callable[[], Any]) -> None:
    """Call a function at the end of the process, even if ``end_process`` ends it."""
    atexit.register(function)
    _at_end.append(function)


def end_process(status: int) -> NoReturn:
    """End the process without shutting libraries down, as their threads may still run."""
    for function in reversed(_at_end):
        with suppress(Exception):
            function()
    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):  # closed, or on a full disk
            stream.flush()
    os._exit(status)


def _line(text: str) -> str:
    """Return a text as one line that a terminal can show; libraries' texts may have many lines."""
    return "".join(map(_printable, " ".join(line.strip() for line in text.splitlines())))


def _printable(letter: str) -> str:
    """Escape a character that is not printable: file names may hold terminal control codes or invalid UTF-8."""
    return letter if letter.isprintable() else repr(letter)[1:-1]


def _shorten(text: str, longest: int = _LONGEST_VALUE) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."
