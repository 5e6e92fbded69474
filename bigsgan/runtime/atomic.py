"""Atomic file writes: a temporary name, fsync, rename."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path to write to inside the block; after it, the file written there replaces ``path``.

    If the block fails, ``path`` stays as it was, and the file written is removed. The file gets the mode that the
    umask leaves, whatever mode the library that writes it chooses (safetensors 0.8: 0600).
    """
    unfinished = path.with_name(path.name + ".tmp")
    mode = _make(unfinished)
    try:
        yield unfinished
        if stat.S_IMODE(os.stat(unfinished).st_mode) != mode:  # checked first: some file systems have no modes
            os.chmod(unfinished, mode)
        fsync(unfinished)  # otherwise a loss of power could leave the new name on an empty file
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


@contextmanager
def leaving_nothing(*paths: Path) -> Iterator[None]:
    """Remove those of the directories that the block made, if it fails; inner ones are given first."""
    new = [path for path in paths if not os.path.lexists(path)]
    try:
        yield
    except BaseException:
        for path in new:
            shutil.rmtree(path, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(text)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make(unfinished: Path) -> int:
    """Make an empty file, replacing one that a killed process left, and return its mode.

    Raises:
        OSError: The file cannot be made, or its name belongs to a link, a pipe or the like.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(unfinished).st_mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(unfinished))
        unfinished.unlink()
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
