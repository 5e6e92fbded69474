"""Checkpoints that are complete or absent, and shards of any layout put together again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bigsgan import checkpoint
from bigsgan.engines.base import Piece
from bigsgan.errors import UserError
from tests.alone import Part

LAYOUT: dict[str, Any] = {"world_size": 1, "generator.stage": 2}
Usage = namedtuple("Usage", "total used free")


class ThreadRank:
    """The collectives of a rank that is a thread."""

    def __init__(self, rank: int, values: list[float], meeting: threading.Barrier) -> None:
        self._rank, self._values, self._meeting = rank, values, meeting

    def rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return len(self._values)

    def barrier(self) -> None:
        self._meeting.wait()

    def any_rank(self, flag: bool) -> bool:
        return bool(self.total(flag))

    def total(self, value: float) -> float:
        self._values[self._rank] = value
        self.barrier()
        result = sum(self._values)
        self.barrier()
        return result


def entries(value: float) -> dict[str, checkpoint.StateEntry]:
    return {
        "generator": Part({"shard.0": torch.full((10,), value), "step": torch.tensor(7)}, {"scale": value, "count": 3}),
        "average": Part({"shard.0": torch.arange(4.0) + value}),
        "counters": Part({}, {"nimg": value}),
    }


def save(directory: Path, nimg: int) -> bool:
    return checkpoint.save(directory, nimg, entries(float(nimg)), LAYOUT, checkpoint.OneRank())


def loaded(found: checkpoint.Checkpoint, names: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: Part({}) for name in names}
    checkpoint.load(found, parts, LAYOUT, checkpoint.OneRank())
    return {name: part.loaded for name, part in parts.items()}


def assert_holds(found: checkpoint.Checkpoint | None, nimg: int) -> None:
    assert found is not None
    assert found.nimg == nimg
    expected = entries(float(nimg))
    for name, (tensors, numbers) in loaded(found, expected).items():
        assert numbers == expected[name].numbers()
        assert tensors.keys() == expected[name].tensors().keys()
        assert all(torch.equal(tensors[key], value) for key, value in expected[name].tensors().items())


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def save_on_ranks(directory: Path, nimg: int, parts: list[dict[str, checkpoint.StateEntry]]) -> list[bool]:
    flags, meeting = [False] * len(parts), threading.Barrier(len(parts), timeout=20)
    ranks = [ThreadRank(rank, flags, meeting) for rank in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(lambda rank, part: checkpoint.save(directory, nimg, part, {}, rank), ranks, parts))


def test_what_was_saved_is_loaded(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    assert checkpoint.newest(directory) is None
    assert save(directory, 64)
    assert save(directory, 128)
    assert_holds(checkpoint.find(tmp_path / "run", 64), 64)
    assert_holds(checkpoint.find(tmp_path / "run", 128), 128)
    assert_holds(checkpoint.newest(directory), 128)
    assert names(directory) == {"000000000064", "000000000128", "latest"}
    assert (directory / "latest").read_text() == "000000000128\n"
    manifest = json.loads((directory / "000000000128" / "manifest.json").read_text())
    file = directory / "000000000128" / "rank00000.safetensors"
    assert manifest["files"] == {file.name: file.stat().st_size}
    assert (manifest["nimg"], manifest["world_size"], manifest["layout"]) == (128, 1, LAYOUT)


def test_the_same_tag_is_saved_again(tmp_path):
    assert save(tmp_path, 64)
    assert checkpoint.save(tmp_path, 64, {"generator": Part({"shard.0": torch.ones(2)})}, LAYOUT, checkpoint.OneRank())
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert loaded(found, {"generator": None})["generator"][0]["shard.0"].tolist() == [1, 1]


def kill_at(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """End the process, as far as a test can, at one of the writes of a save."""
    real, calls = os.replace, []

    def replace(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == {"manifest": 1, "rename": 2}.get(where):
            raise KeyboardInterrupt
        real(source, target)

    def save_file(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half of the tens")
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    if where == "tensors":
        monkeypatch.setattr(checkpoint, "save_file", save_file)


@pytest.mark.parametrize("where", ["tensors", "manifest", "rename"])
def test_a_killed_save_leaves_nothing_that_looks_complete(tmp_path, monkeypatch, where):
    assert save(tmp_path, 64)
    with monkeypatch.context() as patch:
        kill_at(patch, where)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 128)
    assert names(tmp_path) == {"000000000064", "000000000128.partial", "latest"}
    assert_holds(checkpoint.newest(tmp_path), 64)
    assert save(tmp_path, 128)
    assert names(tmp_path) == {"000000000064", "000000000128", "latest"}
    assert_holds(checkpoint.newest(tmp_path), 128)


@pytest.mark.parametrize("free", [60, 90], ids=["no room", "room"])  # ``entries`` takes 64
def test_what_killed_saves_left_is_removed_by_the_next(tmp_path, monkeypatch, free):
    assert save(tmp_path, 64)
    for nimg, where in ((128, "tensors"), (192, "rename")):
        with monkeypatch.context() as patch:
            kill_at(patch, where)
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path, nimg)
        # Each save removes what the one before it left.
        assert names(tmp_path) == {"000000000064", f"{nimg:012d}.partial", "latest"}
    (tmp_path / "000000000032.partial").mkdir()
    (tmp_path / "000000000032.partial" / "rank00001.safetensors").write_bytes(b"of more ranks")
    (tmp_path / "notes").mkdir()  # not ours
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 10, free))
    assert save(tmp_path, 256) == (free == 90)
    assert names(tmp_path) == {"000000000064", "latest", "notes"} | ({"000000000256"} if free == 90 else set())
    assert_holds(checkpoint.newest(tmp_path), 256 if free == 90 else 64)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_format(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 0}))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated tensors": lambda path: truncate(path / "rank00000.safetensors"),
    "missing tensors": lambda path: (path / "rank00000.safetensors").unlink(),
    "missing manifest": lambda path: (path / "manifest.json").unlink(),
    "truncated manifest": lambda path: truncate(path / "manifest.json"),
    "empty manifest": lambda path: os.truncate(path / "manifest.json", 0),
    "another format": lambda path: change_format(path / "manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_passed_over_for_an_older_one(tmp_path, damage):
    directory = tmp_path / "checkpoints"
    assert save(directory, 64)
    assert save(directory, 128)
    DAMAGE[damage](directory / "000000000128")
    assert_holds(checkpoint.newest(directory), 64)
    assert_holds(checkpoint.find(tmp_path), 64)
    with pytest.raises(UserError, match=r"is no saved checkpoint; choose from 64$"):
        checkpoint.find(tmp_path, 128)
    shutil.rmtree(directory / "000000000064")
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.find(tmp_path)


def test_a_file_of_the_right_size_and_wrong_content_is_named(tmp_path):
    assert save(tmp_path, 64)
    file = tmp_path / "000000000064" / "rank00000.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    with pytest.raises(UserError) as caught:
        loaded(found, {"generator": None})
    assert caught.value.field == str(file)
    with pytest.raises(UserError) as caught:
        checkpoint.read_parameters(found, "generator", {"a": torch.Size([1])})
    assert caught.value.field == str(file)


def test_prune_keeps_the_newest_complete_ones(tmp_path):
    for nimg in (64, 128, 192, 256):
        assert save(tmp_path, nimg)
    DAMAGE["missing manifest"](tmp_path / "000000000256")
    checkpoint.prune(tmp_path, 2)
    assert names(tmp_path) == {"000000000128", "000000000192", "000000000256", "latest"}
    checkpoint.prune(tmp_path, 5)
    assert_holds(checkpoint.newest(tmp_path), 192)


@pytest.mark.parametrize("key, value", [("world_size", 2), ("generator.stage", 3), ("discriminator.stage", 1)])
def test_another_layout_is_refused_by_name(tmp_path, key, value):
    assert save(tmp_path, 64)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    part = Part({})
    with pytest.raises(UserError) as caught:
        checkpoint.load(found, {"generator": part}, {**LAYOUT, key: value}, checkpoint.OneRank())
    assert key in caught.value.field
    assert caught.value.value == value
    assert f"was {LAYOUT.get(key)!r}" in caught.value.problem
    assert part.loaded == ({}, {})


def test_a_full_disk_costs_this_checkpoint_alone(tmp_path, monkeypatch, caplog):
    assert save(tmp_path, 64)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 10, 60))  # ``entries`` takes 64
    assert not save(tmp_path, 128)
    assert "free some space" in caplog.text
    assert names(tmp_path) == {"000000000064", "latest"}
    assert_holds(checkpoint.newest(tmp_path), 64)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 10, 90))
    assert save(tmp_path, 128)


@pytest.mark.parametrize("function", ["_write_manifest", "save_file", "write_text"])
def test_a_disk_that_fills_while_writing_costs_this_checkpoint_alone(tmp_path, monkeypatch, function):
    def fill(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert save(tmp_path, 64)
    monkeypatch.setattr(checkpoint, function, fill)
    assert not save(tmp_path, 128)
    assert names(tmp_path) == {"000000000064", "latest"}
    assert_holds(checkpoint.newest(tmp_path), 64)


def test_a_directory_that_cannot_be_made_is_no_crash(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert not save(tmp_path / "file" / "checkpoints", 64)


# Parameters a (3, 4) and b (5,) over two ranks, in two shards, with padding before and after pieces.
SHAPES = {"a": torch.Size([3, 4]), "b": torch.Size([5])}
A, B = torch.arange(12.0), torch.arange(100.0, 105.0)
PADDING = torch.full((2,), -1.0)


def rank_parts() -> list[dict[str, checkpoint.StateEntry]]:
    first = Part(
        {
            "shard.0.master": torch.cat([A[:7], PADDING]),
            "shard.1.master": torch.cat([PADDING, B[3:]]),
            "buffer.u": torch.ones(2),
        },
        layout={"shard.0.master": [Piece("a", 0, 7, 0)], "shard.1.master": [Piece("b", 3, 2, 2)]},
    )
    second = Part(
        {"shard.0.master": torch.cat([A[7:], B[:3], PADDING]), "buffer.u": torch.zeros(2)},
        layout={"shard.0.master": [Piece("a", 7, 5, 0), Piece("b", 0, 3, 5)]},
    )
    return [{"generator": first}, {"generator": second}]


def test_shards_of_two_ranks_are_put_together(tmp_path):
    parts = rank_parts()
    assert save_on_ranks(tmp_path, 64, parts) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert set(found.manifest["files"]) == {"rank00000.safetensors", "rank00001.safetensors"}
    state = checkpoint.read_parameters(found, "generator", SHAPES)
    assert state.keys() == {"a", "b", "u"}
    assert torch.equal(state["a"], A.view(3, 4))
    assert torch.equal(state["b"], B)
    assert torch.equal(state["u"], torch.ones(2))  # rank 0's
    for rank, part in enumerate(parts):  # each rank finds its own again
        mine = Part({}, layout=part["generator"].layout())
        checkpoint.load(found, {"generator": mine}, {}, ThreadRank(rank, [False] * 2, threading.Barrier(1)))
        expected = part["generator"].tensors()
        assert mine.loaded[0].keys() == expected.keys()
        assert all(torch.equal(mine.loaded[0][key], value) for key, value in expected.items())


def test_where_every_rank_holds_everything_the_first_is_enough(tmp_path):
    whole = Part({"shard.0": torch.cat([A, B])}, layout={"shard.0": [Piece("a", 0, 12, 0), Piece("b", 0, 5, 12)]})
    assert save_on_ranks(tmp_path, 64, [{"generator": whole}, {"generator": whole}]) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    state = checkpoint.read_parameters(found, "generator", SHAPES)
    assert torch.equal(torch.cat([state["a"].flatten(), state["b"]]), torch.cat([A, B]))


def test_missing_elements_are_counted_and_named(tmp_path):
    assert save_on_ranks(tmp_path, 64, rank_parts()) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    half = checkpoint.Checkpoint(found.path, {**found.manifest, "world_size": 1})
    with pytest.raises(UserError, match="lacks 5 elements") as caught:
        checkpoint.read_parameters(half, "generator", SHAPES)
    assert caught.value.field == str(found.path)
    with pytest.raises(UserError, match="lacks 2 elements"):
        checkpoint.read_parameters(found, "generator", {**SHAPES, "c": torch.Size([2])})


def test_one_rank_without_space_stops_all(tmp_path, monkeypatch):
    assert save_on_ranks(tmp_path, 64, rank_parts()) == [True, True]
    real = checkpoint._write_rank

    def write_rank(partial: Path, ranks: Any, parts: Any) -> None:
        if ranks.rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(partial, ranks, parts)

    monkeypatch.setattr(checkpoint, "_write_rank", write_rank)
    assert save_on_ranks(tmp_path, 128, rank_parts()) == [False, False]
    assert names(tmp_path) == {"000000000064", "latest"}
