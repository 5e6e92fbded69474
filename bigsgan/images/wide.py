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

from bigsgan.errors import UserError, counted, reason
from bigsgan.images.npz import array_header, num_bytes
from bigsgan.images.reading import (
    TIFF,
    CorruptImage,
    eight_bits,
    is_wide,
    note,
    note_proportions,
    open_image,
    orientation,
    own_channels,
    placed,
    upright,
)
from bigsgan.images.size import Fitting, Size
from bigsgan.runtime.extras import require
from bigsgan.runtime.paths import check_regular

ARRAYS = ".npy"
_PNG = b"\x89PNG"
_BIT_DEPTH = 24  # byte of a PNG file: PNG specification, 11.2.1
_EXACT = 2**53  # from here on, float64 has not all integers
_UPRIGHT = {
    2: (1, -1, False), 3: (-1, -1, False), 4: (-1, 1, False),
    5: (1, 1, True), 6: (1, -1, True), 7: (-1, -1, True), 8: (-1, 1, True),
}  # fmt: skip
"""Steps through rows and columns, after these were swapped or not, that turn an image with this orientation upright."""


def read_wide(
    path: str, fitting: Fitting, channels: int, values: Sequence[float], content: bytes | None = None
) -> Tensor:
    """Read an image file, or ``content``, for which ``path`` is only a name: float32 (C, H, W) in [-1, 1].

    ``values`` are those of black and white.

    Raises:
        CorruptImage: It cannot be read, or has other channels.
        UserError: A package is missing.
    """
    return wide_tensor(read_numbers(path, content, channels), path, fitting, channels, values)


def read_numbers(path: str, content: bytes | None = None, channels: int | None = None) -> np.ndarray:
    """Return the numbers of an image file, (H, W), (H, W, C) or, of .npy alone, (C, H, W).

    Pictures of 8 bits are converted to ``channels``, or else to their own, 1 or 3; those of other files are not.

    Raises:
        CorruptImage: It cannot be read.
        UserError: A package is missing.
    """
    found = read_image(path, content)
    return picture_array(found, channels) if isinstance(found, Image.Image) else found


def read_image(path: str, content: bytes | None = None) -> np.ndarray | Image.Image:
    """Return the numbers of an image file, as ``read_numbers`` does; a picture of 8 bits as it is.

    Raises:
        CorruptImage: It cannot be read.
        UserError: A package is missing.
    """
    try:
        if content is None:
            check_regular(path)
            content = Path(path).read_bytes()
        return _decoded(path, content)
    except (CorruptImage, UserError):
        raise
    except Exception as error:  # damaged bytes make readers raise all kinds
        raise CorruptImage(path, reason(error, path)) from error


def _decoded(path: str, content: bytes) -> np.ndarray | Image.Image:
    suffix = Path(path).suffix.lower()
    if suffix == ARRAYS:
        file = io.BytesIO(content)
        shape, _, dtype = array_header(file)
        if dtype.hasobject or len(content) - file.tell() < num_bytes(shape, dtype):
            raise ValueError("it is cut off, or has Python objects")
        found: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        return found
    if suffix in TIFF and (found_tiff := _tiff(content)) is not None:
        return found_tiff
    # It refuses what is damaged: libpng would end the process.
    image = open_image(path, io.BytesIO(content), noting=False)
    if content[:4] == _PNG and content[_BIT_DEPTH] == 16:
        vision = importlib.import_module("torchvision.io")
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pixels: np.ndarray = vision.decode_png(data, vision.ImageReadMode.UNCHANGED).numpy()
        return turned(pixels.transpose(1, 2, 0), orientation(image))
    if image.format == "PPM" and is_wide(content):
        raise ValueError("more than 8 bits are read from PNG, TIFF and .npy files alone")
    return image


def picture_array(image: Image.Image, channels: int | None) -> np.ndarray:
    """Return the numbers of a picture of 8 bits, upright, with ``channels`` if there is a way to convert to these.

    Without ``channels``, it keeps its own, 1 or 3.
    """
    image = upright(image)
    channels = own_channels(image) if channels is None else channels
    if image.mode == "F" or image.mode.startswith("I"):
        return np.asarray(image)
    if channels in (1, 3):
        return np.asarray(eight_bits(image, channels))
    if (channels, image.mode) != (4, "CMYK"):
        image = image.convert({2: "LA", 4: "RGBA"}.get(channels, image.mode))
    return np.asarray(image)


def _tiff(content: bytes) -> np.ndarray | None:
    """Return the numbers of a TIFF file of more than 8 bits or other channels; None for a picture that Pillow reads.

    Raises:
        ValueError: Its values are indices of colours, or 0 is white.
        UserError: A package is missing.
    """
    require("tiff", "data.range")
    with importlib.import_module("tifffile").TiffFile(io.BytesIO(content)) as file:
        page, series = file.pages.first, file.series[0]
        meaning = getattr(page.photometric, "name", "")
        is_picture = page.bitspersample <= 8 and page.dtype in (np.uint8, np.bool_) and len(file.pages) == 1
        if is_picture and page.samplesperpixel in (1, 3, 4):
            return None
        if meaning in ("MINISWHITE", "PALETTE"):
            raise ValueError(f"TIFF of the kind {meaning} is not supported with more than 8 bits")
        found = np.asarray(series.asarray())
        if found.ndim == 3 and series.axes[-1] != "S":  # planes, or pages
            found = np.moveaxis(found, 0, 2)
        tag = page.tags.get("Orientation")
        return turned(found, None if tag is None else int(tag.value))


