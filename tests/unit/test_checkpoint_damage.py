"""Damaged, incomplete and foreign checkpoints: which one a run resumes from, and what it says of the others."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigsgan import checkpoint
from bigsgan.checkpoint import StateShard, tags
from bigsgan.errors import UserError
from tests.single_process import Entry, entry, save
from tests.unit.test_checkpoint import FILE, A, B, assert_holds, on_ranks, rank_entries, save_one, saved


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


INCOMPLETE: dict[str, Callable[[Path], Any]] = {
    "truncated tensors": lambda path: truncate(path / FILE),
    "missing tensors": lambda path: (path / FILE).unlink(),
    "missing manifest": lambda path: (path / "manifest.json").unlink(),
    "empty manifest": lambda path: os.truncate(path / "manifest.json", 0),
    "a flipped digit": lambda path: replace_in(path / "manifest.json", '"count": 3', '"count": 7'),
    "another tag's manifest": lambda path: change(path / "manifest.json", nimg=64),
}


@pytest.mark.parametrize("what", INCOMPLETE)
def test_what_is_not_complete_is_passed_over_for_an_older_one(tmp_path, what):
    directory = tmp_path / "checkpoints"
    assert save_one(directory, 64)
    assert save_one(directory, 128)
    INCOMPLETE[what](directory / "000000000128")
    assert_holds(checkpoint.newest(directory), 64)
    assert_holds(checkpoint.find(tmp_path), 64)
    with pytest.raises(UserError, match=r"must be a saved checkpoint.*; .*choose from 64$"):
        checkpoint.find(tmp_path, 128)
    shutil.rmtree(directory / "000000000064")
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.find(tmp_path)
    with pytest.raises(UserError, match="contains only damaged checkpoints"):
        checkpoint.newest(directory)


def test_tags_of_other_versions_are_not_called_damaged(tmp_path):
    directory = tmp_path / "checkpoints"
    for nimg in (64, 128):
        assert save_one(directory, nimg)
        change(directory / f"{nimg:012d}" / "manifest.json", format=1)
    truth = r"has format 1 of an older version, this version reads format 2; "
    remedy = "finish the run with that version, or start a new `out`$"
    for look, field in (
        (checkpoint.find, tmp_path),
        (checkpoint.find_intact, tmp_path),
        (checkpoint.newest, directory),
    ):
        with pytest.raises(UserError, match=truth + remedy) as caught:
            look(field)
        assert str(field) in str(caught.value)
    change(directory / "000000000128" / "manifest.json", format=3)
    with pytest.raises(UserError, match=r"has format 1 and 3 of another version, this version reads format 2"):
        checkpoint.newest(directory)
    assert save_one(directory, 256)
    with pytest.raises(UserError, match=rf"^--nimg: 64 {truth}use that version, or choose from 256$"):
        checkpoint.find(tmp_path, 64)
    assert_holds(checkpoint.newest(directory), 256)
    truncate(directory / "000000000256" / FILE)
    with pytest.raises(UserError, match=r"contains damaged checkpoints, and others with format 1 and 3 of another ver"):
        checkpoint.newest(directory)


def test_a_flipped_bit_is_passed_over_for_an_older_one(tmp_path, caplog):
    directory = tmp_path / "checkpoints"
    assert save_one(directory, 64)
    assert save_one(directory, 128)
    flip(directory / "000000000128" / FILE)
    problem = f"the checksum of {FILE} differs from the manifest's"
    assert checkpoint.damage(checkpoint.find(tmp_path, 128), checkpoint.SingleProcess()) == problem
    assert checkpoint.damage(checkpoint.find(tmp_path, 64), checkpoint.SingleProcess()) is None
    assert_holds(checkpoint.find_intact(tmp_path), 64)
    assert f"skipping {directory / '000000000128'}: {problem}" in caplog.text
    with pytest.raises(UserError, match=r"^--nimg: .*, got 128 \(that checkpoint is damaged\); choose from 64$"):
        checkpoint.find_intact(tmp_path, 128)
    flip(directory / "000000000064" / FILE)
    with pytest.raises(UserError, match="contains only damaged checkpoints"):
        checkpoint.find_intact(tmp_path)


def test_ranks_share_the_reading_and_agree(tmp_path):
    parts = rank_entries()
    found = saved(tmp_path, parts)
    assert on_ranks(lambda ranks, _: checkpoint.damage(found, ranks), [0, 1]) == [None, None]
    flip(found.path / "rank00001.safetensors")
    for count in (2, 3):  # also more ranks than files
        problems = on_ranks(lambda ranks, _: checkpoint.damage(found, ranks), list(range(count)))
        assert problems == ["the checksum of rank00001.safetensors differs from the manifest's"] * count


def test_only_what_is_needed_is_looked_at(tmp_path, caplog):
    """As where G and D lie on different ranks: damage to D's file does not keep G from sampling."""
    parts = [{"average": entry({"a": A}), "generator": entry({"a": A})}, {"discriminator": entry({"b": B})}]
    directory = tmp_path / "checkpoints"
    for nimg in (64, 128):
        assert on_ranks(lambda ranks, part, nimg=nimg: save(directory, nimg, part, ranks), parts) == [True, True]
    found = checkpoint.find(tmp_path, 128)
    files = {name: checkpoint.files_with(found, name) for name in ("average", "generator", "discriminator", "none")}
    second = "rank00001.safetensors"
    assert files == {"average": [FILE], "generator": [FILE], "discriminator": [second], "none": []}
    flip(found.path / second)

    def intact(name: str) -> int:
        return checkpoint.find_intact(tmp_path, None, lambda found: checkpoint.files_with(found, name)).nimg

    assert (intact("average"), intact("generator"), intact("discriminator")) == (128, 128, 64)
    (found.path / second).write_bytes(b"\xff" * (found.path / second).stat().st_size)
    assert checkpoint.files_with(found, "average") == [FILE]
    assert (intact("average"), intact("discriminator")) == (128, 64)
    assert caplog.text.count(f"the checksum of {second} differs from the manifest's") == 2
    flip(directory / "000000000128" / FILE)
    flip(directory / "000000000064" / FILE)
    with pytest.raises(UserError, match="contains only damaged checkpoints"):
        intact("average")


def test_files_are_read_side_by_side_and_each_is_looked_at(tmp_path, monkeypatch):
    parts = [{"g": Entry([StateShard("master", "a", r, A[r : r + 1])])} for r in range(12)]
    found = saved(tmp_path, parts)
    together, real, moved = threading.Barrier(2, timeout=20), tags.checksum, []

    def checksum(path: Path, tell: Callable[[int], None]) -> str:
        together.wait()  # for ever, if one were read after the other
        return real(path, tell)

    monkeypatch.setattr(tags, "checksum", checksum)
    assert checkpoint.damage(found, checkpoint.SingleProcess(), moved=moved.append) is None
    assert sum(moved) == sum(file["bytes"] for file in found.manifest["files"].values())
    monkeypatch.setattr(tags, "checksum", real)
    for name in found.manifest["files"]:
        flip(found.path / name)
        assert (
            checkpoint.damage(found, checkpoint.SingleProcess())
            == f"the checksum of {name} differs from the manifest's"
        )
        flip(found.path / name)
