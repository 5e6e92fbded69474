"""Draws a bar chart of the variants as a PNG file, with Pillow, which is a dependency already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from bigsgan.runtime.atomic import replacing
from bigsgan.runtime.paths import writing

_WIDTH, _ROW, _MARGIN, _NAMES, _NUMBERS = 900, 36, 24, 200, 90
_INK, _BAR, _LINE, _SPREAD = (30, 30, 30), (86, 138, 190), (170, 170, 170), (20, 60, 110)
_SIZE = 16


def bar_lengths(bars: Sequence[tuple[str, Sequence[float]]], width: int) -> list[tuple[int, ...]]:
    """Pixels from 0 to the lower quartile, the median and the upper quartile of each bar; the largest has ``width``."""
    largest = max(high for _, (_, _, high) in bars)
    return [tuple(round(width * seconds / largest) for seconds in each) for _, each in bars]


def write_bars(out: Path, title: str, bars: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Write a chart of horizontal bars as a PNG file.

    Each bar has a name, a lower quartile, a median, which the bar shows, and an upper quartile.

    Raises:
        UserError: The file cannot be written.
    """
    font = ImageFont.load_default(_SIZE)
    names = max(_NAMES, *(int(font.getlength(name)) + _SIZE for name, _ in bars))  # names of combinations are long
    bar = _WIDTH - 2 * _MARGIN - _NAMES - _NUMBERS
    size = _WIDTH - _NAMES + names, 2 * _MARGIN + _ROW * (len(bars) + 1)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN, _MARGIN), title, _INK, font)
    left = _MARGIN + names
    for i, ((name, (_, middle, _)), (low, length, high)) in enumerate(zip(bars, bar_lengths(bars, bar), strict=True)):
        top = _MARGIN + _ROW * (i + 1)
        draw.text((_MARGIN, top + 6), name, _INK, font)
        draw.rectangle((left, top + 4, left + length, top + _ROW - 8), _BAR)
        draw.line((left + low, top + _ROW // 2 - 2, left + high, top + _ROW // 2 - 2), _SPREAD, 3)
        draw.text((left + max(length, high) + 8, top + 6), f"{middle:.2f}", _INK, font)
    draw.line((left, _MARGIN + _ROW, left, image.height - _MARGIN), _LINE)
    with writing(out), replacing(out) as unfinished:
        image.save(unfinished, format="PNG")
