"""Reads image files into uint8 tensors: pixel formats, orientation, crop and resize.

Shapes: C channels (1 grey, 3 RGB), R pixels a side.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bigsgan.errors import reason
from bigsgan.runtime.paths import check_regular

_EXIF_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # the transposition that turns an image with this EXIF orientation upright: EXIF 2.32, table 6


class CorruptImage(Exception):  # noqa: N818 - it does not end a run, it is counted
    """An unreadable image, which the loader replaces by another."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


def open_image(path: str, content: BinaryIO | None = None) -> Image.Image:
    """Read and decode an image file, or ``content``, for which ``path`` is only a name.

    Raises:
        CorruptImage: The file is missing, truncated or not an image.
    """
    try:
        if content is None:
            check_regular(path)
        with Image.open(path if content is None else content) as image:
            image.load()  # now, so that a truncated file fails here
            return image
    except Exception as error:  # damaged bytes make Pillow raise SyntaxError, struct.error, ...
        # Pillow's text has the repr of ``content``, with an address that differs from run to run.
        raise CorruptImage(path, reason(error, path).replace(f" {content!r}", "")) from error


def image_tensor(image: Image.Image, name: str, resolution: int, channels: int) -> Tensor:
    """Convert, turn upright, crop and resize: uint8 (C, R, R).

    The largest centred square (odd margins leave the extra pixel at the right or the bottom) is resized with Pillow's
    Lanczos filter, which widens with the reduction, so that nothing aliases.

    Raises:
        CorruptImage: The image has a mode that cannot be converted; ``name`` is its name in the report.
    """
    try:
        image = _eight_bits(upright(image), channels)
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        image = image.crop((left, top, left + side, top + side))
        image = image.resize((resolution, resolution), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.array(image))  # (R, R) or (R, R, 3)
        return pixels.view(resolution, resolution, channels).permute(2, 0, 1).contiguous()
    except Exception as error:  # as in open_image: some data sets decode only now
        raise CorruptImage(name, reason(error, name)) from error


def _eight_bits(image: Image.Image, channels: int) -> Image.Image:
    """Convert to mode L (1 channel) or RGB (3).

    Alpha is composited over white: the colour under a transparent pixel is often arbitrary. 16 bits are scaled, 65535
    to 255; 32-bit integers count as 16 bits, as files in that mode hold 16. Colour becomes grey as luma, ITU-R 601.
    CMYK is converted without a colour profile: (255 - C) (255 - K) / 255.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range, 8 or 16 bits are supported")
    if image.mode == "I" or image.mode.startswith("I;16"):
        wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        # 65535 = 255 * 257, so this is v / 257 to the nearest integer; Pillow's own conversions clip or truncate.
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    if image.mode != "L":
        image = image.convert("RGB")  # first: Pillow cannot convert LAB to L
    return image.convert("L" if channels == 1 else "RGB")


def upright(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF data says, and drop these; damaged ones count as none, as the pixels are still good."""
    image.load()  # which turns a TIFF
    try:
        orientation = image.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # struct.error, SyntaxError, KeyError ...: damaged metadata makes Pillow raise all kinds
        return image
    if orientation not in _UPRIGHT:
        return image
    turned = image.transpose(_UPRIGHT[orientation])
    turned.info = {key: value for key, value in turned.info.items() if key == "transparency"}
    return turned
