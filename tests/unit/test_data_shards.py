"""The index that is kept of tar shards: headers are read once, and again where a shard or the index has changed."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import build_dataset, shards
from bigsgan.errors import UserError, shown
from tests.archives import write_tar
from tests.unit.test_data_packed import image_bytes, section


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Names of the shards whose headers are read, as they are."""
    names, real = [], shards.read_headers

    def read_headers(data: Data, path: Path) -> Any:
        names.append(path.name)
        return real(data, path)

    monkeypatch.setattr(shards, "read_headers", read_headers)
    return names


def everything(dataset: Any) -> list[tuple[list, int, str]]:
    return [(dataset[i][0].tolist(), dataset[i][1], dataset.path(i)) for i in range(len(dataset))]


def test_headers_of_shards_that_stay_are_read_once(tmp_path, opened):
    root = tmp_path / "shards"
    for number in range(3):
        members = {f"{i}ü.png": image_bytes(10 * number + i) for i in range(number + 1)}
        classes = {f"{i}ü.cls": str(0 if i else number).encode() for i in range(number + 1)}
        write_tar(root / f"{number}.tar", {**members, **classes})
    write_tar(root / "3.tar", {})
    with_classes, without = section("tar", root, num_classes=3), section("tar", root)
    first, plain = everything(build_dataset(with_classes)), everything(build_dataset(without))
    shards.keep_indices()
    assert [label for _, label, _ in first] == [0, 1, 0, 2, 0, 0]
    assert sorted(opened) == [f"{number}.tar" for number in (0, 0, 1, 1, 2, 2, 3, 3)]  # with classes, and without
    opened.clear()
    assert everything(build_dataset(with_classes)) == first
    assert everything(build_dataset(without)) == plain
    assert [label for _, label, _ in plain] == [0] * 6
    assert opened == []
    write_tar(root / "1.tar", {"new.png": image_bytes(50), "new.cls": b"1"})
    (root / "2.tar").rename(root / "4.tar")
    changed = everything(build_dataset(with_classes))
    assert sorted(opened) == ["1.tar", "4.tar"]
    assert [path for *_, path in changed] == [
        f"{root}/{name}" for name in ("0.tar/0ü.png", "1.tar/new.png", "4.tar/0ü.png", "4.tar/1ü.png", "4.tar/2ü.png")
    ]
    assert changed[1][0] == everything(build_dataset(section("tar", root, num_classes=3)))[1][0] != first[1][0]


def numbers(root: Path, **keys: Any) -> list[int]:
    return build_dataset(section("tar", root, **keys)).labels.tolist()


def test_classes_stand_in_cls_or_json_or_txt(tmp_path, caplog):
    """img2dataset writes captions as .txt and what it knows as .json, others the class in any of the three."""
    root, about = tmp_path / "shards", json.dumps({"label": 2, "group": 1, "width": 9}).encode()
    texts = {
        "a.cls": b"3", "a.json": about, "a.txt": b"1", "b.json": about, "b.txt": b"1", "c.txt": b" 1\n",
        "d.txt": b"a caption", "d.json": b'{"width": 9}', "e.json": b"[2]", "f.json": b"{", "lone.json": about,
    }  # fmt: skip
    images = {f"{key}.png": image_bytes(number) for number, key in enumerate("abcdef")}
    write_tar(root / "0.tar", {**dict(list(texts.items())[:4]), **images, **dict(list(texts.items())[4:])})
    with (
        caplog.at_level(logging.WARNING, "bigsgan"),
        pytest.raises(UserError, match=r"has 4 of 6 images without a label \(such as c"),
    ):
        numbers(root, num_classes=4)  # where one text is a caption, all are
    assert caplog.messages[-1] == f"{root}: 9 other files ignored: 5 .json, 4 .txt, such as a.json"
    assert numbers(root) == [0] * 6
    del images["e.png"], images["f.png"], texts["c.txt"], texts["d.txt"]
    texts |= {"c.cls": b"0", "d.cls": b"1"}
    write_tar(root / "0.tar", {**images, **texts})
    assert numbers(root, num_classes=4) == [3, 2, 0, 1]
    shards.keep_indices()
    assert numbers(root, num_classes=4, label_key="group") == [3, 1, 0, 1]  # not from the index of another key
    shards.keep_indices()
    assert numbers(root, num_classes=4, label_key="group") == [3, 1, 0, 1]
    write_tar(root / "0.tar", {**images, "a.cls": b"0", "b.json": about, "c.txt": b" 1\n", "d.txt": b"3"})
    assert numbers(root, num_classes=4) == [0, 2, 1, 3]
    with pytest.raises(UserError, match="has no classes"):
        numbers(write_tar(tmp_path / "one" / "0.tar", images).parent, num_classes=1, label_key="meta.label")


