"""Data sets of the user's own code: any map-style ``torch.utils.data.Dataset`` of images, with or without labels.

Shapes: C channels, H x W pixels of an image as the data set has it.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bigsgan import plugins
from bigsgan.config.data import Data
from bigsgan.config.signature import build, takes
from bigsgan.data.datasets import ImageDataset, Label
from bigsgan.data.fingerprint import Fingerprint, of_attributes
from bigsgan.data.labels import as_vector, vectors_of
from bigsgan.data.listing import wrong_num_classes
from bigsgan.errors import UserError
from bigsgan.images.reading import CorruptImage, accepting_truncated, image_tensor
from bigsgan.images.wide import picture_array, wide_tensor

_log = logging.getLogger(__name__)

_COMPARED = 8
"""Images whose own labels are compared with those in an attribute, less one."""
_READ_AGAIN = 2
"""Times that a sample is read again, to see whether it is the same."""
_OFFERED = ("root", "resolution", "image_channels", "num_classes", "condition_size")
_FORMS = "a PIL image, a uint8 tensor (C, H, W) or (H, W), or a uint8 array (H, W, C) or (H, W)"


class OutsideImages(ImageDataset):
    """A data set of other code, with its images cropped, resized and converted like those of a folder."""

    def __init__(self, source: Any, data: Data, name: str) -> None:
        self.source, self.data, self.name = source, data, name
        self.class_names = names_of(source)
        self.in_memory = bool(getattr(source, "in_memory", False))

    def __len__(self) -> int:
        return len(self.source)

    @functools.cached_property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]
        """The labels in an attribute of the data set, if some of its images have them too."""
        data, num = self.data, len(self)
        if not data.condition_width or data.conditions_are_tokens:  # which may not fit into memory
            return None
        some = sorted({index * (num - 1) // _COMPARED for index in range(_COMPARED + 1)})
        for values in (getattr(self.source, name, None) for name in ("labels", "targets", "attr")):
            with suppress(Exception):  # anything: the user's code
                if len(values) == num and all(  # type: ignore[arg-type]
                    np.array_equal(recipe_label(data, values[index]), recipe_label(data, self.sample(index)[1]))  # type: ignore[index]
                    for index in some
                ):
                    if data.has_vectors:
                        return vectors_of(data, values, str)  # type: ignore[arg-type]
                    return np.array([class_of(value) for value in values], np.int64)  # type: ignore[union-attr]
        return None

    def __getitem__(self, index: int) -> tuple[Tensor, Label]:
        name = self.image_name(index)
        with accepting_truncated(self.data.accepts_truncated):
            image, label = self.sample(index)
            try:
                if self.data.pairs:
                    images = zip(image, (self.data.input_channels, self.data.image_channels), strict=True)
                    return torch.cat([self._converted(each, name, channels) for each, channels in images]), 0
                return self._converted(image, name, self.data.image_channels), recipe_label(self.data, label)
            except ValueError as error:
                raise CorruptImage(name, str(error)) from error

    def sample(self, index: int) -> tuple[Any, Any]:
        """Return an image, or a pair, and its label as the data set has them, None without a label.

        Raises:
            CorruptImage: The data set raises an exception, or the sample is empty.
        """
        try:
            return _parts(self.source[index], self.data.pairs)
        except CorruptImage:
            raise
        except (Exception, SystemExit) as error:  # anything: the user's code
            raise CorruptImage(self.image_name(index), plugins.described(error)) from error

    def image_name(self, index: int) -> str:
        """Return the name of an image, for messages."""
        return f"image {index} of {self.name}"

    def fingerprint(self) -> Fingerprint:
        """Return a digest of the attributes with an item for each image."""
        return of_attributes(self.source, len(self), os.path.expanduser(str(self.data.root)))

    def _converted(self, image: Any, name: str, channels: int) -> Tensor:
        fitting = self.data.fitting
        if self.data.range is not None:
            return wide_tensor(numbers_of(image, channels), name, fitting, channels, self.data.range)
        if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.shape == (channels, *fitting.size):
            return image.contiguous()
        return image_tensor(pil_image(image), name, fitting, channels)


def build_outside(data: Data) -> OutsideImages:
    """Build the data set that the name in ``data.kind`` returns.

    Raises:
        UserError: It cannot be built, is no map-style data set or is empty; its samples are not images, or lack the
            classes that the recipe has.
    """
    offered = {name: value for name in _OFFERED if (value := getattr(data, name)) is not None}
    offered |= {"input_channels": data.input_channels} if data.pairs else {}
    offered["resolution"] = data.resolution.value
    if data.root and "root" not in takes(plugins.load("data.kind", data.kind, "data")):
        problem, detail = f"must be unset with data.kind={data.kind}", "its signature does not name root"
        raise UserError("data.root", data.root, problem, "remove it, or let that code take it", detail)
    source = build("data.kind", data.kind, "data", data.arguments, offered)
    remedy = "return a torch.utils.data.Dataset with __len__ and __getitem__"
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        detail = f"it returns {type(source).__name__}"
        raise UserError("data.kind", data.kind, "must return a map-style data set", remedy, detail)
    if not plugins.called("data.kind", data.kind, lambda: len(source), " in __len__"):
        raise UserError("data.kind", data.kind, "contains no images", "check its arguments")
    _check_sample(source, data)
    images = OutsideImages(source, data, data.kind)
    if _is_random(images):
        _log.warning(
            "data.kind: %s returns another sample when one is read again, so that no run repeats or resumes another; "
            "leave random numbers to data.horizontal_flip, data.crop_from and augmentation",
            data.kind,
        )
    return images


def _is_random(images: OutsideImages) -> bool:
    """Return whether some samples are not the same when they are read again; unreadable ones do not count."""
    for index in {0, len(images) // 2, len(images) - 1}:
        with suppress(CorruptImage):
            image, label = images[index]
            for _ in range(_READ_AGAIN):
                other, other_label = images[index]
                if not (torch.equal(image, other) and np.array_equal(label, other_label)):
                    return True
    return False


def names_of(source: Any) -> list[str]:
    """Return the names of classes from an attribute ``classes`` or ``categories``, as torchvision's data sets have it.

    Of several names of one class, it is the first; all of them, with commas, where another class has the first too.
    """
    found = getattr(source, "classes", getattr(source, "categories", None))
    if not isinstance(found, list | tuple | dict):
        return []
    several = [name if isinstance(name, list | tuple) and name else (name,) for name in found]
    if not all(isinstance(name, str) for names in several for name in names):
        return []
    times = Counter(names[0] for names in several)
    return [names[0] if times[names[0]] == 1 else ", ".join(names) for names in several]


def _check_sample(source: Any, data: Data) -> None:
    """Check the first sample, and its class: in a loading process, each would count as an unreadable image."""
    sample = plugins.called("data.kind", data.kind, lambda: source[0], " in __getitem__(0)")
    try:
        image, label = _parts(sample, data.pairs)
        for each in image if data.pairs else [image]:
            pil_image(each) if data.range is None else numbers_of(each, data.image_channels)
    except ValueError as error:
        problem = f"has a first sample that is no {'pair of images' if data.pairs else 'image'}: {error}"
        raise UserError("data.kind", data.kind, problem, f"return {'two, each ' * data.pairs}{_FORMS}") from None
    try:
        number = recipe_label(data, label)
    except ValueError as error:
        if data.has_vectors:
            problem, remedy = f"has a first image whose label does not fit: {error}", "correct the data's keys"
            raise UserError("data.kind", data.kind, problem, remedy) from None
        problem = "must be 0 with this data"
        remedy = "give each image the number of its class, or set data.num_classes=0 to train without classes"
        raise UserError("data.num_classes", data.num_classes, problem, remedy, f"of its first image, {error}") from None
    if not isinstance(number, int):
        return
    classes = getattr(source, "classes", None)
    found = len(classes) if isinstance(classes, list | tuple | dict) else number + 1
    if data.num_classes and (found > data.num_classes or (classes is not None and found != data.num_classes)):
        raise wrong_num_classes(data, found, "classes")


def _parts(sample: Any, is_pair: bool) -> tuple[Any, Any]:
    """Return the image and the label, None without one, of a sample: the image alone, or the first two of a tuple.

    Of pairs, these are the images.
    """
    if is_pair:
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise ValueError(f"it is of type {type(sample).__name__}, not a tuple of two")
        return tuple(sample), None
    if isinstance(sample, tuple | list):
        if not sample:
            raise ValueError("an empty sample")
        return sample[0], sample[1] if len(sample) > 1 else None
    return sample, None


def pil_image(image: Any) -> Image.Image:
    """Convert a PIL image, a tensor or an array, as code of the user's own returns them.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, Tensor):
        pixels = image.detach().cpu()
        pixels = pixels.permute(1, 2, 0) if pixels.dim() == 3 else pixels
        image = pixels.numpy()
    if not isinstance(image, np.ndarray):
        raise ValueError(f"it is of type {type(image).__name__}")
    channels = image.shape[2] if image.ndim == 3 else 1
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or channels not in (1, 3, 4) or not image.size:
        raise ValueError(f"it is {image.dtype} of shape {image.shape} as (H, W, C)")
    return Image.fromarray(np.ascontiguousarray(image[:, :, 0] if image.ndim == 3 and channels == 1 else image))


