"""Data sets of rows: files that h5py, `datasets` and pyarrow have written."""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import RealImages, Slice, build_dataset
from bigsgan.data.fingerprint import Fingerprint
from bigsgan.data.listing import warn_once
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.reading import CorruptImage
from tests.archives import png
from tests.unit.test_wide import png16

NUM, SIDE = 12, 8
PIXELS = np.random.default_rng(0).integers(0, 256, (NUM, SIDE, SIDE, 3), dtype=np.uint8)
LABELS = np.arange(NUM) % 3


def write_hdf5(
    path: Path, *, planar: bool = True, images: str = "imgs", labels: str | None = "labels", num: int = NUM, **more: Any
):
    """As BigGAN-PyTorch's make_hdf5.py does: one batch, then others."""
    pixels = (PIXELS.transpose(0, 3, 1, 2) if planar else PIXELS)[:num]
    with h5py.File(path, "w") as file:
        shape = pixels.shape[1:]
        made = file.create_dataset(images, (4, *shape), "uint8", maxshape=(NUM, *shape), chunks=(4, *shape), **more)
        made.resize(num, axis=0)
        made[...] = pixels
        if labels:
            file.create_dataset(labels, data=LABELS[:num].astype(np.int64), maxshape=(NUM,), chunks=(4,))
    return path


NAMES = ["owl", "cat", "dog"]
FEATURES = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES), "text": datasets.Value("string")}


def columns(num: int = NUM, **changes: Any) -> dict[str, list]:
    given = {"image": [{"bytes": png(pixels), "path": None} for pixels in PIXELS[:num]], "label": LABELS[:num].tolist()}
    return {**given, "text": [f"caption {number}" for number in range(num)], **changes}


def rows(num: int = NUM, **changes: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns(num, **changes), datasets.Features(FEATURES))


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes a data set in one of the forms in which people have it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def written(form: str) -> Path:
        root = tmp_path / form
        if form == "disk":
            rows().with_format("torch").save_to_disk(root, num_shards=2)
        elif form == "splits":
            datasets.DatasetDict({"train": rows(), "test": rows(5)}).save_to_disk(root)
        elif form == "repository":
            (root / "data").mkdir(parents=True)
            (root / "README.md").write_text("about it")
            for number in range(2):
                rows().shard(2, number).to_parquet(root / f"data/train-{number:05}-of-00002.parquet")
            rows(5).to_parquet(root / "data/test-00000-of-00001.parquet")
        elif form == "file.parquet":
            rows().to_parquet(root)
        else:  # of other programs, without the library's types
            images = {"image": [png(pixels) for pixels in PIXELS], "label": [NAMES[label] for label in LABELS]}
            given = columns(**images) if form == "bytes" else columns()
            root.mkdir()
            pyarrow.parquet.write_table(pyarrow.table(given), root / "0.parquet")
        return root

    return written


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


@pytest.mark.parametrize("planar, names", [(True, {}), (False, {"images": "x", "labels": "group/y"})])
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


@pytest.mark.parametrize("labels", [LABELS[:, None], LABELS.astype(np.float32), LABELS[:, None].astype(np.float64)])
def test_classes_of_hdf5_may_be_a_column_or_floats(labels, tmp_path):
    write_hdf5(tmp_path / "data.hdf5")
    with h5py.File(tmp_path / "data.hdf5", "a") as file:
        del file["labels"]
        file["labels"] = labels
        file["halves"] = labels + 0.5
    keys = {"kind": "hdf5", "root": str(tmp_path / "data.hdf5"), "resolution": 8, "image_channels": 3, "num_classes": 3}
    np.testing.assert_array_equal(build_dataset(Data(**keys)).labels, LABELS)
    with pytest.raises(UserError, match=r"has no label for each of 12 images in 'halves'"):
        build_dataset(Data(**keys, label_key="halves"))


