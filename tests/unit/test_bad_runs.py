"""Bad data, run directories, checkpoints and outputs: what is found out only once torch is imported.

As for a bad recipe: exit status 2, one line with field, value and remedy, and nothing on disk harmed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bigsgan import cli, export, sample, train
from bigsgan.checkpoint import saver
from bigsgan.checkpoint.tags import checksum, sealed
from bigsgan.config.run_directory import write_recipe
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.runtime import comm
from bigsgan.runtime.locking import hold
from tests import REPOSITORY
from tests.alone import save, whole
from tests.tiny import tiny_recipe

TAG = "run/checkpoints/000000000064"
RANK_FILE = "checkpoints/000000000064/rank00000.safetensors"
MANIFEST = "checkpoints/000000000064/manifest.json"
LAYOUT = {
    "world_size": 1,
    "generator.stage": 0,
    "generator.precision": "fp32",
    "discriminator.stage": 0,
    "discriminator.precision": "fp32",
}


@pytest.fixture(scope="module")
def made_run(tmp_path_factory) -> Path:
    """A run directory with one checkpoint at 64 images."""
    directory = tmp_path_factory.mktemp("made")
    recipe = tiny_recipe(directory)
    networks = {network: build_network(recipe, network) for network in ("generator", "discriminator")}
    for network in networks.values():
        initialize(network, seed=0)
    entries = {name: whole(network) for name, network in networks.items()}
    entries["average"] = whole(networks["generator"])
    run = directory / "run"
    write_recipe(recipe, run, {})
    assert save(run / "checkpoints", 64, entries, recipe=recipe.model_dump(), layout=LAYOUT)
    return run


@pytest.fixture
def run(made_run, tmp_path, monkeypatch) -> Iterator[Path]:
    """A copy of it, to be damaged. Training stops short of DeepSpeed, in this process without a process group."""
    monkeypatch.setattr(comm, "initialize", lambda *patience: None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield Path(shutil.copytree(made_run, tmp_path / "run"))
    logger = logging.getLogger("bigsgan")
    logger.handlers.clear()  # a process that ends leaves its log open
    logger.propagate = True


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the logs and the lock."""
    files = [p for p in directory.rglob("*") if p.is_file() and p.parent.name != "logs" and p.name != ".lock"]
    return {str(path): path.read_bytes() for path in files}


def check(capsys, arguments: list[str], field: str, *parts: str) -> None:
    before = contents(Path())
    assert cli.main(arguments) == 2
    printed, message = capsys.readouterr()
    assert printed == ""
    (line,) = [line for line in message.splitlines() if not line.startswith("WARNING: skipping ")]
    assert line.startswith(f"bigsgan: {field}"), line
    for part in parts:
        assert part in line, line
    assert "; " in line
    assert contents(Path()) == before


def train_arguments(*overrides: str) -> list[str]:
    path = Path("tiny.yaml")
    tiny_recipe(Path())  # writes it
    return ["train", "--config", str(path), *overrides]


