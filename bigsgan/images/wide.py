"""Reads images of any channels and depth, in which a range of values stands for black to white: PNG, TIFF and .npy.

Shapes: C channels, H x W pixels.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bigsgan.errors import counted, reason
from bigsgan.images.npz import array_header
from bigsgan.images.reading import CorruptImage, note, open_image, placed, upright
from bigsgan.images.size import Fitting
from bigsgan.runtime.paths import check_regular

ARRAYS = ".npy"
_TIFF = (".tif", ".tiff")
_PNG = b"\x89PNG"
_BIT_DEPTH = 24  # byte of a PNG file: PNG specification, 11.2.1


def read_wide(
    path: str, fitting: Fitting, channels: int, values: Sequence[float], content: bytes | None = None
) -> Tensor:
    """Read an image file, or ``content``, for which ``path`` is only a name: float32 (C, H, W) in [-1, 1].

    ``values`` are those of black and white.

    Raises:
        CorruptImage: It cannot be read, or has other channels.
    """
    try:
        if content is None:
            check_regular(path)
            content = Path(path).read_bytes()
        return wide_tensor(_array(path, content), path, fitting, channels, values)
    except CorruptImage:
        raise
    except Exception as error:  # damaged bytes make readers raise all kinds
        raise CorruptImage(path, reason(error, path)) from error


def _array(path: str, content: bytes) -> np.ndarray:
    """Return the numbers of a file, in any layout."""
    suffix = Path(path).suffix.lower()
    if suffix == ARRAYS:
        file = io.BytesIO(content)
        shape, _, dtype = array_header(file)
        if dtype.hasobject or len(content) - file.tell() < int(np.prod(shape)) * dtype.itemsize:
            raise ValueError("it is cut off, or has Python objects")
        found: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        return found
    if suffix in _TIFF:
        tiff = importlib.import_module("tifffile")
        return np.asarray(tiff.imread(io.BytesIO(content)))
    if content[:4] == _PNG and content[_BIT_DEPTH] == 16:
        vision = importlib.import_module("torchvision.io")
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pixels: np.ndarray = vision.decode_png(data, vision.ImageReadMode.UNCHANGED).numpy()
        return pixels.transpose(1, 2, 0)
    image = upright(open_image(path, io.BytesIO(content)))
    return np.asarray(image.convert("RGB") if image.mode in ("P", "PA") else image)


def wide_tensor(array: np.ndarray, name: str, fitting: Fitting, channels: int, values: Sequence[float]) -> Tensor:
    """Scale numbers, and make them fit as ``image_tensor`` does: float32 (C, H, W) in [-1, 1].

    Args:
        array: (H, W), (H, W, C) or (C, H, W), the third where its first side is C and its last is not.
        name: Name of the image in the report.
        fitting: What makes it fit.
        channels: C.
        values: Those of black and white; others become black or white.

    Raises:
        CorruptImage: It has another number of channels or sides, or numbers that are not finite.
    """
    if array.dtype.kind not in "biuf" or array.ndim not in (2, 3) or not array.size:
        raise CorruptImage(name, f"it is {array.dtype} of shape {array.shape}, and no image")
    array = array[:, :, None] if array.ndim == 2 else array
    if array.shape[2] != channels and array.shape[0] == channels:
        array = array.transpose(1, 2, 0)
    if array.shape[2] != channels:
        raise CorruptImage(name, f"it has {counted(array.shape[2], 'channel')}, not {channels}")
    lowest, highest = float(array.min()), float(array.max())
    if not np.isfinite([lowest, highest]).all():
        raise CorruptImage(name, "it has numbers that are not finite")
    note(name, (lowest, highest))
    low, high = values
    scaled = np.clip((array.astype(np.float64) - low) * (2 / (high - low)) - 1, -1, 1).astype(np.float32)
    size = fitting.size
    found = np.full((channels, *size), -1, np.float32)
    for channel, plane in zip(found, np.moveaxis(scaled, 2, 0), strict=True):
        image = Image.fromarray(np.ascontiguousarray(plane))
        box, inside = placed(image, fitting)
        image = image.crop(box).resize((inside.width, inside.height), Image.Resampling.LANCZOS)
        top, left = (size.height - inside.height) // 2, (size.width - inside.width) // 2
        channel[top : top + inside.height, left : left + inside.width] = np.clip(np.asarray(image), -1, 1)
    return torch.from_numpy(found)


def outside_range(noted: Sequence[tuple[float, float]], values: Sequence[float]) -> str:
    """Say how many images, by their lowest and highest values, leave a range; an empty text if none does."""
    low, high = values
    out = [each for each in noted if each[0] < low or each[1] > high]
    if not out:
        return ""
    lowest, highest = min(each[0] for each in out), max(each[1] for each in out)
    have = "1 has" if len(out) == 1 else f"{len(out)} have"
    return f"{have} values outside data.range, from {lowest:g} to {highest:g}, which become black or white"


def in_units(images: Tensor, values: Sequence[float] | None) -> Tensor:
    """Return images in [-1, 1] in the units of the data, float32, where ``values`` are those of black and white."""
    low, high = values or (-1.0, 1.0)
    return (images.float() + 1) * ((high - low) / 2) + low


def viewable(images: Tensor) -> Tensor:
    """Return the channels (n, 1 or 3, H, W) of images (n, C, H, W) that one looks at: the first three, or the first."""
    channels = images.shape[1]
    return images if channels in (1, 3) else images[:, : 3 if channels > 3 else 1]
