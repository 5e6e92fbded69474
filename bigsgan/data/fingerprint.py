"""Identifies a listing of images without opening files: by number, names, classes and sizes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from bigsgan.errors import counted

STAT_FILES = 256
"""Files of a listing, spread over it, whose sizes are compared: a file system may take a millisecond for each."""

_MOST_BYTES = 1 << 30
"""Of an array that is read as a whole; it may be a mapped file of any size."""


class Fingerprint(NamedTuple):
    """Digests of a listing of images; empty if a data set has nothing of that kind."""

    num_images: int  # N
    names: str = ""  # digest of the images' names below the data's root, in order
    classes: str = ""  # digest of their classes, in order
    sizes: str = ""  # digest of sizes and places of files
    codec: str = ""  # digest of the weights of the autoencoder that decodes latents
    scaling: str = ""  # how latents are shifted and scaled

    def difference(self, other: Fingerprint) -> str | None:
        """Describe how ``other`` differs; None if it does not."""
        if self.num_images != other.num_images:
            return counted(other.num_images, "image")
        words = {
            "names": "images of other names",
            "classes": "images of other classes",
            "sizes": "files of other sizes",
            "codec": "an autoencoder of other weights",
            "scaling": "latents of another scale",
        }
        return next((text for field, text in words.items() if getattr(self, field) != getattr(other, field)), None)


def digest(pieces: Iterable[bytes]) -> str:
    """Return the hash of a sequence of byte strings, including the bounds between them."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(len(piece).to_bytes(8, "little") + piece)
    return found.hexdigest()


def of_attributes(source: object, num: int, root: str) -> Fingerprint:
    """Return the digest of a data set's attributes with one item for each of its ``num`` images.

    These are paths, without ``root`` at their beginning, classes, or pixels; some are not sorted.
    """
    each = sorted(getattr(source, "__dict__", {}).items(), key=lambda pair: pair[0])
    lists = [(name, value) for name, value in each if isinstance(value, list | tuple | np.ndarray | Tensor)]
    one_each = [(name, value) for name, value in lists if _length(value) == num]
    once = {id(value): (name, value) for name, value in one_each}  # ImageFolder has the same list twice
    return Fingerprint(num, digest(name.encode() + b"=" + _content(value, root) for name, value in once.values()))


def _length(value: Any) -> int:
    return 1 if isinstance(value, np.ndarray | Tensor) and value.ndim == 0 else len(value)


def file_sizes(paths: Iterable[str]) -> str:
    """Return the hash of the sizes of files, of which some may not exist."""
    return digest(_size(path).encode() for path in paths)


def some_of(num: int) -> range:
    """Return up to ``STAT_FILES`` indices, spread over ``range(num)``."""
    return range(0, num, max(1, -(-num // STAT_FILES)))


def _size(path: str) -> str:
    try:
        return str(os.stat(path).st_size)
    except OSError:
        return "unreadable"


def _content(value: Any, root: str) -> bytes:
    """Return bytes that identify a sequence of paths, numbers, or tuples of them; of anything else, no bytes.

    The most frequent types come first.
    """
    if isinstance(value, str):
        return value.removeprefix(root).encode("utf-8", "surrogateescape")
    if isinstance(value, int):
        return str(value).encode()
    if isinstance(value, list | tuple):
        return b"\0".join([b"(", *(_content(item, root) for item in value), b")"])
    if isinstance(value, np.ndarray | Tensor):
        array = np.asarray(value)
        array = array[list(some_of(len(array)))] if array.nbytes > _MOST_BYTES else array
        return b"" if array.dtype.hasobject else f"{array.dtype} {array.shape}".encode() + array.tobytes()
    if isinstance(value, os.PathLike):
        return _content(os.fspath(value), root)
    return str(value).encode() if isinstance(value, float | None) else b""
