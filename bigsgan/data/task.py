"""One conversion of `bigsgan data prepare` or `encode`: its parameters, and the paths of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bigsgan.data.source import Source
from bigsgan.images.size import Fitting
from bigsgan.images.wide import ARRAYS

SHARDED = ("tar", "latents")
"""Formats of tar shards."""

_PART_SIZE = 1_000


@dataclass(frozen=True)
class Task:
    """The parameters of a conversion, and the paths of its parts."""

    source: Source
    destination: Path
    fitting: Fitting
    format: str
    more: dict[str, Any] = field(default_factory=dict)  # further parameters that all parts must share
    values: Sequence[float] | None = None  # values of black and white, of images that keep their units
    image_channels: int | None = None  # C of all images; None for the own number of each

    @property
    def suffix(self) -> str:
        """The suffix of the images."""
        return ".png" if self.values is None else ARRAYS

    @property
    def command(self) -> str:
        """The command of `bigsgan data` that does the conversion."""
        return "encode" if self.format == "latents" else "prepare"

    @property
    def work(self) -> Path:
        """Directory of the plan and the reports, and of the parts of a zip file."""
        if self.format == "zip":
            return self.destination.with_name(f"{self.destination.name}.parts")
        return self.destination / f".{self.command}"

    @property
    def plan_file(self) -> Path:
        """Path of the plan."""
        return self.work / "plan.json"

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The parameters that all parts must share."""
        return {
            "format": self.format,
            "resolution": self.fitting.size.value,
            **({} if self.fitting.how == "crop" else {"fit": self.fitting.how}),
            "part_size": _PART_SIZE,
            "source": self.source.digest(),
            **self.more,
        }

    def parts(self) -> dict[int, range]:
        """Return the image indices of each part."""
        num = len(self.source.labels)
        firsts = range(0, num, _PART_SIZE)
        return {number: range(first, min(first + _PART_SIZE, num)) for number, first in enumerate(firsts)}

    def archive(self, number: int) -> Path | None:
        """Return the path of a part's archive, if it has one."""
        if self.format in SHARDED:
            return self.destination / f"shard-{number:06d}.tar"
        return self.work / f"part-{number:06d}.zip" if self.format == "zip" else None

    def report(self, number: int) -> Path:
        """Return the path of a part's report, which is written when the part is complete."""
        return self.work / f"part-{number:06d}.json"

    def is_complete(self, number: int) -> bool:
        """Return whether a part has been written."""
        archive = self.archive(number)
        return self.report(number).is_file() and (archive is None or archive.is_file())

    def name(self, index: int) -> str:
        """Return the path of an image within the destination, without its suffix. Names sort as the source does."""
        label = self.source.labels[index]
        folder = f"{self.source.classes[label]}/" if self.source.classes and self.format not in SHARDED else ""
        return f"{folder}{index:08d}"
