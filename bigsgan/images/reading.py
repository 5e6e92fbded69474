"""Reads image files into uint8 tensors: pixel formats, orientation, crop and resize.

Shapes: C channels (1 grey, 3 RGB), H x W pixels.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageFile, PngImagePlugin, UnidentifiedImageError
from torch import Tensor

from bigsgan.errors import reason
from bigsgan.images.size import Fitting, Size
from bigsgan.runtime.paths import check_regular

_MOST_PIXELS = 1 << 28
"""Of an image, which Pillow decodes as a whole: 1 GiB, as it keeps four bytes for a colour. It refuses more."""
_MANY_PIXELS = 2 * 89_478_485
"""Pillow's own limit. Larger images are reduced before anything else."""
_MOST_SAMPLED = 1 << 20  # pixels whose values are sorted
_REDUCTION = 3
"""Sides of a reduced image, in those that are wanted: Lanczos is then "very close to fair resampling" (Pillow)."""
_PLAIN_MODES = {"1": "L", "P": "RGBA", "PA": "RGBA", "I;16": "I", "I;16B": "I", "I;16L": "I", "I;16N": "I"}
"""Modes whose pixels Pillow cannot average, and those that hold the same."""

Image.MAX_IMAGE_PIXELS = _MOST_PIXELS // 2  # Pillow refuses twice as many, and warns before
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
# Compressed text, which may inflate: Pillow allows 1 MiB, but photographs have larger ICC profiles and XMP.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 1 << 28

_accepts_truncated: ContextVar[bool] = ContextVar("accepts_truncated", default=False)


class _LoadTruncated:
    """Pillow's switch, which all threads share, and which other code may have turned on before."""

    def __init__(self, others: object) -> None:
        self._others = others

    def __bool__(self) -> bool:
        return _accepts_truncated.get() or bool(self._others)


ImageFile.LOAD_TRUNCATED_IMAGES = _LoadTruncated(ImageFile.LOAD_TRUNCATED_IMAGES)  # type: ignore[assignment]

_WHITE = 65535  # of 16 bits
_kept: ContextVar[list[bool] | None] = ContextVar("kept", default=None)
_noted: ContextVar[tuple[list[tuple[float, float]], list[str]] | None] = ContextVar("noted", default=None)

TIFF = (".tif", ".tiff")
_SAMPLE_FORMAT = 339  # of TIFF 6.0: 2 is signed
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
_ON_ITS_SIDE = (5, 6, 7, 8)


class CorruptImage(Exception):  # noqa: N818 - it does not end a run, it is counted
    """An unreadable image, which the loader replaces by another."""

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path}: {reason}")


def open_image(path: str, content: BinaryIO | None = None, noting: bool = True) -> Image.Image:
    """Read and decode an image file, or ``content``, for which ``path`` is only a name.

    With ``noting``, the values of more than 8 bits are noted where that is asked for.

    Raises:
        CorruptImage: The file is missing, truncated or not an image.
    """
    try:
        with opened_image(path, content) as image:
            is_wide = _is_wide(image)
            if 2 in getattr(image, "tag_v2", {}).get(_SAMPLE_FORMAT, ()) and not image.mode.startswith("I"):
                raise ValueError("signed pixels of 8 bits need data.range")
            image.load()  # now, so that a truncated file fails here
            if noting and is_wide and _noted.get() is not None:
                note(path, _values(image))
            return image
    except Exception as error:  # damaged bytes make Pillow raise SyntaxError, struct.error, ...
        # Pillow's text has the repr of a file, with an address that differs from run to run.
        why = re.sub(r" <_io\.[^>]*>", "", reason(error, path))
        if noting and isinstance(error, UnidentifiedImageError) and path.lower().endswith(TIFF):
            why += "; unless it is damaged, data.range reads it"  # more channels than Pillow knows
        raise CorruptImage(path, why) from error


