"""Finds the numbers that a recipe leaves to its data: classes and channels."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import partial

from PIL import Image

from bigsgan.config.data import Data
from bigsgan.config.recipe import Recipe, parse_recipe
from bigsgan.data.datasets import directory_files
from bigsgan.data.labels import in_folders, labels_of_images
from bigsgan.data.listing import Files, some_names
from bigsgan.data.originals import own_channels
from bigsgan.data.packed import zip_listing, zip_member, zip_members
from bigsgan.errors import UserError, counted

_MOST_OPENED = 1_000


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
        found["num_classes"], names = _classes(data, files)
        texts.append(counted(found["num_classes"], "class").replace("0 classes", "no classes") + some_names(names))
    if "image_channels" in data.left_to_data:
        found["image_channels"] = _channels(files, opened)
        texts.append(counted(found["image_channels"], "channel"))
    keys = [f"data.{key}={number}" for key, number in found.items()]
    tree = recipe.model_dump()
    tree["data"] |= found
    return parse_recipe(tree), keys, f"{data.root} has {' and '.join(texts)}: {' '.join(keys)}"


def _listed(data: Data) -> tuple[Files, Callable[[str], io.BytesIO | str]]:
    """Return the files of a folder or zip file, and a function that gives what Pillow opens by a file's name."""
    if data.kind == "zip":
        members = zip_members(data)
        return zip_listing(data, members), lambda name: io.BytesIO(zip_member(data, members[name]))
    root, files = directory_files(data)
    return files, partial(os.path.join, root)


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


def _channels(files: Files, opened: Callable[[str], io.BytesIO | str]) -> int:
    """Return 1 if all of some images are grey, else 3. Unreadable ones do not count; training tells of them."""
    some = files.images[:: -(-len(files.images) // _MOST_OPENED) or 1]
    found = set()
    for name in some:
        try:
            with Image.open(opened(name)) as image:
                found.add(own_channels(image))
        except Exception:  # damaged bytes make Pillow raise SyntaxError, struct.error, ...
            continue
        if 3 in found:
            break
    return 1 if found == {1} else 3