def turned(array: np.ndarray, given: int | None) -> np.ndarray:
    """Turn an array (H, W, ...) upright, as EXIF's or TIFF's orientation says."""
    rows, columns, transposed = _UPRIGHT.get(given or 1, (1, 1, False))
    return (array.swapaxes(0, 1) if transposed else array)[::rows, ::columns]


def wide_tensor(array: np.ndarray, name: str, fitting: Fitting, channels: int, values: Sequence[float]) -> Tensor:
    """Make numbers fit, and scale them: float32 (C, H, W) in [-1, 1]. See ``fitted``.

    Raises:
        CorruptImage: It is no image, or does not have these channels.
    """
    low, high = values
    found = fitted(array, name, fitting, channels, values).double()  # float32 would round twice
    return ((found - low) * (2 / (high - low)) - 1).clamp(-1, 1).float()


def fitted(array: np.ndarray, name: str, fitting: Fitting, channels: int | None, values: Sequence[float]) -> Tensor:
    """Make numbers fit as ``image_tensor`` does, and keep them in their units: float32 (C, H, W).

    What fits already is only rounded to float32 and clipped, so that a second call changes nothing.

    Args:
        array: Its numbers; see ``channels_last``.
        name: Name of the image in the report.
        fitting: What makes it fit.
        channels: C; None for the array's own.
        values: Those of black and white; others become black or white.

    Raises:
        CorruptImage: It has another number of channels or sides, or numbers that are not finite.
    """
    array = channels_last(array, name, channels)
    note(name, extent(array, name))
    (low, high), size = values, fitting.size
    note_proportions(Size(*array.shape[:2]), fitting)
    (left, top, right, bottom), inside = placed(Size(*array.shape[:2]), fitting)
    found = np.full((array.shape[2], *size), low, np.float32)
    for number, channel in enumerate(found):
        plane = np.clip(array[top:bottom, left:right, number].astype(np.float64), low, high).astype(np.float32)
        image = Image.fromarray(plane).resize((inside.width, inside.height), Image.Resampling.LANCZOS)
        first, start = (size.height - inside.height) // 2, (size.width - inside.width) // 2
        inner = np.clip(np.asarray(image), np.float32(low), np.float32(high))  # the filter overshoots at edges
        channel[first : first + inside.height, start : start + inside.width] = inner
    return torch.from_numpy(found)


def channels_last(array: np.ndarray, name: str, channels: int | None = None) -> np.ndarray:
    """Return an image (H, W), (H, W, C) or, if its first side is C and its last is not, (C, H, W) as (H, W, C).

    Without ``channels``, C is the smaller of these sides.

    Raises:
        CorruptImage: It is no image, or has other channels.
    """
    _check_image(array, name)
    array = array[:, :, None] if array.ndim == 2 else array
    first, last = array.shape[0], array.shape[2]
    channels = min(first, last) if channels is None else channels
    if last != channels and first == channels:
        return array.transpose(1, 2, 0)
    if last != channels:
        raise CorruptImage(name, f"it has {counted(last, 'channel')}, not {channels}, of shape {array.shape}")
    return array


def _check_image(array: np.ndarray, name: str) -> None:
    if array.dtype.kind not in "biuf" or array.ndim not in (2, 3) or not array.size:
        raise CorruptImage(name, f"it is {array.dtype} of shape {array.shape}, and no image")


def extent(array: np.ndarray, name: str) -> tuple[float, float]:
    """Return the lowest and the highest number of an image.

    Raises:
        CorruptImage: A number is not finite, or there is none.
    """
    _check_image(array, name)
    lowest, highest = float(array.min()), float(array.max())
    if not np.isfinite([lowest, highest]).all():
        raise CorruptImage(name, "it has numbers that are not finite")
    return lowest, highest


def range_text(values: Sequence[float]) -> str:
    """Return the values of black and white as an override has them, such as ``[-1000,3000]``."""
    exact = [int(each) if float(each).is_integer() and abs(each) < _EXACT else float(each) for each in values]
    return str(exact).replace(" ", "")


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
    """Return images in the units of the data, float32, where ``values`` are those of black and white.

    Images are clipped to [-1, 1], as the data are to these values.
    """
    low, high = values or (-1.0, 1.0)
    images = images.double().clamp(-1, 1)
    return ((1 + images) * (high / 2) + (1 - images) * (low / 2)).float()


def viewable(images: Tensor) -> Tensor:
    """Return the channels (n, 1 or 3, H, W) of images (n, C, H, W) that one looks at: the first three, or the first."""
    channels = images.shape[1]
    return images if channels in (1, 3) else images[:, : 3 if channels > 3 else 1]
