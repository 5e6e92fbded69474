"""The limits of this process that a shell or a scheduler sets (`ulimit`), and the errors that they cause."""

from __future__ import annotations

import errno
import os
import resource
import traceback
from pathlib import Path

from bigsgan.errors import UserError

LEAST_FILES, _FILES_PER_RANK = 128, 4
"""A rank, its store and its loading processes have some 100 open files, and connections to other ranks."""

_NO_MEMORY = (
    "failed to map segment",
    "annot allocate memory",
    "can't allocate memory",
    "bad_alloc",
    "could not create a primitive",
    "could not create a memory object",
)
"""Of the system's loader and calls, of C++, and of oneDNN."""

_STARTERS = ("subprocess", "popen_fork", "popen_spawn_posix", "popen_forkserver")
"""Python's modules that start processes."""

_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")


def files_wanted(num_ranks: int) -> int:
    """Return how many files a rank of so many should be allowed to open: archives, loaders, and shards of all ranks."""
    return 512 + 8 * num_ranks


def allow_open_files(num_ranks: int) -> None:
    """Raise the soft limit of open files to ``files_wanted``, as far as the hard limit allows, for this process alone.

    Raises:
        UserError: A rank of so many would fail all the same, maybe only as it saves.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files_wanted(num_ranks) if hard == resource.RLIM_INFINITY else min(hard, files_wanted(num_ranks))
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft := wanted, hard))
    least = LEAST_FILES + _FILES_PER_RANK * (num_ranks - 1)
    if 0 <= soft < least:
        raise _too_few_files(f"at least {least}")


def reached(error: BaseException) -> UserError | None:
    """Return the message for an error, of the system or of a library, that a limit has caused; None for any other."""
    number, text = getattr(error, "errno", None), str(error)
    if number == errno.EMFILE or os.strerror(errno.EMFILE) in text:
        return _too_few_files("more")
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(part in text for part in _NO_MEMORY):
        return _unless_unlimited("ulimit -v", resource.RLIMIT_AS, 1024, "KiB of address space")
    starts = _starts_process(error) if isinstance(error, OSError) else any(part in text for part in _NO_THREAD)
    if starts:
        memory = _unless_unlimited("ulimit -v", resource.RLIMIT_AS, 1024, "KiB of address space")
        return memory or _unless_unlimited("ulimit -u", resource.RLIMIT_NPROC, 1, "processes and threads of this user")
    return None


def _starts_process(error: OSError) -> bool:
    """Return whether the system refused a process. Locks, pipes and sockets have that number too, if they are busy."""
    frames = traceback.extract_tb(error.__traceback__)
    return error.errno == errno.EAGAIN and any(Path(frame.filename).stem in _STARTERS for frame in frames)


def _too_few_files(number: str) -> UserError:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UserError("ulimit -n", soft, f"must allow {number} open files", "run `ulimit -n 65536` before")


def _unless_unlimited(command: str, limit: int, unit: int, what: str) -> UserError | None:
    soft, _ = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY:
        return None
    return UserError(command, soft // unit, f"must allow more {what}", f"run `{command} unlimited` before")
