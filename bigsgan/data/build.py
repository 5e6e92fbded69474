"""Opens the data set that a recipe describes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from bigsgan.config.data import Data
from bigsgan.data.datasets import DigitImages, ImageDataset, SyntheticImages, build_folder
from bigsgan.data.hdf5 import build_hdf5
from bigsgan.data.huggingface import build_huggingface
from bigsgan.data.latents import build_latents
from bigsgan.data.outside import build_outside
from bigsgan.data.packed import build_zip
from bigsgan.data.pairs import (
    SyntheticPairs,
    UnpairedDigits,
    build_paired_folders,
    build_side_by_side,
    build_unpaired_folders,
)
from bigsgan.data.shards import build_tar

_TWO_DOMAINS: Mapping[str, Callable[..., ImageDataset]] = {
    "unpaired_folders": build_unpaired_folders,
    "unpaired_digits": UnpairedDigits,
}
_KINDS: Mapping[str, Callable[[Data], ImageDataset]] = {
    "digits": DigitImages,
    "synthetic": SyntheticImages,
    "synthetic_pairs": SyntheticPairs,
    "paired_folders": build_paired_folders,
    "side_by_side": build_side_by_side,
    **_TWO_DOMAINS,
    "zip": build_zip,
    "tar": build_tar,
    "folder": build_folder,
    "hdf5": build_hdf5,
    "huggingface": build_huggingface,
    "latents": build_latents,
}
"""All kinds of bigsgan's own except torchvision's, which is imported only if a recipe asks for it."""


def build_dataset(data: Data) -> ImageDataset:
    """Open the data set that a recipe's ``data`` section describes.

    Raises:
        UserError: The data set does not exist, is empty, or does not have ``data.num_classes`` classes.
    """
    build = build_outside if data.is_outside else _KINDS.get(data.kind)
    return build(data) if build else importlib.import_module("bigsgan.data.from_torchvision").build_torchvision(data)


def build_training_dataset(data: Data) -> ImageDataset:
    """Open the data set that ``RealImages`` reads: with random crops, at the size from which they are cut.

    Two domains meet in several passes.

    Raises:
        UserError: See ``build_dataset``.
    """
    data = data.model_copy(update={"resolution": data.crop_from or data.resolution, "crop_from": None})
    return _TWO_DOMAINS[data.kind](data, trains=True) if data.joins_domains else build_dataset(data)
