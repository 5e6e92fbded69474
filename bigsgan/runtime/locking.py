"""File locks, which keep a second process from writing; the kernel releases them when the process ends.

docs/explanation/libraries.md says why these are not filelock's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import parse_json

_REFUSALS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without locks; the last is that of Lustre mounted without ``flock``."""

_PATIENCE_SECONDS = 100.0
"""How long to wait for a holder on another host. An NFS server keeps the locks of a lost host for the lease of 90 s,
and the lost host's job may be started again before that."""

_POLL_SECONDS = 0.5

_log = logging.getLogger(__name__)


class _Holder(NamedTuple):
    """The content of a lock's file, which the lock's holder has written."""

    host: str
    pid: int
    since: str


def hold(path: Path, field: str, value: str, remedy: str) -> Callable[[], None]:
    """Lock ``path``, a file for this purpose alone, until the process ends in any way.

    If the file system keeps no locks, there is one warning and no lock. Forked processes do not hold the lock.

    The file stays there, as a process could be about to lock it. ``field``, ``value`` and ``remedy`` go into the
    UserError if another process holds the lock.

    Returns:
        A function that releases the lock before the process ends.

    Raises:
        UserError: Another process holds the lock, or the file cannot be written.
    """
    until: float | None = None
    while True:
        try:
            file = _locked(path)
        except BlockingIOError:
            holder = _read(path)
        except OSError as error:
            if error.errno not in _REFUSALS:
                problem = f"cannot be locked: {reason(error, path)}"
                raise UserError(str(path), None, problem, "give a directory that you can write to") from None
            text = "%s is on a file system without locks (%s): do not start a second job in that directory"
            _log.warning(text, path, error)
            return lambda: None
        else:
            return _held(file)
        who = f"process {holder.pid} on {holder.host} since {holder.since}" if holder else "another process"
        if until is None:
            until = time.monotonic() + _PATIENCE_SECONDS
            if holder is None or holder.host != socket.gethostname():
                _log.warning("%s is in use by %s, waiting for %.0f s in case it is dead", value, who, _PATIENCE_SECONDS)
        if time.monotonic() > until or (holder is not None and holder.host == socket.gethostname()):
            raise UserError(field, value, f"is in use by {who}", remedy)
        time.sleep(_POLL_SECONDS)


def is_held(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file; None if that is unknown. A missing file is not locked.

    For a moment it takes a shared lock, which several processes may have at once and for which reading is enough.
    """
    try:
        with open(path, opener=_open_regular) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks, or the file no permission
        return None
    return False


def _locked(path: Path) -> FileIO:
    """Open and lock a file, and check that ``path`` still leads to it; otherwise try again."""
    while True:
        file = FileIO(path, "a+", opener=_open_regular)  # open for writing, as NFS locks no other files
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # somebody has removed the file
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file, which will be emptied: a link could lead to any file, and a pipe has no end."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "a pipe or device, not a regular file", path)
    return descriptor


def _held(file: FileIO) -> Callable[[], None]:
    """Write the holder into the file of a lock, and return the function that releases the lock."""
    holder = _Holder(socket.gethostname(), os.getpid(), datetime.now().astimezone().isoformat(" ", "seconds"))
    with suppress(OSError):  # a full disk does not prevent the lock
        file.truncate(0)
        file.write(json.dumps(holder._asdict()).encode() + b"\n")
    os.register_at_fork(after_in_child=file.close)  # or a child that outlives this process would hold the lock

    def release() -> None:
        if not file.closed:
            with suppress(OSError):
                file.truncate(0)
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()

    return release


def _read(path: Path) -> _Holder | None:
    """Return the holder of the lock; None as long as the file does not say."""
    try:
        return _Holder(**parse_json(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
