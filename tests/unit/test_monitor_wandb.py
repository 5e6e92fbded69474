"""W&B's library as it is, offline: what its file holds, against the CSV file, TensorBoard and the PNG files."""

import csv
import errno
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bigsgan.errors import UserError
from bigsgan.monitor import Reporter, check_wandb, wandb_run
from tests.wandb_file import read_segments
from tests.wandb_server import serving

ALL = ["tensorboard", "wandb", "csv"]
RECIPE = {
    "seed": 3,
    "out": "runs/a",
    "augmentation": None,
    "optimizer": {"generator": {"lr": 2e-4, "betas": [0.0, 0.99]}},
}
FIRST = {"loss/generator": 1 / 3, "logits/real": math.nan}
ALARM = {"loss/generator": 0.2, "alarm/gradients_explode/generator": 1.0}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No settings of the machine's, and each test's own process of W&B."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wandb, "run", None)  # which stays where its process is killed
    yield
    wandb.teardown()


@pytest.fixture
def warnings(caplog):
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("bigsgan")]


def rows_of(out: Path) -> list[tuple[int, str, float]]:
    with (out / "metrics.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["nimg", "name", "value"]
    return [(int(nimg), name, float(value)) for nimg, name, value in rows]


def series_of(out: Path, name: str) -> list[tuple[int, float]]:
    return [(nimg, value) for nimg, key, value in rows_of(out) if key == name]


def grid(seed: int) -> torch.Tensor:
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.mark.slow
def test_each_holds_what_it_can(tmp_path):
    out = tmp_path / "run"
    reporter = Reporter(out, 0, 1000, 0, ALL, RECIPE)
    reporter.report(64, FIRST)
    reporter.images("samples/live", grid(0), 2, 64)
    reporter.images("samples/ema", grid(1), 2, 64)
    reporter.report(128, ALARM)
    reporter.measured(128, {"metrics/fid64": 12.5})
    reporter.close()

    (segment,) = read_segments(out)
    assert segment.finished
    assert (segment.project, segment.name, segment.config) == ("bigsgan", "run", RECIPE)
    assert segment.metrics == {"*": "nimg"}
    assert [row["_step"] for row in segment.rows] == [64, 65, 66, 128, 129]
    events = EventAccumulator(str(out), size_guidance={"images": 0}).Reload()
    assert set(events.Tags()["scalars"]) == FIRST.keys() | ALARM.keys() | {"metrics/fid64"}
    assert "lr: 0.0002" in events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    for name in events.Tags()["scalars"]:
        kept = series_of(out, name)
        np.testing.assert_equal(segment.series(name), kept)
        seen = [(event.step, event.value) for event in events.Scalars(name)]
        np.testing.assert_equal(seen, [(nimg, float(np.float32(value))) for nimg, value in kept])
    assert series_of(out, "loss/generator") == [(64, 1 / 3), (128, 0.2)]
    for tag in ("samples/live", "samples/ema"):
        png = (out / "samples" / f"{tag.replace('/', '_')}_{64:012d}.png").read_bytes()
        ((nimg, path),) = segment.series(f"{tag}/path")
        assert nimg == 64
        assert (segment.directory / "files" / path).read_bytes() == png
        (image,) = events.Images(tag)
        assert image.step == 64


@pytest.mark.slow
def test_an_alarm_that_begins_is_a_message(tmp_path):
    reporter, names = Reporter(tmp_path, 0, 512, 0, ["wandb"], RECIPE), ["low_diversity", "penalty_is_off/r1"]
    both = {**FIRST, **{f"alarm/{name}": 1.0 for name in names}}
    for nimg, metrics in enumerate((FIRST, ALARM, ALARM, both, FIRST, ALARM), start=1):
        reporter.report(64 * nimg, metrics)
        reporter.measured(64 * nimg, {"metrics/fid64": 12.5})
    reporter.close()
    (segment,) = read_segments(tmp_path)
    text = "at {} images; the log of rank 0 says what to try"
    explode = "gradients_explode/generator"
    assert segment.alerts == [
        (explode, text.format(128)),
        *((name, text.format(256)) for name in names),
        (explode, text.format(384)),
    ]


@pytest.mark.slow
def test_a_resumed_run_is_the_same_one_and_its_steps_continue(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "portraits")
    monkeypatch.setenv("WANDB_NAME", "third try")
    for resume_nimg, values in ((0, {64: 1.0, 128: 2.0, 192: 3.0}), (128, {192: 4.0, 256: 5.0})):
        reporter = Reporter(tmp_path, 0, 256, resume_nimg, ALL, {**RECIPE, "seed": resume_nimg})
        for nimg, value in values.items():
            reporter.report(nimg, {"loss/generator": value})
        reporter.close()
    first, second = read_segments(tmp_path)
    assert first.run_id == second.run_id
    assert (second.project, second.name) == ("portraits", "third try")
    assert second.config["seed"] == 128
    assert [row["_step"] for row in first.rows + second.rows] == [64, 128, 192, 193, 256]
    # A later step replaces an earlier one of the same nimg: what remains is what the CSV file has kept.
    assert series_of(tmp_path, "loss/generator") == [(64, 1.0), (128, 2.0), (192, 4.0), (256, 5.0)]
    merged = dict(first.series("loss/generator")) | dict(second.series("loss/generator"))
    assert list(merged.items()) == series_of(tmp_path, "loss/generator")


@pytest.mark.slow
@pytest.mark.parametrize(
    "second",
    [pytest.param("run", marks=pytest.mark.slow), "elsewhere"],  # where only W&B knows the last step
)
def test_online_the_rows_of_a_resumed_run_follow_those_that_are_there(second, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_MODE", "online")
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        for out, resume_nimg, values in (
            ("run", 0, {64: 1.0, 128: 2.0, 192: 3.0}),
            (second, 128, {192: 4.0, 256: 5.0}),
        ):
            reporter = Reporter(tmp_path / out, 0, 256, resume_nimg, ["wandb"], RECIPE)
            monkeypatch.setenv("WANDB_RUN_ID", json.loads((tmp_path / out / "wandb" / "run.json").read_text())["id"])
            for nimg, value in values.items():
                reporter.report(nimg, {"loss/generator": value})
            reporter.close()
    rows = [(row["_step"], row["nimg"], row["loss/generator"]) for row in server.rows]
    assert rows == [(64, 64, 1.0), (128, 128, 2.0), (192, 192, 3.0), (193, 192, 4.0), (256, 256, 5.0)]


def test_a_run_that_rolls_back_goes_on_in_the_same_file(tmp_path):
    reporter = Reporter(tmp_path, 0, 256, 0, ["wandb", "csv"], RECIPE)
    for nimg, value in ((64, 1.0), (128, 2.0)):
        reporter.report(nimg, {"loss/generator": value})
    reporter.rewind(64)
    for nimg, value in ((128, 3.0), (192, 4.0)):
        reporter.report(nimg, {"loss/generator": value})
    reporter.close()
    (segment,) = read_segments(tmp_path)
    assert [(row["_step"], row["nimg"], row["loss/generator"]) for row in segment.rows] == [
        (64, 64, 1.0),
        (128, 128, 2.0),
        (129, 128, 3.0),
        (192, 192, 4.0),
    ]
    assert rows_of(tmp_path) == [(nimg, "loss/generator", value) for nimg, value in ((64, 1.0), (128, 3.0), (192, 4.0))]
    assert not list(tmp_path.glob("events*"))


def test_training_goes_on_without_wandb_when_it_dies(tmp_path, warnings):
    reporter = Reporter(tmp_path, 0, 256, 0, ALL, RECIPE)
    reporter.report(64, {"loss/generator": 1.0})
    (process,) = [each for each in psutil.Process().children() if each.name() == "wandb-core"]
    process.kill()
    process.wait()
    for nimg in range(128, 1024, 64):
        reporter.report(nimg, {"loss/generator": 2.0})
        reporter.images("samples/ema", grid(0), 2, nimg)
    reporter.close()
    (warning,) = warnings()
    assert warning.startswith("Weights & Biases: ")
    assert warning.endswith("; training continues without it")
    assert [nimg for nimg, *_ in rows_of(tmp_path)] == list(range(64, 1024, 64))


def test_a_disk_that_is_full_for_a_moment_ends_no_reports(tmp_path, warnings, monkeypatch):
    out = tmp_path / "run"
    reporter = Reporter(out, 0, 1000, 0, ["wandb", "csv"], RECIPE)
    reporter.report(64, FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(wandb_run, "write_text", full)
        for nimg in (128, 192):
            reporter.report(nimg, {"loss/generator": 0.5})
    reporter.report(256, {"loss/generator": 0.25})
    reporter.close()
    assert warnings() == [
        f"{out / 'wandb' / 'run.json'}: cannot be written: No space left on device; free some space, fix its "
        "permissions, or choose another path; reports to Weights & Biases continue"
    ]
    (segment,) = read_segments(out)
    assert [row["nimg"] for row in segment.rows] == [64, 128, 192, 256]
    assert json.loads((out / "wandb" / "run.json").read_text())["step"] == 256


def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("content", ["{", '{"id": [1]}'])
def test_training_begins_without_wandb_when_it_cannot_start(content, tmp_path, warnings):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run.json").write_text(content)
    reporter = Reporter(tmp_path, 0, 256, 0, ["wandb"], RECIPE)
    reporter.report(64, {"loss/generator": 1.0})
    reporter.close()
    (warning,) = warnings()
    assert warning.endswith("; training continues without it")
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"nimg": 64, "loss/generator": 1.0}


def test_wandb_without_its_library_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # then an import of it fails
        with pytest.raises(UserError) as caught:
            check_wandb()
    assert str(caught.value) == (
        "monitor: 'wandb' needs the package wandb, which is not installed; install the extra `wandb` "
        "(`pip install -e '.[wandb]'` in bigsgan's repository)"
    )


@pytest.mark.parametrize(
    "variables, message",
    [
        ({}, "needs an API key of Weights & Biases; run `wandb login`, or set WANDB_MODE=offline"),
        ({"WANDB_MODE": "ofline"}, "is refused by its library ("),
    ],
)
def test_wandb_that_cannot_go_online_is_refused(variables, message, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        check_wandb()
    assert str(caught.value).startswith(f"monitor: 'wandb' {message}")