@contextmanager
def opened_image(path: str, content: BinaryIO | None = None) -> Iterator[ImageFile.ImageFile]:
    """Yield an image file, or ``content``, of which nothing but the header is read.

    Pillow would map a path into memory, and 13.0 scrambles a TIFF in it that has to be turned.
    """
    with ExitStack() as stack:
        if content is None:
            check_regular(path)
            content = stack.enter_context(open(path, "rb"))
        yield stack.enter_context(Image.open(content))


@contextmanager
def noting_values(paths: list[str] | None = None) -> Iterator[list[tuple[float, float]]]:
    """Yield a list of the lowest and highest value of each image of more than 8 bits that is opened in the block.

    Their paths are added to ``paths``.
    """
    found: list[tuple[float, float]] = []
    token = _noted.set((found, [] if paths is None else paths))
    try:
        yield found
    finally:
        _noted.reset(token)


@contextmanager
def noting_proportions() -> Iterator[list[bool]]:
    """Yield a list with whether each image that is made to fit in the block has the wanted proportions."""
    found: list[bool] = []
    token = _kept.set(found)
    try:
        yield found
    finally:
        _kept.reset(token)


def is_wide(content: bytes) -> bool:
    """Return whether the pixels of a file that Pillow reads have more than 8 bits."""
    with Image.open(io.BytesIO(content)) as image:
        return _is_wide(image)


def note(path: str, values: tuple[float, float]) -> None:
    """Note the lowest and highest value of an image, in a block of ``noting_values``."""
    if (noted := _noted.get()) is not None:
        noted[0].append(values)
        noted[1].append(path)


def values_of(path: str) -> list[tuple[float, float]]:
    """Return the lowest and highest value of an image of more than 8 bits; decode no other. The image is readable."""
    with opened_image(path) as image:
        if not _is_wide(image):
            return []
    with noting_values() as found:
        open_image(path)
    return found


@contextmanager
def accepting_truncated(accepted: bool) -> Iterator[None]:
    """Let what this thread opens in the block be cut off: Pillow decodes what is there, and leaves the rest blank."""
    if accepted and not isinstance(ImageFile.LOAD_TRUNCATED_IMAGES, _LoadTruncated):  # other code has set it since
        ImageFile.LOAD_TRUNCATED_IMAGES = _LoadTruncated(ImageFile.LOAD_TRUNCATED_IMAGES)  # type: ignore[assignment]
    token = _accepts_truncated.set(accepted)
    try:
        yield
    finally:
        _accepts_truncated.reset(token)


def _is_wide(image: ImageFile.ImageFile) -> bool:
    """Return whether pixels have more than 8 bits in the file; Pillow keeps the upper 8 bits of colours."""
    return image.mode.startswith("I") or any(";16" in str(tile) or _is_wide_ppm(tile) for tile in image.tile)


def _is_wide_ppm(tile: tuple[Any, ...]) -> bool:
    """Return whether a tile is a PPM's with a largest value above 255, the last argument of Pillow's decoder."""
    return tile[0] in ("ppm", "ppm_plain") and isinstance(tile[3], tuple) and tile[3][-1] > 255


