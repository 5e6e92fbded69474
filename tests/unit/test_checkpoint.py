"""Tags that are complete or absent, intact or passed over, and values of any layout put together again."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bigsgan import checkpoint
from bigsgan.checkpoint import StateShard, aside, saver, tags
from bigsgan.config.sections import Checkpoints
from bigsgan.errors import UserError
from bigsgan.runtime import memory
from tests.alone import Entry, entry, save

LAYOUT: dict[str, Any] = {"world_size": 1, "generator.stage": 2}
Usage = namedtuple("Usage", "total used free")
FILE = "rank00000.safetensors"


class ThreadRank:
    """The collectives of a rank that is a thread."""

    def __init__(self, rank: int, values: list[Any], meeting: threading.Barrier) -> None:
        self._rank, self._values, self._meeting = rank, values, meeting

    def rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return len(self._values)

    def barrier(self) -> None:
        self._meeting.wait()

    def patient_barrier(self) -> Callable[[], None]:
        return self.barrier

    def any_rank(self, flag: bool) -> bool:
        return any(self._all(flag))

    def total(self, value: float) -> float:
        return float(sum(self._all(value)))

    def from_rank_zero(self, value: Any) -> Any:
        return self._all(value)[0]

    def gather_objects(self, value: Any) -> list[Any] | None:
        found = self._all(value)
        return found if self._rank == 0 else None

    def _all(self, value: Any) -> list[Any]:
        self._values[self._rank] = value
        self.barrier()
        found = list(self._values)
        self.barrier()
        return found


def on_ranks(function: Callable[..., Any], *arguments: list[Any]) -> list[Any]:
    """Call ``function(rank, argument of that rank, ...)`` on as many ranks as there are arguments."""
    world_size = len(arguments[0])
    values, meeting = [None] * world_size, threading.Barrier(world_size, timeout=20)
    ranks = [ThreadRank(rank, values, meeting) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(function, ranks, *arguments))


def entries(value: float) -> dict[str, Entry]:
    generator = entry({"a": torch.full((10,), value), "b": torch.tensor([7])}, {"scale": value, "count": 3})
    average = entry({"a": torch.arange(4.0) + value})
    return {"generator": generator, "average": average, "counters": Entry([], {"nimg": int(value)})}


def save_one(directory: Path, nimg: int, **section: Any) -> bool:
    return save(directory, nimg, entries(float(nimg)), layout=LAYOUT, **section)


def loaded(found: checkpoint.Checkpoint, wanted: Mapping[str, Entry]) -> dict[str, Any]:
    reader = checkpoint.Reader(found)
    for name, part in wanted.items():
        part.load(reader.entry(name))
    return {name: part.loaded for name, part in wanted.items()}


def assert_holds(found: checkpoint.Checkpoint | None, nimg: int) -> None:
    assert found is not None
    assert found.nimg == nimg
    expected = entries(float(nimg))
    for name, (tensors, numbers) in loaded(found, expected).items():
        assert numbers == expected[name].numbers()
        for part in expected[name].parts():
            assert torch.equal(tensors[part.name], part.values)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("background", [True, False])
def test_what_was_saved_is_loaded(tmp_path, background):
    directory = tmp_path / "run" / "checkpoints"
    assert checkpoint.newest(directory) is None
    assert save_one(directory, 64, background=background)
    assert save_one(directory, 128, background=background)
    assert_holds(checkpoint.find(tmp_path / "run", 64), 64)
    assert_holds(checkpoint.find(tmp_path / "run", 128), 128)
    assert_holds(checkpoint.newest(directory), 128)
    assert names(directory) == {"000000000064", "000000000128", "latest"}
    assert names(directory / "000000000128") == {FILE, "manifest.json"}
    assert (directory / "latest").read_text() == "000000000128\n"


def test_the_manifest_tells_what_other_tools_need(tmp_path):
    numbers = {"generator": entry({"layers.0.w": torch.ones(3)}, {"num_applied": 4})}
    assert save(tmp_path, 64, numbers, recipe={"batch": 8}, layout=LAYOUT)
    manifest = json.loads((tmp_path / "000000000064" / "manifest.json").read_text())
    file = tmp_path / "000000000064" / FILE
    printed = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True).stdout.split()[0]
    assert manifest == {
        "format": 2, "nimg": 64, "world_size": 1, "layout": LAYOUT, "recipe": {"batch": 8}, "metrics": {},
        "numbers": {"generator": {"num_applied": 4}}, "kinds": {"generator": ["master"]},
        "files": {FILE: {"bytes": file.stat().st_size, "sha256": printed}}, "sha256": manifest["sha256"],
    }  # fmt: skip
    del manifest["sha256"]
    content = json.dumps(manifest, sort_keys=True).encode()
    assert tags.sealed(manifest)["sha256"] == hashlib.sha256(content).hexdigest()


def test_what_changes_after_a_save_began_is_not_saved(tmp_path, monkeypatch):
    """The writer waits until the state has moved on."""
    moved = threading.Event()
    real = saver.write_tensors

    def write_tensors(*arguments: Any) -> str:
        assert moved.wait(20)
        return real(*arguments)

    monkeypatch.setattr(saver, "write_tensors", write_tensors)
    state = torch.zeros(1000)
    live = Entry([StateShard("master", "a", 0, state[:500]), StateShard("master", "a", 500, state[500:])])
    writer = checkpoint.Saver(tmp_path, checkpoint.SingleProcess(), Checkpoints())
    for value in (1.0, 2.0):  # the second copy goes where the first one was
        state.fill_(value)
        moved.clear()
        assert writer.save(int(value), {"generator": live}, checkpoint.Description({}, {}, {}))
        assert checkpoint.newest(tmp_path) is None or checkpoint.newest(tmp_path).nimg < value
        state.fill_(-1)
        moved.set()
        assert writer.finish()
        out = entry({"a": torch.zeros(1000)})
        loaded(checkpoint.newest(tmp_path), {"generator": out})
        assert torch.equal(out.loaded[0]["a"], torch.full((1000,), value))
    assert writer.write_seconds > 0


@pytest.mark.parametrize("free, is_aside", [(89, True), (88, False), (None, True)])
def test_where_copies_do_not_fit_saves_are_in_the_foreground(tmp_path, monkeypatch, caplog, free, is_aside):
    """Two ranks of 48 and 32 bytes on one host: 80 in all, of which nine tenths of what is free have to suffice."""
    parts = [{"g": entry({"a": torch.ones(12)})}, {"g": Entry([StateShard("master", "a", 12, torch.ones(8))])}]
    monkeypatch.setattr(memory, "free_host_bytes", lambda: free)
    gate, real = threading.Event(), saver.write_tensors

    def write_tensors(*arguments: Any) -> str:
        assert gate.wait(20)
        return real(*arguments)

    def saves(ranks: ThreadRank, part: dict[str, Entry]) -> None:
        writer = checkpoint.Saver(tmp_path, ranks, Checkpoints())
        for nimg in (64, 128):
            if not is_aside:
                gate.set()
            assert writer.save(nimg, part, checkpoint.Description({}, {}, {}))
            assert (tmp_path / f"{nimg:012d}").exists() != is_aside
            ranks.barrier()
            gate.set()
            assert writer.finish()
            ranks.barrier()
            gate.clear()
            ranks.barrier()

    monkeypatch.setattr(saver, "write_tensors", write_tensors)
    on_ranks(saves, parts)
    expected = "checkpoints are written in the foreground from now on: copies of the state of 2 ranks take "
    # The level may be that of a run's log, if a test before this one opened one.
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text.startswith(expected) for text in warnings] == [True, True] * (not is_aside)  # one for each rank


def test_memory_is_counted_by_host(monkeypatch):
    def problem(*needs: tuple[str, int, int | None]) -> str | None:
        return aside._problem([aside._Need(*need) for need in needs])

    gib = 2**30
    assert problem(("a", 5 * gib, 10 * gib), ("b", 5 * gib, 10 * gib)) is None
    expected = "copies of the state of 2 ranks take 10.0 GiB on b, where 9.0 GiB are free"
    assert problem(("a", 8 * gib, 10 * gib), ("b", 5 * gib, 10 * gib), ("b", 5 * gib, 9 * gib)) == expected
    assert problem(("a", 8 * gib, None), ("a", 8 * gib, None)) is None


def test_a_damaged_tag_is_saved_again(tmp_path):
    assert save_one(tmp_path, 64)
    (tmp_path / "000000000064" / FILE).write_bytes(b"damaged")
    assert save(tmp_path, 64, {"generator": entry({"a": torch.ones(2)})})
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert loaded(found, {"generator": entry({"a": torch.zeros(2)})})["generator"][0]["a"].tolist() == [1, 1]
    assert save_one(tmp_path, 128)
    assert names(tmp_path) == {"000000000064", "000000000128", "latest"}


def test_a_kill_at_any_instant_loses_no_intact_tag(tmp_path):
    """Twenty processes save and save again, until each is killed somewhere."""
    draw = random.Random(0)
    seen = set()
    for attempt in range(20):
        directory = tmp_path / str(attempt)
        child = os.fork()
        if child == 0:  # pragma: no cover
            torch.set_num_threads(1)
            for i in range(10_000):
                if not save_one(directory, 64 * (i + 1)):
                    break
            os._exit(1)
        while checkpoint.newest_or_none(directory) is None:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        seen |= {path.suffix for path in directory.iterdir()}
        found = checkpoint.newest(directory)
        assert found is not None
        assert checkpoint.damage(found, checkpoint.SingleProcess()) is None
        assert_holds(found, found.nimg)
        later = found.nimg + 640
        assert save_one(directory, later)
        assert_holds(checkpoint.newest(directory), later)
        assert not [path for path in directory.iterdir() if path.suffix == ".partial"]
    assert ".partial" in seen  # some were killed in the middle


def test_what_killed_saves_left_is_removed_by_the_next(tmp_path, monkeypatch):
    assert save_one(tmp_path, 64)
    (tmp_path / "000000000032.partial").mkdir()
    (tmp_path / "000000000032.partial" / "rank00001.safetensors").write_bytes(b"of more ranks")
    (tmp_path / "notes").mkdir()  # not ours
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: Usage(100, 10, 30))
        assert not save_one(tmp_path, 256)
    assert names(tmp_path) == {"000000000064", "latest", "notes"}
    assert save_one(tmp_path, 256)
    assert names(tmp_path) == {"000000000064", "000000000256", "latest", "notes"}


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
    "truncated manifest": lambda path: truncate(path / "manifest.json"),
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
    expected = "has format 1" if what == "another format" else "must be a saved checkpoint"
    with pytest.raises(UserError, match=rf"{expected}.*; .*choose from 64$"):
        checkpoint.find(tmp_path, 128)
    shutil.rmtree(directory / "000000000064")
    if what == "another format":
        return
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
    with pytest.raises(
        UserError, match=r"^--nimg: must be a saved checkpoint, got 128 \(that checkpoint is damaged\); choose from 64$"
    ):
        checkpoint.find_intact(tmp_path, 128)
    flip(directory / "000000000064" / FILE)
    with pytest.raises(UserError, match="contains only damaged checkpoints"):
        checkpoint.find_intact(tmp_path)


def test_ranks_share_the_reading_and_agree(tmp_path):
    parts = rank_entries()
    assert on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), parts) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
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
    assert checkpoint.files_with(found, "average") == [FILE, second]  # whose header could hide anything
    assert (intact("average"), intact("discriminator")) == (64, 64)
    assert caplog.text.count(f"the checksum of {second} differs from the manifest's") == 3
    flip(directory / "000000000064" / FILE)
    with pytest.raises(UserError, match="contains only damaged checkpoints"):
        intact("average")


def test_files_are_read_side_by_side_and_each_is_looked_at(tmp_path, monkeypatch):
    parts = [{"g": Entry([StateShard("master", "a", r, A[r : r + 1])])} for r in range(12)]
    assert all(on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), parts))
    found = checkpoint.newest(tmp_path)
    assert found is not None
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


def nimgs(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


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


def test_what_is_newer_than_a_save_does_not_count(tmp_path):
    """The run goes on from 64, as 128 is damaged inside, and saves 96, which has to stay."""
    for nimg in (64, 128):
        assert save_one(tmp_path, nimg, keep=2)
    flip(tmp_path / "000000000128" / FILE)
    assert save_one(tmp_path, 96, keep=1)
    assert nimgs(tmp_path) == [96, 128]


def test_a_full_disk_costs_this_checkpoint_alone(tmp_path, monkeypatch, caplog):
    assert save_one(tmp_path, 64)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 10, 60))  # ``entries`` takes 64
    assert not save_one(tmp_path, 128)
    assert "free some space" in caplog.text
    assert names(tmp_path) == {"000000000064", "latest"}
    assert_holds(checkpoint.newest(tmp_path), 64)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 10, 90))
    assert save_one(tmp_path, 128)


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


def test_a_warning_calls_what_was_saved_by_its_name(tmp_path, monkeypatch, caplog):
    def refuse(*_: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(saver, "prune", refuse)
    snapshots = saver.Saver(tmp_path, checkpoint.SingleProcess(), Checkpoints(), what="EMA snapshot")
    assert snapshots.save(64, entries(64.0), checkpoint.Description({}, {}, {}))
    assert snapshots.finish()
    assert "EMA snapshot at 64 images was saved, but older ones were not removed: " in caplog.text


def test_a_real_full_disk_costs_this_checkpoint_alone(tmp_path, caplog):
    """A file system of 2 MiB, and a state that fits once; what the operating system says while writing."""
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a file system takes root")
    try:
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
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_directory_that_cannot_be_made_is_no_crash(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert not save_one(tmp_path / "file" / "checkpoints", 64)
    assert "cannot be written" in caplog.text


def test_a_directory_that_ranks_do_not_share_is_refused(tmp_path, caplog):
    directories = [tmp_path / "here", tmp_path / "there"]
    saved = on_ranks(lambda ranks, directory, part: save(directory, 64, part, ranks), directories, rank_entries())
    assert saved == [False, False]
    assert "must be the same directory on all ranks" in caplog.text


# Parameters a (12,) and b (5,) over two ranks.
A, B = torch.arange(12.0), torch.arange(100.0, 105.0)


def rank_entries() -> list[dict[str, Entry]]:
    first = [
        StateShard("master", "a", 0, A[:7]),
        StateShard("master", "b", 3, B[3:]),
        StateShard("buffer", "u", 0, torch.ones(2)),
    ]
    second = [StateShard("master", "a", 7, A[7:]), StateShard("master", "b", 0, B[:3])]
    shared = [StateShard("state", "s", 0, torch.ones(3), everywhere=True)]
    return [{"generator": Entry(first), "extra": Entry(shared)}, {"generator": Entry(second), "extra": Entry(shared)}]


def test_any_rank_reads_any_stretch(tmp_path):
    assert on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), rank_entries()) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert set(found.manifest["files"]) == {FILE, "rank00001.safetensors"}
    assert found.manifest["kinds"] == {"extra": ["state"], "generator": ["buffer", "master"]}
    for world_size in (1, 2, 3, 5):
        for rank in range(world_size):
            saved = checkpoint.Reader(found, rank, world_size).entry("generator")
            for name, value in (("a", A), ("b", B)):
                for start in range(len(value)):
                    for end in range(start, len(value) + 1):
                        out = torch.full((end - start,), -1.0)
                        saved.read("master", name, start, out)
                        assert torch.equal(out, value[start:end])
    state = torch.zeros(3)
    checkpoint.Reader(found, 1, 2).entry("extra").read("state", "s", 0, state)
    assert torch.equal(state, torch.ones(3))


def test_a_rank_opens_no_more_files_than_it_needs(tmp_path):
    """Eight ranks wrote; as many, half or twice as many read next to nothing of the others' files."""
    values = torch.arange(80.0)
    parts = [{"g": Entry([StateShard("master", "a", 10 * r, values[10 * r : 10 * r + 10])])} for r in range(8)]
    assert all(on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), parts))
    found = checkpoint.newest(tmp_path)
    assert found is not None
    for world_size, most in ((8, 1), (4, 3), (16, 1)):
        share = len(values) // world_size
        for rank in range(world_size):
            reader = checkpoint.Reader(found, rank, world_size)
            out = torch.zeros(share)
            reader.entry("g").read("master", "a", rank * share, out)
            assert torch.equal(out, values[rank * share : (rank + 1) * share])
            assert reader.num_opened <= most


