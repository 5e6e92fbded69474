"""Labels of images: those in dataset.json or a file that the recipe names, or the names of folders.

A label is the number of a class, or a vector of numbers (K,); see conditions.py.

dataset.json is the file of StyleGAN's and EDM2's dataset_tool.py, ``{"labels": [["00000/img00000000.png", 3], ...]}``,
and is read as their ImageFolderDataset reads it: each image needs a label, the folders beside it are not classes, and
``{"labels": null}`` says that there are none. ``"class_names": ["cat", "dog"]`` beside the labels, which those tools do
not write, names the classes by number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bigsgan.config.data import Data
from bigsgan.data.label_tables import read_table
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
from bigsgan.data.tokens import padded, present
from bigsgan.errors import UserError, counted, reason, shown
from bigsgan.runtime.paths import check_regular, parse_json

_MOST_CLASSES = 2**31
_ACCEPTING = "set data.missing_labels=accept"
_FORM, _NAMES = '{"labels": [["name", 0], ...]}', '"class_names": ["cat", "dog"]'


class Listing(NamedTuple):
    """The content of dataset.json."""

    labels: dict[str, Any] | None  # of each name; None if it says that there are none
    names: list[str]  # of the classes; empty if it has none


def with_classes(data: Data, files: Files, wanted: str) -> tuple[list[str], np.ndarray, list[str]]:
    """Return the images that a recipe trains on, in order, their labels, and the names of the classes.

    With ``data.num_classes`` or ``data.condition_size``, labels are those of ``data.labels_file`` or dataset.json. Else
    each folder of the root is a class, in alphabetical order; images may lie deeper in it. Ignored files are warned of.
    ``wanted`` describes a source with images, for the message that there are none.

    Raises:
        UserError: There are no images, there are not ``data.num_classes`` classes, some folders contain no images,
            the file with labels does not fit the images, or more files than images would be ignored.
    """
    if not files.images:
        raise no_images(data, wanted, ignored(files.others, []))
    names, labels, classes = files.images, np.zeros(len(files.images), np.int64), list[str]()
    if data.condition_width and (listed := labels_of_images(data, files)) is not None:
        labels, classes = listed
        found = len(classes) or (data.num_classes if data.has_vectors else int(labels.max()) + 1)
        if found != data.num_classes:
            raise wrong_num_classes(data, found, f"classes in {_file_of(data)}")
    elif data.condition_width:
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


def _by_folder(data: Data, files: Files) -> tuple[list[str], np.ndarray, list[str]]:
    for key in ("condition_size", "multi_label"):
        if value := getattr(data, key):
            remedy, detail = f"write them into {LABELS_FILE}, or set data.labels_file", "folders tell one class each"
            raise UserError(f"data.{key}", value, "needs a file of labels", remedy, detail)
    found = in_folders(files)
    if len(found) != data.num_classes:
        raise wrong_num_classes(
            data, len(found), f"class folder{'' if len(found) == 1 else 's'}{some_names(list(found))}"
        )
    if empty := [name for name, images in found.items() if not images]:
        problem = f"has class folders without images{some_names(empty)}"
        remedy = f"add files of {KINDS_OF_IMAGES}, or remove the folders and lower data.num_classes"
        raise UserError("data.root", data.root, problem, remedy)
    names = [image for images in found.values() for image in images]
    labels: list[Any] = [label for label, images in enumerate(found.values()) for _ in images]
    if data.missing_labels == "accept":  # images beside the folders have no class
        loose = [name for name in files.images if "/" not in name]
        names, labels = names + loose, labels + [None] * len(loose)
    return names, labels_of(data, names, dict(zip(names, labels, strict=True))), list(found)


def labels_of_images(data: Data, files: Files) -> tuple[np.ndarray, list[str]] | None:
    """Return the images' labels from ``data.labels_file`` or dataset.json, and names of classes; None without these.

    Raises:
        UserError: It cannot be read, does not list an image, lists one that is not there, or has other labels than the
            recipe says.
    """
    suffix = Path(str(data.labels_file)).suffix.lower()
    if data.labels_file is not None and suffix not in (".csv", ".tsv", ".json"):
        raise UserError("data.labels_file", data.labels_file, "must end in .csv, .tsv or .json", "name it so")
    if suffix in (".csv", ".tsv"):
        listing = Listing(*read_table(data, set(files.images)))
    elif data.labels_file is None and files.labels is None:
        _check_root(data, files)
        return None
    else:
        listing = _listing(data, files)
    if listing.labels is not None:
        _check_listing(data, listing.labels, files)
    labels = labels_of(data, files.images, listing.labels)
    return labels, names_of_classes(data, listing, labels)


def _listing(data: Data, files: Files) -> Listing:
    """Read ``data.labels_file`` or dataset.json."""
    try:
        if data.labels_file is None:
            assert files.labels is not None
            return read_listing(data, files.labels())
        check_regular(data.labels_file)
        return read_listing(data, Path(data.labels_file).read_bytes())
    except OSError as error:
        if data.labels_file is None:
            raise unreadable_root(data, error) from error
        problem = f"cannot be read: {reason(error, data.labels_file)}"
        raise UserError(
            "data.labels_file", data.labels_file, problem, "give a file of labels (.csv, .tsv or .json)"
        ) from error


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


def read_listing(data: Data, content: bytes) -> Listing:
    """Read dataset.json.

    Raises:
        UserError: It is damaged, lists a name twice with different labels, or has names of classes that are none.
    """
    try:
        about = parse_json(content)
        given = about["labels"]
        if given is None:
            return Listing(None, [])
        dict(given)  # raises what names the place
        each = given.items() if isinstance(given, dict) else given
        in_archive = os.path.isfile(str(data.root))
        pairs = [(plain_name(str(name), in_archive), label) for name, label in each]
        names = about.get("class_names", [])
    except (ValueError, KeyError, TypeError) as error:
        raise unlisted(data, error) from None
    found = dict(pairs)
    for name, label in pairs:
        if label not in [found[name]]:  # NaN is itself
            problem = f"has two labels of {name} in its {LABELS_FILE}, {shown(label)} and {shown(found[name])}"
            raise UserError("data.root", data.root, problem, f"list each file once in {LABELS_FILE}")
    names = [] if names is None else names
    are_texts = isinstance(names, list) and all(isinstance(name, str) and name and name.isprintable() for name in names)
    if not are_texts or len(set(names)) != len(names):
        problem = f"has class_names in its {_file_of(data)} that are no list of different texts"
        raise UserError("data.root", data.root, problem, f"write {_NAMES} beside its labels, or remove them")
    return Listing(found, names)


def names_of_classes(data: Data, listing: Listing, labels: np.ndarray) -> list[str]:
    """Return the names of the classes in a listing; none if its labels (N,) or (N, K) mark no classes.

    Raises:
        UserError: They are not as many as the classes.
    """
    names = listing.names
    if not names or (data.has_vectors and not data.num_classes):
        return []
    if labels.ndim == 1 and (most := int(labels.max(initial=0))) >= len(names):
        problem = (
            f"has {counted(len(names), 'name')} in class_names of its {_file_of(data)}, and images of class {most}"
        )
        raise UserError("data.root", data.root, problem, "name each class, or remove class_names")
    return names


def labels_of(data: Data, names: Sequence[str], listed: Mapping[str, Any] | None) -> np.ndarray:
    """Return the label of each listed name, (N,) int64 or (N, K) float32; 0 for all if there are no labels.

    Raises:
        UserError: There are no labels though the recipe has some, or a label is not of the recipe's form.
    """
    if data.has_vectors:
        labels = [None if listed is None else listed.get(name) for name in names]
        return vectors_of(data, labels, lambda row: f"{names[row]} in {_file_of(data)}")
    if listed is None:
        if data.num_classes > 1:
            raise wrong_num_classes(data, 0, f"classes in {_file_of(data)}")
        return np.zeros(len(names), np.int64)
    return np.array([_class_number(data, name, listed[name]) for name in names], dtype=np.int64)


def _file_of(data: Data) -> str:
    return str(data.labels_file) if data.labels_file else LABELS_FILE


def as_vector(data: Data, label: Any) -> np.ndarray:
    """Return the vector (K,) float32 of a label: the number of a class, or K numbers; or padded tokens (T, W + 1).

    None, NaN, class -1 and no tokens are a missing label.

    Raises:
        ValueError: It is missing where it must not be, or is not of the recipe's form.
    """
    width, classes = data.condition_width, data.num_classes
    try:
        with np.errstate(over="ignore"):
            vector = np.asarray(np.nan if label is None else label, dtype=np.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # texts, lists of lists, tensors on a GPU
        raise ValueError("it is neither a number nor a list of numbers") from None
    if data.conditions_are_tokens:
        return present(data, np.zeros(data.condition_shape, np.float32) if label is None else padded(data, vector))
    is_class = vector.ndim == 0 and classes > 0 and not data.condition_size and not (data.multi_label and classes == 1)
    if vector.size and (np.isnan(vector).all() or (is_class and vector == -1)):
        if data.missing_labels == "accept":
            return np.zeros(width, np.float32)
        raise ValueError("it is missing")
    if is_class:
        if not (0 <= vector < classes and vector == int(vector)):
            raise ValueError(f"it is {shown(float(vector))}, and not a class from 0 to {classes - 1}")
        return np.eye(1, width, int(vector), dtype=np.float32)[0]
    if vector.ndim == 0 and width == 1:
        vector = vector.reshape(1)
    if vector.shape != (width,):
        found = f"the shape {vector.shape}" if vector.ndim > 1 else counted(vector.size, "number")
        raise ValueError(f"it has {found}, not {width}")
    if problem := _problem(data, vector[None]):
        raise ValueError(problem)
    return vector


def _problem(data: Data, vectors: np.ndarray) -> str:
    """Say what is wrong with some of vectors (N, K); an empty text if nothing is."""
    marks = vectors[:, : data.num_classes]
    if not np.isfinite(vectors).all():
        return "it has a number that is not finite"
    if not np.isin(marks, (0, 1)).all():
        return f"its first {data.num_classes} numbers are not 0 or 1"
    nums = marks.sum(axis=1)
    wrong = nums[(nums > 1) | ((nums < 1) & (data.missing_labels == "refuse"))]
    return (
        f"it has {int(wrong[0])} classes, not one" if data.num_classes and not data.multi_label and len(wrong) else ""
    )


def vectors_of(data: Data, labels: Sequence[Any] | np.ndarray, name: Callable[[int], str]) -> np.ndarray:
    """Return the vectors (N, K) float32 of images' labels; see ``as_vector``. ``name`` names an image.

    Raises:
        UserError: One does not fit the recipe.
    """
    with suppress(TypeError, ValueError, OverflowError), np.errstate(over="ignore"):  # of equal lengths, as most are
        found = np.array(labels, dtype=np.float32)
        if found.shape == (len(labels), data.condition_width) and not _problem(data, found):
            return found
    found = np.zeros((len(labels), data.condition_width), np.float32)
    for row, label in enumerate(labels):
        try:
            found[row] = as_vector(data, label)
        except ValueError as error:
            problem = f"has a label that does not fit, of {name(row)}: {error}"
            remedy = "correct it, or data.num_classes, data.condition_size and data.multi_label"
            remedy = f"add it, or {_ACCEPTING}" if str(error) == "it is missing" else remedy
            key = "labels_file" if data.labels_file else "root"
            raise UserError(f"data.{key}", getattr(data, key), problem, remedy) from None
    return found


def _class_number(data: Data, name: str, label: Any) -> int:
    remedy = "number classes from 0" + (", or set data.num_classes=0" if data.num_classes else "")
    if isinstance(label, list | dict):
        problem = f"has lists of numbers as labels in its {_file_of(data)}, such as that of {name}"
        remedy = "set data.num_classes=0 and data.condition_size to their length, or data.multi_label=true if each is"
        remedy += " 0 or 1 for a class"
        raise UserError("data.root", data.root, problem, remedy)
    if label is None or label != label:  # NaN is not itself
        key = "labels_file" if data.labels_file else "root"
        problem = f"has no label of {name}" + f" in its {_file_of(data)}" * (key == "root")
        raise UserError(f"data.{key}", getattr(data, key), problem, f"add it, {_ACCEPTING}, or set data.num_classes=0")
    problem = f"has a label that is not the number of a class in its {_file_of(data)}, {shown(label)} of {name}"
    with suppress(TypeError, ValueError, OverflowError):  # null, text, an infinite number
        number = int(label)
        if number == float(label) and 0 <= number < _MOST_CLASSES:
            return number
        if number < 0:
            problem = f"has a class below 0 in its {_file_of(data)}, that of {name}"
            remedy += f", or {_ACCEPTING} if -1 is a missing one" * (number == -1)
    raise UserError("data.root", data.root, problem, remedy)


def _check_listing(data: Data, listed: Mapping[str, Any], files: Files) -> None:
    """Refuse an image that is not listed, unless some labels may be missing; warn of missing images, or refuse most."""
    file = _file_of(data)
    in_archive = os.path.isfile(str(data.root)) and not data.labels_file
    remedy = "pack it again" if in_archive else f"correct {file}"
    unknown = [name for name in files.images if name not in listed]
    lacks_all = len(unknown) == len(files.images)
    if unknown and (lacks_all or data.missing_labels != "accept"):
        problem = f"has {unknown[0]}, which its {file} does not list"
        detail = f"it lacks {'all' if lacks_all else len(unknown)} images" if len(unknown) > 1 else ""
        raise UserError("data.root", data.root, problem, remedy + f", or {_ACCEPTING}" * (not lacks_all), detail)
    missing = listed.keys() - set(files.images)
    if not missing:
        return
    name, are = min(missing), "is" if len(missing) == 1 else "are"
    detail = f"{file} lists {counted(len(missing), 'file')} that {are} not read"
    if len(missing) <= len(files.images):  # as NVIDIA's loader, which looks up the labels of the files that are there
        warn_once(f"{data.root}: {detail}, such as {name}")
        return
    problem = f"has no {name}, which its {file} lists"
    if name in files.others:
        problem = f"has {name} in its {file}, which is none of {KINDS_OF_IMAGES}"
    raise UserError("data.root", data.root, problem, remedy, detail)


def unlisted(data: Data, error: Exception) -> UserError:
    """Return the error that dataset.json cannot be read."""
    remedy = f"write {_FORM} into {_file_of(data)}"
    if os.path.isfile(str(data.root)) and not data.labels_file:
        remedy = f"pack it again with {_FORM} in {LABELS_FILE}"
    if data.kind != "latents" and not data.labels_file:  # whose classes have no other place
        remedy += ", or remove that file if the folders are the classes"
    return UserError("data.root", data.root, f"has no readable {_file_of(data)}: {reason(error)}", remedy)
