"""Classes of images: numbers in dataset.json, or the names of folders.

dataset.json is the file of StyleGAN's and EDM2's dataset_tool.py, ``{"labels": [["00000/img00000000.png", 3], ...]}``,
and is read as their ImageFolderDataset reads it: each image needs a label, the folders beside it are not classes, and
``{"labels": null}`` says that there are none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from bigsgan.config.data import Data
from bigsgan.data.listing import (
    KINDS_OF_IMAGES,
    LABELS_FILE,
    Files,
    Ignored,
    ignored,
    no_images,
    plain_name,
    some_names,
    unreadable_root,
    warn_once,
    wrong_num_classes,
)
from bigsgan.errors import UserError, counted, reason, shown
from bigsgan.runtime.paths import parse_json

_MOST_CLASSES = 2**31


def with_classes(data: Data, files: Files, wanted: str) -> tuple[list[str], list[int], list[str]]:
    """Return the images that a recipe trains on, in order, the class of each, and the names of the classes.

    With ``data.num_classes``, classes are those of dataset.json, or else each folder of the root is one, in
    alphabetical order; images may lie deeper in it. Only folders have names. Ignored files are warned of.
    ``wanted`` describes a source with images, for the message that there are none.

    Raises:
        UserError: There are no images, there are not ``data.num_classes`` classes, some folders contain no images,
            dataset.json does not fit the images, or more files than images would be ignored.
    """
    if not files.images:
        raise no_images(data, wanted, ignored(files.others, []))
    names, labels, classes = files.images, [0] * len(files.images), list[str]()
    if data.num_classes and (listed := labels_of_images(data, files)) is not None:
        labels = listed
        if (found := max(labels) + 1) != data.num_classes:
            raise wrong_num_classes(data, found, f"classes in {LABELS_FILE}")
    elif data.num_classes:
        names, labels, classes = _by_folder(data, files)
    others = left_out(files, names)
    others.check("data.root", data.root, len(names), data.max_ignored)
    others.tell(data.root)
    return names, labels, classes


def left_out(files: Files, names: Sequence[str]) -> Ignored:
    """Describe the files that are not among ``names``."""
    used = set(names)
    return ignored([name for each in (files.others, files.images) for name in each if name not in used], names)


def in_folders(files: Files) -> dict[str, list[str]]:
    """Return the images in each folder of the root by its name, in the order of the names."""
    found: dict[str, list[str]] = {name: [] for name in files.folders}
    for name in files.images:
        folder, below, _ = name.partition("/")
        if below:
            found[folder].append(name)
    return found


def _by_folder(data: Data, files: Files) -> tuple[list[str], list[int], list[str]]:
    found = in_folders(files)
    if len(found) != data.num_classes:
        raise wrong_num_classes(
            data, len(found), f"class folder{'' if len(found) == 1 else 's'}{some_names(list(found))}"
        )
    if empty := [name for name, images in found.items() if not images]:
        problem = f"has class folders without images{some_names(empty)}"
        remedy = f"add files of {KINDS_OF_IMAGES}, or remove the folders and lower data.num_classes"
        raise UserError("data.root", data.root, problem, remedy)
    each = list(found.values())
    labels = [label for label, images in enumerate(each) for _ in images]
    return [image for images in each for image in images], labels, list(found)


def labels_of_images(data: Data, files: Files) -> list[int] | None:
    """Return the class of each image from dataset.json; None if there is no such file.

    Raises:
        UserError: It cannot be read, does not list an image, lists one that is not there, or has no class numbers.
    """
    if files.labels is None:
        _check_root(data, files)
        return None
    try:
        listed = read_listing(data, files.labels())
    except OSError as error:
        raise unreadable_root(data, error) from error
    if listed is not None:
        _check_listing(data, listed, files)
    return class_numbers(data, files.images, listed)


def _check_root(data: Data, files: Files) -> None:
    """Refuse data sets with the folders around them, which would count as classes."""
    inner = sorted(os.path.dirname(name) for name in files.others if os.path.basename(name) == LABELS_FILE)
    if not inner:
        return
    problem, detail = f"has {inner[0]}/{LABELS_FILE}, and no {LABELS_FILE}", "it lists the classes of a data set"
    problem += " beside that folder" if len(inner) == 1 else f" beside the folders{some_names(inner)}"
    remedy = f"give {data.root}/{inner[0]}"
    if os.path.isfile(str(data.root)):
        remedy = f"pack the files in {inner[0]} without that folder"
    if len(files.folders) > 1:
        remedy += f", or remove {LABELS_FILE} if the folders are the classes"
    raise UserError("data.root", data.root, problem, remedy, detail)


def read_listing(data: Data, content: bytes) -> dict[str, Any] | None:
    """Return the label of each name in dataset.json; None if it says that there are no labels.

    Raises:
        UserError: It is damaged, or lists a name twice with different labels.
    """
    try:
        given = parse_json(content)["labels"]
        if given is None:
            return None
        dict(given)  # raises what names the place
        each = given.items() if isinstance(given, dict) else given
        in_archive = os.path.isfile(str(data.root))
        pairs = [(plain_name(str(name), in_archive), label) for name, label in each]
    except (ValueError, KeyError, TypeError) as error:
        raise unlisted(data, error) from None
    found = dict(pairs)
    for name, label in pairs:
        if label not in [found[name]]:  # NaN is itself
            problem = f"has two labels of {name} in its {LABELS_FILE}, {shown(label)} and {shown(found[name])}"
            raise UserError("data.root", data.root, problem, f"list each file once in {LABELS_FILE}")
    return found


def class_numbers(data: Data, names: Sequence[str], listed: Mapping[str, Any] | None) -> list[int]:
    """Return the class of each listed name; 0 for all if there are no labels.

    Raises:
        UserError: There are no labels though the recipe has classes, or a label is not the number of a class.
    """
    if listed is None:
        if data.num_classes > 1:
            raise wrong_num_classes(data, 0, f"classes in {LABELS_FILE}")
        return [0] * len(names)
    return [_class_number(data, name, listed[name]) for name in names]


def _class_number(data: Data, name: str, label: Any) -> int:
    remedy = "number classes from 0" + (", or set data.num_classes=0" if data.num_classes else "")
    if isinstance(label, list | dict):
        problem = f"has lists of numbers as labels in its {LABELS_FILE}, such as that of {name}"
        remedy = f'write the number of one class for each image, or {{"labels": null}} for none, into {LABELS_FILE}'
        remedy += ", or set data.num_classes=0" if data.num_classes else ""
        raise UserError("data.root", data.root, problem, remedy, "conditions that are vectors are not supported")
    problem = f"has a label that is not the number of a class in its {LABELS_FILE}, {shown(label)} of {name}"
    with suppress(TypeError, ValueError, OverflowError):  # null, text, an infinite number
        number = int(label)
        if number == float(label) and 0 <= number < _MOST_CLASSES:
            return number
        if number < 0:
            problem = f"has a class below 0 in its {LABELS_FILE}, that of {name}"
    raise UserError("data.root", data.root, problem, remedy)


def _check_listing(data: Data, listed: Mapping[str, Any], files: Files) -> None:
    """Refuse an image that dataset.json does not list; warn of listed images that are missing, or refuse most."""
    remedy = "pack it again" if os.path.isfile(str(data.root)) else f"correct {LABELS_FILE}"
    if unknown := [name for name in files.images if name not in listed]:
        problem = f"has {unknown[0]}, which its {LABELS_FILE} does not list"
        detail = f"it lacks {len(unknown)} images" if len(unknown) > 1 else ""
        raise UserError("data.root", data.root, problem, remedy, detail)
    missing = listed.keys() - set(files.images)
    if not missing:
        return
    name, are = min(missing), "is" if len(missing) == 1 else "are"
    detail = f"{LABELS_FILE} lists {counted(len(missing), 'file')} that {are} not read"
    if len(missing) <= len(files.images):  # as NVIDIA's loader, which looks up the labels of the files that are there
        warn_once(f"{data.root}: {detail}, such as {name}")
        return
    problem = f"has no {name}, which its {LABELS_FILE} lists"
    if name in files.others:
        problem = f"has {name} in its {LABELS_FILE}, which is none of {KINDS_OF_IMAGES}"
    raise UserError("data.root", data.root, problem, remedy, detail)


def unlisted(data: Data, error: Exception) -> UserError:
    """Return the error that dataset.json cannot be read."""
    form = '{"labels": [["name", 0], ...]}'
    remedy = f"write {form} into {LABELS_FILE}"
    if os.path.isfile(str(data.root)):
        remedy = f"pack it again with {form} in {LABELS_FILE}"
    if data.kind != "latents":  # whose classes have no other place
        remedy += ", or remove that file if the folders are the classes"
    return UserError("data.root", data.root, f"has no readable {LABELS_FILE}: {reason(error)}", remedy)
