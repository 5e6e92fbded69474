"""A run as a user sees it: the command, what it leaves behind, resuming, sampling and exporting."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from bigsgan import cli
from bigsgan.config import load_recipe
from bigsgan.config.data import Data
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.grids import image_grid
from bigsgan.inference.columns import choose_columns
from bigsgan.inference.sheets import Sampler
from bigsgan.inference.trained import open_trained
from bigsgan.models.build import build_network
from tests.tiny import tiny_recipe

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
SAME_SUMS = ["deterministic=true"] if torch.cuda.is_available() else []
"""Without which cuDNN may take other algorithms in another process, and a resumed run differs in its last bits."""


def train(directory: Path, total: int) -> str:
    done = begin(directory, total)
    output, _ = done.communicate(timeout=240)
    assert done.returncode == 0, output
    return output


def begin(directory: Path, total: int, saves: int = 16) -> subprocess.Popen[str]:
    tiny_recipe(directory)
    overrides = [f"out={directory / 'run'}", f"total_nimg={total}", f"checkpoint_nimg={saves}", *SAME_SUMS]
    overrides += ["report_nimg=8", "sample_nimg=32", "ema.power={snapshot_nimg: 8}"]
    overrides += ["metrics={names: [fid64, pr64, labels64], every_nimg: 16}"]
    command = [sys.executable, "launch/train.py", "--config", directory / "tiny.yaml", *overrides]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, text=True, env=environment, **pipes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("end")
    return directory, train(directory, 32)


@pytest.mark.smoke
def test_metrics_are_measured_on_the_way(run):
    directory, output = run
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = {row["nimg"]: row for row in rows if "metrics/fid64" in row}
    assert list(measured) == [16, 32]
    assert "fid64 " in output
    records = [json.loads(line) for line in (directory / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [(record["metric"], record["nimg"]) for record in records] == [
        (name, nimg) for nimg in (16, 32) for name in ("fid64", "pr64", "labels64")
    ]
    for record in records[::3]:
        assert record["fid64"] == measured[record["nimg"]]["metrics/fid64"] > 0
        about = ("weights", "num_real", "num_fake", "features", "resizer")
        assert [record[key] for key in about] == ["ema", 1797, 64, "digits", "none"]
        assert len(record["features_sha256"]) == 16
    events = EventAccumulator(str(directory / "run")).Reload()
    assert [event.step for event in events.Scalars("metrics/pr64_recall")] == [16, 32]


@pytest.mark.slow
def test_evaluate(run, capsys):
    directory, _ = run
    kept = directory / "run" / "evaluations.jsonl"
    before = kept.read_text()
    arguments = ["evaluate", "--run", str(directory / "run"), "--metrics", "fid64,is64", "--seed", "3", "--json"]
    assert cli.main(arguments) == 0
    records = json.loads(capsys.readouterr().out)
    assert [json.loads(line) for line in kept.read_text().removeprefix(before).splitlines()] == records
    assert [(r["metric"], r["nimg"], r["seed"], r["weights"]) for r in records] == [
        ("fid64", 32, 3, "ema"),
        ("is64", 32, 3, "ema"),
    ]
    assert 1 <= records[1]["is64"] <= 10
    assert cli.main([*arguments, "--resizer", "antialiased"]) == 0  # the same numbers again
    printed, said = capsys.readouterr()
    again = json.loads(printed)
    assert "no effect with features digits: --resizer\n" in said
    assert [record["fid64"] for record in again[:1]] == [records[0]["fid64"]]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--metrics", "ppl100"], "--metrics: 'ppl100' needs a generator with styles, and biggan has none"),
        (["--features", "nothing"], "--features: must be a feature network or a file, got 'nothing'"),
        (["batch=3"], "argument: must be a key that only changes where the data is read from, got 'batch=3'"),
        (["data.resolution=32"], "data.resolution: must be 16, as in the run, got 32"),
    ],
)
def test_wrong_questions(run, capsys, more, message):
    directory, _ = run
    more = more if "--metrics" in more else ["--metrics", "fid64", *more]
    assert cli.main(["evaluate", "--run", str(directory / "run"), *more]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: {message}")


def test_last_lines_say_where_things_are(run):
    directory, output = run
    for name in ("samples", "checkpoints/000000000032", "metrics.jsonl"):
        assert str(directory / "run" / name) in output
    assert f"tensorboard --logdir {directory}" in output
    assert "total_nimg=64" in output


@pytest.mark.smoke
def test_metrics_hold_what_tensorboard_shows(run):
    directory, _ = run
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss/generator" in row]  # and not the quality metrics
    assert [row["nimg"] for row in rows] == [8, 16, 24, 32]
    names = {"loss/generator", "loss/discriminator", "logits/real", "logits/fake", "accuracy/real", "accuracy/fake"}
    names |= {f"{what}/{net}" for what in ("grad_norm", "lr", "loss_scale") for net in ("generator", "discriminator")}
    names |= {"images_per_second", "data_wait", "memory/max_gib", "memory/rank0_gib", "ema_decay", "ranks"}
    events = EventAccumulator(str(directory / "run"), size_guidance={"images": 0}).Reload()
    assert names <= set(events.Tags()["scalars"])
    for name in names:
        assert [e.value for e in events.Scalars(name)] == pytest.approx([row[name] for row in rows], rel=1e-6), name
    assert set(events.Tags()["images"]) == {"samples/live", "samples/ema", "samples/real"}
    assert rows[0]["lr/generator"] == 0.002
    assert rows[0]["ranks"] == 1
    assert set(EventMultiplexer().AddRunsFromDirectory(str(directory)).Runs()) == {"run"}  # called as its directory


def test_grids_have_a_column_for_each_class(run):
    directory, _ = run
    grid = np.asarray(Image.open(directory / "run" / "samples" / "samples_ema_000000000032.png"))
    assert grid.shape == (10 * 18 + 2, 10 * 18 + 2)


def test_every_rank_keeps_a_log(run):
    directory, _ = run
    log = (directory / "run" / "logs" / "rank00000.log").read_text()
    assert "rank 0" in log
    assert "8 images" in log


@pytest.mark.slow
def test_the_same_command_resumes(run, tmp_path):
    directory, _ = run
    assert "is complete at 32 images; raise total_nimg" in train(directory, 32)
    kill_before_it_saves(directory)
    printed = train(directory, 48)
    assert f"Resuming from {directory / 'run' / 'checkpoints' / '000000000032'}" in printed
    assert "training: images 32 to 48, 1 rank on cpu, a report every " in printed
    train(tmp_path, 48)
    resumed, whole = (
        load_file(d / "run/checkpoints/000000000048/rank00000.safetensors") for d in (directory, tmp_path)
    )
    assert resumed.keys() == whole.keys()
    for key, value in whole.items():
        assert torch.equal(value, resumed[key]), key
    assert sorted(p.name for p in (directory / "run" / "checkpoints").iterdir()) == [
        "000000000016", "000000000032", "000000000048", "latest",
    ]  # fmt: skip
    resumed, whole = (
        load_file(d / "run/ema_snapshots/000000000048/rank00000.safetensors") for d in (directory, tmp_path)
    )
    assert {key.split("/")[1] for key in whole} == {"buffer", "power_0.05", "power_0.1"}
    for key, value in whole.items():
        assert torch.equal(value, resumed[key]), key


def kill_before_it_saves(directory: Path) -> None:
    """Resume the run, and kill it between two checkpoints, after some updates that are lost."""
    report = directory / "run" / "metrics.jsonl"
    size = report.stat().st_size
    process = begin(directory, 1_000_000, saves=1_000_000)
    try:
        until = time.monotonic() + 120
        while report.stat().st_size == size:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("options", [["--truncation", "0.5"], ["--live", "--batch", "50"]], ids=" ".join)
def test_an_exported_generator_makes_the_images_of_sample(run, tmp_path, options):
    directory, _ = run
    grid, weights = tmp_path / "grid.png", tmp_path / "g.safetensors"
    arguments = ["--run", str(directory / "run"), *options]
    assert cli.main(["sample", *arguments, "--num", "20", "--seed", "3", "--out", str(grid)]) == 0
    threshold = float(options[1]) if "--truncation" in options else None

    def images(*how: str) -> np.ndarray:
        """The grid from the file alone: recipe and weights, in evaluation mode, all at once."""
        given = [word for word in arguments if word not in ("--batch", "50")] if how else arguments
        assert cli.main(["export", *given, *how, "--out", str(weights)]) == 0
        with safe_open(weights, framework="pt") as file:
            header = file.metadata()
        assert header["statistics"] == ("as trained" if how else "standing")
        assert header.get("truncation") == (None if threshold is None or how else str(threshold))
        (tmp_path / "recipe.yaml").write_text(header["recipe"])  # JSON is YAML
        network = build_network(load_recipe(tmp_path / "recipe.yaml", []), "generator")
        network.load_state_dict(load_file(weights))
        draws = Draws(3)
        if threshold is None:
            latents = draws.normal("sample", (0,), 0, 20, 12)
        else:
            latents = draws.truncated_normal("sample", 0, 20, 12, threshold)
        with torch.no_grad():
            made = network.eval()(torch.from_numpy(latents), torch.arange(20) % 10)
        return image_grid(made, 10)[0].numpy()

    shown = np.asarray(Image.open(grid)).astype(int)
    assert np.abs(shown - images()).max() <= 1  # rounding, as other numbers are computed at a time
    if threshold is None:
        assert np.abs(shown - images("--no-standing")).max() > 1


def test_columns_are_the_first_classes_that_fit_unless_asked():
    def classes(num: int, *names: str) -> Data:
        return Data(kind="synthetic", num_classes=num, class_names=list(names) or None)

    assert choose_columns(classes(1000), None, 100) == list(range(16))
    assert choose_columns(classes(3), None, 100) == [0, 1, 2]
    assert choose_columns(classes(0), None, 100) == [0] * 10
    assert choose_columns(classes(1000), ["999", "30-49"], 21) == [999, *range(30, 50)]
    assert choose_columns(classes(3, "cat", "dog", "eel"), ["eel", "0-1", "cat"], 100) == [2, 0, 1, 0]
    assert choose_columns(classes(4, "1", "10", "2", "0-1"), ["10", "2", "0-1", "3", "1"], 100) == [1, 2, 3, 3, 0]
    with pytest.raises(UserError, match=r"--classes: must be a class, got 'ell'; did you mean eel\?"):
        choose_columns(classes(3, "cat", "dog", "eel"), ["ell"], 100)
    with pytest.raises(UserError, match=r"must be a class, got 'cat' \(the run has no names of classes\); give num"):
        choose_columns(classes(3), ["cat"], 100)


@pytest.mark.slow
def test_columns_are_the_classes_asked_for(run, tmp_path):
    directory, _ = run
    trained = open_trained(directory / "run", "generator", False, 32, CPU)
    # Of the same latents: each image depends on its own latent and class alone.
    by_class = [Sampler(trained, 0, 100, range(10)).grid(11, torch.tensor([label]), None).images for label in range(10)]
    images = torch.stack([by_class[label][i] for i, label in enumerate([3, 7, 8, 9, 3, 3, 7, 8, 9, 3, 3])])
    grid = tmp_path / "grid.png"
    arguments = ["--run", str(directory / "run"), "--nimg", "32", "--num", "11", "--out", str(grid)]
    assert cli.main(["sample", *arguments, "--classes", "3, 7-9,3"]) == 0
    shown = np.asarray(Image.open(grid)).astype(int)
    assert shown.shape == (3 * 18 + 2, 5 * 18 + 2)
    assert np.abs(shown - image_grid(images, 5)[0].numpy()).max() <= 1
    assert np.abs(shown - image_grid(images.roll(1, 0), 5)[0].numpy()).max() > 1


def test_an_export_without_standing_statistics_is_what_was_saved(run, tmp_path):
    directory, _ = run
    for network, options in (("generator", ["--no-standing", "--live"]), ("discriminator", [])):
        weights = tmp_path / f"{network}.safetensors"
        arguments = ["--run", str(directory / "run"), "--nimg", "32", "--network", network, *options]
        assert cli.main(["export", *arguments, "--out", str(weights)]) == 0
        saved = load_file(directory / "run" / "checkpoints" / "000000000032" / "rank00000.safetensors")
        exported = load_file(weights)
        buffers = [key for key in saved if key.startswith(f"{network}/buffer/")]
        assert buffers
        for key in buffers:
            assert torch.equal(exported[key.split("/")[2].removesuffix("@0")].flatten(), saved[key])


@pytest.mark.slow
def test_evaluate_against_a_file(run, tmp_path, capsys):
    """Samples in an archive are as near to the real images as `evaluate` says; another seed's are near to them."""
    directory, _ = run
    arguments, samples = ["--run", str(directory / "run")], tmp_path / "samples.npz"
    assert cli.main(["sample", *arguments, "--num", "400", "--out", str(samples)]) == 0
    capsys.readouterr()
    found = {}
    for name, more in (("data", []), ("samples", ["--reference", str(samples)])):
        assert cli.main(["evaluate", *arguments, "--metrics", "fid400", "--json", *more]) == 0
        (found[name],) = json.loads(capsys.readouterr().out)
    assert found["samples"]["fid400"] < 0.2 * found["data"]["fid400"]
    digest = hashlib.sha256(samples.read_bytes()).hexdigest()
    assert (found["samples"]["reference"], found["samples"]["reference_sha256"]) == (str(samples), digest)
    assert (found["samples"]["num_real"], found["data"]["num_real"]) == (400, 1797)
    assert "reference" not in found["data"]


