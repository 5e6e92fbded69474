"""Progress of a run: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import TextIO

from tqdm import tqdm

_LOSSES = {"G": "loss/generator", "D": "loss/discriminator"}

_RATE = " images/s"
_BAR_COLUMNS = 10
"""Columns of the percentage, the shortest bar and the space around them."""


class Progress:
    """Shows images seen, losses, images/s since the last update, and the time left at this process's mean speed.

    On a terminal this is one bar, which is redrawn; elsewhere each update is its own line, as a bar redrawn into a log
    file is unreadable. A bar that is too long for the terminal has no images/s: tqdm would cut its end off.
    """

    def __init__(self, total_nimg: int, initial_nimg: int, stream: TextIO | None = None) -> None:
        """Start the clock at ``initial_nimg``, the images seen before this process; ``stream`` is stderr by default."""
        self._total_nimg, self._initial_nimg, self._nimg = total_nimg, initial_nimg, initial_nimg
        self._stream = sys.stderr if stream is None else stream
        self._started = self._updated = monotonic()
        self._bar: tqdm | None = None
        if _has_rows(self._stream):
            self._bar = tqdm(
                total=total_nimg,
                initial=initial_nimg,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {desc}",
            )

    def update(self, nimg: int, metrics: Mapping[str, float]) -> None:
        """Show that ``nimg`` images were seen, and the losses of both networks, as far as ``metrics`` has them."""
        now = monotonic()
        parts = self._parts(nimg, metrics, now)
        text = "  ".join(parts)
        self._nimg, self._updated = nimg, now
        if self._bar is None:
            self.write(text)
        else:
            self._bar.n = min(nimg, self._total_nimg)  # the last batch may exceed the total
            with suppress(OSError):
                if len(text) + _BAR_COLUMNS > os.get_terminal_size(self._stream.fileno()).columns:
                    text = "  ".join(part for part in parts if not part.endswith(_RATE))
                self._bar.set_description_str(text)

    def write(self, text: str) -> None:
        """Print ``text`` on its own lines above the bar. A full disk behind the stream does not end the run."""
        with suppress(OSError):
            tqdm.write(text, file=self._stream)
            self._stream.flush()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()

    def _parts(self, nimg: int, metrics: Mapping[str, float], now: float) -> list[str]:
        parts = [f"nimg {nimg}/{self._total_nimg}"]
        parts += [f"{short} {metrics[name]:.2f}" for short, name in _LOSSES.items() if name in metrics]
        seen_nimg = nimg - self._nimg
        if seen_nimg > 0 and now > self._updated:
            seconds_per_image = (now - self._started) / (nimg - self._initial_nimg)
            left = max(self._total_nimg - nimg, 0) * seconds_per_image
            parts.append(f"{seen_nimg / (now - self._updated):.1f}{_RATE}")
            parts.append(f"{tqdm.format_interval(left)} left")
        return parts


def _has_rows(stream: TextIO) -> bool:
    """Return whether a bar can be drawn: tqdm draws none on a terminal of size 0 x 0, as CI and ``script`` open."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).lines > 0
