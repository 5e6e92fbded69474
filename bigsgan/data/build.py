"""Opens the data set that a recipe describes."""

from __future__ import annotations

import importlib

from bigsgan.config.sections import Data
from bigsgan.data.datasets import DigitImages, ImageDataset, SyntheticImages, build_folder
from bigsgan.data.packed import build_zip
from bigsgan.data.pairs import SyntheticPairs, build_paired_folders, build_side_by_side
from bigsgan.data.shards import build_tar


def build_dataset(data: Data) -> ImageDataset:
    """Open the data set that a recipe's ``data`` section describes.

    Raises:
        UserError: It does not exist, is empty, or has another number of classes than ``data.num_classes``.
    """
    if data.kind == "digits":
        return DigitImages(data)
    if data.kind == "synthetic":
        return SyntheticImages(data)
    if data.kind == "synthetic_pairs":
        return SyntheticPairs(data)
    if data.kind == "paired_folders":
        return build_paired_folders(data)
    if data.kind == "side_by_side":
        return build_side_by_side(data)
    if data.kind == "zip":
        return build_zip(data)
    if data.kind == "tar":
        return build_tar(data)
    if data.kind == "folder":
        return build_folder(data)
    found: ImageDataset = importlib.import_module("bigsgan.data.from_torchvision").build_torchvision(data)
    return found


def build_training_dataset(data: Data) -> ImageDataset:
    """Open the data set that ``RealImages`` reads: with random crops, at the size from which they are cut.

    Raises:
        UserError: See ``build_dataset``.
    """
    return build_dataset(data.model_copy(update={"resolution": data.crop_from or data.resolution, "crop_from": None}))
