"""dataset.json of StyleGAN's tool: classes as NVIDIA's ImageFolderDataset reads them, in each kind of data."""

from __future__ import annotations

import json
import os
import re
import zipfile
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import build_dataset
from bigsgan.data.source import open_source
from bigsgan.errors import UserError
from tests.archives import png, write_zip
from tests.preparing import origin

NUM = 30


def images() -> dict[str, bytes]:
    """Grey images whose value is their number, in folders of ten, as dataset_tool.py names them."""
    return {f"{i // 10:05}/img{i:08}.png": png(i) for i in range(NUM)}


def write(kind: str, place: Path, members: dict[str, bytes], labels: object = None, text: str | None = None) -> Path:
    """A folder or zip file of these members, and dataset.json with these labels or this text."""
    content = json.dumps({"labels": labels}) if text is None else text
    members = {**members, "dataset.json": content.encode()}
    if kind == "zip":
        return write_zip(place.with_suffix(".zip"), members)
    for name, each in members.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(each)
    return place


def opened(kind: str, root: Path, num_classes: int):
    return build_dataset(Data(kind=kind, root=str(root), resolution=4, image_channels=1, num_classes=num_classes))


def values(dataset) -> dict[int, int]:
    """The class of each image by its value."""
    return {int(pixels[0, 0, 0]): label for pixels, label in (dataset[i] for i in range(len(dataset)))}


def nvidia_labels(root: Path) -> dict[str, int]:
    """What stylegan2-ada-pytorch's training/dataset.py does: _all_fnames, _image_fnames, _load_raw_labels."""
    if root.is_dir():
        names = {os.path.relpath(os.path.join(at, name), root) for at, _, found in os.walk(root) for name in found}
        content = (root / "dataset.json").read_text()
    else:
        with zipfile.ZipFile(root) as archive:
            names, content = set(archive.namelist()), archive.read("dataset.json").decode()
    listed = dict(json.loads(content)["labels"])
    found = sorted(name for name in names if os.path.splitext(name)[1].lower() in Image.registered_extensions())
    return dict(zip(found, np.array([listed[name] for name in found]).astype(np.int64).tolist(), strict=True))


@pytest.mark.parametrize("kind", ["zip", "folder"])
@pytest.mark.parametrize("form", ["pairs", "a dictionary", "floats"])
def test_classes_are_those_of_the_listing_and_not_the_folders(tmp_path, kind, form):
    labels = [[name, i % 3] for i, name in enumerate(images())]
    given = {"pairs": labels, "a dictionary": dict(labels), "floats": [[n, float(i)] for n, i in labels]}[form]
    root = write(kind, tmp_path / "data", images(), given)
    dataset = opened(kind, root, 3)
    assert values(dataset) == {i: i % 3 for i in range(NUM)}
    names = [dataset.path(i).removeprefix(f"{root}/") for i in range(NUM)]
    assert [(name, dataset[i][1]) for i, name in enumerate(names)] == list(nvidia_labels(root).items())
    assert set(values(opened(kind, root, 0)).values()) == {0}


