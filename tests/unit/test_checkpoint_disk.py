"""Checkpoints that stay and that go, and disks that are full, fail, or are not shared."""

from __future__ import annotations

import errno
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bigsgan import checkpoint
from bigsgan.checkpoint import saver, tags
from bigsgan.config.sections import Checkpoints
from tests.examined import small_disk
from tests.single_process import entry, save
from tests.unit.test_checkpoint import (
    FILE,
    Usage,
    assert_holds,
    entries,
    loaded,
    names,
    on_ranks,
    rank_entries,
    save_one,
)
from tests.unit.test_checkpoint_damage import INCOMPLETE, flip


def nimgs(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


def test_tags_are_in_the_order_of_their_images(tmp_path):
    for nimg in (999_999_999_992, 1_000_000_000_008, 64):
        (tmp_path / f"{nimg:012d}").mkdir()
    assert [int(path.name) for path in tags._tags(tmp_path)] == [1_000_000_000_008, 999_999_999_992, 64]


def test_the_newest_stay(tmp_path):
    for nimg in (64, 128, 192, 256):
        assert save_one(tmp_path, nimg, keep=2)
    assert nimgs(tmp_path) == [192, 256]
    INCOMPLETE["missing manifest"](tmp_path / "000000000256")
    assert save_one(tmp_path, 320, keep=2)
    assert nimgs(tmp_path) == [192, 256, 320]  # what is not complete counts for nothing


def test_milestones_and_the_best_stay(tmp_path):
    fid = {64: 9.0, 128: 3.0, 192: 4.0, 256: 5.0, 320: 6.0, 384: 7.0}
    writer = checkpoint.Saver(
        tmp_path, checkpoint.SingleProcess(), Checkpoints(keep=1, keep_every_nimg=150, keep_best={"metric": "fid"})
    )
    for nimg, value in fid.items():
        assert writer.save(nimg, entries(float(nimg)), checkpoint.Description({}, {}, {"fid": value, "other": 1.0}))
        assert writer.finish()
    assert nimgs(tmp_path) == [128, 192, 320, 384]  # best, reaches 150, reaches 300, newest
    tags.prune(tmp_path, Checkpoints(keep=1, keep_best={"metric": "fid", "goal": "max"}), 384)
    assert nimgs(tmp_path) == [384]
    tags.prune(tmp_path, Checkpoints(keep=1, keep_best={"metric": "unknown"}), 384)
    assert nimgs(tmp_path) == [384]
    assert writer.save(448, entries(448.0), checkpoint.Description({}, {}, {"fid": math.nan}))
    assert writer.finish()
    tags.prune(tmp_path, Checkpoints(keep=1, keep_best={"metric": "fid"}), 448)
    assert nimgs(tmp_path) == [384, 448]


def test_milestones_are_of_the_interval(tmp_path):
    """One that a stop saves at 160, beyond 150, gives way to the next at 192; beyond 450 there is only a stop's."""
    section = Checkpoints(keep=1, keep_every_nimg=150)
    writer = checkpoint.Saver(tmp_path, checkpoint.SingleProcess(), section)
    recipe = {"checkpoint_nimg": 64, "batch": 8}
    for nimg, stay in ((64, []), (160, []), (192, [192]), (320, [192, 320]), (456, [192, 320, 456]), (640, None)):
        assert writer.save(nimg, entries(float(nimg)), checkpoint.Description(recipe, {}, {}))
        assert writer.finish()
        assert nimgs(tmp_path) == sorted({nimg, *([192, 320, 456] if stay is None else stay)})


@pytest.mark.parametrize("goal", ["min", "max"])
def test_of_equals_the_oldest_is_the_best(tmp_path, goal):
    """One that a stop saves has the value that was reported with the one before."""
    writer = checkpoint.Saver(
        tmp_path, checkpoint.SingleProcess(), Checkpoints(keep=1, keep_best={"metric": "fid", "goal": goal})
    )
    for nimg, value in ((64, 3.0), (72, 3.0), (128, 3.0 + (goal == "min") - (goal == "max"))):
        assert writer.save(nimg, entries(float(nimg)), checkpoint.Description({}, {}, {"fid": value}))
        assert writer.finish()
    assert nimgs(tmp_path) == [64, 128]


def test_what_is_newer_than_a_save_does_not_count(tmp_path):
    """The run resumes from 64, as 128 is damaged inside, and saves 96, which has to stay."""
    for nimg in (64, 128):
        assert save_one(tmp_path, nimg, keep=2)
    flip(tmp_path / "000000000128" / FILE)
    assert save_one(tmp_path, 96, keep=1)
    assert nimgs(tmp_path) == [96, 128]


@pytest.mark.parametrize("nimg", [96, 192])
def test_a_save_removes_tags_that_the_run_found_bad(tmp_path, nimg):
    """Training failed from 128 and went back to 64: without 128, a run that is stopped at 96 resumes from there."""
    writer = checkpoint.Saver(tmp_path, checkpoint.SingleProcess(), Checkpoints())
    for tag in (64, 128):
        assert writer.save(tag, entries(float(tag)), checkpoint.Description({}, {}, {}))
    assert writer.finish()
    writer.bad.add(checkpoint.newest(tmp_path).manifest["sha256"])
    assert writer.save(nimg, entries(float(nimg)), checkpoint.Description({}, {}, {}))
    assert writer.finish()
    assert nimgs(tmp_path) == [64, nimg]


@pytest.mark.timeout(60)
def test_a_directory_that_goes_after_a_rank_has_written_costs_this_checkpoint_alone(tmp_path, monkeypatch, caplog):
    """Rank 0 waits for what the ranks tell in files of that directory."""

    def write(path: Path, text: str) -> None:
        run, moved = tmp_path / "run", tmp_path / "moved"
        if path.name.endswith(".written.json") and not moved.exists():  # before who waits may see the file
            run.rename(moved)
            path = moved / path.relative_to(run)
        write_text(path, text)

    write_text = saver.write_text
    monkeypatch.setattr(saver, "write_text", write)
    assert not save_one(tmp_path / "run", 64)
    assert "checkpoint at 64 images was not saved: " in caplog.text
    assert save_one(tmp_path / "run", 128)
    assert nimgs(tmp_path / "run") == [128]


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("function", ["write_tensors", "fsync", "prune"])
def test_a_disk_that_fails_while_writing_costs_this_checkpoint_alone(tmp_path, monkeypatch, function, background):
    def fill(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert save_one(tmp_path, 64)
    monkeypatch.setattr(saver, function, fill)
    assert save_one(tmp_path, 128, background=background) == (function == "prune")  # by when the tag is complete
    if function == "prune":
        assert_holds(checkpoint.newest(tmp_path), 128)
    else:
        assert names(tmp_path) == {"000000000064", "latest"}
        assert_holds(checkpoint.newest(tmp_path), 64)


def test_a_real_full_disk_costs_this_checkpoint_alone(tmp_path, caplog):
    """A file system of 2 MiB, and a state that fits once; what the operating system says while writing."""
    disk = tmp_path / "small"
    with small_disk(disk, "2m"):
        state = {"generator": entry({"a": torch.rand(300_000)})}
        assert save(disk / "checkpoints", 64, state)
        assert not save(disk / "checkpoints", 128, state)
        assert re.search(r"must have 1\.1 MiB free for the ranks to write, got \d+\.\d KiB", caplog.text)
        usage = Usage(1, 0, 2**40)  # a disk that others fill after the check
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path: usage)
            assert not save(disk / "checkpoints", 128, state)
        assert names(disk / "checkpoints") == {"000000000064", "latest"}
        found = checkpoint.find_intact(disk)
        assert torch.equal(
            loaded(found, {"generator": entry({"a": torch.zeros(300_000)})})["generator"][0]["a"],
            state["generator"].parts()[0].values,
        )


def test_a_directory_that_ranks_do_not_share_is_refused(tmp_path, caplog):
    directories = [tmp_path / "here", tmp_path / "there"]
    saved = on_ranks(lambda ranks, directory, part: save(directory, 64, part, ranks), directories, rank_entries())
    assert saved == [False, False]
    assert "must be the same directory on all ranks" in caplog.text


def test_one_rank_that_cannot_write_stops_all(tmp_path, monkeypatch):
    assert on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), rank_entries()) == [True, True]
    real = saver.write_tensors

    def write_tensors(path: Path, *arguments: Any) -> str:
        if path.name != FILE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *arguments)

    monkeypatch.setattr(saver, "write_tensors", write_tensors)
    assert on_ranks(lambda ranks, part: save(tmp_path, 128, part, ranks), rank_entries()) == [False, False]
    assert names(tmp_path) == {"000000000064", "latest"}
