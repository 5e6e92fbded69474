"""Data that others have made: pipes, links without an end, members that inflate, names that are not UTF-8."""

import io
import logging
import os
import shutil
import tarfile
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import build_dataset
from bigsgan.errors import UserError
from bigsgan.images import reading
from bigsgan.images.reading import CorruptImage, open_image
from bigsgan.images.size import Size
from bigsgan.monitor import open_rank_log

TIMEOUT = pytest.mark.timeout(20)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_image(path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), 7, np.uint8)).save(path, format="PNG")


def prepare(source, destination, format):
    options = ["--resolution", "8", "--format", format, "--workers", "1"]
    return cli.main(["data", "prepare", source, destination, *options])


def section(kind, root="data", **keys):
    return Data(kind=kind, root=root, num_classes=keys.pop("num_classes", 0), resolution=8, **keys)


@TIMEOUT
def test_a_pipe_among_images_counts_as_one_that_cannot_be_read():
    write_image("data/a.png")
    os.mkfifo("data/b.png")
    dataset = build_dataset(section("folder"))
    assert dataset[0][0].tolist() == [[[7] * 8] * 8]
    with pytest.raises(CorruptImage, match=r"data/b.png: a pipe, socket or device, not a regular file"):
        dataset[1]
    with pytest.raises(CorruptImage, match=r"data: .*directory"):
        open_image("data")


