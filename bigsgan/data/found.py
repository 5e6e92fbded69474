"""Finds the numbers that a recipe leaves to its data: classes, channels, sizes, and the values of black and white."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from bigsgan.config.data import Data
from bigsgan.config.from_data import AUTO
from bigsgan.config.recipe import Recipe, parse_recipe
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.data.datasets import directory_files
from bigsgan.data.hdf5 import read_hdf5
from bigsgan.data.huggingface import read_huggingface
from bigsgan.data.labels import in_folders, labels_of_images
from bigsgan.data.listing import Files, ignored, no_images, some_names
from bigsgan.data.outside import pil_image
from bigsgan.data.packed import PackedFiles, zip_content, zip_files, zip_listing, zip_members
from bigsgan.data.shards import names_beside, read_shards, tar_content
from bigsgan.data.tables import TableImages
from bigsgan.errors import UserError, counted
from bigsgan.images.reading import CorruptImage, accepting_truncated, opened_image, own_channels, upright_size
from bigsgan.images.size import Size
from bigsgan.images.wide import channels_last, extent, range_text, read_numbers

_MOST_OPENED = 1_000
_ROUNDING = 32
"""Sides that differ by no more than one of so many pixels are alike."""
_Read: TypeAlias = Callable[[], tuple[str, bytes | Image.Image | None]]
"""Tells the name and the content of an image, None for that of the file of this name."""


class _Listed(NamedTuple):
    """What a data set has."""

    images: Sequence[Any]  # what names them
    read: Callable[[Sequence[Any]], Iterator[_Read]]  # tells how to read some of them
    classes: Callable[[], tuple[int, list[str]]]  # finds the number of classes, 0 for a single one, and their names


@dataclass
class _Found:
    """What was found."""

    keys: dict[str, Any] = field(default_factory=dict)  # of the section data
    texts: list[str] = field(default_factory=list)  # tell it
    sizes: set[Size] = field(default_factory=set)  # of some images


def _within(largest: Size, size: Size) -> Size:
    """Return the size with no more pixels than the largest."""
    share = min(1.0, (largest.num_pixels / size.num_pixels) ** 0.5)
    return Size(*(max(1, round(side * share)) for side in size))


def _equal_up_to_rounding(sizes: Iterable[Size], largest: Size) -> bool:
    """Return whether all sizes, within the largest, are the same but for the rounding of thumbnails."""
    sizes = [_within(largest, size) for size in sizes]
    return all(max(sides) - min(sides) <= max(sides) / _ROUNDING for sides in zip(*sizes, strict=True))


_WRITTEN: dict[str, Callable[[Any], str]] = {"range": range_text, "resolution": lambda size: size.text}
"""How overrides have these values."""


def with_found(recipe: Recipe) -> tuple[Recipe, list[str], str]:
    """Return a recipe with what its data has in place of ``auto``, that as overrides, and a text that tells it.

    Without the data, nothing is found, and the recipe stays as it is: it cannot train then.

    Raises:
        UserError: The data cannot be read, has images beside folders of classes, or does not fit the recipe.
    """
    data = recipe.data
    if not data.left_to_data or not (data.root and os.path.exists(data.root)):
        return recipe, [], ""
    if begun := _begun_with(recipe):
        found_recipe, keys, text = with_found(_with_keys(recipe, begun))
        written = _overrides(begun)
        texts = [f"{recipe.out} began with {' '.join(written)}", text]
        return found_recipe, [*written, *keys], "\n".join(filter(None, texts))
    listed = _listed(data)
    found = _Found()
    if "num_classes" in data.left_to_data:
        num, names = listed.classes()
        found.keys["num_classes"] = num
        found.texts.append(f"{counted(num, 'class') if num else 'no classes'}{some_names(names)}")
    if {"image_channels", "range", "resolution"} & set(data.left_to_data):
        some = listed.images[:: -(-len(listed.images) // _MOST_OPENED) or 1]  # evenly spread
        (_read_pictures if data.range is None else _read_numbers)(data, listed.read(some), found)
    if "resolution" in data.left_to_data:
        _choose_size(recipe, found)
    keys = _overrides(found.keys)
    told = ", ".join(found.texts[:-1]) + " and " * (len(found.texts) > 1) + found.texts[-1]
    return _with_keys(recipe, found.keys), keys, f"{data.root} has {told}: {' '.join(keys)}"


def _begun_with(recipe: Recipe) -> dict[str, Any]:
    """Return what the run in ``out`` has for keys that are left to the data, which may have got other images since.

    Classes are left out, as labels have to fit their number, and so is a size above the largest.
    """
    try:
        begun = read_saved_recipe(Path(recipe.out), "out").data
        has_begun = begun.root == recipe.data.root and any(Path(recipe.out, "checkpoints").glob("[0-9]*"))
    except (UserError, OSError):  # there is none, or resuming tells what is wrong with it
        return {}
    if not has_begun or begun.resolution.num_pixels > recipe.data.resolution.num_pixels:
        return {}
    left = set(recipe.data.left_to_data) - {"num_classes"} - set(begun.left_to_data)
    return {key: getattr(begun, key) for key in sorted(left) if getattr(begun, key) is not None}


def _overrides(keys: dict[str, Any]) -> list[str]:
    return [f"data.{key}={_WRITTEN.get(key, str)(each)}" for key, each in keys.items()]


def _with_keys(recipe: Recipe, keys: dict[str, Any]) -> Recipe:
    tree = recipe.model_dump()
    tree["data"] |= keys
    return parse_recipe(tree)


def _choose_size(recipe: Recipe, found: _Found) -> None:
    """Find the size of a recipe: near that of the images, which networks can have; the largest if they have several."""
    largest = recipe.data.resolution
    found.keys["resolution"] = Size(*largest)
    if not found.sizes or not _equal_up_to_rounding(found.sizes, largest):
        found.texts.append("images of several proportions or sizes" if found.sizes else "no readable images")
        return
    own, problem = min(found.sizes, key=tuple), ""
    within = min((_within(largest, size) for size in found.sizes), key=tuple)
    found.texts.append(f"images of {own}" + f" to {max(found.sizes, key=tuple)}" * (len(found.sizes) > 1))
    for size in dict.fromkeys(within.nearest_multiple_of(1 << i) for i in range(largest.longer.bit_length())):
        if size.num_pixels > largest.num_pixels:
            continue
        try:
            _with_keys(recipe, found.keys | {"resolution": size})
        except UserError as error:
            problem = problem or f" ({error.field} {error.problem})"
        else:
            found.keys["resolution"] = size
            break
    taken = found.keys["resolution"]
    if taken != within and (within == own or taken == Size(*largest)):  # no shrunk image is told its rounding
        found.texts[-1] += problem


def _listed(data: Data) -> _Listed:
    if data.kind in ("folder", "zip"):
        return _folder(data) if data.kind == "folder" else _zip(data)
    if "num_classes" in data.left_to_data:
        data = data.model_copy(update={"num_classes": 1})  # with 0, classes are not read
    if data.kind == "tar":
        return _shards(data)
    return _rows(read_hdf5(data) if data.kind == "hdf5" else read_huggingface(data))


def _folder(data: Data) -> _Listed:
    root, files = directory_files(data)

    def read(names: Iterable[str]) -> Iterator[_Read]:
        return (partial(_loose, os.path.join(root, name)) for name in names)

    return _of_files(data, files, "a directory with files", read)


def _loose(path: str) -> tuple[str, None]:
    return path, None


def _zip(data: Data) -> _Listed:
    members = zip_members(data)

    def read(names: Sequence[str]) -> Iterator[_Read]:
        places = zip_files(data, members, list(names), np.zeros(len(names), np.int64))
        return _in_archive(PackedFiles(*places, zip_content), range(len(names)))

    return _of_files(data, zip_listing(data, members), "a zip file with files", read)


def _of_files(data: Data, files: Files, wanted: str, read: Callable[[Sequence[str]], Iterator[_Read]]) -> _Listed:
    if not files.images:
        raise no_images(data, wanted, ignored(files.others, []))
    return _Listed(files.images, read, lambda: _classes(data, files))


def _shards(data: Data) -> _Listed:
    found = read_shards(data)
    packed = PackedFiles(found.archives, found.names, found.entries, tar_content)

    def classes() -> tuple[int, list[str]]:
        has_labels = len(found.unlabelled) < len(found.names)
        return _of_labels(packed.labels if has_labels else None, names_beside(Path(str(data.root))))

    return _Listed(range(len(packed)), partial(_in_archive, packed), classes)


def _rows(table: TableImages) -> _Listed:
    def image(row: int) -> tuple[str, Image.Image]:
        return table.image_name(row), pil_image(table.sample(row)[0])

    def read(rows: Iterable[int]) -> Iterator[_Read]:
        return (partial(image, row) for row in rows)

    return _Listed(range(len(table)), read, lambda: _of_labels(table.source.labels, table.source.classes))


def _of_labels(labels: np.ndarray | None, names: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of classes (N,), of which the last may have no image, 0 for a single one, and their names."""
    num = 0 if labels is None else max(int(labels.max(initial=0)) + 1, len(names))
    return (num, list(names) if len(names) == num else []) if num > 1 else (0, [])


