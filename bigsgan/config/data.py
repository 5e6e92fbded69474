"""The recipe's ``data`` section: the source of real images, and the form in which networks see them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from bigsgan.config.conditions import check_conditions
from bigsgan.config.from_data import OrAuto, SizeOrAuto, check_left_to_data, left_to_data
from bigsgan.config.outside import outside_name
from bigsgan.config.sections import Fraction, NaturalInt, PathText, PositiveFloat, PositiveInt, Section, Width
from bigsgan.config.size import ImageSize
from bigsgan.config.value_range import check_range
from bigsgan.errors import UserError, counted
from bigsgan.images.size import Fit, Fitting, Size

_UNUSED_OF_CODEC = {"pixels": ("block", "path", "factor", "channels", "scale"), "dct": ("path", "factor", "channels")}
_AUTOENCODERS = ("diffusers", "torchscript")
_PAIRED = ("paired_folders", "side_by_side", "synthetic_pairs")
DIGITS = ("digits", "unpaired_digits")
DIRECTIONS = ("a_to_b", "b_to_a")
"""From the first of two domains, below `input_root`, to the second, and back."""

_TWO_DOMAINS = ("unpaired_folders", "unpaired_digits")
_TWO_IMAGES = (*_PAIRED, *_TWO_DOMAINS)
_TWO_FOLDERS = ("paired_folders", "unpaired_folders")
WALKED = ("folder", *_TWO_FOLDERS, "side_by_side")
"""Kinds whose images are all those below a directory."""
_LISTED = ("folder", "zip", "tar", "latents", *_TWO_FOLDERS, "side_by_side")
_CONDITIONED = ("folder", "zip", "tar", "latents", "torchvision", "huggingface", "hdf5")
_TELLING_FILES = ("folder", "zip", "tar")
_FILES = (*_LISTED, "torchvision", "huggingface", "hdf5")
_OUTSIDE = "package.module:name"

READERS = {
    "root": (*_FILES, _OUTSIDE),
    "arguments": (_OUTSIDE,),
    "max_corrupt": (*_FILES, _OUTSIDE),
    "max_ignored": _LISTED,
    "truncated": tuple(kind for kind in _FILES if kind not in ("latents", "hdf5")),
    "fit": (*(kind for kind in _FILES if kind != "latents"), _OUTSIDE),
    "dataset": ("torchvision",),
    "split": ("huggingface",),
    "image_key": ("huggingface", "hdf5"),
    "label_key": ("tar", "huggingface", "hdf5"),
    "input_root": _TWO_FOLDERS,
    "input_side": ("side_by_side",),
    "input_channels": (*_TWO_IMAGES, _OUTSIDE),
    "pairs": (_OUTSIDE,),
    "num_images": ("synthetic", "synthetic_pairs"),
    "range": ("folder", "zip", "tar", "huggingface", "hdf5", _OUTSIDE),
    "condition_size": (*_CONDITIONED, "synthetic", _OUTSIDE),
    "condition_dropout": (*_CONDITIONED, "digits", "synthetic", _OUTSIDE),
    "multi_label": (*_CONDITIONED, _OUTSIDE),
    "missing_labels": (*_CONDITIONED, "digits", _OUTSIDE),
    "labels_file": ("folder", "zip"),
}
"""The kinds of data that read a key."""

_Kind = Literal[
    "digits",
    "folder",
    "zip",
    "tar",
    "torchvision",
    "huggingface",
    "hdf5",
    "synthetic",
    "paired_folders",
    "side_by_side",
    "synthetic_pairs",
    "unpaired_folders",
    "unpaired_digits",
    "latents",
]


MOST_CHANNELS = 16
MOST_NAMES, LONGEST_NAME = 5_000, 200
"""Of classes, as a recipe's file holds 10,000 values and 256 KiB."""
_Name = Annotated[str, Field(min_length=1)]
ClassName = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class Codec(Section):
    """The form in which networks see and make images."""

    kind: Literal["pixels", "dct", "diffusers", "torchscript"] = "pixels"
    """``dct`` is the orthonormal discrete cosine transform (type II) of each block of pixels. ``diffusers`` and
    ``torchscript`` decode an autoencoder's latents (``data.kind: latents``)."""
    block: Literal[2, 4, 8] = 2
    """Pixels a side of ``dct``'s blocks; one channel becomes ``block`` squared."""
    path: PathText | None = None
    """Folder of ``diffusers``' AutoencoderKL, or ``torchscript``'s decoder from latents to images (n, C, H, W) in [-1,
    1]."""
    factor: Annotated[int, Field(gt=0, le=64)] = 8
    """Side of an image divided by that of its latents."""
    channels: Width = 4
    """Channels of the latents."""
    scale: PositiveFloat | None = None
    """Factor of latents. By default 1, or that of ``diffusers``' config.json."""

    @model_validator(mode="after")
    def _check(self) -> Codec:
        self.refuse_changed("data.codec", _UNUSED_OF_CODEC.get(self.kind, ("block",)), f"kind={self.kind}")
        if self.is_autoencoder and not self.path:
            remedy = f"give the local {'folder' if self.kind == 'diffusers' else 'file'} of the autoencoder"
            raise UserError("data.codec.path", None, f"must be given with data.codec.kind={self.kind}", remedy)
        return self

    @property
    def is_autoencoder(self) -> bool:
        """Whether it is an autoencoder, which is too slow to encode images while training."""
        return self.kind in _AUTOENCODERS

    @property
    def side_factor(self) -> int:
        """How many times shorter the sides are in the form that networks see than in images."""
        return {"pixels": 1, "dct": self.block}.get(self.kind, self.factor)