def test_missing_elements_are_counted_and_named(tmp_path):
    assert on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), rank_entries()) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    reader = checkpoint.Reader(found)
    with pytest.raises(UserError, match=r"lacks 3 elements of generator/master/a, which") as caught:
        reader.entry("generator").read("master", "a", 10, torch.zeros(5))
    assert caught.value.field == str(found.path)
    with pytest.raises(UserError, match="lacks 2 elements of generator/master/c"):
        reader.entry("generator").read("master", "c", 0, torch.zeros(2))
    with pytest.raises(
        UserError, match=r"has no anchors, which this run's recipe needs; resume with the recipe that saved it"
    ):
        reader.entry("anchors")


def test_a_network_of_another_size_is_refused(tmp_path):
    assert save(tmp_path, 64, {"generator": entry({"weight": torch.zeros(12), "bias": torch.zeros(3)})})
    found = checkpoint.newest(tmp_path)
    assert found is not None
    checkpoint.Reader(found).entry("generator").read_network(torch.nn.Linear(4, 3))
    with pytest.raises(
        UserError,
        match=r".*: must have 2 elements of generator/master/bias with this run's recipe, got 3; use another",
    ):
        checkpoint.Reader(found).entry("generator").read_network(torch.nn.Linear(4, 2))
    with pytest.raises(UserError, match="lacks 3 elements of generator/master/weight"):
        checkpoint.Reader(found).entry("generator").read_network(torch.nn.Linear(5, 3))


