"""Data sets of torchvision. Importing it takes seconds, so this module is imported only if a recipe names one."""

from __future__ import annotations

import difflib
import inspect
import operator
import os
from typing import Any

import numpy as np
import torchvision.datasets
from PIL import Image

from bigsgan.config.data import Data
from bigsgan.data.labels import as_vector
from bigsgan.data.listing import LABELS_FILE, wrong_num_classes
from bigsgan.data.outside import OutsideImages
from bigsgan.errors import UserError, reason
from bigsgan.images.reading import open_image


def build_torchvision(data: Data) -> OutsideImages:
    """Open a class of torchvision.datasets in ``data.root``, without downloading.

    Split arguments (``train``, ``split``) keep torchvision's defaults, the training split wherever there is one.
    """
    name = str(data.dataset)
    if name == "ImageFolder" and data.num_classes and os.path.exists(os.path.join(str(data.root), LABELS_FILE)):
        problem, detail = "must be 'folder' with this data", f"ImageFolder does not read {LABELS_FILE}, its classes"
        raise UserError("data.kind", data.kind, problem, "set data.kind=folder", detail)
    known = _torchvision_classes()
    if name not in known:
        names = {each.lower(): each for each in known}
        close = difflib.get_close_matches(name.lower(), names, n=1)
        remedy = f"did you mean {names[close[0]]}?" if close else "give the name of a class such as CIFAR10"
        raise UserError("data.dataset", name, "must be a class of torchvision.datasets", remedy)
    source_class = known[name]
    parameters = _constructor_parameters(source_class)
    # Our own reader handles alpha and 16 bits, and names the file that it cannot read.
    given = {"root": str(data.root), "download": False, "loader": open_image}
    needed = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    if missing := [key for key in needed if key not in given]:
        problem = f"needs {', '.join(missing)}, which a recipe cannot give"
        remedy = "store its images in class folders and use data.kind=folder"
        raise UserError("data.dataset", name, problem, remedy)
    try:
        source = source_class(**{key: value for key, value in given.items() if key in parameters})
    except ImportError as error:
        remedy = "install the package that it names"
        raise UserError("data.dataset", name, f"cannot be read: {reason(error)}", remedy) from error
    except Exception as error:  # the classes raise all kinds of errors if their files are missing or damaged
        problem = f"cannot be read as {name}: {reason(error)}"
        remedy = f"put the files of {name} there, as torchvision.datasets.{name} expects or downloads them"
        raise UserError("data.root", data.root, problem, remedy) from error
    _check_torchvision(source, data)
    return OutsideImages(source, data, f"{data.dataset} in {data.root}")


def _torchvision_classes() -> dict[str, Any]:
    public = {name: getattr(torchvision.datasets, name) for name in sorted(torchvision.datasets.__all__)}
    base = public.pop("VisionDataset")
    return {name: found for name, found in public.items() if inspect.isclass(found) and issubclass(found, base)}


def _constructor_parameters(source_class: type) -> dict[str, inspect.Parameter]:
    """Return a constructor's parameters, with those that it passes on to its base classes as ``**kwargs``."""
    found: dict[str, inspect.Parameter] = {}
    for base in source_class.__mro__:
        own = inspect.signature(base.__init__).parameters  # type: ignore[misc]
        named = {name: p for name, p in own.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        found = named | found
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
            break
    found.pop("self", None)
    return found


def _check_torchvision(source: Any, data: Data) -> None:
    """Check the number of images and classes, and that the first sample is an image with a class number."""
    if not len(source):
        raise UserError("data.root", data.root, f"contains no images of {data.dataset}", "put its files there")
    try:
        sample = source[0]
    except Exception:  # the loader will meet this error again, count it and report it
        return
    if not isinstance(sample, tuple) or not isinstance(sample[0], Image.Image):
        raise UserError("data.dataset", data.dataset, "must be a data set of images", "choose one such as CIFAR10")
    if not data.condition_width:
        return
    if data.has_vectors:
        try:
            as_vector(data, sample[1])
        except ValueError as error:
            problem, remedy = f"has labels that do not fit the recipe: {error}", "correct the keys of the data section"
            raise UserError("data.dataset", data.dataset, problem, remedy, "of its first image") from None
        return
    try:
        operator.index(sample[1])
    except TypeError:
        problem, detail = "must be 0 with this data", f"the labels of {data.dataset} are not class numbers"
        remedy = "set data.num_classes=0 to train without classes"
        raise UserError("data.num_classes", data.num_classes, problem, remedy, detail) from None
    found = _num_classes(source)
    if found is not None and found != data.num_classes:
        raise wrong_num_classes(data, found, "classes")


def _num_classes(source: Any) -> int | None:
    """Return the number of classes, from whichever attribute the data set keeps them in."""
    for name in ("classes", "categories"):
        if hasattr(source, name):
            return len(getattr(source, name))
    for name in ("targets", "labels"):
        if hasattr(source, name):
            return int(np.max(np.asarray(getattr(source, name)))) + 1
    return None
