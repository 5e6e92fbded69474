"""`bigsgan data prepare` of every kind of data: what it makes holds what training reads from the source."""

from __future__ import annotations

import pickle
import shlex
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.config.origin import find_origin
from bigsgan.config.yaml_file import parse_override
from bigsgan.data import build_dataset
from bigsgan.data.source import open_source
from bigsgan.errors import UserError
from bigsgan.images.size import Fitting, Size
from tests.preparing import samples
from tests.unit.test_data_hostile import cut_jpeg, decoded
from tests.unit.test_data_tables import LABELS, NAMES, NUM, PIXELS, rows, write_hdf5

SIZE = 6


class Faces(torch.utils.data.Dataset):
    """Code of a user's own, whose third image cannot be read."""

    def __init__(self, num_classes: int, broken: int = -1, labels: tuple = tuple(LABELS)) -> None:
        self.broken, self.labels, self.num_classes = broken, labels, num_classes
        self.unfit_for_pickles = lambda: None

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, number: int) -> tuple[np.ndarray, Any]:
        if number == self.broken:
            raise RuntimeError("no such face")
        return PIXELS[number], self.labels[number]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("their")
    module.Faces = Faces
    monkeypatch.setitem(sys.modules, "their", module)


def write_folder(root: str, pixels: np.ndarray = PIXELS, folders: list[str] | None = None) -> Path:
    """Images in the folders of their classes, or without."""
    for number, image in enumerate(pixels):
        path = Path(root, folders[LABELS[number]] if folders else ".", f"{number:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return Path(root)


def write_shards(suffix: str) -> None:
    Path("shards").mkdir()
    for shard in range(2):
        with tarfile.open(f"shards/{shard}.tar{suffix}", f"w:{suffix[1:]}") as archive:
            for number in range(shard * 5, NUM if shard else 5):
                Path("x.png").unlink(missing_ok=True)
                Image.fromarray(PIXELS[number]).save("x.png")
                Path("x.json").write_text(f'{{"group": {LABELS[number]}}}')
                archive.add("x.png", f"{number}.png")
                archive.add("x.json", f"{number}.json")


def write(kind: str) -> tuple[str, list[str], dict[str, Any]]:
    """The source, the words of the command, and the keys of a recipe that reads the source."""
    if kind == "hdf5":
        write_hdf5(Path("data.hdf5"), labels="y")
        return "data.hdf5", ["data.label_key=y"], {"label_key": "y"}
    if kind == "huggingface":
        rows().save_to_disk("rows")
        return "rows", [], {}
    if kind == "zip":
        with zipfile.ZipFile("data.zip", "w") as archive:
            for path in sorted(write_folder("images", folders=sorted(NAMES)).rglob("*.png")):
                archive.write(path, path.relative_to("images"))
        return "data.zip", [], {}
    if kind.startswith("tar"):
        write_shards(kind.removeprefix("tar"))
        return "shards", ["data.label_key=group"], {"label_key": "group"}
    if kind == "torchvision":
        write_folder("images", folders=sorted(NAMES))
        return "images", ["--kind", "torchvision", "data.dataset=ImageFolder"], {"dataset": "ImageFolder"}
    assert kind == "their:Faces"
    return kind, ["data.num_classes=3"], {"root": None}


def prepared(capsys, source: str, *words: str, made: str = "made", format: str = "tar", size: str = str(SIZE)) -> Data:
    """The section that the command prints."""
    assert cli.main(["data", "prepare", source, made, "--resolution", size, "--format", format, *words]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("data.kind="))
    return Data(**{keys[1]: value for keys, value in map(parse_override, shlex.split(line))})


@pytest.mark.parametrize("kind", ["hdf5", "huggingface", "zip", "tar", "tar.gz", "torchvision", "their:Faces"])
def test_every_kind_becomes_what_training_reads(kind, capsys):
    source, words, keys = write(kind)
    for _ in range(2):  # the second time all is there
        dataset = build_dataset(prepared(capsys, source, *words))
    if kind == "tar.gz":  # which training cannot read
        Path("shards").rename("compressed")
        write_shards("")
    given = {"kind": kind.partition(".")[0], "root": source, "num_classes": 3, "image_channels": 3}
    expected = build_dataset(Data(**{**given, "resolution": SIZE, **keys}))
    assert samples(dataset) == samples(expected)
    assert list(dataset.class_names) == list(expected.class_names)


@pytest.mark.parametrize("kind", ["hdf5", "huggingface", "zip", "their:Faces"])
def test_other_ranks_read_what_rank_0_has_listed(kind):
    name, words, _ = write(kind)
    fitting = Fitting(Size.of(SIZE))
    source = open_source(find_origin(Path(name), fitting, {}, words), 1)
    received = pickle.loads(pickle.dumps(source))
    assert (received.labels, received.classes, received.digest()) == (source.labels, source.classes, source.digest())
    for number in (0, NUM - 1):
        expected, found = (each.images.pixels(number, None, fitting, None)[0] for each in (source, received))
        assert torch.equal(expected, found)


@pytest.mark.parametrize("format", ["zip", "folder"])
def test_classes_keep_their_numbers_in_folders(format, capsys):
    write_hdf5(Path("data.hdf5"))
    dataset = build_dataset(prepared(capsys, "data.hdf5", format=format, made=f"made.{format}"))
    assert sorted(samples(dataset)) == sorted(samples(build_dataset(Data(
        kind="hdf5", root="data.hdf5", num_classes=3, image_channels=3, resolution=SIZE))))  # fmt: skip
    plain = build_dataset(prepared(capsys, "data.hdf5", "data.num_classes=0", format=format, made=f"plain.{format}"))
    assert [pixels for pixels, _ in samples(plain)] == [pixels for pixels, _ in samples(build_dataset(Data(
        kind="hdf5", root="data.hdf5", num_classes=0, image_channels=3, resolution=SIZE)))]  # fmt: skip
    rows().save_to_disk("rows")  # of owl, cat, dog
    assert cli.main(["data", "prepare", "rows", "x", "--resolution", "6", "--format", format]) == 2
    told = "SRC: 'rows' has classes in another order than folders, owl before cat; give --format tar, which keeps the"
    assert told in capsys.readouterr().err
    write_hdf5(Path("data.hdf5"), planar=False)
    assert cli.main(["data", "prepare", "data.hdf5", f"made.{format}", "--resolution", "6", "--format", format]) == 2
    assert "holds work on other images than SRC has now" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["paired_folders", "side_by_side"])