def cut_jpeg() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)).save(file, "JPEG")
    return file.getvalue()[: len(file.getvalue()) // 2]


def decoded(content: bytes, monkeypatch) -> np.ndarray:
    """What Pillow makes of it with its own switch."""
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        return np.asarray(Image.open(io.BytesIO(content)))


@pytest.mark.parametrize("kind", ["folder", "zip", "tar", "torchvision", "paired_folders", "unpaired_folders"])
def test_images_that_are_cut_off_are_accepted_on_request_alone(kind, monkeypatch):
    content = cut_jpeg()
    for name in ("data/a/0.jpg", "data/a/1.jpg"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    root = {"zip": "0.zip", "tar": "shards"}.get(kind, "data")
    Path("shards").mkdir()
    with tarfile.open("shards/0.tar", "w") as shard, zipfile.ZipFile("0.zip", "w") as archive:
        for name in ("0.jpg", "1.jpg"):
            shard.add(f"data/a/{name}", name)
            archive.write(f"data/a/{name}", name)
    keys = {"dataset": "ImageFolder"} if kind == "torchvision" else {}
    shutil.copytree("data", "inputs")
    keys |= {"input_root": "inputs", "input_channels": 1} if "paired" in kind else {}
    data = section(kind, root, **keys).model_copy(update={"resolution": Size.of(64)})
    with pytest.raises(CorruptImage, match="truncated"):
        build_dataset(data)[1]
    dataset = build_dataset(data.model_copy(update={"truncated": "accept"}))
    with ThreadPoolExecutor(1) as threads:
        pixels = dataset[1][0]
        with reading.accepting_truncated(True):  # in this thread, and not in the other
            assert not threads.submit(lambda: bool(ImageFile.LOAD_TRUNCATED_IMAGES)).result()
    assert torch.equal(pixels[-1], torch.from_numpy(decoded(content, monkeypatch).copy()))
    assert (pixels[-1][-8:] == 128).all()
    with pytest.raises(OSError, match="truncated"):  # in code of others
        Image.open(io.BytesIO(content)).load()


@TIMEOUT
@pytest.mark.parametrize("kind, name", [("tar", "data/a.tar"), ("zip", "data"), ("folder", "data")])
def test_a_pipe_in_the_place_of_an_archive_is_refused(kind, name):
    Path(name).parent.mkdir(exist_ok=True)
    os.mkfifo(name)
    with pytest.raises(
        UserError,
        match=r"^data.root: 'data' cannot be read: a pipe|^data.root: must be a (file|directory), got 'data'; ",
    ):
        build_dataset(section(kind))


@TIMEOUT
def test_preparing_leaves_pipes_out_and_does_not_read_from_one(capsys):
    write_image("images/a.png")
    os.mkfifo("images/b.png")
    assert prepare("images", "data.zip", "zip") == 0
    assert "data.zip: 1 image of no classes" in capsys.readouterr().out
    os.mkfifo("pipe")
    assert prepare("pipe", "other.zip", "zip") == 2
    assert "SRC: must be a directory, got 'pipe'" in capsys.readouterr().err


@TIMEOUT
@pytest.mark.parametrize("num_classes", [0, 2])
def test_links_that_lead_back_up_are_refused(num_classes):
    write_image("data/a/1.png")
    write_image("data/b/1.png")
    os.symlink("../b", "data/a/b")  # which is not a loop
    assert len(build_dataset(section("folder", num_classes=num_classes))) == 3
    for i in range(8):
        os.symlink("../a", f"data/b/a{i}")
    problem = r"must not link to one of its parent directories; remove that link"
    with pytest.raises(UserError, match=problem):
        build_dataset(section("folder", num_classes=num_classes))


@TIMEOUT
@pytest.mark.parametrize("num_classes", [0, 1])
def test_links_that_multiply_are_refused(num_classes):
    write_image("data/a/level39/1.png")
    for i in range(39):
        os.makedirs(f"data/a/level{i}", exist_ok=True)
        for side in "ab":
            os.symlink(f"../level{i + 1}", f"data/a/level{i}/{side}")
    with pytest.raises(UserError, match=r"must be reachable by at most 1000 paths; remove links"):
        build_dataset(section("folder", num_classes=num_classes))


def test_names_that_are_no_utf_8_are_logged_and_printed(tmp_path, capsys):
    name = os.fsdecode(b"data-\xff")
    write_image(f"{name}/a.png")
    log = open_rank_log(tmp_path / "logs", 0, lambda text: None)
    logging.getLogger("bigsgan.data").warning("skipped %s", name)
    log.close()
    assert "skipped data-\\udcff" in (tmp_path / "logs/rank00000.log").read_text()
    capsys.readouterr()
    assert prepare(name, f"{name}.zip", "zip") == 0
    assert "data-\\udcff.zip: 1 image of no classes" in capsys.readouterr().out
    assert zipfile.ZipFile(f"{name}.zip").namelist() == ["00000000.png"]


def write_zip(members, **changes):
    """A zip file of images that say in its directory what ``changes`` gives."""
    with zipfile.ZipFile("data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        for info in archive.infolist():
            for key, value in changes.items():
                setattr(info, key, value)


def test_members_of_zip_files_that_are_larger_than_images_are_refused():
    write_zip({"a.png": b"x"}, file_size=2**40)
    with pytest.raises(UserError, match=r"^data.root: 'data.zip' has a member of 1024.0 GiB, larger than any image"):
        build_dataset(section("zip", "data.zip"))


@pytest.mark.slow
@TIMEOUT
def test_members_of_zip_files_do_not_inflate_beyond_what_their_directory_says():
    write_zip({"a.png": bytes(2**28)}, file_size=100)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptImage, match=r"a.png: it is larger than the zip file's directory says"):
            build_dataset(section("zip", "data.zip"))[0]
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [2**33, 2**62])
def test_members_of_shards_that_are_larger_than_images_are_refused(size):
    Path("data").mkdir()
    info = tarfile.TarInfo("a.png")
    info.size = size
    Path("data/a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(UserError, match=r"^data.root: 'data' has a member of .* GiB, larger than any image, a.png in"):
        build_dataset(section("tar"))


def test_class_numbers_of_shards_are_short():
    Path("data").mkdir()
    with tarfile.open("data/a.tar", "w") as archive:
        for name, size in (("a.png", 3), ("a.cls", 10**6)):
            info = tarfile.TarInfo(name)
            info.size = size
            archive.addfile(info, io.BytesIO(b" " * size))
    with pytest.raises(UserError, match=r"^data.root: 'data' has no class number in a.cls of "):
        build_dataset(section("tar", num_classes=2))
