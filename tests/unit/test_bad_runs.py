"""Bad data, run directories and checkpoints: what is found out only once torch is imported.

As for a bad recipe: exit status 2, one line with field, value and remedy, and nothing on disk harmed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bigsgan import cli, trainer
from bigsgan.checkpoint.tags import checksum, sealed
from bigsgan.config.run_directory import write_recipe
from bigsgan.runtime.locking import hold
from tests import REPOSITORY
from tests.bad_runs import check, contents, train_arguments
from tests.tiny import tiny_recipe

TAG = "run/checkpoints/000000000064"
RANK_FILE = "checkpoints/000000000064/rank00000.safetensors"
MANIFEST = "checkpoints/000000000064/manifest.json"


def remove_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def truncate(run: Path) -> None:
    (run / RANK_FILE).write_bytes((run / RANK_FILE).read_bytes()[:-1])


def overwrite_header(run: Path) -> None:
    content = bytearray((run / RANK_FILE).read_bytes())
    content[8:200] = b"\xff" * 192
    (run / RANK_FILE).write_bytes(content)


def overwrite_header_and_checksum(run: Path) -> None:
    overwrite_header(run)
    manifest = json.loads((run / MANIFEST).read_text())
    manifest["files"]["rank00000.safetensors"]["sha256"] = checksum(run / RANK_FILE)
    (run / MANIFEST).write_text(json.dumps(sealed(manifest)))


def break_recipe(run: Path) -> None:
    (run / "config.yaml").write_text("out: [")


def widen_recipe(run: Path) -> None:
    write_recipe(tiny_recipe(Path(), "generator.embedding_size=7"), run, {})


def narrow_recipe(run: Path) -> None:
    write_recipe(tiny_recipe(Path(), "generator.embedding_size=5"), run, {})


NOT_COMPLETE = ("--run", "'run' has no complete checkpoint", "give the `out` directory of a run that has saved")
DAMAGE: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (remove_checkpoints, NOT_COMPLETE),
    (truncate, NOT_COMPLETE),
    (overwrite_header, ("--run", "'run' contains only damaged checkpoints", "restore an intact copy")),
    (overwrite_header_and_checksum, (TAG, "is damaged: rank00000.safetensors", "remove that directory")),
    (break_recipe, ("run/config.yaml", "must be a valid recipe (run/config.yaml: must be", "fix or remove that file")),
    (widen_recipe, (TAG, "lacks 10 elements of average/master/layers.0.", "use another checkpoint")),
    (narrow_recipe, (TAG, "elements of average/master/layers.0.", "must have 50 elements", "use another checkpoint")),
]


@pytest.mark.parametrize("damage, expected", DAMAGE, ids=lambda part: getattr(part, "__name__", ""))
@pytest.mark.parametrize("command", ["sample", "export"])
def test_damaged_runs(command, damage, expected, run, capsys):
    damage(run)
    check(capsys, [command, "--run", "run", "--out", "x"], *expected)


def one_class(name: str = "one", *, readable: bool = True) -> None:
    folder = Path("images") / name
    folder.mkdir(parents=True)
    for index in range(3):
        path = folder / f"{index}.png"
        if readable:
            Image.new("L", (16, 16), index).save(path)
        else:
            path.write_bytes(b"\x89PNG\r\n\x1a\n and no more")


def test_data(run, capsys):
    one_class()
    arguments = train_arguments("out=new", "data.kind=folder", "data.root=images")
    check(capsys, arguments, "data.num_classes", "must be 1 with this data, got 10", "num_classes=1,")
    assert not Path("new/config.yaml").exists()


def foreign_recipe() -> None:
    Path("run/config.yaml").write_text("service: {port: 80}\n")
    remove_checkpoints(Path("run"))


RESUME: dict[str, tuple[Callable[[], None], list[str], tuple[str, ...]]] = {
    "another batch": (lambda: None, ["batch=16"], ("batch", "must be 8, as in the run", "accept it by --allow-change")),
    "another network": (lambda: None, ["generator.channels=3", "--allow-change", "generator.channels"],
        ("generator.channels", "must be 2, as in the run 'run', got 3", "with init_from to keep the weights")),
    "another precision": (lambda: None, ["engines.generator.ds_config=ds_configs/zero1_bf16.json"],
        ("engines.generator.precision", "must be 'fp32', as in the run 'run',", "accept it by --allow-change")),
    "weights of features": (
        lambda: None,
        ["metrics={names: [fid100], every_nimg: 64, features: {network: inception, weights: run}}", "out=new"],
        ("metrics.features.weights", "must be a file, got 'run'", "download https://"),
    ),
    "no run to begin with": (lambda: None, ["init_from.run=missing", "out=new"], ("init_from.run",
        "must be a run directory, got 'missing' (it has no config.yaml)", "give the `out` of a run")),
    "no such checkpoint to begin with": (lambda: None, ["init_from={run: run, nimg: 63}", "out=new"], ("init_from.nimg",
        "must be a saved checkpoint, got 63", "choose from 64")),
    "damaged": (lambda: truncate(Path("run")), [], ("run/checkpoints", "contains only damaged", "restore an intact")),
    "no recipe": (lambda: break_recipe(Path("run")), [], ("run/config.yaml", "must be a valid", "fix or remove that")),
    "somebody else's": (foreign_recipe, [], ("run/config.yaml", "must be a valid recipe", "another directory")),
    "a file in the way": (lambda: None, ["out=run/config.yaml"], ("out", "must be a directory", "give a directory")),
    "nowhere": (lambda: None, ["out=/dev/null/run"], ("out", "must be a directory, got", "give a directory that can")),
    "unwritable": (lambda: None, ["out=/proc/run"], ("out", "'/proc/run' cannot be written", "give a")),
    "own checkpoints": (lambda: None, ["out=run/checkpoints"], ("out", "belongs to the run run", "a path outside")),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUME)
def test_run_directories(name, run, capsys):
    damage, overrides, expected = RESUME[name]
    arguments = train_arguments(*overrides, *([] if "out=" in "".join(overrides) else ["out=run"]))
    damage()
    check(capsys, arguments, *expected)
    if name == "weights of features":
        assert not Path("new").exists()


@pytest.mark.parametrize("command", ["train", "sample", "export"])
def test_a_run_that_another_job_trains(command, run, capsys):
    """Training is refused; what only reads goes on."""
    release = hold(run / ".lock", "out", "run", "wait")
    if command == "train":
        remedy = "wait until that job has ended, or end it"
        check(capsys, train_arguments("out=run"), "out", f"'run' is in use by process {os.getpid()} on ", remedy)
        release()
        check(capsys, train_arguments("out=run", "batch=16"), "batch")  # as far as the recipe's check
    else:
        assert cli.main([command, "--run", "run", "--out", "x"] + ["--num", "4"] * (command == "sample")) == 0
        release()


def test_running_out_of_memory_names_what_to_change(run, monkeypatch, capsys):
    def allocate(*arguments: Any) -> None:
        torch.empty(2**52)

    monkeypatch.setattr(trainer.Trainer, "_open", allocate)
    remedies = "more micro-batches (accumulation=2)", "zero3.json"
    parts = "can't allocate memory", "8 (generator), 4 (discriminator) images", *remedies
    check(capsys, train_arguments("engines.discriminator.accumulation=2"), "memory: is not enough on rank 0", *parts)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(trainer.Trainer, "_open", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.main(train_arguments())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["not on this machine", "corrupt images"])
def test_the_script(name, run):
    """With a real process group: what is met while engines are built, and after that."""
    arguments = train_arguments()
    if name == "corrupt images":
        one_class(readable=False)
        arguments += ["out=new", "data.kind=folder", "data.root=images", "data.num_classes=0", "data.max_corrupt=1"]
        arguments.append("data.num_workers=0")
        expected = "data.root: 'images' contains no readable images (of 3 images that were tried, images/one/0.png: "
    else:
        Path("ds.json").write_text('{"zero_optimization": {"stage": 1}, "fp16": {"enabled": true}}')
        arguments += ["out=new", "engines.generator.ds_config=ds.json"]
        expected = f"engines.generator.ds_config: '{Path('ds.json').absolute()}' sets fp16, which this cpu does not"
    before = contents(Path("run"))
    command = [sys.executable, str(REPOSITORY / "launch" / "train.py"), *arguments[1:]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "bigsgan: " in line]
    assert line.startswith(f"bigsgan: {expected}")
    assert result.stderr.count(expected) == 1
    assert "Traceback" not in result.stderr
    assert contents(Path("run")) == before
