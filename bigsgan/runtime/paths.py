"""Paths as users write them: home directories, checks that a file is a regular file, and messages of refused writes."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from bigsgan.errors import UserError, reason


def expanded(text: str) -> str:
    """Replace a leading ``~`` or ``~user`` by the home directory.

    Raises:
        ValueError: The user does not exist. Its text is a predicate for ``UserError``.
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


def read_text(path: Path, most_bytes: int = 1 << 20) -> str:
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


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON, with options of ``json.loads``.

    Raises:
        ValueError: It is not valid, or is nested too deeply.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_stored(path: str | Path | BinaryIO) -> None:
    """Refuse a zip file with compressed members, which torch.save does not write: torch inflates them to any size.

    Readers of zip files differ in where they look for the directory, so it has to be where all of them find it.

    Raises:
        ValueError: A member is compressed, members overlap, or the file is a damaged zip file.
    """
    with open(path, "rb") if isinstance(path, str | Path) else nullcontext(path) as file:
        begins = file.read(len(_FIRST_MEMBER))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - sum(_ENDS)))
        end = file.read()
        if begins != _FIRST_MEMBER:  # torch does not take it for a zip file either
            return
        if not _directory_is_last(end, size):
            raise ValueError("it is damaged: a zip file whose directory does not stand at its end")
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
        except zipfile.BadZipFile as error:
            raise ValueError(f"it is a damaged zip file: {error}") from None
    for info in members:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"its member {info.filename} is compressed, which torch.save does not do")
    if sum(info.file_size for info in members) > size:
        raise ValueError("its members overlap, which torch.save does not do")


_FIRST_MEMBER = b"PK\x03\x04"
_ENDS = (56, 20, 22)
"""Bytes of the records that end a zip file: ZIP64's end record and its locator, both optional, and the end record."""


def _directory_is_last(end: bytes, size: int) -> bool:
    """Return whether a file of ``size`` bytes ends with the directory, without a comment (APPNOTE.TXT, section 4.3)."""
    record, locator, last = (end[-sum(_ENDS[i:]) : len(end) - sum(_ENDS[i + 1 :])] for i in range(3))
    if last[:4] != b"PK\x05\x06" or len(last) != _ENDS[2] or last[-2:] != b"\0\0":
        return False
    stop = size - len(last)
    length, offset = struct.unpack("<2L", last[12:20])
    if locator[:4] == b"PK\x06\x07":
        stop -= len(locator) + len(record)
        if len(record) != _ENDS[0] or record[:4] != b"PK\x06\x06" or locator[8:16] != struct.pack("<Q", stop):
            return False
        length, offset = struct.unpack("<2Q", record[40:56])
    return bool(offset + length == stop)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block (disk full, no permission) into a message that ``path`` cannot be written."""
    try:
        yield
    except OSError as error:
        problem = f"cannot be written: {reason(error, path)}"
        remedy = "free some space, fix its permissions, or choose another path"
        raise UserError(str(path), None, problem, remedy) from error
