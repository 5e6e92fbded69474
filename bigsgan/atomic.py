"""Files that are whole or absent: written under another name, brought to the disk, and renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path to write to inside the block; after it, what was written takes the place of ``path``.

    Where the block fails, ``path`` stays as it was and what was written is removed.
    """
    unfinished = path.with_name(path.name + ".tmp")
    try:
        yield unfinished
        fsync(unfinished)  # or a machine that loses power could leave the new name on an empty file
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
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