@pytest.mark.slow
def test_an_ema_of_another_width(run, tmp_path, capsys):
    """A width that was kept is what the checkpoint holds; one that was not is near, as four snapshots allow."""
    directory, _ = run
    snapshots = directory / "run" / "ema_snapshots"
    assert sorted(path.name for path in snapshots.iterdir())[:4] == [f"{n:012d}" for n in (8, 16, 24, 32)]
    saved = load_file(directory / "run" / "checkpoints" / "000000000032" / "rank00000.safetensors")
    arguments, weights = ["--run", str(directory / "run")], tmp_path / "g.safetensors"
    found = {}
    for width in ("0.05", "0.07", "0.1"):
        more = ["--nimg", "32", "--ema-width", width, "--no-standing", "--out", str(weights)]
        assert cli.main(["export", *arguments, *more]) == 0
        found[width] = load_file(weights)
        with safe_open(weights, framework="pt") as file:
            header = file.metadata()
        assert (header["ema_width"], header["weights"], header["nimg"]) == (width, "ema", "32")
    for key in [key for key in saved if key.startswith("average/power_")]:
        _, kind, name = key.removesuffix("@0").split("/")
        got = found[kind.removeprefix("power_")][name].flatten()
        assert (got - saved[key]).abs().max() <= 1e-6 * saved[key].abs().max(), key
    flat = [torch.cat([value.flatten() for value in each.values()]) for each in found.values()]
    assert min((flat[1] - other).norm() for other in flat[::2]) > 0
    assert (flat[1] - flat[0]).norm() < 0.05 * flat[0].norm()
    capsys.readouterr()
    arguments += ["--nimg", "24", "--ema-width", "0.07"]
    assert cli.main(["sample", *arguments, "--num", "10", "--out", str(tmp_path / "grid.png")]) == 0
    assert "at 24 images seen" in capsys.readouterr().out
    assert cli.main(["evaluate", *arguments, "--metrics", "fid64", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["ema_width"], record["nimg"], record["weights"]) == (0.07, 24, "ema")
    assert cli.main(["sample", *arguments, "--live", "--out", str(tmp_path / "grid.png")]) == 2
    assert "--ema-width: cannot be combined with --live" in capsys.readouterr().err


@pytest.mark.smoke
def test_sample_and_export(run, tmp_path, capsys):
    directory, _ = run
    grid, weights = tmp_path / "grid.png", tmp_path / "g.safetensors"
    arguments = ["--run", str(directory / "run"), "--nimg", "32"]
    assert cli.main(["sample", *arguments, "--num", "20", "--truncation", "0.8", "--out", str(grid)]) == 0
    assert Image.open(grid).size == (182, 38)
    assert cli.main(["export", *arguments, "--out", str(weights)]) == 0
    exported = load_file(weights)
    saved = load_file(directory / "run" / "checkpoints" / "000000000032" / "rank00000.safetensors")
    with safe_open(weights, framework="pt") as file:
        assert file.metadata()["weights"] == "ema"
    masters = [key for key in saved if key.startswith("average/master/")]
    assert len(masters) == len(list(build_network(tiny_recipe(tmp_path), "generator").parameters()))
    for key in masters:
        assert torch.equal(exported[key.split("/")[2].removesuffix("@0")].flatten(), saved[key])
    assert "0.0" in capsys.readouterr().out
