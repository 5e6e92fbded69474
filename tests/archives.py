"""Images as bytes, and archives of members, for tests of data sets."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def png(pixels: np.ndarray | int, size: int = 4) -> bytes:
    """An image of these pixels, or a grey square of one value."""
    file = io.BytesIO()
    image = Image.new("L", (size, size), pixels) if isinstance(pixels, int) else Image.fromarray(pixels)
    image.save(file, "PNG")
    return file.getvalue()


def write_zip(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def write_tar(
    path: Path,
    members: Mapping[str, bytes] | Iterable[tuple[str, bytes]],
    tar_format: int = tarfile.GNU_FORMAT,
    mode: str = "w",
) -> Path:
    """A shard; names may stand in it twice."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, mode, format=tar_format) as archive:  # type: ignore[call-overload]
        for name, content in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
