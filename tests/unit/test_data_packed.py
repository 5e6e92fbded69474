"""Images in zip files and tar shards are those of the same files in a folder; damaged archives are named."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bigsgan.config.data import Data
from bigsgan.data import RealImages, Slice, build_dataset, packed
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.reading import CorruptImage
from tests.archives import png, write_tar, write_zip

# In the order of the folders: "a" comes before "a-b", though "a-b/1.png" comes before "a/1.png".
NAMES = ["a/2.png", "a/deep/er/1.jpg", "a-b/1.PNG", "a-b/10.png", "a-b/9.webp", "c/x.tif"]
LABELS = [0, 0, 1, 1, 1, 2]


def section(kind: str, root: Path, **changes) -> Data:
    return Data(**{"kind": kind, "root": str(root), "num_classes": 0, "resolution": 4, "image_channels": 3, **changes})


def image_bytes(seed: int, suffix: str = "png") -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, Image.registered_extensions()[f".{suffix.lower()}"])
    return file.getvalue()


def write_folder(root: Path) -> Path:
    for seed, name in enumerate(NAMES):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(seed, path.suffix[1:]))
    return root


def assert_same(dataset, other) -> None:
    assert len(dataset) == len(other)
    for index in range(len(dataset)):
        (pixels, label), (expected, expected_label) = dataset[index], other[index]
        assert pixels.dtype == torch.uint8
        assert torch.equal(pixels, expected)
        assert label == expected_label


@pytest.mark.parametrize("num_classes", [0, 3])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_zip_file_holds_what_the_folder_holds(tmp_path, num_classes, compression, channels):
    root = write_folder(tmp_path / "folder")
    members = {name: (root / name).read_bytes() for name in reversed(NAMES)}
    rubbish = dict.fromkeys(("a/._2.png", "a/notes.txt", ".git/x.png", "__MACOSX/a/2.png"), b"no image")
    path = write_zip(tmp_path / "images.zip", {**rubbish, "c/": b"", **members}, compression)
    changes = {"num_classes": num_classes, "image_channels": channels}
    dataset = build_dataset(section("zip", path, **changes))
    assert_same(dataset, build_dataset(section("folder", root, **changes)))
    if num_classes:
        assert [dataset[index][1] for index in range(6)] == LABELS
        assert [dataset.path(index) for index in range(6)] == [f"{path}/{name}" for name in NAMES]


def test_what_a_packer_puts_before_and_between_members_is_passed_over(tmp_path):
    path = tmp_path / "images.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for seed in range(3):
            info = zipfile.ZipInfo(f"{seed}.png")
            info.extra = b"\x99\x99\x04\x00rest"  # an unknown extra field
            archive.writestr(info, image_bytes(seed))
    path.write_bytes(b"a program that unpacks itself" + path.read_bytes())
    dataset = build_dataset(section("zip", path))
    plain = build_dataset(section("zip", write_zip(tmp_path / "2.zip", {f"{s}.png": image_bytes(s) for s in range(3)})))
    assert_same(dataset, plain)


def test_shards_come_in_order_with_their_classes(tmp_path):
    root = tmp_path / "shards"
    write_tar(root / "b.tar", {"7.jpg": image_bytes(2, "jpg"), "7.cls": b"2\n", "5.png": image_bytes(3), "5.cls": b"0"})
    write_tar(root / "a.tar", {"./x/9.cls": b"1", "./x/9.png": image_bytes(0), "./x/1.json": b"{}",
                               "1.PNG": image_bytes(1), "x/1.cls": b"2", "1.cls": b"0", "._1.png": b"",
                               "1.seg.png": b""})  # fmt: skip
    write_tar(root / "c.tar", {})
    write_tar(root / "._a.tar", {"1.png": image_bytes(9)})
    (root / "notes.txt").write_text("no shard")
    dataset = build_dataset(section("tar", root, num_classes=3))
    folder = tmp_path / "folder"
    folder.mkdir()
    for seed, suffix in enumerate(["png", "png", "jpg", "png"]):
        (folder / f"{seed}.{suffix}").write_bytes(image_bytes(seed, suffix))
    expected = build_dataset(section("folder", folder))
    assert [int(dataset[index][1]) for index in range(len(dataset))] == [1, 0, 2, 0]
    for index in range(4):
        assert torch.equal(dataset[index][0], expected[index][0])
    assert dataset.path(0) == f"{root}/a.tar/./x/9.png"
    assert_same(build_dataset(section("tar", root)), expected)  # without classes all have class 0


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_in_shards_are_read(tmp_path, tar_format):
    key = "long/" * 60 + "ü"
    write_tar(tmp_path / "s" / "0.tar", {f"{key}.png": image_bytes(0), f"{key}.cls": b"1"}, tar_format)
    dataset = build_dataset(section("tar", tmp_path / "s", num_classes=2))
    assert dataset[0][1] == 1
    assert dataset.path(0).endswith(f"{key}.png")
    write_zip(tmp_path / "0.zip", {f"{key}.png": image_bytes(0)})
    assert torch.equal(dataset[0][0], build_dataset(section("zip", tmp_path / "0.zip"))[0][0])


def packed_numbers(kind: str, directory: Path, first: int = 0) -> Path:
    """12 grey images whose value is ``first`` + 10 * index, of classes 0, 1, 2, in an archive or a folder."""
    directory.mkdir(exist_ok=True)
    members = {}
    for index in range(12):
        name = f"{index // 4}/{index:02d}"
        members |= {f"{name}.png": png(first + 10 * index, 2), f"{name}.cls": str(index // 4).encode()}
    images = {name: content for name, content in members.items() if name.endswith(".png")}
    if kind == "zip":
        return write_zip(directory / "images.zip", images)
    for name, content in images.items() if kind == "folder" else ():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    for shard in range(3) if kind == "tar" else ():
        write_tar(directory / f"{shard}.tar", dict(list(members.items())[8 * shard : 8 * shard + 8]))
    return directory


@pytest.mark.parametrize(
    "kind, world_size, num_workers",
    [(kind, ranks, 0) for kind in ("folder", "zip", "tar") for ranks in (1, 2)] + [("zip", 2, 2), ("tar", 1, 2)],
)
def test_the_loader_yields_every_sample_once_in_each_epoch(tmp_path, kind, world_size, num_workers):
    root = packed_numbers(kind, tmp_path / "data")
    data = section(kind, root, num_classes=3, resolution=2, image_channels=1, num_workers=num_workers, prefetch=1)
    dataset = build_dataset(data)
    dataset[0]  # opened in this process before loading processes are forked
    ranks = [
        RealImages(
            dataset, data, Draws(5), Slice(4, 1, rank, world_size), torch.device("cpu")
        )
        for rank in range(world_size)
    ]  # fmt: skip
    epochs = []
    for _ in range(2):
        batches = [micro_batch for _ in range(3) for rank in ranks for micro_batch in rank.next_phase()]
        images = torch.cat([batch.images for batch in batches])
        values = ((images + 1) * 127.5).round().int()
        assert (values == values[:, :1, :1, :1]).all()
        labels = torch.cat([batch.labels for batch in batches])
        epochs.append(list(zip(values[:, 0, 0, 0].tolist(), labels.tolist(), strict=True)))
    for rank in ranks:
        rank.close()
    expected = [(10 * index, index // 4) for index in range(12)]
    assert [sorted(epoch) for epoch in epochs] == [expected, expected]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_every_process_opens_the_archives_for_itself(tmp_path, kind):
    root = packed_numbers(kind, tmp_path / "data")
    dataset = build_dataset(section(kind, root, resolution=2, image_channels=1))
    assert int(dataset[3][0][0, 0, 0]) == 30  # and so it is open here
    other = packed_numbers(kind, tmp_path / "other", first=1)
    archive, replacement = (root, other) if kind == "zip" else (root / "0.tar", other / "0.tar")
    os.replace(replacement, archive)  # only who opens the path from now on finds other values
    assert int(dataset[3][0][0, 0, 0]) == 30
    if kind == "tar":  # a zip file's directory has the old checksum
        assert int(pickle.loads(pickle.dumps(dataset))[3][0][0, 0, 0]) == 31
    else:
        with pytest.raises(CorruptImage, match="checksum"):
            pickle.loads(pickle.dumps(dataset))[3]

    def read(queue) -> None:
        try:
            queue.put(int(dataset[3][0][0, 0, 0]))
        except CorruptImage as error:
            queue.put("checksum" in error.reason)

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=read, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == (31 if kind == "tar" else True)
    child.join()


def test_few_shards_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "_MOST_OPEN", 2)
    root = packed_numbers("tar", tmp_path / "data")
    dataset = build_dataset(section("tar", root, resolution=2, image_channels=1))
    for index in (0, 4, 8, 5, 1, 9):
        assert int(dataset[index][0][0, 0, 0]) == 10 * index
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        found = [os.readlink(link) for link in links if os.path.islink(link)]
        assert len([name for name in found if name.startswith(str(root))]) <= 2


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_images_that_cannot_be_read_are_reported_by_path(tmp_path, kind):
    whole = image_bytes(0)
    members = {"a.png": whole[: len(whole) // 2], "b.png": b"not an image", "c.png": b"", "d.png": whole}
    root = tmp_path / "data"
    root.mkdir()
    archive = write_zip(root / "x.zip", members) if kind == "zip" else write_tar(root / "x.tar", members)
    dataset = build_dataset(section(kind, archive if kind == "zip" else root))
    for index, reason in enumerate(["truncated", "cannot identify", "cannot identify"]):
        with pytest.raises(CorruptImage) as caught:
            dataset[index]
        assert caught.value.path == f"{archive}/{'abc'[index]}.png"
        assert reason in caught.value.reason
    assert dataset[3][0].shape == (3, 4, 4)
    again = build_dataset(section(kind, archive if kind == "zip" else root))
    archive.rename(tmp_path / "gone")
    with pytest.raises(CorruptImage, match="No such file"):
        again[3]
    archive.write_bytes(b"PK\x03\x04")
    with pytest.raises(CorruptImage, match="the archive is truncated"):
        again[3]


def test_damage_inside_a_zip_file_is_found_by_its_checksum(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"a.bmp": image_bytes(0, "bmp"), "b.bmp": image_bytes(1, "bmp")})
    content = bytearray(path.read_bytes())
    content[30 + len("a.bmp") + 100] ^= 1  # a pixel: the decoder would not notice
    content[content.index(b"PK\x03\x04", 1)] = 0  # the header of the second member
    path.write_bytes(content)
    dataset = build_dataset(section("zip", path))
    with pytest.raises(CorruptImage, match=r"x.zip/a.bmp: its checksum differs"):
        dataset[0]
    with pytest.raises(CorruptImage, match=r"x.zip/b.bmp: it does not start where"):
        dataset[1]


def without(path: Path, keep: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(keep(path.read_bytes()))
    return path


PNG = image_bytes(0)  # less than one block of tar, so that the second header stands at 1024
PACKED: dict[str, tuple[str, dict[str, bytes], int, str]] = {
    # kind, members, data.num_classes, message
    "hidden": ("zip", {"..\\..\\1.png": PNG}, 0, r".* contains no images; .* whose names and folders do not begin"),
    "no image": ("zip", {"a/1.txt": b""}, 0, r"data.root: .* contains no images \(1 other file .*: 1 .txt, such as"),
    "folders": ("zip", {"a/1.png": PNG, "b/1.png": PNG}, 3, r"data.num_classes: must be 2 .*, got 3 \(.*x.zip has 2"),
    "empty class": ("zip", {"a/1.png": PNG, "b/": b"", "c/1.txt": b""}, 3, r"folders without images \(b, c\)"),
    "number": ("tar", {"1.png": PNG, "1.cls": b"3"}, 3, r"data.num_classes: must be 4 .*, got 3 \(.* has 4 classes\)"),
    "text": ("tar", {"1.png": PNG, "1.cls": b"cat"}, 3, r"data.root: '.*' has no class number in 1.cls of .*x.tar"),
}


@pytest.mark.parametrize("name", PACKED)
def test_archives_that_do_not_fit_are_refused(tmp_path, name):
    kind, members, num_classes, message = PACKED[name]
    root = tmp_path / "data"
    if kind == "zip":
        root = write_zip(tmp_path / "x.zip", members)
    else:
        write_tar(root / "x.tar", members)
    with pytest.raises(UserError, match=message):
        build_dataset(section(kind, root, num_classes=num_classes))


def test_the_other_kind_of_root_is_refused(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"1.png": PNG})
    with pytest.raises(UserError, match=r"data.root: must be a file, got '.*'; give the zip file"):
        build_dataset(section("zip", tmp_path))
    with pytest.raises(UserError, match=r"data.root: must be a directory, got '.*'; give a shard \(\*\.tar\), or the"):
        build_dataset(section("tar", path))
    with pytest.raises(UserError, match=r"data.root: '.*' contains no shards \(\*\.tar\); "):
        build_dataset(section("tar", tmp_path))
    for kind in ("zip", "tar"):
        with pytest.raises(UserError, match=rf"data.root: must be given with data.kind={kind}; "):
            Data(kind=kind)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "no archive": lambda content: b"not an archive at all" * 100,
    "nothing": lambda content: b"",
    "cut": lambda content: content[:1500],
    "cut in a header": lambda content: content[:1100],
}


@pytest.mark.parametrize("damage", ["cut", "cut in a header"])
def test_a_damaged_zip_file_is_refused(tmp_path, damage):
    path = write_zip(tmp_path / "x.zip", {f"{number}.png": PNG for number in range(5)})
    assert path.stat().st_size > 1500  # what is cut there lacks something
    without(path, DAMAGE[damage])
    with pytest.raises(UserError, match=r"data.root: '.*x.zip' is damaged: .*; pack it again"):
        build_dataset(section("zip", path))


def test_a_zip_file_compressed_by_another_method_is_refused(tmp_path):
    path = write_zip(tmp_path / "x.zip", {"1.png": PNG}, zipfile.ZIP_BZIP2)
    with pytest.raises(UserError, match=r"data.root: '.*' has a member that is encrypted or compressed .*, 1.png"):
        build_dataset(section("zip", path))


DAMAGED_SHARD = {
    **DAMAGE,
    "a damaged header": lambda content: content[:1124] + b"\xff" + content[1125:],
    "no end": lambda content: content[:1024],
}


@pytest.mark.parametrize("damage", DAMAGED_SHARD)
def test_a_damaged_shard_is_named(tmp_path, damage):
    root = tmp_path / "data"
    write_tar(root / "a.tar", {"1.png": PNG})
    path = write_tar(root / "b.tar", {"1.png": PNG, "2.png": PNG})
    without(path, DAMAGED_SHARD[damage])
    with pytest.raises(UserError, match=r"data.root: '.*data' has a damaged shard, b.tar: .*; pack it again"):
        build_dataset(section("tar", root))
