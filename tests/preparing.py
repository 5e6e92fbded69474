"""Tests of `bigsgan data prepare`: images of all kinds, what is read of them, and a process that is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from bigsgan.config.data import Data
from bigsgan.config.origin import Origin, find_origin
from bigsgan.data import build_dataset, prepare
from bigsgan.images.size import Fitting, Size

FORMATS = ["zip", "tar", "folder"]
SIZE = 6


def noise(seed: int, height: int = 9, width: int = 7, channels: int = 3) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze())


def write_source(root: Path) -> Path:
    """14 images of all kinds in three classes, of which two differ in their endings alone."""
    turned = Image.Exif()
    turned[0x0112] = 6
    wide = np.random.default_rng(50).integers(0, 65_536, (8, 8), dtype=np.uint16)
    images = {
        "cat/1.png": noise(1), "cat/1.jpg": noise(2), "cat/deep/er/0.webp": noise(3),
        "cat/alpha.png": noise(4, 8, 8, 4),
        "dog-big/grey.png": noise(5, channels=1), "dog-big/wide.png": Image.fromarray(wide),
        "dog-big/turned.jpg": noise(6), "dog-big/palette.png": noise(7).quantize(16),
        "dog/bits.png": noise(8, channels=1).convert("1"), "dog/cmyk.tif": noise(9).convert("CMYK"),
        "dog/small.bmp": noise(10, 3, 2), "dog/grey_alpha.png": noise(11, channels=2),
        "dog/x.y.z.png": noise(12, 40, 90), "dog/ü.png": noise(13),
    }  # fmt: skip
    for name, image in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / name, **({"exif": turned} if "turned" in name else {}))
    return root


def destination(tmp_path, kind: str) -> Path:
    return tmp_path / ("made.zip" if kind == "zip" else "made")


def origin(source: Path, resolution: int = SIZE) -> Origin:
    return find_origin(source, Fitting(Size.of(resolution)), {})


def opened(kind: str, root: Path, num_classes: int = 3, channels: int = 3, resolution: int = SIZE):
    return build_dataset(
        Data(kind=kind, root=str(root), num_classes=num_classes, image_channels=channels, resolution=resolution)
    )


def samples(dataset) -> list[tuple[list, int]]:
    return [(dataset[index][0].tolist(), dataset[index][1]) for index in range(len(dataset))]


def files(root: Path) -> dict[str, bytes]:
    """Every file beside ``source``, with its content."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] != "source"
    }


def identities(root: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file is written anew, though with the same bytes."""
    return {name: ((root / name).stat().st_ino, (root / name).stat().st_mtime_ns) for name in files(root)}


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


def interrupt(monkeypatch, name: str, calls: int) -> None:
    """Have a function of ``prepare`` fail on its call after ``calls``, leaving an unfinished file as a kill does."""
    real, seen = getattr(prepare, name), []

    def fail(path, *arguments):
        seen.append(path)
        if len(seen) > calls:
            path.with_name(path.name + ".tmp").write_bytes(b"half")
            raise Killed
        return real(path, *arguments)

    monkeypatch.setattr(prepare, name, fail)