SAMPLE: dict[str, tuple[str, ...]] = {
    "--run . --out x.png": (
        "--run",
        "must be a run directory, got '.' (it has no config.yaml)",
        "give the `out` of a run",
    ),
    "--run missing --out x.png": (
        "--run",
        "must be a run directory, got 'missing' (it has no config.yaml)",
        "give the `out` of a run",
    ),
    "--run run --out x.png --num 0": ("--num", "must be 1 to 1000000000, got 0", "give a number in this range"),
    "--run run --out x.png --num 1000000000": (
        "--num",
        "must be at most 4194304 with images of 16 pixels, got",
        "give a smaller number",
    ),
    "--run run --out x.png --interpolate 9223372036854775807": (
        "--interpolate",
        "must be 2 to 10000 images from one sample to the next, got",
        "give a number in this range",
    ),
    "--run run --out x.png --batch 9223372036854775807": (
        "--batch",
        "must be 1 to 65536, got 9223372036854775807",
        "give a number in this range",
    ),
    "--run run --out x.png --num -4": ("--num", "must be 1 to 1000000000, got -4", "give a number in this range"),
    "--run run --out x.png --num 9999999999": (
        "--num",
        "must be 1 to 1000000000, got 9999999999",
        "give a number in this range",
    ),
    "--run run --out x.png --classes 3,10": (
        "--classes",
        "must be 0 to 9, the classes of the run, got 10",
        "give numbers in this range",
    ),
    "--run run --out x.png --classes 0-99999999999999999": (
        "--classes",
        "must be 0 to 9, the classes of the run, got 99999999999999999",
        "give numbers in this range",
    ),
    "--run run --out x.png --classes 5-3": (
        "--classes",
        "must be a list of classes, got '5-3'",
        "such as 3,17,200-209",
    ),
    "--run run --out x.png --classes 3,": ("--classes", "must be a list of classes, got '3,'", "such as 3,17,200-209"),
    "--run run --out x.png --classes cat": (
        "--classes",
        "must be a list of classes, got 'cat'",
        "such as 3,17,200-209",
    ),
    "--run run --out x.png --classes=-1": ("--classes", "must be a list of classes, got '-1'", "such as 3,17,200-209"),
    "--run run --out x.png --classes 0-9 --num 9": (
        "--num",
        "must be at least 10, the number of classes, got 9",
        "--num 10 or more",
    ),
    "--run run --out x.png --batch 0": ("--batch", "must be 1 to 65536, got 0", "give a number in this range"),
    "--run run --out x.png --truncation -1": (
        "--truncation",
        "must be at least 0.02, got -1.0 (latents are resampled until",
        "give a number such as 0.8",
    ),
    "--run run --out x.png --truncation 0": (
        "--truncation",
        "must be at least 0.02, got 0.0 (latents are resampled until",
        "give a number such as 0.8",
    ),
    "--run run --out x.png --truncation 1e-9": (
        "--truncation",
        "must be at least 0.02, got 1e-09 (latents are resampled until",
        "give a number such as 0.8",
    ),
    "--run run --out x.png --truncation nan": (
        "--truncation",
        "must be at least 0.02, got nan (latents are resampled until",
        "give a number such as 0.8",
    ),
    "--run run --out x.png --seed -1": (
        "--seed",
        "must be 0 to 9223372036854775807, got -1",
        "give a number in this range",
    ),
    "--run run --out x.png --nimg 63": ("--nimg", "must be a saved checkpoint, got 63", "choose from 64"),
    "--run run --out run": ("--out", "must be a file, got 'run' (it is a directory)", "give the path of a file in it"),
    "--run run --out run/config.yaml": (
        "--out",
        "a path outside the run",
        "give a path outside the run",
    ),
    "--run run --files --out run/samples": (
        "--out",
        "'run/samples' belongs to the run run",
        "give a path outside the run",
    ),
    "--run run --files --out run/config.yaml": (
        "--out",
        "must be a directory, got 'run/config.yaml'",
        "give a directory that exists or can be made",
    ),
    "--run run --out no/x.png": (
        "--out",
        "must lie in a directory, got 'no/x.png' (that directory does",
        "make the directory first",
    ),
}

