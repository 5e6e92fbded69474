"""Images in .npz files, as ADM's evaluation suite reads and writes them (Dhariwal and Nichol 2021, arXiv 2105.05233).

Shapes: N images (N, R, R, C) uint8 under `arr_0`; their classes (N,) int64 under `arr_1`, where there are classes.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bigsgan.runtime.paths import check_regular

IMAGES, LABELS = "arr_0", "arr_1"

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # zip, APPNOTE 4.3.7: signature, ..., length of name and of extra field


def write_images(
    path: Path, shape: tuple[int, int, int, int], batches: Iterable[np.ndarray], labels: np.ndarray | None
) -> None:
    """Write images as they come: no more than a batch lies in memory.

    The same images make the same bytes, as members have no date.

    Raises:
        OSError: The file cannot be written.
        ValueError: There are other images than ``shape`` says.
    """
    left = shape[0]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo(f"{IMAGES}.npy"), "w", force_zip64=True) as member:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for batch in batches:
                if batch.shape[1:] != shape[1:] or batch.dtype != np.uint8:
                    raise ValueError(f"a batch is {batch.dtype} {batch.shape}, of images {shape}")
                member.write(np.ascontiguousarray(batch).data)
                left -= len(batch)
        if left:
            raise ValueError(f"{left} images are missing")
        if labels is not None:
            with archive.open(zipfile.ZipInfo(f"{LABELS}.npy"), "w") as member:
                np.lib.format.write_array(member, np.asarray(labels, dtype=np.int64), allow_pickle=False)


def mapped_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an uncompressed .npz file by name, mapped into memory and not read.

    Raises:
        OSError: It cannot be read, or is no regular file.
        ValueError: It is no such file, or an array is compressed or has Python objects.
    """
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            return {info.filename.removesuffix(".npy"): _mapped(path, file, info) for info in archive.infolist()}
    except (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError) as error:
        raise ValueError(str(error)) from None


def _mapped(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> np.ndarray:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"{info.filename} is compressed, which numpy.savez does not do")
    file.seek(info.header_offset)
    _, *lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + sum(lengths)
    file.seek(start)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, in_columns, dtype = read(file)
    offset = file.tell()
    size = int(np.prod([dtype.itemsize, *map(int, shape)], dtype=object))
    if dtype.hasobject or offset + size > start + info.file_size:
        raise ValueError(f"{info.filename} is damaged, or has Python objects")
    if not size:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape, "F" if in_columns else "C")
