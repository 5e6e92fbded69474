"""Data sets of rows: HDF5 files of BigGAN-PyTorch, written by h5py."""

from __future__ import annotations

import importlib.util
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from bigsgan.config.data import Data
from bigsgan.data import RealImages, Slice, build_dataset
from bigsgan.data.fingerprint import Fingerprint
from bigsgan.draws import Draws
from bigsgan.errors import UserError

NUM, SIDE = 12, 8
PIXELS = np.random.default_rng(0).integers(0, 256, (NUM, SIDE, SIDE, 3), dtype=np.uint8)
LABELS = np.arange(NUM) % 3


def write_hdf5(path: Path, *, planar: bool = True, images: str = "imgs", labels: str | None = "labels", **more: Any):
    """As BigGAN-PyTorch's make_hdf5.py does: one batch, then others."""
    pixels = PIXELS.transpose(0, 3, 1, 2) if planar else PIXELS
    with h5py.File(path, "w") as file:
        shape = pixels.shape[1:]
        made = file.create_dataset(images, (4, *shape), "uint8", maxshape=(NUM, *shape), chunks=(4, *shape), **more)
        made.resize(NUM, axis=0)
        made[...] = pixels
        if labels:
            file.create_dataset(labels, data=LABELS.astype(np.int64), chunks=(4,))
    return path


def section(kind: str, root: Path, **changes: Any) -> Data:
    given = {"kind": kind, "root": str(root), "resolution": SIDE, "image_channels": 3, "num_classes": 3}
    return Data(**{**given, **changes})


def check(dataset: Any, pixels: np.ndarray = PIXELS) -> None:
    """Images (N, H, W, C) and their classes are those that were written, also after pickling."""
    for each in (dataset, pickle.loads(pickle.dumps(dataset))):
        for number in range(NUM):
            image, label = each[number]
            assert torch.equal(image, torch.from_numpy(pixels[number]).permute(2, 0, 1))
            assert label == LABELS[number]
    assert dataset.labels.tolist() == LABELS.tolist()


def check_loaded(dataset: Any, data: Data) -> None:
    """Forked processes read what this process does, while it has the file open."""
    assert len({dataset[number][0].sum() for number in range(NUM)}) == NUM
    images = RealImages(dataset, data, Draws(5), Slice(4, 1, 0, 1), torch.device("cpu"))
    found = []
    for _ in range(3):
        (batch,) = images.next_phase()
        found += [((image + 1) * 127.5).round().to(torch.uint8) for image in batch.images]
        dataset[0]
    images.close()
    expected = sorted(image.transpose(2, 0, 1).tolist() for image in PIXELS)
    assert sorted(image.tolist() for image in found) == expected


@pytest.mark.parametrize("planar", [True, False])
@pytest.mark.parametrize("names", [{}, {"images": "x", "labels": "group/y"}])
def test_hdf5_holds_images_and_classes(tmp_path, planar, names, caplog):
    root = write_hdf5(tmp_path / "data.hdf5", planar=planar, **names)
    keys = {"image_key": "x", "label_key": "group/y"} if names else {}
    data = section("hdf5", root, num_workers=2, **keys)
    dataset = build_dataset(data)
    check(dataset)
    check_loaded(dataset, data)
    grey = build_dataset(section("hdf5", root, num_classes=0, image_channels=1, resolution=4, **keys))
    expected = Image.fromarray(PIXELS[3]).convert("L").resize((4, 4), Image.Resampling.LANCZOS)
    assert torch.equal(grey[3][0][0], torch.from_numpy(np.array(expected)))
    assert grey.labels.tolist() == [0] * NUM
    assert not caplog.records
    found = dataset.fingerprint()
    other = shutil.copy(root, tmp_path / "other.hdf5")
    assert found.difference(build_dataset(section("hdf5", other, **keys)).fingerprint()) is None
    with h5py.File(other, "a") as file:
        file[names.get("labels", "labels")][0] = 2
    assert found.difference(build_dataset(section("hdf5", other, **keys)).fingerprint()) == "images of other classes"
    assert found.difference(Fingerprint(11)) == "11 images"


def test_images_that_are_compressed_together_are_told(tmp_path, caplog):
    root = write_hdf5(tmp_path / "data.hdf5", compression="lzf")
    with caplog.at_level(logging.WARNING, "bigsgan"):
        check(build_dataset(section("hdf5", root)))
    together = "4 images are compressed together, and all are read for each"
    assert [record.getMessage() for record in caplog.records] == [
        f"{root}: {together}; `bigsgan data prepare` makes files that are read faster"
    ]


@pytest.mark.parametrize(
    "written, keys, message",
    [
        ({"images": "x"}, {}, r"has no images 'imgs' \(it has \(labels, x\)\); name them in data.image_key"),
        ({}, {"image_key": "labels"}, r"has int64 of shape \(12,\) in 'labels'; give an HDF5 file with images"),
        ({"labels": None}, {}, r"has no class numbers; name what has the class numbers \(data.label_key\), or set"),
        ({}, {"label_key": "imgs"}, r"has no class number for each of 12 images in 'imgs' \(it has uint8 \(12, 3,"),
        ({}, {"num_classes": 5}, r"data.num_classes: must be 3 with this data, got 5"),
    ],
)  # fmt: skip
def test_hdf5_without_what_is_wanted_is_refused(tmp_path, written, keys, message):
    root = write_hdf5(tmp_path / "data.hdf5", **written)
    with pytest.raises(UserError, match=message):
        build_dataset(section("hdf5", root, **keys))


def test_what_is_no_hdf5_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "data.hdf5").write_bytes(b"none")
    for root, problem in (("data.hdf5", "cannot be read: .*signature"), ("x", "does not exist"), ("", "be a file")):
        with pytest.raises(UserError, match=problem):
            build_dataset(section("hdf5", tmp_path / root))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"data.kind: 'hdf5' needs the package h5py, .*pip install -e '.\[hdf5\]'"):
        build_dataset(section("hdf5", tmp_path / "data.hdf5"))
