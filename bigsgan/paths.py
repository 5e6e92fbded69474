"""Paths as users write them: home directories, and checks that a file is a regular file."""

from __future__ import annotations

import errno
import os
import stat
import zipfile
from pathlib import Path
from typing import BinaryIO


def expanded(text: str) -> str:
    """Replace a leading ``~`` or ``~user`` by the home directory.

    Raises:
        ValueError: The user does not exist. The text is a predicate, as ``UserError`` takes it.
    """
    found = os.path.expanduser(text)
    if found.startswith("~"):
        raise ValueError(f"names a home directory that does not exist ({found.partition('/')[0]})")
    return found


def check_regular(path: str | Path) -> None:
    """Refuse anything but a regular file, before it is opened: opening a pipe blocks until it has a writer.

    Raises:
        OSError: It is a directory, a pipe or a device, or does not exist.
    """
    found = os.stat(path).st_mode
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found):
        raise OSError(errno.EINVAL, "a pipe, socket or device, not a regular file", str(path))


def read_text(path: Path, most_bytes: int) -> str:
    """Read a text file, UTF-8.

    Raises:
        OSError: It is not a regular file, or cannot be read.
        ValueError: It is larger than ``most_bytes``, or not UTF-8.
    """
    check_regular(path)
    with open(path, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes // 1024} KiB")
    return content.decode("utf-8")


def check_stored(path: str | Path | BinaryIO) -> None:
    """Refuse a zip file with compressed members, which torch.save does not write: torch inflates them to any size.

    Raises:
        ValueError: A member is compressed, or the file is a damaged zip file.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    raise ValueError(f"its member {info.filename} is compressed, which torch.save does not do")
    except zipfile.BadZipFile as error:
        raise ValueError(f"it is a damaged zip file: {error}") from None