def test_pairs_become_images_of_both_halves(kind, capsys, caplog):
    grey = PIXELS[:, :, :6, 0].repeat(2, axis=1)  # higher than wide, and of one channel
    write_folder("inputs", grey)
    write_folder("targets")
    words, keys = ["data.input_root=inputs"], {"root": "targets", "input_root": "inputs"}
    if kind == "side_by_side":
        write_folder("both", np.concatenate([PIXELS, 255 - PIXELS], axis=2))
        words, keys = ["data.input_side=right"], {"root": "both", "input_side": "right"}
    Path(keys["root"], "03.png").write_bytes(b"none")
    words += ["--kind", kind]
    data = prepared(capsys, keys["root"], *words, format="folder")
    assert (data.kind, data.input_channels, data.image_channels) == ("side_by_side", 3, 3)
    assert "input_side" in data.model_fields_set  # as pix2pix_facades has another
    shape = {"resolution": SIZE, "num_classes": 0, "image_channels": 3, "input_channels": 3}
    dataset, expected = build_dataset(data), build_dataset(Data(kind=kind, **keys, **shape))
    assert len(dataset) == NUM - 1
    for number, other in enumerate([number for number in range(NUM) if number != 3]):
        assert torch.equal(dataset[number][0], expected[other][0])
    assert "skipped an unreadable image: " in caplog.text
    options = [keys["root"], "x", "--resolution", "6", *words]
    assert cli.main(["data", "prepare", *options, "--format", "zip"]) == 2
    assert f"--format: must be folder with --kind {kind}, got 'zip'" in capsys.readouterr().err
    assert cli.main(["data", "encode", *options, "--codec", "dct"]) == 2
    assert f"--kind: '{kind}' cannot be encoded; encode one of its folders" in capsys.readouterr().err


