"""Runs that go back to an older checkpoint: what they train then, and what a kill before the next save leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bigsgan import checkpoint
from bigsgan.checkpoint import returns
from bigsgan.training.returning import settle
from tests.bad_runs import contents
from tests.distributed.whole_runs import BATCH, rows, run_whole

SETTINGS = {
    "total_nimg": 12 * BATCH, "report_nimg": 2 * BATCH, "sample_nimg": 3 * BATCH, "checkpoint_nimg": 4 * BATCH,
    "checkpoints.keep": 100, "monitor": "[tensorboard, csv]", "ema.power": f"{{snapshot_nimg: {4 * BATCH}}}",
}  # fmt: skip
TIMES = ("images_per_second", "data_wait", "checkpoint/", "memory/")


def tags(run: Path) -> list[int]:
    return sorted(each.nimg // BATCH for each in checkpoint.tags.complete(run / "checkpoints"))


def files(run: Path) -> list[str]:
    """Names of sample grids and snapshots."""
    return sorted(path.name for name in ("samples", "ema_snapshots") for path in (run / name).iterdir())


def table(run: Path) -> list[str]:
    lines = (run / "metrics.csv").read_text().splitlines()
    return [line for line in lines if not any(f",{name}" in line for name in TIMES)]


def curve(run: Path) -> list[tuple[int, float]]:
    """What TensorBoard shows of a loss."""
    events = EventAccumulator(str(run)).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss/generator")]


def assert_same(run: Path, other: Path) -> None:
    """The runs have the same weights, states and reports, bit for bit."""
    assert tags(run) == tags(other)
    for path in (run / "checkpoints").glob("*/*.safetensors"):
        one, two = (load_file(each) for each in (path, other / path.relative_to(run)))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert rows(run) == rows(other)
    assert table(run) == table(other)
    assert files(run) == files(other)
    assert curve(run) == curve(other)


def train(ranks, num: int, directory: Path, nimg: int | None = None, **settings: object) -> None:
    directory.mkdir(exist_ok=True)
    found = ranks(num).run(run_whole, str(directory), {**SETTINGS, **settings}, None, None, "", nimg)
    assert found == ["done"] * num


def kill_at_6(update: int) -> None:
    if update == 6:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
def test_a_run_that_went_back_equals_one_that_did_not(ranks, tmp_path, num):
    """It has stopped, and so reported and saved, where the other did not."""
    train(ranks, num, tmp_path / "whole")
    run = tmp_path / "back" / "run"
    train(ranks, num, tmp_path / "back", total_nimg=7 * BATCH)
    assert tags(run) == [4, 7]
    assert f"samples_ema_{7 * BATCH:012d}.png" in files(run)
    train(ranks, num, tmp_path / "back", nimg=4 * BATCH)
    assert tags(run) == [4, 8, 12]
    assert_same(run, tmp_path / "whole" / "run")
    assert not (run / "checkpoints" / returns.LEFT).exists()
    assert returns.read(run / "checkpoints") == returns.Return(4 * BATCH, {}, {}, saved=True)


@pytest.mark.slow
def test_a_second_start_goes_on(ranks, tmp_path):
    run = tmp_path / "run"
    train(ranks, 1, tmp_path)
    train(ranks, 1, tmp_path, nimg=4 * BATCH, total_nimg=9 * BATCH)
    assert tags(run) == [4, 8, 9]
    before = (run / "checkpoints" / f"{8 * BATCH:012d}" / "manifest.json").read_bytes()
    train(ranks, 1, tmp_path, nimg=4 * BATCH, total_nimg=10 * BATCH)
    assert tags(run) == [4, 8, 9, 10]
    assert (run / "checkpoints" / f"{8 * BATCH:012d}" / "manifest.json").read_bytes() == before
    train(ranks, 1, tmp_path, nimg=8 * BATCH)  # other images than before
    assert tags(run) == [4, 8, 12]


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("then", [None, 4 * BATCH])
def test_a_kill_before_the_next_save(ranks, tmp_path, num, then):
    """The checkpoints count again and everything is as it was; or the run goes back again."""
    run = tmp_path / "back" / "run"
    train(ranks, num, tmp_path / "back", total_nimg=9 * BATCH)
    before, others = contents(run), {"total_nimg": 11 * BATCH, "sample_nimg": BATCH, "report_nimg": BATCH}
    words = {**SETTINGS, **others}
    with pytest.raises(RuntimeError, match="rank"):
        ranks(num).run(run_whole, str(tmp_path / "back"), words, None, kill_at_6, "", 4 * BATCH)
    assert tags(run) == [4, 8, 9]
    assert [row["nimg"] // BATCH for row in rows(run)] == [2, 4, 5, 6]
    assert f"samples_ema_{6 * BATCH:012d}.png" in files(run)
    if then is None:
        settle(run)
        kept = {path for path in contents(run) if Path(path).name not in ("config.yaml",)}
        assert kept == {path for path in before if Path(path).name != "config.yaml"}
        assert all(contents(run)[path] == before[path] for path in kept)
        train(ranks, num, tmp_path / "back")
        assert tags(run) == [4, 8, 9, 12]
    else:
        train(ranks, num, tmp_path / "whole")
        train(ranks, num, tmp_path / "back", then)
        assert_same(run, tmp_path / "whole" / "run")


@pytest.mark.slow
def test_another_number_is_refused(ranks, tmp_path):
    train(ranks, 2, tmp_path, total_nimg=9 * BATCH)
    before = contents(tmp_path / "run")
    found = ranks(2).run(run_whole, str(tmp_path), SETTINGS, None, None, "", 5 * BATCH)
    text = f"--nimg: must be a saved checkpoint, got {5 * BATCH}; choose from {9 * BATCH}, {8 * BATCH}, {4 * BATCH}"
    assert found == [text] * 2
    assert contents(tmp_path / "run") == before