def with_more(kind: str, name: str) -> list[dict[str, Entry]]:
    """A linear layer on two ranks, of which the second has a value more, at the end of its file."""
    weight, bias = torch.arange(12.0), torch.zeros(3)
    first = [StateShard("master", "weight", 0, weight[:6]), StateShard("exp_avg", "weight", 0, weight[:6])]
    second = [StateShard("master", "weight", 6, weight[6:]), StateShard("master", "bias", 0, bias)]
    return [{"g": Entry(first)}, {"g": Entry([*second, StateShard(kind, name, 0, torch.full((2,), 5.0))])}]


@pytest.mark.parametrize(
    "kind, name, problem",
    [
        ("master", "extra", "has g/master/extra, which the network of this run's recipe does not have"),
        ("buffer", "extra", "has g/buffer/extra, which the network of this run's recipe does not have"),
        ("master", "layers.-1.p", None),  # of augmentation, which may be taken out
        ("exp_avg", "extra", None),
    ],
)
def test_values_without_a_place_in_the_network_are_refused(tmp_path, kind, name, problem):
    """Whether one process reads all, or some rank restores the part that it is asked for."""
    assert on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), with_more(kind, name)) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    with torch.device("meta"):
        network = torch.nn.Linear(4, 3)

    def refused(ranks: ThreadRank, wanted: dict[str, Entry]) -> str:
        try:
            checkpoint.restore(found, wanted, ranks, networks={"g": network})
        except UserError as error:
            return str(error)
        return ""

    remedy = "use another checkpoint, or the version of bigsgan that saved it"
    expected = {"", f"{found.path}: {problem}; {remedy}"} if problem else {""}
    for world_size in (1, 2, 3):
        part = {"g": Entry([StateShard("master", "weight", 0, torch.zeros(2))])}
        assert set(on_ranks(refused, [part] * world_size)) | {""} == expected
    reading = torch.nn.Linear(4, 3)
    if problem is None:
        checkpoint.Reader(found).entry("g").read_network(reading)
        assert torch.equal(reading.weight.flatten(), torch.arange(12.0))
    else:
        with pytest.raises(UserError, match=f"{problem}; {remedy}"):
            checkpoint.Reader(found).entry("g").read_network(reading)


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