@pytest.mark.parametrize(
    "written, keys, message",
    [
        ({"images": "x"}, {}, r"has no images 'imgs' \(it has \(labels, x\)\); name them in data.image_key"),
        ({}, {"image_key": "labels"}, r"has int64 of shape \(12,\) in 'labels'; give an HDF5 file with images"),
        ({"labels": None}, {}, r"has no labels; name what has the labels \(data.label_key\), or set"),
        ({}, {"label_key": "imgs"}, r"has no label for each of 12 images in 'imgs' \(it has uint8 \(12, 3,"),
        ({"num": 0}, {}, r"contains no images; give a file with images"),
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


@pytest.mark.parametrize("form", ["disk", "splits", "repository", "bytes", "structs"])
def test_data_sets_of_hugging_face_hold_images_and_classes(write, form):
    root, split = write(form), {"split": "train"} if form in ("splits", "repository") else {}
    data = section("huggingface", root, num_workers=2, **split)
    dataset = build_dataset(data)
    if form == "bytes":  # whose classes are texts
        order = sorted(NAMES)
        assert dataset.class_names == order
        assert [order[label] for label in dataset.labels] == [NAMES[label] for label in LABELS]
        assert [dataset[number][1] for number in range(NUM)] == dataset.labels.tolist()
    else:
        check(dataset)
        assert dataset.class_names == ([] if form == "structs" else NAMES)
    check_loaded(dataset, data)
    plain = build_dataset(section("huggingface", root, num_classes=0, **split))
    assert (plain[4][1], plain.labels.tolist()) == (0, [0] * NUM)
    if split:
        assert len(build_dataset(section("huggingface", root, split="test"))) == 5
        with pytest.raises(UserError, match=r"data.split: must be one of t\w+, t\w+; name the split to train on"):
            build_dataset(section("huggingface", root))
    elif form == "disk":
        with pytest.raises(UserError, match=r"data.split: must be unset with this data, got 'test'"):
            build_dataset(section("huggingface", root, split="test"))
    same, other = build_dataset(data).fingerprint(), section("huggingface", root, num_classes=0, **split)
    assert dataset.fingerprint().difference(same) is None
    assert same.difference(build_dataset(other).fingerprint()) == "images of other classes"


def test_parquet_files_that_no_split_has_are_refused_and_other_files_told(tmp_path, monkeypatch, caplog, capsys):
    """Once the name of one file tells a split, the library reads no file whose name tells none."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    warn_once.cache_clear()
    root = tmp_path / "data"
    (root / "sub").mkdir(parents=True)
    for name in ("train-00000", "extra"):
        rows().to_parquet(root / f"{name}.parquet")
    for name in ("README.md", "sub/a.png", "sub/b.PNG", "c.csv", ".gitattributes"):
        (root / name).write_text("x")
    message = r"data.root: '.*/data' has 1 file of no split, which would be ignored \(extra.parquet\); name each after"
    with pytest.raises(UserError, match=message):
        build_dataset(section("huggingface", root))
    (root / "extra.parquet").rename(root / "train-00001.parquet")
    assert len(build_dataset(section("huggingface", root))) == 2 * NUM
    told = "3 other files ignored: 2 .png, 1 .csv, such as sub/a.png"
    assert [record.message for record in caplog.records if "ignored" in record.message] == [f"{root}: {told}"]
    words = ["data", "prepare", str(root), str(tmp_path / "made"), "--format", "tar", "--resolution", str(SIDE)]
    assert cli.main([*words, "--workers", "1", "--kind", "huggingface"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == told


def test_parquet_that_has_changed_is_copied_anew(write):
    root = write("file.parquet")
    check(build_dataset(section("huggingface", root)))
    rows(image=[{"bytes": png(255 - pixels), "path": None} for pixels in PIXELS]).to_parquet(root)
    os.utime(root, (1, 1))
    check(build_dataset(section("huggingface", root)), 255 - PIXELS)


def test_rows_without_a_readable_image_count_as_unreadable(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Image.fromarray(PIXELS[0]).save(tmp_path / "0.png")
    content = png(PIXELS[1])
    images = [{"bytes": None, "path": str(tmp_path / "0.png")}, {"bytes": content[: len(content) // 2], "path": "x"}]
    images += [None, {"bytes": None, "path": str(tmp_path / "none.png")}]
    (tmp_path / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({**columns(4), "image": images}), tmp_path / "data/0.parquet")
    dataset = build_dataset(section("huggingface", tmp_path / "data"))
    assert torch.equal(dataset[0][0], torch.from_numpy(PIXELS[0]).permute(2, 0, 1))
    for number, problem in enumerate(["truncated", "its row has no image", "none.png|No such file"], 1):
        with pytest.raises(CorruptImage, match=f"image {number} of {tmp_path / 'data'}: .*({problem})"):
            dataset[number]
    accepted = build_dataset(section("huggingface", tmp_path / "data", truncated="accept"))
    assert accepted[1][0].shape == (3, SIDE, SIDE)


@pytest.mark.parametrize(
    "given, keys, message",
    [
        ({}, {"image_key": "text"}, r"has no column of images 'text' \(it has \(image, label, text\)\)"),
        ({}, {"label_key": "x"}, r"has no column of classes 'x' \(it has \(label\)\)"),
        ({}, {"label_key": "image"}, r"has no class numbers in 'image', but 'PIL.*'; name another column in"),
        ({}, {"num_classes": 2}, r"data.num_classes: must be 3 with this data, got 2"),
        ({"label": [None] * NUM}, {}, r"has rows without a class in 'label'; add them, set"),
        ({"label": [-1] * NUM}, {}, r"has a class below 0, -1 in row 0; set data.missing_labels=accept if -1 is"),
    ],
)
def test_data_sets_of_hugging_face_without_what_is_wanted_are_refused(tmp_path, given, keys, message):
    rows(**given).save_to_disk(tmp_path / "data")
    with pytest.raises(UserError, match=message):
        build_dataset(section("huggingface", tmp_path / "data", **keys))


def test_what_is_no_data_set_of_hugging_face_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "bad.parquet").write_bytes(b"none")
    (tmp_path / "empty").mkdir()
    for name, problem in (
        ("x", "does not exist; give a directory that save_to_disk has written, or parquet files"),
        ("empty", r"cannot be read: it has neither state.json nor \*.parquet; give a directory that save_to_disk"),
        ("bad.parquet", "cannot be read: Parquet "),
    ):
        with pytest.raises(UserError, match=f"data.root: '{tmp_path / name}' {problem}"):
            build_dataset(section("huggingface", tmp_path / name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"data.kind: 'huggingface' needs the package datasets, .*'.\[huggingface\]'"):
        build_dataset(section("huggingface", tmp_path / "empty"))


VECTORS = np.random.default_rng(1).normal(size=(NUM, 2)).astype(np.float32)


@pytest.mark.parametrize("form", ["hdf5", "parquet"])
def test_vectors_of_rows(form, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / f"x.{form}"
    if form == "hdf5":
        write_hdf5(path)
        with h5py.File(path, "a") as file:
            file["numbers"] = VECTORS
    else:
        table = pyarrow.table({**columns(), "numbers": VECTORS.tolist()})
        pyarrow.parquet.write_table(table, path)
    kind = {"hdf5": "hdf5", "parquet": "huggingface"}[form]
    keys = {"kind": kind, "root": str(path), "resolution": SIDE, "image_channels": 3, "num_classes": 0}
    dataset = build_dataset(Data(**keys, condition_size=2, label_key="numbers"))
    np.testing.assert_array_equal(dataset.labels, VECTORS)
    np.testing.assert_array_equal(dataset[3][1], VECTORS[3])
    with pytest.raises(UserError, match=r"of row 0: it has 2 numbers, not 3"):
        build_dataset(Data(**keys, condition_size=3, label_key="numbers"))


def test_several_classes_of_a_row(tmp_path):
    classes = [[number % 3, 2] if number % 4 else None for number in range(NUM)]
    features = datasets.Features({**FEATURES, "label": datasets.Sequence(datasets.ClassLabel(names=NAMES))})
    datasets.Dataset.from_dict(columns(label=classes), features).save_to_disk(tmp_path / "x")
    keys = {"kind": "huggingface", "root": str(tmp_path / "x"), "resolution": SIDE, "image_channels": 3}
    keys |= {"num_classes": 3, "multi_label": True}
    dataset = build_dataset(Data(**keys, missing_labels="accept"))
    expected = [[number % 4 > 0 and place in (number % 3, 2) for place in range(3)] for number in range(NUM)]
    np.testing.assert_array_equal(dataset.labels, np.float32(expected))
    assert list(dataset.class_names) == NAMES
    with pytest.raises(UserError, match=r"of row 0: it is missing"):
        build_dataset(Data(**keys))


@pytest.mark.parametrize("label", ["a class", "a name"])
def test_rows_without_a_class_have_a_label_of_zeros(tmp_path, label):
    """Also the first one."""
    classes = [None if number < 2 else number % 3 for number in range(NUM)]
    if label == "a class":
        features = datasets.Features({**FEATURES, "label": datasets.ClassLabel(names=NAMES)})
        table = datasets.Dataset.from_dict(columns(label=classes), features)
    else:
        texts = [None if number is None else NAMES[number] for number in classes]
        features = datasets.Features({**FEATURES, "label": datasets.Value("string")})
        table = datasets.Dataset.from_dict(columns(label=texts), features)
    table.save_to_disk(tmp_path / "x")
    keys = {"kind": "huggingface", "root": str(tmp_path / "x"), "resolution": SIDE, "image_channels": 3}
    dataset = build_dataset(Data(**keys, num_classes=3, missing_labels="accept"))
    order = list(dataset.class_names)
    assert order == (NAMES if label == "a class" else sorted(NAMES))
    expected = [[number is not None and name == NAMES[number] for name in order] for number in classes]
    np.testing.assert_array_equal(dataset.labels, np.float32(expected))


@pytest.mark.parametrize("planar", [False, True])
def test_numbers_of_a_range_in_hdf5(tmp_path, planar):
    """16 bits, of five channels."""
    pixels = np.random.default_rng(1).integers(0, 4096, (NUM, SIDE, SIDE, 5), dtype=np.uint16)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["imgs"] = pixels.transpose(0, 3, 1, 2) if planar else pixels
        file["labels"] = LABELS
    check_scaled(section("hdf5", tmp_path / "x.hdf5", image_channels=5, range=[0, 4095]), pixels)
    with pytest.raises(UserError, match=r"^data\.root: .* has uint16 of shape .* in 'imgs'"):
        build_dataset(section("hdf5", tmp_path / "x.hdf5"))


def test_numbers_of_a_range_in_columns(tmp_path):
    """PNG files of 16 bits in colour."""
    pixels = np.random.default_rng(1).integers(0, 4096, (NUM, SIDE, SIDE, 3), dtype=np.uint16)
    images = [{"bytes": png16(each), "path": None} for each in pixels]
    rows(image=images).save_to_disk(tmp_path / "rows")
    check_scaled(section("huggingface", tmp_path / "rows", range=[0, 4095]), pixels)


def test_grey_pictures_with_a_range_stay_grey(tmp_path, capsys):
    pixels = np.random.default_rng(1).integers(0, 256, (NUM, SIDE, SIDE), dtype=np.uint8)
    rows(image=[Image.fromarray(each) for each in pixels]).save_to_disk(tmp_path / "rows")
    words = ["--resolution", str(SIDE), "--format", "tar", "--workers", "1", "data.range=[0,255]"]
    assert cli.main(["data", "prepare", str(tmp_path / "rows"), str(tmp_path / "made"), *words]) == 0
    assert "data.image_channels=1 " in capsys.readouterr().out
    made = Data(kind="tar", root=str(tmp_path / "made"), resolution=SIDE, range=[0, 255], num_classes=3)
    found = torch.stack([build_dataset(made)[number][0] for number in range(NUM)])
    np.testing.assert_allclose(found.numpy()[:, 0], pixels / 127.5 - 1, rtol=0, atol=1e-6)


def check_scaled(data: Data, pixels: np.ndarray) -> None:
    """Images are those numbers (N, H, W, C) in [-1, 1], and `bigsgan data prepare` keeps them."""
    dataset = build_dataset(data)
    images = torch.stack([dataset[number][0] for number in range(NUM)])
    expected = torch.from_numpy(pixels.astype(np.float64) * 2 / 4095 - 1).permute(0, 3, 1, 2)
    torch.testing.assert_close(images.double(), expected, atol=1e-7, rtol=0)
    assert [dataset[number][1] for number in range(NUM)] == LABELS.tolist()
    made = Path(str(data.root)).with_name("made")
    words = ["--resolution", str(SIDE), "--format", "tar", "--workers", "1", "data.range=[0,4095]"]
    assert cli.main(["data", "prepare", str(data.root), str(made), *words]) == 0
    again = build_dataset(data.model_copy(update={"kind": "tar", "root": str(made)}))
    assert torch.equal(torch.stack([again[number][0] for number in range(NUM)]), images)
