"""Identifies a listing of images without opening files: by number, names, classes and sizes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import NamedTuple

STAT_FILES = 256
"""Files of a listing, spread over it, whose sizes are compared: a file system may take a millisecond for each."""


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
            return f"{other.num_images} images"
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
