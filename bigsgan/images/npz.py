"""Images in .npz files, as ADM's evaluation suite reads and writes them (Dhariwal and Nichol 2021, arXiv 2105.05233).

Shapes: N images (N, H, W, C) uint8 under `arr_0`; their classes (N,) int64, or vectors (N, K) float32,
under `arr_1`, if there are any.
"""

from __future__ import annotations

import io
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from bigsgan.errors import counted, reason
from bigsgan.runtime.paths import check_regular

IMAGES, LABELS = "arr_0", "arr_1"

LOCAL_HEADER = struct.Struct("<4s22xHH")  # zip, APPNOTE 4.3.7: signature, ..., length of name and of extra field

_DAMAGE = (zipfile.BadZipFile, struct.error, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError)
"""Errors of a damaged archive; the last is that of an archive with a password."""


_BYTES = np.dtype(np.uint8)


def write_images(
    path: Path,
    shape: tuple[int, int, int, int],
    batches: Iterable[np.ndarray],
    labels: np.ndarray | None,
    dtype: np.dtype = _BYTES,
) -> None:
    """Write images of a type as they come, with no more than one batch in memory.

    The same images give the same bytes, as members have no date.

    Raises:
        OSError: The file cannot be written.
        ValueError: The images do not fit ``shape``.
    """
    left = shape[0]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo(f"{IMAGES}.npy"), "w", force_zip64=True) as member:
            header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for batch in batches:
                if batch.shape[1:] != shape[1:] or batch.dtype != dtype:
                    raise ValueError(f"a batch is {batch.dtype} {batch.shape}, of images {shape}")
                member.write(np.ascontiguousarray(batch).data)
                left -= len(batch)
        if left:
            raise ValueError(f"it lacks {counted(left, 'image')}")
        if labels is not None:
            with archive.open(zipfile.ZipInfo(f"{LABELS}.npy"), "w") as member:
                np.lib.format.write_array(member, np.asarray(labels), allow_pickle=False)


def mapped_arrays(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the named arrays, as far as an .npz file has them, mapped into memory and not read.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ValueError: It is not an .npz file, or one of these arrays is compressed or has Python objects.
    """
    with _members(path, names) as (_, members), path.open("rb") as file:
        return {name: _mapped(path, file, info) for name, info in members.items()}


def read_arrays(path: Path, names: Collection[str], most_bytes: int) -> dict[str, np.ndarray]:
    """Return the named arrays, as far as an .npz file has them, compressed or not, read into memory.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
        ValueError: It is not an .npz file, or one of these arrays has Python objects or is larger than ``most_bytes``.
    """
    with _members(path, names) as (archive, members):
        return {name: _read(archive, info, most_bytes) for name, info in members.items()}


@contextmanager
def _members(path: Path, names: Collection[str]) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            found = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            yield archive, {name: info for name, info in found.items() if name in names}
    except _DAMAGE as error:
        raise ValueError(str(error)) from None


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most_bytes: int) -> np.ndarray:
    with archive.open(info) as member:  # the header first: it alone says how much memory the array takes
        shape, _, dtype = array_header(member)
        if dtype.hasobject or num_bytes(shape, dtype) > most_bytes:
            raise ValueError(f"{info.filename} is larger than {most_bytes >> 20} MiB, or has Python objects")
    with archive.open(info) as member:
        found: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
    return found


def _mapped(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> np.ndarray:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"{info.filename} is compressed, which numpy.savez does not do")
    file.seek(info.header_offset)
    _, *lengths = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    start = info.header_offset + LOCAL_HEADER.size + sum(lengths)
    file.seek(start)
    shape, in_columns, dtype = array_header(file)
    offset, size = file.tell(), num_bytes(shape, dtype)
    if dtype.hasobject or offset + size > start + info.file_size:
        raise ValueError(f"{info.filename} is damaged, or has Python objects")
    if not size:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape, "F" if in_columns else "C")


_HEADERS: dict[tuple[int, int], Callable[[Any], tuple[tuple[int, ...], bool, np.dtype]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def array_of(content: bytes) -> np.ndarray:
    """Return the numbers of a .npy file.

    The header is checked first: numpy would allocate whatever size it gives, unpickle objects, or open an archive.

    Raises:
        ValueError: It is damaged, or does not hold numbers.
    """
    file = io.BytesIO(content)
    try:
        shape, in_columns, dtype = array_header(file)
    except Exception as error:  # damaged headers make numpy raise all kinds
        raise ValueError(reason(error)) from None
    if dtype.kind not in "fiu":
        raise ValueError(f"it holds the type {dtype}, and not numbers")
    num, start = math.prod(shape), file.tell()
    if len(content) < start + num_bytes(shape, dtype):
        raise ValueError("it is cut off")
    return np.frombuffer(content, dtype, num, start).reshape(shape, order="F" if in_columns else "C")


def array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of a .npy file: its shape, whether it is in Fortran's order, and its type.

    Raises:
        Exception: It is damaged, or of another version; numpy raises all kinds.
    """
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"its version {version} is not supported")
    return _HEADERS[version](file)


def num_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Return the bytes of an array of any size, as Python's integers do not overflow."""
    return int(np.prod([dtype.itemsize, *map(int, shape)], dtype=object))
