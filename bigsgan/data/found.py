"""Finds the numbers that a recipe leaves to its data: classes, channels, and the values of black and white."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias
from zipfile import ZipInfo

import numpy as np
from PIL import Image

from bigsgan.config.data import Data
from bigsgan.config.from_data import AUTO
from bigsgan.config.recipe import Recipe, parse_recipe
from bigsgan.data.datasets import directory_files
from bigsgan.data.labels import in_folders, labels_of_images
from bigsgan.data.listing import Files, some_names
from bigsgan.data.packed import PackedFiles, zip_content, zip_files, zip_listing, zip_members
from bigsgan.errors import UserError, counted
from bigsgan.images.reading import CorruptImage, accepting_truncated, own_channels
from bigsgan.images.wide import channels_in, extent, range_text, read_numbers

_MOST_OPENED = 1_000
_Read: TypeAlias = Callable[[], tuple[str, bytes | None]]
"""Tells the path and the content of an image, None for that of the file there."""


def with_found(recipe: Recipe) -> tuple[Recipe, list[str], str]:
    """Return a recipe with what its data has in place of ``auto``, that as overrides, and a text that tells it.

    Without the data, nothing is found, and the recipe stays as it is: it cannot train then.

    Raises:
        UserError: The data cannot be read, has images beside folders of classes, or does not fit the recipe.
    """
    data = recipe.data
    if not data.left_to_data or not (data.root and os.path.exists(data.root)):
        return recipe, [], ""
    files, contents = _listed(data)
    found: dict[str, Any] = {}
    texts = list[str]()
    if "num_classes" in data.left_to_data:
        num, names = _classes(data, files)
        found["num_classes"] = num
        texts.append(f"{counted(num, 'class') if num else 'no classes'}{some_names(names)}")
    if data.range is not None and {"image_channels", "range"} & set(data.left_to_data):
        found |= _of_numbers(data, contents(_some(files.images)), texts)
    elif "image_channels" in data.left_to_data:
        found["image_channels"] = _channels(contents(_some(files.images)))
        texts.append(counted(found["image_channels"], "channel"))
    keys = [f"data.{key}={range_text(each) if key == 'range' else each}" for key, each in found.items()]
    tree = recipe.model_dump()
    tree["data"] |= found
    told = ", ".join(texts[:-1]) + " and " * (len(texts) > 1) + texts[-1]
    return parse_recipe(tree), keys, f"{data.root} has {told}: {' '.join(keys)}"


def _listed(data: Data) -> tuple[Files, Callable[[list[str]], Iterator[_Read]]]:
    """Return the files of a folder or zip file, and a function that tells how to read images by their names."""
    if data.kind == "zip":
        members = zip_members(data)
        return zip_listing(data, members), lambda names: _in_zip(data, members, names)
    root, files = directory_files(data)
    return files, lambda names: (partial(_loose, os.path.join(root, name)) for name in names)


def _loose(path: str) -> tuple[str, None]:
    return path, None


def _in_zip(data: Data, members: Mapping[str, ZipInfo], names: list[str]) -> Iterator[_Read]:
    packed = PackedFiles(*zip_files(data, members, names, np.zeros(len(names), np.int64)), zip_content)

    def read(index: int) -> tuple[str, bytes]:
        return packed.path(index), packed.read(index)

    return (partial(read, index) for index in range(len(names)))


def _some(names: list[str]) -> list[str]:
    """Return some names, evenly spread."""
    return names[:: -(-len(names) // _MOST_OPENED) or 1]


def _classes(data: Data, files: Files) -> tuple[int, list[str]]:
    """Return the number of classes, 0 for a single one, and their names if they have some."""
    if (listed := labels_of_images(data, files)) is not None:
        labels, names = listed
        num = len(names) or int(labels.max(initial=0)) + 1
        return (num, names) if num > 1 else (0, [])
    folders = in_folders(files)
    loose = [name for name in files.images if "/" not in name]
    if len(loose) == len(files.images) or len(folders) == 1:
        return 0, []
    if loose:
        problem = f"must be given where images lie beside folders{some_names(loose)}"
        remedy = "set data.num_classes=0 to train without classes, or move these images"
        raise UserError("data.num_classes", None, problem, remedy)
    return len(folders), list(folders)


def _channels(images: Iterable[_Read]) -> int:
    """Return 1 if all images are grey, else 3. Unreadable ones do not count; training tells of them."""
    found = set()
    for read in images:
        try:
            path, content = read()
            with Image.open(path if content is None else io.BytesIO(content)) as image:
                found.add(own_channels(image))
        except Exception:  # damaged bytes make Pillow raise SyntaxError, struct.error, ...
            continue
        if 3 in found:
            break
    return 1 if found == {1} else 3


def _of_numbers(data: Data, images: Iterable[_Read], texts: list[str]) -> dict[str, Any]:
    """Return the channels of images with a range, and that range, as far as they are left to the data; add texts.

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
            numbers = read_numbers(path, content, given)
            low, high = extent(numbers, path)
            channels.add(channels_in(numbers))
            lows.append(low)
            highs.append(high)
    left, found = data.left_to_data, dict[str, Any]()
    if not lows:
        remedy = "repair its images, or give these keys: " + " ".join(f"data.{key}" for key in left)
        raise UserError("data.root", data.root, "contains no readable images", remedy)
    if given is None:
        if len(channels) > 1:
            problem = f"must be a number for images of {' and '.join(map(str, sorted(channels)))} channels"
            raise UserError("data.image_channels", AUTO, problem, "give that of those to train on")
        found["image_channels"] = channels.pop()
        texts.append(counted(found["image_channels"], "channel"))
    if "range" in left:
        low, high = min(lows), max(highs)
        if low == high:
            problem, remedy = f"must be two numbers where all values are {low:g}", "give the values of black and white"
            raise UserError("data.range", AUTO, problem, remedy)
        found["range"] = [low, high]
        texts.append(f"values from {low:g} to {high:g}")
    return found