def _values(image: Image.Image) -> tuple[int, int]:
    """Return the lowest and highest value, or those of all but one pixel in a thousand if these use a part of it."""
    opaque = [band not in "AaX" for band in image.getbands()]  # alpha and padding are full where no value is
    found = np.asarray(image).reshape(-1, len(opaque))[:, opaque].ravel()
    scale, more = (1, 0) if image.mode.startswith("I") else (256, 255)  # of colours, Pillow keeps the upper 8 bits
    low, high = scale * int(found.min()), scale * int(found.max()) + more
    if _fills(low, high):
        some = found[:: -(-found.size // _MOST_SAMPLED)]
        left_out = -(-some.size // 1000)
        if 2 * left_out < some.size:
            some = np.partition(some, [left_out, some.size - 1 - left_out])
            inner = scale * int(some[left_out]), scale * int(some[-1 - left_out]) + more
            return (low, high) if _fills(*inner) else inner
    return low, high


def _fills(low: float, high: float) -> bool:
    return low >= 0 and high <= _WHITE and high - low > _WHITE / 2


def used_range(values: Sequence[tuple[float, float]]) -> str:
    """Say which part of black to white these lowest and highest values use; an empty text if it is more than half.

    Images that use more themselves, such as one with a bright pixel, do not count. Those that use less are told if they
    are more than half of all, or end where 10, 12 or 14 bits do.
    """
    odd = [each for each in values if not _fills(*each)]
    is_within = all(low >= 0 and high <= _WHITE for low, high in odd)
    if is_within and 2 * len(odd) <= len(values) and not _has_fewer_bits(odd):
        return ""
    values = odd
    low, high = min(low for low, _ in values), max(high for _, high in values)
    part = max(0, min(high, _WHITE) - max(low, 0)) / _WHITE
    if is_within and part > 1 / 2:
        return ""
    images = "1 image of more than 8 bits has" if len(values) == 1 else f"{len(values)} images of more than 8 bits have"
    used = f"{100 * part:.3g} % of the range from 0 (black) to {_WHITE} (white)"
    clipped = "" if is_within else "; those outside it become black or white"
    return f"{images} values from {low} to {high}, and use {used}{clipped}; scale them to it"


def _has_fewer_bits(values: Sequence[tuple[float, float]]) -> bool:
    """Return whether several images have values up to the white of 10, 12 or 14 bits."""
    highest = max((high for _, high in values), default=0)
    return len(values) > 1 and any(0.9 * 2**bits < highest < 2**bits for bits in (10, 12, 14))


def image_tensor(image: Image.Image, name: str, fitting: Fitting | None, channels: int) -> Tensor:
    """Convert, turn upright, and make it fit if a ``fitting`` is given: uint8 (C, H, W).

    Of an image that is cropped, that is the largest centred part of the wanted proportions (odd margins leave the extra
    pixel at the right or the bottom). It is resized with Pillow's Lanczos filter, which widens with the reduction, so
    that nothing aliases. An image that is padded gets black pixels on both sides.

    Raises:
        CorruptImage: The image has a mode that cannot be converted; ``name`` is its name in the report.
    """
    try:
        image = eight_bits(upright(image if fitting is None else _reduced(image, fitting)), channels)
        image = image if fitting is None else _fitted(image, fitting)
        pixels = torch.from_numpy(np.array(image))  # (H, W) or (H, W, 3)
        return pixels.view(image.height, image.width, channels).permute(2, 0, 1).contiguous()
    except Exception as error:  # as in open_image: some data sets decode only now
        raise CorruptImage(name, reason(error, name)) from error


def _fitted(image: Image.Image, fitting: Fitting) -> Image.Image:
    note_proportions(image, fitting)
    box, inside = placed(image, fitting)
    image = image.crop(box).resize((inside.width, inside.height), Image.Resampling.LANCZOS)
    size = fitting.size
    if inside == size:
        return image
    canvas = Image.new(image.mode, (size.width, size.height))
    canvas.paste(image, ((size.width - inside.width) // 2, (size.height - inside.height) // 2))
    return canvas


def note_proportions(image: Image.Image | Size, fitting: Fitting) -> None:
    """Note whether an image has the wanted proportions, in a block of ``noting_proportions``."""
    if (kept := _kept.get()) is not None:
        part, _ = placed(image, Fitting(fitting.size))
        kept.append(part == (0, 0, image.width, image.height))


def placed(image: Image.Image | Size, fitting: Fitting) -> tuple[tuple[int, int, int, int], Size]:
    """Return the part of an image that is used, (left, top, right, bottom), and the size that this part gets."""
    width, height, size = image.width, image.height, fitting.size
    whole = (0, 0, width, height)
    if fitting.how == "stretch":
        return whole, size
    is_wide = width * size.height > height * size.width  # wider than wanted
    if fitting.how == "pad":
        if is_wide:
            return whole, Size(max(1, round(height * size.width / width)), size.width)
        return whole, Size(size.height, max(1, round(width * size.height / height)))
    used = (max(1, round(height * size.width / size.height)), height)
    if not is_wide:
        used = (width, max(1, round(width * size.height / size.width)))
    left, top = (width - used[0]) // 2, (height - used[1]) // 2
    return (left, top, left + used[0], top + used[1]), size


def _reduced(image: Image.Image, fitting: Fitting) -> Image.Image:
    """Average the pixels of the used part of a very large image, as all else would copy it several times."""
    if image.width * image.height <= _MANY_PIXELS:
        return image
    if orientation(image) in _ON_ITS_SIDE:
        fitting = Fitting(Size(fitting.size.width, fitting.size.height), fitting.how)
    (left, top, right, bottom), inside = placed(image, fitting)
    size = inside.times(_REDUCTION)
    if right - left < 2 * size.width or bottom - top < 2 * size.height:
        return image
    plain = image.convert(_PLAIN_MODES[image.mode]) if image.mode in _PLAIN_MODES else image
    return plain.resize((size.width, size.height), Image.Resampling.BOX, (left, top, right, bottom))


def eight_bits(image: Image.Image, channels: int) -> Image.Image:
    """Convert to mode L (1 channel) or RGB (3).

    Alpha is composited over white: the colour under a transparent pixel is often arbitrary. 16 bits are scaled, 65535
    to 255; 32-bit integers count as 16 bits, as files in that mode hold 16. Colour becomes grey as luma, ITU-R 601.
    CMYK is converted without a colour profile: (255 - C) (255 - K) / 255.
    """
    if image.mode == "F":
        low, high = image.getextrema()
        given = f"here from {low:g} to {high:g}"
        raise ValueError(f"floating-point pixels have no known range, {given}; data.range gives one to train on them")
    if image.mode == "I" or image.mode.startswith("I;16"):
        wide = np.clip(np.asarray(image).astype(np.int64), 0, _WHITE)
        # 65535 = 255 * 257, so this is v / 257 to the nearest integer; Pillow's own conversions clip or truncate.
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    if image.mode not in ("L", "RGB"):
        image = image.convert("RGB")  # first: Pillow cannot convert LAB to L
    wanted = "L" if channels == 1 else "RGB"
    return image if image.mode == wanted else image.convert(wanted)  # which would copy


def own_channels(image: Image.Image) -> int:
    """Return C. Greyscale files stay greyscale, which is exact for recipes of either kind; all others become RGB."""
    return 1 if image.mode in ("1", "L", "LA", "La", "F") or image.mode.startswith("I") else 3


def orientation(image: Image.Image) -> int | None:
    """Return the EXIF orientation of an image; None without one."""
    try:
        found: int | None = image.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # struct.error, SyntaxError, KeyError ...: damaged metadata makes Pillow raise all kinds
        return None
    return found


def upright_size(image: Image.Image) -> Size:
    """Return the size of ``upright(image)``; decode only a TIFF, whose size may turn when it is loaded.

    A PNG file's orientation counts if it stands before the pixels.
    """
    if image.format == "TIFF":
        image = upright(image)
    elif (image.format != "PNG" or "exif" in image.info) and orientation(image) in _ON_ITS_SIDE:
        return Size(image.width, image.height)
    return Size(image.height, image.width)


def upright(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF data says, and drop these; damaged ones count as none, as the pixels are still good."""
    image.load()  # which turns a TIFF
    given = orientation(image)
    if given not in _UPRIGHT:
        return image
    turned = image.transpose(_UPRIGHT[given])
    turned.info = {key: value for key, value in turned.info.items() if key == "transparency"}
    return turned
