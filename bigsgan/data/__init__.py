"""Real images: data sets, their order, and the loader that brings them to the device."""

from bigsgan.data.build import build_dataset, build_training_dataset
from bigsgan.data.datasets import readable_images, readable_samples
from bigsgan.data.loader import LabelledImages, RealImages, ShownImages
from bigsgan.data.order import Slice

__all__ = [
    "LabelledImages",
    "RealImages",
    "ShownImages",
    "Slice",
    "build_dataset",
    "build_training_dataset",
    "readable_images",
    "readable_samples",
]