def test_images_that_are_cut_off_are_prepared_on_request(capsys, monkeypatch):
    content = cut_jpeg()
    write_folder("images", PIXELS[:1])
    Path("images/cut.jpg").write_bytes(content)
    assert len(build_dataset(prepared(capsys, "images"))) == 1
    dataset = build_dataset(prepared(capsys, "images", "--truncated", "accept", made="all", size="64"))
    assert torch.equal(dataset[1][0][0], torch.from_numpy(decoded(content, monkeypatch).copy()))
    options = ["--resolution", "6", "--format", "tar", "--truncated", "accept"]
    assert cli.main(["data", "prepare", "images", "made", *options]) == 2
    assert "holds work with truncated skip, not accept" in capsys.readouterr().err


def test_labels_of_code_that_are_no_classes(capsys):
    words = ["their:Faces", "made", "--resolution", "6", "--format", "tar", "data.num_classes=3"]
    assert cli.main(["data", "prepare", *words, "data.arguments.broken=2"]) == 0
    assert "made: 11 images of 3 classes" in capsys.readouterr().out
    mixed = [*LABELS[:4].tolist(), 0.5, *LABELS[5:].tolist()]
    assert cli.main(["data", "prepare", *words, f"data.arguments.labels={mixed}"]) == 2
    told = (
        "SRC: 'their:Faces' has no class number for image 4 of their:Faces: it has the label 0.5, which is not the num"
    )
    assert told in capsys.readouterr().err
    words[-1] = "data.num_classes=5"
    assert cli.main(["data", "prepare", *words]) == 2
    assert "data.num_classes: must be 3 with this data, got 5" in capsys.readouterr().err
    words[-1] = "data.num_classes=0"
    assert cli.main(["data", "prepare", *words[:1], "plain", *words[2:], f"data.arguments.labels={mixed}"]) == 0
    assert "plain: 12 images of no classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--kind", "digits"], "--kind: 'digits' cannot be prepared; give files: the digits need no preparation"),
        (["--kind", "latents"], "--kind: 'latents' cannot be prepared; give the images of which latents are made"),
        (["--kind", "unpaired_folders"], "prepare each of the two folders by its own command, with --kind folder"),
        (["--kind", "nothing"], "--kind: must be 'digits', "),
        (["data.kind=zip"], "data.kind: must be given by --kind; remove it"),
        (["data.crop_from=8"], "data.crop_from: does not change what is made of images; remove it, and set it in"),
        (["data.image_channels=1"], "data.image_channels: does not change what is made of images"),
        (["data.labelkey=1"], "data.labelkey: unknown key; did you mean data.label_key?"),
        (["batch=1"], "batch: is no key with which images are read; give keys of the section data"),
        (["data.split=train"], "data.split: must be unset with data.kind=folder, got 'train'"),
        (["--kind", "hdf5"], "SRC: must be a file, got 'images'"),
        (["--kind", "huggingface"], "SRC: 'images' cannot be read: it has neither state.json nor *.parquet"),
        (["--kind", "their:None"], "is not in their, which has no None"),
    ],
)
def test_sources_that_cannot_be_prepared_are_refused(words, message, capsys):
    write_folder("images", PIXELS[:1])
    assert cli.main(["data", "prepare", "images", "made", "--resolution", "6", "--format", "tar", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("made").exists()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_only_shard_may_be_given_itself(suffix, capsys):
    write_shards(suffix)
    file = f"shards/1.tar{suffix}"
    found = build_dataset(prepared(capsys, file, "data.num_classes=3", "data.label_key=group", size="8"))
    assert torch.equal(torch.stack([image for image, _ in found]), torch.from_numpy(PIXELS[5:]).permute(0, 3, 1, 2))
    read = Data(kind="tar", root=file, num_classes=3, label_key="group", image_channels=3, resolution=8)
    if suffix:
        with pytest.raises(UserError, match=r"^data\.root: 'shards/1\.tar\.gz' is a compressed shard"):
            build_dataset(read)
    else:
        assert build_dataset(read).labels.tolist() == found.labels.tolist() == LABELS[5:].tolist()


def test_an_archive_of_class_folders_is_no_shard(capsys):
    """Its folders would be lost."""
    write_folder("images", folders=NAMES)
    with tarfile.open("images.tar", "w") as archive:
        archive.add("images")
    words = ["data", "prepare", "images.tar", "made", "--resolution", "6", "--format", "tar"]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert "SRC: 'images.tar' has folders (" in told
    assert "; unpack it and give its folder, or give data.num_classes=0" in told
    assert cli.main([*words, "data.num_classes=0"]) == 0


def refused(capsys, source: str, *words: str, made: str = "made") -> str:
    assert cli.main(["data", "prepare", source, made, "--resolution", "6", "--format", "tar", *words]) == 2
    return capsys.readouterr().err


def test_work_on_other_images_of_a_source_is_not_taken_up(capsys):
    write_hdf5(Path("data.hdf5"))
    with h5py.File("data.hdf5", "a") as file:
        file["masks"] = 255 - file["imgs"][:]
    first = samples(build_dataset(prepared(capsys, "data.hdf5")))
    told = refused(capsys, "data.hdf5", "data.image_key=masks")
    assert "DST: 'made' holds work with keys {'kind': 'hdf5'}, not {'image_key': 'masks', 'kind': 'hdf5'}" in told
    masks = samples(build_dataset(prepared(capsys, "data.hdf5", "data.image_key=masks", made="masks")))
    assert [pixels for pixels, _ in masks] != [pixels for pixels, _ in first]
    words = ["data.num_classes=3", "data.arguments.broken=-1"]
    prepared(capsys, "their:Faces", *words, made="own")
    assert "holds work with keys" in refused(capsys, "their:Faces", words[0], "data.arguments.broken=2", made="own")


def test_shards_beside_images_are_not_guessed(capsys):
    write_folder("images", folders=sorted(NAMES))
    for name, kind in (("old.tar.gz", "tar"), ("meta.parquet", "huggingface")):
        stray = Path("images", name)
        stray.write_bytes(b"")
        told = refused(capsys, "images")
        assert "SRC: 'images' has " in told
        assert f"beside images such as 00.png; give --kind folder, or --kind {kind}" in told
        stray.unlink()
    Path("images", "old.tar.gz").write_bytes(b"")
    assert len(build_dataset(prepared(capsys, "images", "--kind", "folder"))) == NUM


def test_numbers_that_are_no_classes(capsys, caplog):
    write_hdf5(Path("data.hdf5"))
    with h5py.File("data.hdf5", "a") as file:
        file["ids"] = np.arange(NUM) + 10**9
        file["other"] = np.arange(NUM)
    told = refused(capsys, "data.hdf5", "data.label_key=ids")
    assert f"SRC: {10**9 + NUM - 1} has a class number of 1000000 or more; number classes from 0" in told
    Path("data.hdf5").unlink()
    write_hdf5(Path("data.hdf5"), labels="y")
    assert cli.main(["data", "prepare", "data.hdf5", "made", "--resolution", "6", "--format", "tar"]) == 0
    assert "data.hdf5: no labels are read; data.label_key names them (y)" in caplog.messages


def test_a_class_without_images_counts_where_it_has_a_name(capsys):
    given = rows()
    given.select([number for number in range(NUM) if LABELS[number] < 2]).save_to_disk("rows")
    data = prepared(capsys, "rows")
    assert data.num_classes == 3
    dataset = build_dataset(data)
    assert list(dataset.class_names) == NAMES
    assert set(dataset.labels.tolist()) == {0, 1}


def test_several_configurations_of_a_repository_are_refused(capsys):
    for place in ("a", "b"):
        Path("hub", place).mkdir(parents=True)
        rows().to_parquet(f"hub/{place}/0.parquet")
    assert "it has several folders of parquet files (a, b), of which one must be given" in refused(capsys, "hub")
    Path("hub/a").rename("hub/train")
    Path("hub/b").rename("hub/test")
    assert len(build_dataset(prepared(capsys, "hub", "data.split=train"))) == NUM
