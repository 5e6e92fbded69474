"""Writes and checks the files of a tag in pieces, and reports the progress."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

Moved = Callable[[int], None]
"""Called with the number of bytes that were written to the disk or read, from any thread."""

_PIECE_BYTES = 1 << 26
"""Bytes written to the disk at a time. Larger pieces are no faster; a disk of 1 MB/s takes about a minute for one."""

_READ_BYTES = 1 << 22

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def unnoticed(num_bytes: int) -> None:
    """Ignore moved bytes."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], moved: Moved) -> str:
    """Write one-dimensional tensors as a file of safetensors, and wait until it is on the disk.

    The library's own ``save_file`` (0.8) is one call: until it returns nothing shows whether the disk still answers,
    and it first copies all tensors of a GPU to the host.

    Tensors may be on any device. ``moved`` is called after each piece that is on the disk.

    Returns:
        SHA-256 of what the file should hold; ``checksum`` returns the same if it does.

    Raises:
        OSError: The disk is full, or fails.
    """
    # Largest elements first, so that every tensor begins at a multiple of its elements' size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    digest, pending = hashlib.sha256(), 0
    with open(path, "wb", buffering=0) as file:
        header = memoryview(_header(names, tensors, metadata))
        for piece in itertools.chain([header], *(_pieces(tensors[name]) for name in names)):
            view = piece
            while view:  # a call may write less than it is asked for
                view = view[file.write(view) :]
            digest.update(piece)
            pending += len(piece)
            if pending >= _PIECE_BYTES:
                os.fdatasync(file.fileno())
                moved(pending)
                pending = 0
        os.fsync(file.fileno())
    moved(pending)
    return digest.hexdigest()


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that holds Inf or NaN, or None.

    Every number is checked, as a sum over finite numbers may overflow; one piece at a time, to save memory.
    """
    for name, values in tensors.items():
        if values.is_floating_point():
            for piece in torch.atleast_1d(values.detach()).split(max(1, _PIECE_BYTES // values.element_size())):
                if not piece.isfinite().all():
                    return name
    return None


def checksum(path: Path, moved: Moved = unnoticed) -> str:
    """Return the SHA-256 of a file, as ``sha256sum`` prints it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            moved(len(block))
    return digest.hexdigest()


def _header(names: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the length and description of a file: https://github.com/huggingface/safetensors#format."""
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        described[name] = {
            "dtype": _DTYPES[tensors[name].dtype], "shape": [tensors[name].numel()], "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(values: Tensor) -> Iterator[memoryview]:
    flat = values.detach().contiguous()
    flat = flat.as_strided(flat.shape, (1,))  # a tensor of a single element may have any stride and be contiguous
    for piece in flat.split(max(1, _PIECE_BYTES // flat.element_size())):
        if piece.numel():
            yield memoryview(piece.cpu().view(torch.uint8).numpy())