EXPORT: dict[str, tuple[str, ...]] = {
    "--run run --out x --format onnx": ("--out", "must end in .onnx with --format onnx, got 'x'", "give x.onnx"),
    "--run run --out x.onnx --format torch-export": ("--out", "must end in .pt2 with --format torch-", "give x.pt2"),
    "--run run --out x.pt2 --dtype bf16": (
        "--dtype",
        "must be fp32 with --format torch-export, got 'bf16' (a graph computes in float32)",
        "remove the option",
    ),
    "--run run --out x.pt2 --network discriminator": ("--format", "'torch-export' needs the generator", "safetensors"),
    "--run run --out x --format hub --network discriminator": ("--format", "'hub' needs the generator", "safetensors"),
    "--run run --out run/samples --format hub": ("--out", "'run/samples' belongs to the run", "a path outside the run"),
    "--run run --out run/config.yaml --format hub": ("--out", "must be a directory, got 'run/config.yaml'", "give a"),
    "--run run --out missing/x.pt2": ("--out", "must lie in a directory, got 'missing/x.pt2'", "make the directory"),
    "--run run --out x --format hub --no-standing --truncation 1": ("--truncation", "needs standing statistics", "add"),
    "--run missing --out x": (
        "--run",
        "must be a run directory, got 'missing' (it has no config.yaml)",
        "give the `out` of a run",
    ),
    "--run run --out x --network discriminator --ema": ("--ema", "which only the generator has", "use --live"),
    "--run run --out x --network discriminator --standing": (
        "--standing",
        "needs the generator, which alone has statistics",
        "remove the option",
    ),
    "--run run --out x --network discriminator --truncation 1": (
        "--truncation",
        "needs standing statistics",
        "remove the option, or add --standing",
    ),
    "--run run --out x --no-standing --truncation 1": (
        "--truncation",
        "needs standing statistics",
        "remove the option, or add --standing",
    ),
    "--run run --out x --truncation 0": (
        "--truncation",
        "must be at least 0.02, got 0.0 (latents are resampled until",
        "give a number such as 0.8",
    ),
    "--run run --out x --batch 0": ("--batch", "must be 1 to 65536, got 0", "give a number in this range"),
    "--run run --out x --nimg -1": ("--nimg", "must be a saved checkpoint, got -1", "choose from 64"),
    "--run run --out run": ("--out", "must be a file, got 'run' (it is a directory)", "give the path of a file in it"),
    f"--run run --out run/{RANK_FILE}": ("--out", "safetensors' belongs to the run run", "a path outside the run"),
    "--run run --out no/x": (
        "--out",
        "must lie in a directory, got 'no/x' (that directory does not",
        "make the directory first",
    ),
}


def test_the_run_itself_is_good(run, capsys):
    assert cli.main(["sample", "--run", "run", "--out", "x.png", "--num", "4", "--truncation", "0.8"]) == 0
    assert cli.main(["export", "--run", "run", "--out", "x.safetensors"]) == 0
    assert Image.open("x.png").size == (2 + 4 * 18, 2 + 18)
    assert Path("x.safetensors").stat().st_size > 1000
    assert {path.name for path in Path().iterdir()} == {"run", "x.png", "x.safetensors"}


@pytest.mark.parametrize("options", SAMPLE)
def test_sample(options, run, capsys):
    check(capsys, ["sample", *options.split()], *SAMPLE[options])


def test_classes_of_a_run_without_classes():
    with pytest.raises(UserError, match=r"^--classes: needs a run with classes; remove the option$"):
        sample.choose_columns(0, [range(1)], 100)


@pytest.mark.parametrize("command", ["sample", "export"])
def test_pipes_are_not_replaced(command, run, capsys):
    os.mkfifo("pipe")
    check(
        capsys,
        [command, "--run", "run", "--out", "pipe"],
        "--out",
        "must be a regular file, got 'pipe'",
    )
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize("options", EXPORT)
def test_export(options, run, capsys):
    check(capsys, ["export", *options.split()], *EXPORT[options])


def test_an_export_names_the_tensor_that_is_not_finite(run, capsys):
    """Of a checkpoint that an older version took."""
    network = build_network(tiny_recipe(Path()), "discriminator")
    initialize(network, seed=0)
    name = next(iter(network.state_dict()))
    with torch.no_grad():
        network.state_dict()[name].view(-1)[0] = torch.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "first_not_finite", lambda tensors: None)
        assert save(run / "checkpoints", 128, {"discriminator": whole(network)}, layout=LAYOUT)
    arguments = ["export", "--run", "run", "--out", "x", "--network", "discriminator"]
    check(
        capsys,
        arguments,
        "--run",
        f"'run' has a discriminator at 128 images with non-finite values in {name}",
        "--nimg",
    )


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


def empty_manifest(run: Path) -> None:
    (run / MANIFEST).write_text("[]")


