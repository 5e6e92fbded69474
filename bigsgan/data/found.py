"""Finds the numbers that a recipe leaves to its data: classes and channels."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeAlias
from zipfile import ZipInfo

import numpy as np
from PIL import Image

from bigsgan.config.data import Data
from bigsgan.config.recipe import Recipe, parse_recipe
from bigsgan.data.datasets import directory_files
from bigsgan.data.labels import in_folders, labels_of_images
from bigsgan.data.listing import Files, some_names
from bigsgan.data.packed import PackedFiles, zip_content, zip_files, zip_listing, zip_members
from bigsgan.errors import UserError, counted
from bigsgan.images.reading import own_channels

_MOST_OPENED = 1_000
_Opens: TypeAlias = Callable[[], Image.Image]


def with_found(recipe: Recipe) -> tuple[Recipe, list[str], str]:
    """Return a recipe with what its data has in place of ``auto``, that as overrides, and a text that tells it.

    Without the data, nothing is found, and the recipe stays as it is: it cannot train then.

    Raises:
        UserError: The data cannot be read, has images beside folders of classes, or does not fit the recipe.
    """
    data = recipe.data
    if not data.left_to_data or not (data.root and os.path.exists(data.root)):
        return recipe, [], ""
    files, opened = _listed(data)
    found: dict[str, int] = {}
    texts = list[str]()
    if "num_classes" in data.left_to_data:
        num, names = _classes(data, files)
        found["num_classes"] = num
        texts.append(f"{counted(num, 'class') if num else 'no classes'}{some_names(names)}")
    if "image_channels" in data.left_to_data:
        found["image_channels"] = _channels(opened(_some(files.images)))
        texts.append(counted(found["image_channels"], "channel"))
    keys = [f"data.{key}={number}" for key, number in found.items()]
    tree = recipe.model_dump()
    tree["data"] |= found
    return parse_recipe(tree), keys, f"{data.root} has {' and '.join(texts)}: {' '.join(keys)}"


def _listed(data: Data) -> tuple[Files, Callable[[list[str]], Iterator[_Opens]]]:
    """Return the files of a folder or zip file, and a function that tells how to open images by their names."""
    if data.kind == "zip":
        members = zip_members(data)
        return zip_listing(data, members), lambda names: _in_zip(data, members, names)
    root, files = directory_files(data)
    return files, lambda names: (partial(Image.open, os.path.join(root, name)) for name in names)


def _in_zip(data: Data, members: Mapping[str, ZipInfo], names: list[str]) -> Iterator[_Opens]:
    packed = PackedFiles(*zip_files(data, members, names, np.zeros(len(names), np.int64)), zip_content)

    def opened(index: int) -> Image.Image:
        return Image.open(io.BytesIO(packed.read(index)))

    return (partial(opened, index) for index in range(len(names)))


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


def _channels(images: Iterable[_Opens]) -> int:
    """Return 1 if all images are grey, else 3. Unreadable ones do not count; training tells of them."""
    found = set()
    for opens in images:
        try:
            with opens() as image:
                found.add(own_channels(image))
        except Exception:  # damaged bytes make Pillow raise SyntaxError, struct.error, ...
            continue
        if 3 in found:
            break
    return 1 if found == {1} else 3
