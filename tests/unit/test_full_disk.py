"""A disk that is full while a run trains: warnings, and every report again once there is room."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from bigsgan import cli
from bigsgan.checkpoint import find_intact
from bigsgan.monitor import Reporter, open_rank_log
from bigsgan.monitor.progress import Progress
from tests import REPOSITORY
from tests.examined import small_disk
from tests.runs import make_run
from tests.tiny import tiny_recipe


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "small", "4m"):
        yield tmp_path / "small"


def fill(disk: Path) -> Path:
    path = disk / "full"
    with suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(b"x" * 512):
            pass
    assert shutil.disk_usage(disk).free == 0
    return path


def rows(out: Path) -> list[int]:
    return [json.loads(line)["nimg"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_reports_and_grids_warn_and_come_back(disk, caplog, capfd):
    out = disk / "run"
    reporter = Reporter(out, 0, 1000, 0)
    reporter.report(8, {"loss/generator": 1.0})
    full = fill(disk)
    scalars = {f"series/{number}": 1.0 for number in range(400)}
    for nimg in (16, 24):
        reporter.report(nimg, scalars)
        reporter.images("samples/ema", torch.rand(4, 3, 64, 64), 2, nimg)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 4
    assert all("cannot be written: No space left on device" in text for text in warnings)
    assert rows(out) == [8]
    reporter.rewind(16)
    full.unlink()
    reporter.report(32, {"loss/generator": 2.0})
    reporter.images("samples/ema", torch.rand(4, 3, 64, 64), 2, 32)
    reporter.close()
    assert rows(out) == [8, 16, 32]
    assert [path.name for path in (out / "samples").iterdir()] == ["samples_ema_000000000032.png"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_universal_checkpoint_is_refused(disk, tmp_path, capsys):
    run, _ = make_run(tmp_path)
    fill(disk)
    assert cli.main(["export", "--run", str(run), "--out", str(disk / "universal"), "--format", "universal"]) == 2
    assert "cannot be written: No space left on device; give a writable path" in capsys.readouterr().err
    assert not (disk / "universal" / "latest_universal").exists()


def test_logs_and_terminals_warn_of_nothing(disk, monkeypatch, capfd):
    log = open_rank_log(disk / "logs", 0, lambda text: (_ for _ in ()).throw(OSError(errno.EPIPE, "Broken pipe")))
    fill(disk)
    for _ in range(100):
        logging.getLogger("bigsgan.test").warning("x" * 1000)
    log.close()
    with open("/dev/full", "w") as stream:
        progress = Progress(100, 0, stream)
        progress.update(10, {})
        progress.close()
        with pytest.raises(OSError, match="No space"):
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(  # one line, and more than is kept back
    "key", ["out", pytest.param(None, marks=pytest.mark.slow)]
)
def test_standard_output_on_a_full_disk(key, tmp_path):
    command = [sys.executable, "-m", "bigsgan", "train", *(["--print", key] if key else ["--dry-run"])]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    expected = "bigsgan: standard output: cannot be written: No space left on device; free some space there"
    assert done.stderr.splitlines() == [expected]
    closed = ["bash", "-c", '"$@" >&-', "closed", *command]
    done = subprocess.run(closed, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "is_freed", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.nightly)]
)
def test_a_run_on_a_full_disk(is_freed, disk, tmp_path):
    """With reports, grids, checkpoints and stderr; only a last checkpoint that fails ends the run, by status 2.

    Where there is room again, stderr is elsewhere, to see that a checkpoint has failed.
    """
    out = disk / "run"
    settings = ["total_nimg=640", "batch=8", "report_nimg=64", "sample_nimg=128", "checkpoint_nimg=128",
                "checkpoints.keep=1", f"out={out}"]  # fmt: skip
    tiny_recipe(tmp_path)  # writes it
    command = [sys.executable, "launch/train.py", "--config", str(tmp_path / "tiny.yaml"), *settings]
    said = (tmp_path if is_freed else disk) / "stderr"
    with said.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=REPOSITORY)
    try:
        wait_for(lambda: list(out.glob("checkpoints/0*[0-9]")), process)
        full = fill(disk)
        if is_freed:
            wait_for(lambda: "was not saved" in said.read_text(), process)
            full.unlink()
        status = process.wait(600)
    finally:
        process.kill()
        process.wait()
    assert status == (0 if is_freed else 2)
    assert "Traceback" not in said.read_text()
    assert (find_intact(out).nimg == 640) == is_freed


def wait_for(event: Callable[[], object], process: subprocess.Popen) -> None:
    """Wait until something has happened in a process that goes on."""
    until = time.monotonic() + 600
    while not event():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
