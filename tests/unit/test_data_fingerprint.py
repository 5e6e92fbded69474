"""Fingerprints of data sets: equal for equal files wherever they lie, and different for every kind of difference."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from bigsgan.config import NETWORKS
from bigsgan.config.data import Data
from bigsgan.data import build_dataset
from bigsgan.data.outside import OutsideImages
from bigsgan.data.packed import write_tar, write_zip
from bigsgan.training import build

NAMES = ["0/a.png", "0/b.png", "1/c.png"]


def png(root, name, value):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 8), value, dtype=np.uint8)).save(path)
    return path.read_bytes()


def folder(root, names=NAMES):
    for i, name in enumerate(names):
        png(root, name, 10 * i)
    return {"kind": "folder", "root": root, "num_classes": 2}


def zipped(root, names=NAMES):
    folder(root, names)
    write_zip(root / "all.zip", [(name, (root / name).read_bytes()) for name in names])
    return {"kind": "zip", "root": root / "all.zip", "num_classes": 2}


def tarred(root, names=NAMES):
    folder(root, names)
    members = []
    for i, name in enumerate(names):
        members += [(f"{i}-{name[2:]}", (root / name).read_bytes()), (f"{i}-{name[2]}.cls", name[0].encode())]
    (root / "shards").mkdir()
    write_tar(root / "shards" / "0.tar", members)
    return {"kind": "tar", "root": root / "shards", "num_classes": 2}


def side_by_side(root, names=NAMES):
    return {**folder(root, names), "kind": "side_by_side", "num_classes": 0}


def paired(root, names=NAMES):
    folder(root / "in", names)
    return {**folder(root / "out", names), "input_root": root / "in", "kind": "paired_folders", "num_classes": 0}


def fingerprint(section):
    text = {key: str(value) if key.endswith("root") else value for key, value in section.items()}
    return build_dataset(Data(resolution=8, image_channels=1, **text)).fingerprint()


@pytest.mark.parametrize("make", [folder, zipped, tarred, side_by_side, paired])
def test_the_place_does_not_count_and_each_file_does(tmp_path, make):
    first = fingerprint(make(tmp_path / "one"))
    assert first.num_images == 3
    assert first.difference(fingerprint(make(tmp_path / "an" / "other" / "place"))) is None
    assert first.difference(fingerprint(make(tmp_path / "more", [*NAMES, "1/d.png"]))) == "4 images"
    assert first.difference(first._replace(num_images=1)) == "1 image"
    assert first.difference(fingerprint(make(tmp_path / "names", [*NAMES[:2], "1/d.png"]))) == "images of other names"


@pytest.mark.parametrize("num_classes", [0, 2])
@pytest.mark.parametrize("kind", ["folder", "side_by_side"])
def test_the_way_a_root_is_written_does_not_count(kind, num_classes, tmp_path, monkeypatch):
    """Its text may stand inside the paths too, and the working directory has none."""
    num_classes = 0 if kind == "side_by_side" else num_classes
    section = {"kind": kind, "num_classes": num_classes}
    monkeypatch.chdir(tmp_path)
    names = ["a/a/a.png", "b/a/b.png"]
    folder(tmp_path / "a", names)
    folder(tmp_path / "other", names)
    first = fingerprint({**section, "root": tmp_path / "other"})
    for root in ("a", "a/", "./a", tmp_path / "a"):
        assert fingerprint({**section, "root": root}) == first
    monkeypatch.chdir("a")
    for root in (".", "./", "../a"):
        assert fingerprint({**section, "root": root}) == first


def test_names_of_shards_count_and_that_of_a_zip_file_does_not(tmp_path):
    section = zipped(tmp_path / "one")
    first = fingerprint(section)
    renamed = section["root"].rename(tmp_path / "staged.zip")
    assert first == fingerprint({**section, "root": renamed})
    section = tarred(tmp_path / "two")
    shutil.copy(section["root"] / "0.tar", section["root"] / "1.tar")
    first = fingerprint(section)
    (section["root"] / "1.tar").rename(section["root"] / "2.tar")
    assert first.difference(fingerprint(section)) == "images of other names"


def test_classes_of_packed_images_count(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    image = png(tmp_path, "a.png", 1)
    for i, classes in enumerate([b"01", b"10"]):
        members = [(f"{j}.png", image) for j in range(2)] + [(f"{j}.cls", classes[j : j + 1]) for j in range(2)]
        write_tar(tmp_path / str(i) / "0.tar", members)
    first, other = (fingerprint({"kind": "tar", "root": tmp_path / str(i), "num_classes": 2}) for i in range(2))
    assert first.difference(other) == "images of other classes"


class Listed:
    """What classes of torchvision look like, some of which list a directory in the order of the file system."""

    def __init__(self, root, names, pixels=None):
        self.root, self._images, self.targets = root, [(f"{root}/{name}", 0) for name in names], [0] * len(names)
        self.pixels = pixels

    def __len__(self):
        return len(self._images)


def test_another_order_of_torchvisions_names_counts():
    def of(root, names, pixels=None):
        data = Data(kind="torchvision", dataset="Omniglot", root=root)
        return OutsideImages(Listed(root, names, pixels), data, "Omniglot").fingerprint()

    first = of("/here", ["a.png", "b.png"])
    assert first.difference(of("/there", ["a.png", "b.png"])) is None
    assert first.difference(of("/here", ["b.png", "a.png"])) == "images of other names"
    white, black = np.ones((2, 4)), np.zeros((2, 4))
    assert of("/here", ["a", "b"], white).difference(of("/here", ["a", "b"], black)) == "images of other names"


@pytest.mark.parametrize("make", [folder, tarred, side_by_side, paired])
def test_the_order_of_a_file_systems_names_does_not_count(tmp_path, monkeypatch, make):
    section = make(tmp_path / "one")
    first, listed, walked = fingerprint(section), Path.iterdir, os.walk

    def walk(*arguments, **keywords):
        for directory, below, names in walked(*arguments, **keywords):
            below.reverse()
            yield directory, below, names[::-1]

    monkeypatch.setattr(os, "walk", walk)
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(list(listed(path))[::-1]))
    assert fingerprint(section) == first


def test_a_resumed_run_is_told_of_other_data(tmp_path, monkeypatch, caplog):
    """Each change of the files moves the places of all images in the order."""
    section = folder(tmp_path)
    first = json.loads(json.dumps(fingerprint(section)._asdict()))  # as a manifest keeps it
    png(tmp_path, "1/d.png", 9)
    now = fingerprint(section)._asdict()
    monkeypatch.setattr(build.checkpoint, "restore", lambda *arguments, **options: None)
    monkeypatch.setattr(build, "network_on_meta", lambda recipe, network: None)
    caplog.set_level(logging.INFO)
    for before, given, expected in [
        (first, first, []),
        (first, now, ["num_images, names, classes, sizes"]),
        (None, now, []),
        ("text", now, []),
    ]:
        layout = {"world_size": 1} | ({} if before is None else {build.DATA: before})
        build._restore(
            SimpleNamespace(layout=layout), {}, {"world_size": 1, build.DATA: given}, SimpleNamespace(networks=NETWORKS)
        )
        said = [record.getMessage().partition("differs in ")[2] for record in caplog.records]
        assert said == expected
        caplog.clear()