class Data(Section):
    """The source of real images. Images reach the networks as float32 in [-1, 1]."""

    kind: _Kind | outside_name("data") = "digits"  # type: ignore[valid-type]
    """Source of images, listed below, or [your code](../how-to/own-data.md), such as ``mypackage.data:Faces``."""
    arguments: dict[str, Any] = Field(default={})
    """Arguments of your code."""
    pairs: bool = False
    """Samples of your code are pairs: an input image, and its target."""
    root: PathText | None = None
    """Directory or file of the data; with two folders, of the targets."""
    input_root: PathText | None = None
    """Directory of the inputs of ``paired_folders`` and ``unpaired_folders``."""
    input_side: Literal["left", "right"] = "left"
    """Side of the input in images of ``side_by_side``."""
    input_channels: PositiveInt = 3
    """Channels of the inputs: 1 or 3."""
    dataset: str | None = None
    """Class in ``torchvision.datasets``, such as CIFAR10."""
    resolution: Annotated[ImageSize, SizeOrAuto()] = Size(16, 16)
    """Pixels a side, or height and width, such as ``[128, 256]``. ``auto 64`` takes a size near the images' that the
    networks can have, with at most the pixels of 64x64; 64 if 1,000 images differ in proportions, or in size within
    64x64."""
    fit: Fit = "crop"
    """Images of other proportions lose their edges, get black ones, or are stretched."""
    image_channels: Annotated[PositiveInt, OrAuto(3)] = 1
    """1 for grey, 3 for colour; up to 16 with ``range`` or ``synthetic``. ``auto`` takes what 1,000 images have: 1 if
    all are grey, else 3, or with ``range`` their number."""
    range: Annotated[Annotated[list[float], Field(min_length=2, max_length=2)] | None, OrAuto((0, 1))] = None
    """Values of black and white, such as ``[0, 4095]``, [in images of any
    type](../tutorials/your-images.md#more-than-8-bits-and-other-channels). ``auto`` takes the lowest and the highest of
    1,000 images."""
    num_classes: Annotated[int, Field(ge=0, lt=2**31), OrAuto(0)] = 10
    """0 trains without classes. ``auto`` counts those of the data; a single one counts as 0."""
    multi_label: bool = False
    """An image's label is a 0 or 1 for each class."""
    condition_size: (
        Annotated[int, Field(ge=0, le=2**16)] | Annotated[list[Width], Field(min_length=2, max_length=2)]
    ) = 0
    """Numbers of a label besides the classes, or ``[T, W]`` for [up to T tokens of W
    numbers](../how-to/latents.md#captions)."""
    condition_dropout: Fraction = 0.0
    """Probability that an image's label is replaced by zeros, while both networks train."""
    missing_labels: Literal["refuse", "accept"] = "refuse"
    """Refuse images without a label, or give them zeros."""
    labels_file: PathText | None = None
    """[File of labels](../tutorials/your-images.md#other-labels-than-one-class), instead of dataset.json or class
    folders."""
    class_names: Annotated[list[ClassName], Field(max_length=MOST_NAMES)] | None = None
    """Names of the classes by number; by default those of the data."""
    split: _Name | None = None
    """Split of ``huggingface``; by default the only one."""
    image_key: _Name | None = None
    """Images: column of ``huggingface`` (by default the only one), or data set of ``hdf5`` (``imgs``)."""
    label_key: _Name | None = None
    """Classes: column of ``huggingface`` (by default the only ``ClassLabel``, else ``label``), data set of ``hdf5``
    (``labels``), or key in JSON files of ``tar`` (``label``)."""
    num_images: Annotated[int, Field(gt=0, le=10**8)] = 50_000
    """Size of the synthetic data sets."""
    crop_from: ImageSize | None = None
    """Size before a random crop to ``resolution`` in training."""
    horizontal_flip: bool = False
    """Mirror each image with probability 1/2."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 4
    """Loading processes of a rank, for kinds that read files."""
    prefetch: Annotated[int, Field(gt=0, le=1024)] = 4
    """Micro-batches that a loading process prepares ahead."""
    max_ignored: NaturalInt | None = None
    """Ignored files that may be images, above which the data is refused; by default the number of images."""
    max_corrupt: NaturalInt | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Unreadable images that a rank skips before the run stops, or their share; by default 10, or 0.001 of the images
    if that is more."""
    truncated: Literal["skip", "accept"] = "skip"
    """Skip images that are cut off, or decode what is there."""
    codec: Codec = Codec()
    """Form in which networks see images."""

    @property
    def conditions_are_tokens(self) -> bool:
        """Whether a condition is a sequence of tokens: (T, W + 1), of which the last numbers are a mask."""
        return isinstance(self.condition_size, list)

    @property
    def condition_shape(self) -> tuple[int, ...]:
        """Shape of a condition as networks see it, where a class counts as one-hot."""
        if isinstance(self.condition_size, list):
            return self.condition_size[0], self.condition_size[1] + 1
        return (self.num_classes + self.condition_size,)

    @property
    def condition_width(self) -> int:
        """Numbers of a condition; 0 without conditions."""
        return math.prod(self.condition_shape)

    @property
    def left_to_data(self) -> list[str]:
        """Keys whose numbers the data tells, and which are not read yet."""
        return left_to_data(self)

    @property
    def may_have_conditions(self) -> bool:
        """Whether there are conditions, or may be once the data is read."""
        return self.condition_width > 0 or "num_classes" in self.left_to_data

    @property
    def may_be_null(self) -> bool:
        """Whether an image may have no label, or lose it."""
        return self.missing_labels == "accept" or self.condition_dropout > 0

    @property
    def has_vectors(self) -> bool:
        """Whether conditions are vectors (K,) or tokens (T, W + 1) of numbers, instead of one class each.

        K is ``condition_width``: a 0 or 1 for each class, and then the other numbers.
        """
        is_more = bool(self.condition_size) or self.multi_label or self.missing_labels == "accept"
        return self.condition_width > 0 and is_more

    @property
    def is_outside(self) -> bool:
        """Whether code of the user's own reads it."""
        return self.kind not in get_args(_Kind)

    @property
    def paired(self) -> bool:
        """Whether the data holds pairs of an input and a target."""
        return self.pairs or self.kind in _PAIRED

    @property
    def joins_domains(self) -> bool:
        """Whether a sample is an image of one domain, joined along the channels with one of another."""
        return self.kind in _TWO_DOMAINS

    @property
    def has_inputs(self) -> bool:
        """Whether a sample holds an input image before the other: a pair, or images of two domains."""
        return self.pairs or self.kind in _TWO_IMAGES

    @property
    def channels(self) -> int:
        """Channels of an image or latent as networks see it; of both images where a sample joins two domains."""
        if self.joins_domains:
            return self.input_channels + self.image_channels
        if self.codec.kind == "dct":
            return self.image_channels * self.codec.block**2
        return self.codec.channels if self.codec.is_autoencoder else self.image_channels

    @property
    def accepts_truncated(self) -> bool:
        """Whether images that are cut off are decoded as far as they go."""
        return self.truncated == "accept"

    @property
    def fitting(self) -> Fitting:
        """What makes images fit."""
        return Fitting(self.resolution, self.fit)

    @property
    def network_size(self) -> Size:
        """Height and width of an image or latent as networks see it."""
        return self.resolution.over(self.codec.side_factor)

    def most_corrupt(self, num_images: int) -> int:
        """Return how many unreadable images a rank skips, of a data set of ``num_images``."""
        if self.max_corrupt is None:
            return max(10, num_images // 1000)
        return self.max_corrupt if isinstance(self.max_corrupt, int) else int(self.max_corrupt * num_images)

    def shared_bytes(self, micro_batch: int, keeps_images: bool = False) -> int:
        """Return one rank's bytes in /dev/shm: of the prefetched micro-batches, and of the one in use.

        With ``keeps_images``, they include the images of latents.
        """
        sample = (self.crop_from or self.resolution).num_pixels * (
            self.image_channels + self.has_inputs * self.input_channels
        )
        if self.kind == "latents":
            images = self.resolution.num_pixels * self.image_channels * keeps_images
            sample = 2 * self.channels * self.network_size.num_pixels * 4 + images  # means and deviations, float32
        sample *= 1 if self.range is None else 4  # float32
        sample += 4 * self.condition_width * self.conditions_are_tokens
        return (self.num_workers * self.prefetch + 1) * micro_batch * sample

    @model_validator(mode="after")
    def _check(self) -> Data:
        # pydantic passes a UserError on unchanged, because it is not a ValueError.
        self._refuse_unread()
        check_left_to_data(self, (*_TELLING_FILES, "huggingface", "hdf5"), _TELLING_FILES)
        if self.kind in _FILES and not self.root:
            place = {"zip": "archive", "hdf5": "file"}.get(self.kind, "directory")
            remedy = f"give the path of the {place}"
            raise UserError("data.root", self.root, f"must be given with data.kind={self.kind}", remedy)
        if self.kind == "torchvision" and not self.dataset:
            remedy = "give the name of a class in torchvision.datasets, such as CIFAR10"
            raise UserError("data.dataset", self.dataset, "must be given with data.kind=torchvision", remedy)
        channels, classes = self.image_channels, self.num_classes
        any_channels = self.range is not None or self.kind == "synthetic"
        for field, number in (("data.image_channels", channels), ("data.input_channels", self.input_channels)):
            if number not in (1, 3) and not (any_channels and number <= MOST_CHANNELS):
                problem = f"must be at most {MOST_CHANNELS}" if any_channels else "must be 1 or 3"
                remedy = f"set {field}=1 for greyscale or 3 for RGB" + ", or data.range" * (
                    not any_channels and field == "data.image_channels"
                )
                raise UserError(field, number, problem, remedy)
        if self.range is not None:
            check_range(self.range)
        if self.crop_from is not None and not self.crop_from.exceeds(self.resolution):
            problem = f"must be greater than data.resolution ({self.resolution.text})"
            raise UserError("data.crop_from", self.crop_from.value, problem, "give a larger number, or remove it")
        if self.kind in _TWO_FOLDERS and not self.input_root:
            problem = f"must be given with data.kind={self.kind}"
            raise UserError("data.input_root", self.input_root, problem, "give the directory of the inputs")
        if not self.may_have_conditions:
            remedy = "remove it, or set data.num_classes or data.condition_size"
            keys = ["missing_labels", "labels_file", "condition_dropout"]
            self.refuse_changed("data", keys, "data.num_classes=0", remedy)
        if not classes:
            self.refuse_changed("data", ["multi_label"], "data.num_classes=0", "remove it, or set data.num_classes")
        if self.is_outside and not self.pairs:
            self.refuse_changed("data", ["input_channels"], "data.pairs=false", "remove it, or set data.pairs=true")
        if self.pairs and self.range is not None:
            raise UserError("data.range", self.range, "must be null with data.pairs=true", "remove it")
        what = "data.pairs=true" if self.pairs else f"data.kind={self.kind}"
        if self.has_inputs and classes:
            problem = f"must be 0 with {what}"
            raise UserError("data.num_classes", classes, problem, "set data.num_classes=0", "pairs have no classes")
        if self.pairs:
            keys = ["condition_size", "condition_dropout", "missing_labels"]
            self.refuse_changed("data", keys, "data.pairs=true", "remove it")
        names = None if "num_classes" in self.left_to_data else self.class_names
        if names is not None and (len(names) != classes or len(set(names)) != classes):
            problem = f"must be {counted(classes, 'different name')}, as many as data.num_classes"
            raise UserError("data.class_names", names, problem, "remove it, or correct it")
        self._check_codec()
        check_conditions(self)
        if self.kind == "digits" and channels != 1:
            remedy, detail = "set data.image_channels=1", "the digits are greyscale"
            raise UserError("data.image_channels", channels, "must be 1 with data.kind=digits", remedy, detail)
        if self.kind == "digits" and classes not in (0, 10):
            remedy = "set data.num_classes=10, or 0 to train without classes"
            raise UserError("data.num_classes", classes, "must be 0 or 10 with data.kind=digits", remedy)
        return self

    def _refuse_unread(self) -> None:
        """Refuse keys that this kind of data does not read."""
        fields, kind = type(self).model_fields, _OUTSIDE if self.is_outside else self.kind
        keys = self.changed("", [key for key, kinds in READERS.items() if kind not in kinds])
        defaults = ((key, fields[key].default) for key in keys)
        unset = " ".join(f"data.{key}={str(value).lower().replace('none', 'null')}" for key, value in defaults)
        for key in keys:
            removed = "remove it" if len(keys) == 1 else "remove them"
            remedy = f"{removed}, set {unset}, or choose a data.kind that reads it ({', '.join(READERS[key])})"
            self.refuse_changed("data", [key], f"data.kind={self.kind}", remedy)

    def _check_codec(self) -> None:
        kind, factor = self.codec.kind, self.codec.side_factor
        if not self.resolution.is_multiple_of(factor):
            problem, detail = f"must be a multiple of {factor}", f"data.codec.kind is {kind}"
            remedy = f"set data.resolution={self.resolution.nearest_multiple_of(factor).text}"
            raise UserError("data.resolution", self.resolution.value, problem, remedy, detail)
        if kind == "pixels" and self.kind == "latents":
            problem, remedy = "must be diffusers, torchscript or dct with data.kind=latents", "name what encoded them"
            raise UserError("data.codec.kind", kind, problem, remedy)
        if self.codec.is_autoencoder and self.kind != "latents":
            detail = "an autoencoder is too slow to encode images while training"
            remedy = "encode them before (`bigsgan data encode`), and set data.kind=latents"
            raise UserError("data.codec.kind", kind, "must be pixels or dct", remedy, detail)
        if self.kind == "latents" and (self.crop_from is not None or self.horizontal_flip):
            field = "data.crop_from" if self.crop_from is not None else "data.horizontal_flip"
            remedy = "remove it, and encode mirrored images beside the others"
            raise UserError(field, getattr(self, field[5:]), "must be unset with data.kind=latents", remedy)
        if self.has_inputs and kind != "pixels":
            problem, remedy = f"must be pixels with data.kind={self.kind}", "remove data.codec"
            raise UserError("data.codec.kind", kind, problem, remedy)