def half_a_manifest(run: Path) -> None:
    manifest = json.loads((run / MANIFEST).read_text())
    del manifest["world_size"]
    (run / MANIFEST).write_text(json.dumps(manifest))


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
    (empty_manifest, NOT_COMPLETE),
    (half_a_manifest, NOT_COMPLETE),
    (overwrite_header, ("--run", "'run' contains only damaged checkpoints", "restore an intact copy")),
    (
        overwrite_header_and_checksum,
        (TAG, "is damaged: rank00000.safetensors: SafetensorError: Error while", "remove that directory"),
    ),
    (
        break_recipe,
        (
            "run/config.yaml",
            "must be a valid recipe (run/config.yaml: must be valid YAML: expected the",
            "fix or remove that file",
        ),
    ),
    (widen_recipe, (TAG, "lacks 10 elements of average/master/layers.0.", "use another checkpoint")),
    (
        narrow_recipe,
        (
            TAG,
            "elements of average/master/layers.0.",
            "must have 50 elements of average/master/layers.0.embedding.weight with this",
            "use another checkpoint",
        ),
    ),
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


DATA: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "missing": (["data.root=missing"], ("data.root", "'missing' does not exist", "give the directory with the images")),
    "a file": (["data.root=tiny.yaml"], ("data.root", "must be a directory, got 'tiny.yaml'", "give the directory")),
    "classes": (
        ["data.root=images"],
        ("data.num_classes", "must be 1 with this data, got 10 (images has 1 class folders", "num_classes=1,"),
    ),
    "no image": (
        ["data.root=run", "data.num_classes=0"],
        ("data.root", "'run' contains no images", "give a directory with"),
    ),
    "no such data set": (
        ["data.dataset=CIFAR11", "data.kind=torchvision", "data.root=images"],
        ("data.dataset", "must be a class of torchvision.datasets, got 'CIFAR11'", "did you mean CIFAR10?"),
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name, run, capsys):
    one_class()
    overrides, expected = DATA[name]
    kind = [] if "data.kind=torchvision" in overrides else ["data.kind=folder"]
    check(capsys, train_arguments("out=new", *kind, *overrides), *expected)
    assert not Path("new/config.yaml").exists()


def foreign_recipe() -> None:
    Path("run/config.yaml").write_text("service: {port: 80}\n")
    remove_checkpoints(Path("run"))