def _in_archive(packed: PackedFiles, numbers: Iterable[int]) -> Iterator[_Read]:
    def read(number: int) -> tuple[str, bytes]:
        return packed.path(number), packed.read(number)

    return (partial(read, number) for number in numbers)


def _classes(data: Data, files: Files) -> tuple[int, list[str]]:
    """Return the number of classes, 0 for a single one, and their names if they have some."""
    if (listed := labels_of_images(data, files)) is not None:
        return _of_labels(*listed)
    folders = in_folders(files)
    loose = [name for name in files.images if "/" not in name]
    if len(loose) == len(files.images) or len(folders) == 1:
        return 0, []
    if loose:
        problem = f"must be given where images lie beside folders{some_names(loose)}"
        remedy = "set data.num_classes=0 to train without classes, or move these images"
        raise UserError("data.num_classes", None, problem, remedy)
    return len(folders), list(folders)


def _read_pictures(data: Data, images: Iterable[_Read], found: _Found) -> None:
    """Find the channels of images, 1 if all are grey and else 3, and their sizes, if they are left to the data.

    Unreadable images do not count; training tells of them. None is read once all is settled.
    """
    channels, left = set[int](), set(data.left_to_data) & {"image_channels", "resolution"}
    for read in images:
        try:
            with accepting_truncated(data.accepts_truncated), _opened(*read()) as image:
                channels.add(own_channels(image))
                if "resolution" in left:
                    found.sizes.add(upright_size(image))
        except Exception:  # damaged bytes make Pillow raise SyntaxError, struct.error, ...
            continue
        if 3 in channels:
            left.discard("image_channels")
        if "resolution" in left and found.sizes and not _equal_up_to_rounding(found.sizes, data.resolution):
            left.discard("resolution")
        if not left:
            break
    if "image_channels" in data.left_to_data:
        found.keys["image_channels"] = 1 if channels == {1} else 3
        found.texts.append(counted(found.keys["image_channels"], "channel"))


