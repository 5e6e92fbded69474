"""A classifier of handwritten digits, trained in seconds on scikit-learn's data: features that need no weights file.

Shapes: n images (n, 1, H, W) in [-1, 1].
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bigsgan.config.data import Data
from bigsgan.data.datasets import DigitImages
from bigsgan.images.codec import decode
from bigsgan.images.size import Size
from bigsgan.runtime.atomic import replacing

VERSION = 1
"""Version of the network and its training, as classifiers of other versions give other features."""

NUM_CLASSES, NUM_FEATURES = 10, 64
_EPOCHS, _BATCH, _LR = 8, 64, 2e-3

_log = logging.getLogger(__name__)


class DigitClassifier(nn.Module):
    """Two convolutions and two linear layers: 64 features, logits of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        )  # fmt: skip
        self.features = nn.Linear(512, NUM_FEATURES)
        self.logits = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, 64) and logits (n, 10)."""
        flat = F.dropout(self.convolutions(images).flatten(1), 0.3, self.training)
        features = F.relu(self.features(flat))
        return features, self.logits(features)


def digit_images(size: Size) -> tuple[Tensor, Tensor]:
    """All digits, (1797, 1, H, W) in [-1, 1], and their classes (1797,)."""
    source = DigitImages(Data(kind="digits", resolution=size, image_channels=1, num_classes=NUM_CLASSES))
    return decode(source.images), torch.tensor(source.labels)


def train_classifier(images: Tensor, labels: Tensor, seed: int = 0) -> DigitClassifier:
    """Train on images and their classes (n,); torch's global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = DigitClassifier()
        optimizer = torch.optim.Adam(network.parameters(), _LR)
        for _ in range(_EPOCHS):
            for batch in torch.randperm(len(images)).split(_BATCH):
                optimizer.zero_grad()
                F.cross_entropy(network(images[batch])[1], labels[batch]).backward()
                optimizer.step()
    return network.eval().requires_grad_(False)


def cached_classifier(size: Size, cache: Path) -> DigitClassifier:
    """The classifier of digits at a size; trained if the cache has none."""
    path = cache / f"digits-classifier-{VERSION}-{size.text}.safetensors"
    network = DigitClassifier()
    try:
        network.load_state_dict(load_file(path))
    except (OSError, RuntimeError, SafetensorError):  # missing, of another version, damaged
        network = train_classifier(*digit_images(size))
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with replacing(path) as unfinished:
                save_file(network.state_dict(), unfinished)
        except (OSError, SafetensorError) as error:
            _log.warning("the digits classifier cannot be cached: %s", error)
    return network.eval().requires_grad_(False)