NAMES = list(images())
LABELS = [[name, i % 3] for i, name in enumerate(NAMES)]
BAD: dict[str, tuple[object, str]] = {
    "vectors": (
        [[name, [0.5, 1.0]] for name in NAMES],
        r"has lists of numbers as labels in its dataset.json, such as that of 00000/img00000000.png; "
        r"set data.num_classes=0 and data.condition_size to their length, or data.multi_label=true",
    ),
    "unlabelled": (LABELS[:-2], r"has .*28.png, which its dataset.json does not list \(it lacks 2.*missing_labels"),
    "missing": ([*LABELS, *([f"00003/{i}.png", 1] for i in range(31))], r"has no 00003/0.png, which its dataset.json"),
    "null": (
        [*LABELS[:-1], [NAMES[-1], None]],
        r"has no label of 00002/img00000029.png in its dataset.json",
    ),
    "not a number": (
        [*LABELS[:-1], [NAMES[-1], float("nan")]],
        r"has no label of 00002/img00000029.png in its",
    ),
    "negative": ([[name, -1] for name in NAMES], r"has a class below 0 in its dataset.json, that of 00000/img00000000"),
    "fractions": ([[name, 0.5] for name in NAMES], r"has a label that is not the number of a class in its"),
    "words": ([[name, "cat"] for name in NAMES], r"has a label that is not the number of a class .*, 'cat' of 00000"),
    "no pairs": ([1, 2], r"has no readable dataset.json: .*; (pack it again|write) .*, or remove that file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["zip", "folder"])
@pytest.mark.parametrize("extra", [[], ["00002/none.png"], ["../../x.png", "notes.txt"]])
def test_names_are_looked_up_as_in_nvidias_loader(tmp_path, kind, extra, caplog):
    """With ./ before them, as a search for files writes them, and beside names of files that are not read."""
    labels = [[f"./{name}", label] for name, label in LABELS] + [[name, 9] for name in extra]
    root = write(kind, tmp_path / "data", {**images(), "notes.txt": b""}, labels)
    assert values(opened(kind, root, 3)) == {i: i % 3 for i in range(NUM)}
    num = "1 file that is" if len(extra) == 1 else f"{len(extra)} files that are"
    told = f"{root}: dataset.json lists {num} not read, such as {min(extra, default='')}"
    assert (told in caplog.messages) == bool(extra)


@pytest.mark.parametrize("name, kind", [*zip(BAD, cycle(["zip", "folder"]), strict=False)])
def test_listings_that_do_not_fit_are_refused(tmp_path, name, kind):
    labels, message = BAD[name]
    root = write(kind, tmp_path / "data", {**images(), "notes.txt": b""}, labels)
    with pytest.raises(UserError, match=rf"data.root: '{root}' {message}"):
        opened(kind, root, 3)
    assert len(opened(kind, root, 0)) == NUM  # which needs no labels


def prepare(source: Path, made: Path, kind: str) -> int:
    options = ["--resolution", "4", "--format", kind, "--workers", "1"]
    return cli.main(["data", "prepare", str(source), str(made), *options])


@pytest.mark.parametrize("kind", ["zip", "tar", "folder"])
def test_prepared_data_has_the_classes_of_the_listing(tmp_path, kind, capsys):
    """Eleven classes, whose names have to sort as their numbers do."""
    source = write("folder", tmp_path / "data", images(), [[name, i % 11] for i, name in enumerate(NAMES)])
    made = tmp_path / ("made.zip" if kind == "zip" else "made")
    assert prepare(source, made, kind) == 0
    assert f"{made}: 30 images of 11 classes, cropped to 4x4\n" in capsys.readouterr().out
    assert values(opened(kind, made, 11)) == {i: i % 11 for i in range(NUM)}


@pytest.mark.parametrize("kind", ["tar", "folder"])
def test_prepared_data_without_labels_has_no_classes(tmp_path, kind, capsys):
    source, made = write("folder", tmp_path / "data", images(), None), tmp_path / "made"
    assert prepare(source, made, kind) == 0
    assert f"{made}: 30 images of no classes, cropped to 4x4\n" in capsys.readouterr().out
    assert values(opened(kind, made, 0)) == dict.fromkeys(range(NUM), 0)


@pytest.mark.parametrize("form", ["names", "numbers"])
def test_an_image_without_a_class_in_a_table_lacks_a_label(tmp_path, form, capsys):
    """Training and preparing refuse it alike, and accept it alike."""
    source, table = tmp_path / "data", tmp_path / "labels.csv"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.png").write_bytes(png(number))
    table.write_text("0.png,cat\n1.png,\n2.png,dog\n" if form == "names" else "0.png,0\n1.png,\n2.png,1\n")
    message = f"data.labels_file: '{table}' has no label of 1.png; add it, set data.missing_labels=accept, or set"
    keys = {"kind": "folder", "root": str(source), "resolution": 4, "image_channels": 1, "labels_file": str(table)}
    with pytest.raises(UserError, match=f"^{message}"):
        build_dataset(Data(**keys, num_classes=2))
    command = ["data", "prepare", str(source), str(tmp_path / "made"), "--resolution", "4", "--format", "tar"]
    command += ["--workers", "1", f"data.labels_file={table}"]
    assert cli.main(command) == 2
    assert message in capsys.readouterr().err
    assert cli.main([*command, "data.missing_labels=accept"]) == 2
    assert "data.num_classes: must be given with data.missing_labels; give" in capsys.readouterr().err
    assert cli.main([*command, "data.missing_labels=accept", "data.num_classes=2"]) == 0
    keys = {"kind": "tar", "root": str(tmp_path / "made"), "resolution": 4, "image_channels": 1}
    made = build_dataset(Data(**keys, num_classes=2, missing_labels="accept"))
    assert made.labels.tolist() == [[1, 0], [0, 0], [0, 1]]


@pytest.mark.parametrize(
    "kind, more", [("zip", []), ("tar", ["data.num_classes=2"]), ("folder", ["data.num_classes=auto"])]
)
def test_prepared_data_has_the_classes_of_a_table(tmp_path, kind, more, capsys):
    source, table = tmp_path / "data", tmp_path / "labels.csv"
    source.mkdir()
    for number in range(4):
        (source / f"{number}.png").write_bytes(png(number))
    table.write_text("0.png,cat\n1.png,dog\n2.png,cat\n3.png,dog\n")
    made = tmp_path / ("made.zip" if kind == "zip" else "made")
    options = ["--resolution", "4", "--format", kind, "--workers", "1", f"data.labels_file={table}", *more]
    assert cli.main(["data", "prepare", str(source), str(made), *options]) == 0
    assert f"{made}: 4 images of 2 classes, cropped to 4x4\n" in capsys.readouterr().out
    assert values(opened(kind, made, 2)) == {i: i % 2 for i in range(4)}
    assert opened(kind, made, 2).class_names == ["cat", "dog"]


def test_classes_without_images_keep_their_numbers(tmp_path, capsys):
    source = write("folder", tmp_path / "data", images(), [[name, 2 * (i % 2)] for i, name in enumerate(NAMES)])
    for kind in ("zip", "folder"):
        assert prepare(source, tmp_path / "made", kind) == 2
        line = capsys.readouterr().err
        assert "has no image of class 1, of 3 classes; give --format tar, which keeps the numbers" in line
    assert prepare(source, tmp_path / "made", "tar") == 0
    assert values(opened("tar", tmp_path / "made", 3)) == {i: 2 * (i % 2) for i in range(NUM)}


def test_other_labels_are_other_work(tmp_path, capsys):
    source = write("folder", tmp_path / "data", images(), LABELS)
    assert prepare(source, tmp_path / "made", "tar") == 0
    assert prepare(source, tmp_path / "made", "tar") == 0
    write("folder", source, {}, [[name, 2 - label] for name, label in LABELS])
    assert prepare(source, tmp_path / "made", "tar") == 2
    assert "holds work on other images than SRC has now" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prepare", "encode"])
def test_lists_of_numbers_are_refused_by_the_commands(tmp_path, capsys, command):
    source = write("folder", tmp_path / "data", images(), BAD["vectors"][0])
    options = ["--format", "zip"] if command == "prepare" else ["--codec", "dct"]
    assert cli.main(["data", command, str(source), str(tmp_path / "made"), "--resolution", "4", *options]) == 2
    line = capsys.readouterr().err
    assert f"SRC: '{source}' has lists of numbers as labels in its dataset.json" in line
    assert "set data.num_classes=0 and data.condition_size to their length" in line


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_encoded_images_have_the_classes_of_the_listing(tmp_path, kind, capsys):
    source = write(kind, tmp_path / "data", images(), LABELS)
    options = ["--codec", "dct", "--resolution", "4", "--workers", "1", "--grey", "--keep-images"]
    assert cli.main(["data", "encode", str(source), str(tmp_path / "made"), *options]) == 0
    assert "data.num_classes=3" in capsys.readouterr().out
    assert values(opened("tar", tmp_path / "made", 3)) == {i: i % 3 for i in range(NUM)}


@pytest.mark.parametrize("num_classes", [2, 3])
def test_names_that_begin_with_a_slash_are_below_the_root(tmp_path, num_classes):
    """As `unzip` and `tar` read them; the classes are the folders, or the listing's."""
    members = {"/": b"", "/a/1.png": png(1), "/b/2.png": png(2)}
    if num_classes == 3:
        members["/dataset.json"] = json.dumps({"labels": [["/a/1.png", 2], ["b/2.png", 0]]}).encode()
    write_zip(tmp_path / "x.zip", members)
    expected = {1: 0, 2: 1} if num_classes == 2 else {1: 2, 2: 0}
    assert values(opened("zip", tmp_path / "x.zip", num_classes)) == expected


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_one_file_has_one_label(tmp_path, kind):
    labels = [*([name, 0] for name in images()), ["00000/img00000000.png", 0]]
    assert len(opened(kind, write(kind, tmp_path / "same", images(), labels), 1)) == NUM
    labels[-1] = ["./00000\\img00000000.png", 1]
    problem = (
        r"has two labels of 00000/img00000000.png in its dataset.json, 0 and 1; list each file once in dataset.json"
    )
    with pytest.raises(UserError, match=rf"data.root: '.*' {problem}"):
        opened(kind, write(kind, tmp_path / "two", images(), labels), 2)


def test_names_with_backslashes_are_paths(tmp_path):
    """As zip files of Windows have them; and a listing that was written there."""
    members = {f"{'abc'[i % 3]}\\{i}.png": png(i) for i in range(6)}
    write_zip(tmp_path / "data.zip", {"a\\": b"", **members, ".git\\x.png": b""})
    assert values(opened("zip", tmp_path / "data.zip", 3)) == {i: i % 3 for i in range(6)}
    root = write("zip", tmp_path / "listed", members, [[name, 1 - i % 2] for i, name in enumerate(members)])
    assert values(opened("zip", root, 2)) == {i: 1 - i % 2 for i in range(6)}


@pytest.mark.parametrize("names", [("a\\0.png", "a/0.png"), ("./0.png", "0.png"), ("./a/0.png", "a\\0.png")])
def test_names_of_a_zip_file_that_are_the_same_are_refused(tmp_path, names):
    """Otherwise one of the two images would be lost. Folders may come twice."""
    members = {name: png(3) if name.endswith("png") else b"" for name in ("a/", "./a/", *names)}
    write_zip(tmp_path / "data.zip", members)
    with pytest.raises(UserError, match=re.escape(f"has members with the same name, {names[0]!r} and {names[1]!r}; ")):
        opened("zip", tmp_path / "data.zip", 0)


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_a_data_set_packed_with_its_folder_is_refused(tmp_path, kind):
    """Otherwise that folder would be the only class."""
    inner = {f"cifar/{name}": content for name, content in images().items()}
    root = write(kind, tmp_path / "data", {**inner, "cifar/dataset.json": json.dumps({"labels": LABELS}).encode()}, "x")
    if kind == "folder":
        (root / "dataset.json").unlink()
        assert values(opened(kind, root / "cifar", 3)) == {i: i % 3 for i in range(NUM)}
    else:
        write_zip(root, {**inner, "cifar/dataset.json": b"{}"})
    message = r"has cifar/dataset.json, and no dataset.json beside that folder \(it lists the classes of a data set\); "
    for num_classes in (1, 3):
        with pytest.raises(UserError, match=message):
            opened(kind, root, num_classes)


@pytest.mark.parametrize("kind", ["zip", "folder"])
@pytest.mark.parametrize("below", ["", "photos/"])
def test_several_data_sets_in_folders_are_refused(tmp_path, kind, below):
    """Otherwise the folders around them would be the classes, and the labels would be lost."""
    listing = json.dumps({"labels": LABELS}).encode()
    both = {f"{below}{part}/{name}": content for part in ("test", "train") for name, content in images().items()}
    both |= {f"{below}{part}/dataset.json": listing for part in ("test", "train")}
    folder = write("folder", tmp_path / "data", both)
    (folder / "dataset.json").unlink()
    root = folder
    if kind == "zip":
        root = write_zip(tmp_path / "data.zip", both)
    message = rf"has {below}test/dataset.json, and no dataset.json beside the folders \({below}test, {below}train\) "
    for num_classes in (1, 2, 3):
        with pytest.raises(UserError, match=message):
            opened(kind, root, num_classes)
    with pytest.raises(UserError, match=message):
        open_source(origin(root), 1)
    if below:
        return
    given = {"kind": "torchvision", "dataset": "ImageFolder", "root": str(folder / "train"), "num_classes": 2}
    with pytest.raises(UserError, match=r"data.kind: must be 'folder' with this data, got 'torchvision'"):
        build_dataset(Data(**given, resolution=4))
