"""Tags that are complete or absent: what a save writes, and what a killed one leaves."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
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
from bigsgan.checkpoint import StateShard, saver, state_copies, tags
from bigsgan.config.sections import Checkpoints
from bigsgan.runtime import memory
from tests.single_process import Entry, entry, save

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


def saved(directory: Path, parts: list[Any]) -> Any:
    """The checkpoint that ranks with these parts save together."""
    assert all(on_ranks(lambda ranks, part: save(directory, 64, part, ranks), parts))
    return checkpoint.newest(directory)


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
        "holders": {"generator/master/layers.0.w": "0"},
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


@pytest.mark.parametrize("free, in_background", [(89, True), (88, False), (None, True)])
def test_where_copies_do_not_fit_saves_are_in_the_foreground(tmp_path, monkeypatch, caplog, free, in_background):
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
            if not in_background:
                gate.set()
            assert writer.save(nimg, part, checkpoint.Description({}, {}, {}))
            assert (tmp_path / f"{nimg:012d}").exists() != in_background
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
    assert [text.startswith(expected) for text in warnings] == [True, True] * (not in_background)  # one for each rank


def test_memory_is_counted_by_host(monkeypatch):
    def problem(*needs: tuple[str, int, int | None]) -> str | None:
        return state_copies._problem([state_copies._Need(*need) for need in needs])

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
    assert loaded(found, {"generator": entry({"a": torch.zeros(2)})})["generator"][0]["a"].tolist() == [1, 1]
    assert save_one(tmp_path, 128)
    assert names(tmp_path) == {"000000000064", "000000000128", "latest"}


@pytest.mark.slow
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