def _opened(path: str, content: bytes | Image.Image | None) -> AbstractContextManager[Image.Image]:
    if isinstance(content, Image.Image):
        return content
    return opened_image(path, None if content is None else io.BytesIO(content))


def _read_numbers(data: Data, images: Iterable[_Read], found: _Found) -> None:
    """Find the channels of images with a range, that range, and their sizes, as far as they are left to the data.

    The range is from the lowest to the highest value of these images, which are up to 1,000 of the data. Unreadable
    ones do not count; training tells of them.

    Raises:
        UserError: A package is missing; the images have different channels, or equal values, or none is readable.
    """
    channels, lows, highs = set[int](), list[float](), list[float]()
    given = None if "image_channels" in data.left_to_data else data.image_channels
    for read in images:
        with suppress(CorruptImage), accepting_truncated(data.accepts_truncated):
            path, content = read()
            assert not isinstance(content, Image.Image)  # of kinds without a range
            numbers = channels_last(read_numbers(path, content, given), path, given)
            low, high = extent(numbers, path)
            if "resolution" in data.left_to_data:
                found.sizes.add(Size(*numbers.shape[:2]))
            channels.add(numbers.shape[2])
            lows.append(low)
            highs.append(high)
    left = data.left_to_data
    if not lows:
        remedy = "repair its images, or give these keys: " + " ".join(f"data.{key}" for key in left)
        raise UserError("data.root", data.root, "contains no readable images", remedy)
    if given is None:
        if len(channels) > 1:
            problem = f"must be a number for images of {' and '.join(map(str, sorted(channels)))} channels"
            raise UserError("data.image_channels", AUTO, problem, "give that of those to train on")
        found.keys["image_channels"] = channels.pop()
        found.texts.append(counted(found.keys["image_channels"], "channel"))
    if "range" in left:
        low, high = min(lows), max(highs)
        if low == high:
            problem, remedy = f"must be two numbers where all values are {low:g}", "give the values of black and white"
            raise UserError("data.range", AUTO, problem, remedy)
        found.keys["range"] = [low, high]
        found.texts.append(f"values from {low:g} to {high:g}")
