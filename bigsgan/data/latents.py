"""Latents of an autoencoder in .npy files, with their classes in dataset.json: the layout of REPA and GAT's code.

Shapes: N latents in a data set, C channels, R numbers a side.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigsgan.config.data import Data
from bigsgan.data.datasets import PathList, data_directory, wrong_num_classes
from bigsgan.data.fingerprint import Fingerprint, digest, file_sizes, some_of
from bigsgan.errors import UserError, reason
from bigsgan.images.reading import CorruptImage

LABELS_FILE = "dataset.json"


class LatentFiles:
    """Latents (C, R, R) float32, or mean and standard deviation of each number of a posterior (2 * C, R, R)."""

    in_memory = False

    def __init__(self, root: Path, names: list[str], labels: list[int], data: Data) -> None:
        self._root, self._names = root, PathList(names)
        self._labels = np.array(labels, dtype=np.int64)
        self._shapes = tuple((times * data.channels, data.side, data.side) for times in (1, 2))

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self._root / self._names[index]
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise CorruptImage(str(path), reason(error)) from None
        if found.ndim == 4 and len(found) == 1:
            found = found[0]
        if found.shape not in self._shapes:
            raise CorruptImage(str(path), f"it has the shape {found.shape}, not {self._shapes[0]} or {self._shapes[1]}")
        latents = torch.from_numpy(found.astype(np.float32))
        if not torch.isfinite(latents).all():
            raise CorruptImage(str(path), "it has numbers that are not finite")
        if len(latents) == self._shapes[0][0]:  # all of one shape, as some may be posteriors and others not
            latents = torch.cat([latents, torch.zeros_like(latents)])
        return latents, int(self._labels[index])

    def fingerprint(self) -> Fingerprint:
        """Return digests of the names, of the classes, and of the sizes of some files."""
        sizes = file_sizes(str(self._root / self._names[index]) for index in some_of(len(self)))
        return Fingerprint(len(self), self._names.digest(), digest([self._labels.tobytes()]), sizes)


def build_latents(data: Data) -> LatentFiles:
    """List the latents that ``dataset.json`` in ``data.root`` names, in the order of their names.

    Raises:
        UserError: It is not there, is of another form, or has another number of classes than ``data.num_classes``.
    """
    root = data_directory("data.root", data.root, f"give the directory with the .npy files and {LABELS_FILE}")
    path = root / LABELS_FILE
    try:
        listed: Any = json.loads(path.read_text(encoding="utf-8"))["labels"]
        pairs = sorted((str(name), int(label)) for name, label in listed)
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = f'write {{"labels": [["name.npy", 0], ...]}} into {LABELS_FILE}'
        raise UserError("data.root", data.root, f"has no readable {LABELS_FILE}: {reason(error)}", remedy) from None
    if not pairs:
        raise UserError("data.root", data.root, f"has no latents in {LABELS_FILE}", "encode some images")
    num_classes = max(label for _, label in pairs) + 1
    if data.num_classes and num_classes != data.num_classes:
        raise wrong_num_classes(data, num_classes, f"classes in {LABELS_FILE}")
    labels = [label if data.num_classes else 0 for _, label in pairs]
    return LatentFiles(root, [name for name, _ in pairs], labels, data)