def numbers_of(image: Any, channels: int | None) -> np.ndarray:
    """Return the numbers of an image of any type: of a tensor (C, H, W) as (H, W, C).

    Pictures of 8 bits are converted to ``channels``, or else to their own, 1 or 3.

    Raises:
        ValueError: It has none.
    """
    if isinstance(image, Image.Image):
        return picture_array(image, channels)
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() and image.dtype != torch.float64 else image
        image = image.permute(1, 2, 0) if image.dim() == 3 else image
    try:
        array = np.asarray(image)
    except (TypeError, RuntimeError) as error:
        raise ValueError(str(error)) from None
    if array.dtype.kind not in "biuf" or array.ndim not in (2, 3):
        raise ValueError(f"it is {array.dtype} of shape {array.shape}")
    return array


def recipe_label(data: Data, label: Any) -> Label:
    """Return a label as the recipe has them.

    Raises:
        ValueError: It does not fit.
    """
    if not data.condition_width:
        return 0
    return as_vector(data, label) if data.has_vectors else class_of(label)


def class_of(label: Any) -> int:
    """Return the number of a class.

    Raises:
        ValueError: It is none, such as None or -1.
    """
    try:
        value: Any = label.item() if isinstance(label, Tensor) and label.numel() == 1 else label
        number = operator.index(value)
    except TypeError:
        what = "no label" if label is None else f"the label {label!r}, which is not the number of a class"
        raise ValueError(f"it has {what}") from None
    if number < 0:
        raise ValueError(f"it has the label {number}, and classes count from 0")
    return number