def test_images_without_a_class_are_refused_unless_labels_may_be_missing(tmp_path, capsys, caplog):
    """Class 0 is not theirs. Shards that are made of them would keep it."""
    root = tmp_path / "shards"
    for shard in range(3):
        members = {f"{i}.png": image_bytes(10 * shard + i) for i in range(10)}
        write_tar(root / f"{shard}.tar", {**members, **{f"{i}.cls": str(i % 3).encode() for i in range(2 * shard, 10)}})
    expected = (
        f"'{root}' has 6 of 30 images without a label (such as 0.png in 1.tar); write them into <key>.cls, or set "
        "data.missing_labels=accept, or data.num_classes=0 to train without classes"
    )
    for num_classes in (1, 3):
        with pytest.raises(UserError) as caught:
            numbers(root, num_classes=num_classes)
        assert str(caught.value) == f"data.root: {expected}"
        shards.keep_indices()  # the second time from the index
    made, options = tmp_path / "made", ["--resolution", "8", "--workers", "1"]
    for command in (["prepare", "--format", "tar"], ["encode", "--codec", "dct"]):
        assert cli.main(["data", command[0], str(root), str(made), *command[1:], *options]) == 2
        assert f"SRC: {expected}" in capsys.readouterr().err
        assert not list(made.rglob("*.tar"))
    assert set(numbers(root)) == {0}
    with caplog.at_level(logging.WARNING, "bigsgan"):
        labels = numbers(root, num_classes=3, missing_labels="accept")
    assert caplog.messages[-1] == f"{root}: 6 of 30 images have no label; theirs is null"
    marked = [(shard, i) for shard in range(3) for i in range(10)]
    assert labels == [[float(i >= 2 * shard and k == i % 3) for k in range(3)] for shard, i in marked]


@pytest.mark.parametrize("label", ["cat", -1, True, 1.5])
def test_a_label_in_json_that_is_no_class_is_named(tmp_path, label):
    root = tmp_path / "shards"
    write_tar(root / "0.tar", {"a.json": json.dumps({"label": label}).encode(), "a.png": image_bytes(0)})
    said = f"has {shown(label)} as 'label', which is not the number of a class, in a.json of {root}/0.tar; give"
    with pytest.raises(UserError, match=f"^data.root: .* {said}"):
        numbers(root, num_classes=2)
    assert numbers(root) == [0]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "format"])
def test_a_damaged_index_of_shards_is_made_anew(tmp_path, opened, damage, monkeypatch):
    root = tmp_path / "shards"
    write_tar(root / "0.tar", {f"{i}.png": image_bytes(i) for i in range(3)})
    expected = everything(build_dataset(section("tar", root)))
    shards.keep_indices()
    (index,) = root.glob(".bigsgan-index-*")
    content = bytearray(index.read_bytes())
    if damage == "flipped":
        content[content.index(b"0.png")] ^= 1
    index.write_bytes(content[:-40] if damage == "cut" else b"" if damage == "empty" else content)
    if damage == "format":
        monkeypatch.setattr(shards, "_FORMAT", shards._FORMAT + 1)
    opened.clear()
    assert everything(build_dataset(section("tar", root))) == expected
    assert opened == ["0.tar"]
    shards.keep_indices()
    assert everything(build_dataset(section("tar", root))) == expected
    assert opened == ["0.tar"]
    assert {path.name for path in root.iterdir()} == {"0.tar", index.name}


def test_shards_that_may_not_be_written_to_are_read_each_time(tmp_path, opened, monkeypatch):
    root = tmp_path / "shards"
    write_tar(root / "0.tar", {"1.png": image_bytes(0)})

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shards, "replacing", refuse)
    for times in (1, 2):
        assert len(build_dataset(section("tar", root))) == 1
        shards.keep_indices()
        assert opened == ["0.tar"] * times
    assert [path.name for path in root.iterdir()] == ["0.tar"]