RESUME: dict[str, tuple[Callable[[], None], list[str], tuple[str, ...]]] = {
    "another batch": (
        lambda: None,
        ["batch=16"],
        (
            "batch",
            "must be 8, as in the run 'run', got 16",
            "accept it by --allow-change batch",
        ),
    ),
    "another seed": (
        lambda: None,
        ["seed=99"],
        ("seed", "must be 1, as in the run 'run', got 99", "or give another `out`"),
    ),
    "another network": (
        lambda: None,
        ["generator.channels=3", "--allow-change", "generator.channels"],
        (
            "generator.channels",
            "must be 2, as in the run 'run', got 3",
            "with init_from to keep the weights",
        ),
    ),
    "another precision": (
        lambda: None,
        ["engines.generator.ds_config=ds_configs/zero1_bf16.json"],
        (
            "engines.generator.precision",
            "must be 'fp32', as in the run 'run', got 'bf16'",
            "accept it by --allow-change engines.generator.precision",
        ),
    ),
    "no such key": (
        lambda: None,
        ["batch=16", "--allow-change", "bach"],
        ("--allow-change", "write a dotted key such as batch"),
    ),
    "weights of features": (
        lambda: None,
        ["metrics={names: [fid100], every_nimg: 64, features: {network: inception, weights: run}}", "out=new"],
        ("metrics.features.weights", "must be a file, got 'run'", "download https://"),
    ),
    "no run to begin with": (
        lambda: None,
        ["init_from.run=missing", "out=new"],
        ("init_from.run", "must be a run directory, got 'missing' (it has no config.yaml)", "give the `out` of a run"),
    ),
    "no such checkpoint to begin with": (
        lambda: None,
        ["init_from={run: run, nimg: 63}", "out=new"],
        ("init_from.nimg", "must be a saved checkpoint, got 63", "choose from 64"),
    ),
    "damaged": (
        lambda: truncate(Path("run")),
        [],
        ("run/checkpoints", "contains only damaged checkpoints", "restore an intact copy, or remove that"),
    ),
    "no recipe": (
        lambda: break_recipe(Path("run")),
        [],
        (
            "run/config.yaml",
            "must be a valid recipe (run/config.yaml: must be valid YAML:",
            "fix or remove that file",
        ),
    ),
    "somebody else's": (
        foreign_recipe,
        [],
        ("run/config.yaml", "must be a valid recipe (service: unknown key", "another directory"),
    ),
    "a file in the way": (
        lambda: None,
        ["out=run/config.yaml"],
        ("out", "must be a directory, got 'run/config.yaml'", "give a directory that exists or can be made"),
    ),
    "a file below": (
        lambda: None,
        ["out=run/config.yaml/run"],
        ("out", "must be a directory, got 'run/config.yaml/run'", "give a directory that can be made"),
    ),
    "nowhere": (
        lambda: None,
        ["out=/dev/null/run"],
        ("out", "must be a directory, got '/dev/null/run' (/dev/null is not a", "give a directory that can be made"),
    ),
    "unwritable": (lambda: None, ["out=/proc/run"], ("/proc/run", "cannot be written", "free some space")),
    "own checkpoints": (lambda: None, ["out=run/checkpoints"], ("out", "belongs to the run run", "a path outside")),
}


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

    monkeypatch.setattr(train, "_run", allocate)
    parts = (
        "can't allocate memory",
        "8 (generator), 4 (discriminator) images",
        "more micro-batches (accumulation=2)",
        "zero3.json",
    )
    check(capsys, train_arguments("engines.discriminator.accumulation=2"), "memory: ran out on rank 0", *parts)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(train, "_run", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        cli.main(train_arguments())


def run_out(*arguments: Any) -> None:
    torch.empty(2**52)


SAMPLE_REMEDY = "compute fewer images at a time (--batch 50), or fewer in all (--num)"
EXPORT_REMEDY = "compute fewer images at a time (--batch 50), or none (--no-standing)"
NO_MEMORY: dict[str, tuple[str, ...]] = {
    "sample": ("ran out with 100 images at a time and 7 in all: ", "can't allocate memory", f"; {SAMPLE_REMEDY}"),
    "sample --batch 1": ("ran out with 1 images at a time and 7 in all: ", "; use a machine with more memory, or"),
    "export": ("ran out while the generator was exported: ", "can't allocate memory", f"; {EXPORT_REMEDY}"),
    "export --no-standing": ("ran out while the generator was exported: ", "; use a machine with more memory"),
    "export --network discriminator": ("ran out while the discriminator was exported: ", "; use a machine with more"),
}


@pytest.mark.parametrize("command", NO_MEMORY)
def test_running_out_of_memory_without_training(command, run, monkeypatch, capsys):
    monkeypatch.setattr(sample, "_make_sheet", run_out)
    monkeypatch.setattr(export, "open_trained", run_out)
    name, *options = command.split()
    options += ["--num", "7"] if name == "sample" else []
    check(capsys, [name, *options, "--run", "run", "--out", "x"], "memory: ", *NO_MEMORY[command])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["refused by DeepSpeed", "corrupt images"])
def test_the_script(name, run):
    """With a real process group: what is met while engines are built, and in the first update."""
    arguments = train_arguments()
    if name == "corrupt images":
        one_class(readable=False)
        arguments += ["out=new", "data.kind=folder", "data.root=images", "data.num_classes=0", "data.max_corrupt=1"]
        arguments.append("data.num_workers=0")
        expected = (
            "data.max_corrupt: 1 unreadable images are allowed, data-parallel rank 0 has found 3 (the last is images/"
        )
    else:
        Path("ds.json").write_text('{"zero_optimization": {"stage": 3, "compute_grad_norm": false}}')
        arguments += ["out=new", "engines.generator.ds_config=ds.json"]
        expected = f"{Path('ds.json').absolute()}: is not valid for DeepSpeed: Value error, compute_grad_norm=false"
    before = contents(Path("run"))
    command = [sys.executable, str(REPOSITORY / "launch" / "train.py"), *arguments[1:]]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "bigsgan: " in line]
    assert line.startswith(f"bigsgan: {expected}")
    assert result.stderr.count(expected) == 1
    assert "Traceback" not in result.stderr
    assert contents(Path("run")) == before
