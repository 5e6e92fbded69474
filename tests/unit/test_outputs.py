"""Where commands write: never in the place of a device, a pipe or a run's own files, and with the user's umask."""

import json
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from bigsgan import cli, importing
from bigsgan.checkpoint import Description, Saver, SingleProcess
from bigsgan.config.data import Data
from bigsgan.config.run_directory import refuse_among_images, refuse_directory, refuse_foreign_metrics, refuse_output
from bigsgan.config.sections import Checkpoints
from bigsgan.data.prepare import prepare
from bigsgan.errors import UserError
from bigsgan.monitor.sinks import CSV
from bigsgan.runtime import atomic
from tests.preparing import origin


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Work in an empty directory beside what looks like a run."""
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoints/000000000064", "samples", "logs"):
        Path("run", name).mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "ds_generator.json", "checkpoints/000000000064/rank00000.safetensors"):
        Path("run", name).write_text("kept")
    return tmp_path


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)


def link_to_device(path):
    os.symlink(os.devnull, path)  # and not the device itself, which a test that fails would replace


SPECIAL = {"fifo": make_fifo, "socket": make_socket, "device": link_to_device}


@pytest.mark.parametrize("refuse", [refuse_output, refuse_directory])
@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_not_replaced(kind, refuse):
    SPECIAL[kind]("special")
    before = os.lstat("special")
    with pytest.raises(UserError, match=r"^--out: must be a (regular file|directory), got 'special'; give "):
        refuse(Path("special"), "--out")
    assert stat.S_IFMT(os.lstat("special").st_mode) == stat.S_IFMT(before.st_mode)


OWN = [
    "run/config.yaml", "run/metrics.jsonl", "run/metrics.csv", "run/wandb", "run/ds_generator.json", "run/.lock",
    "run/evaluations.jsonl",
    "run/pipeline_trace.json", "run/checkpoints/new", "run/checkpoints/000000000064/rank00000.safetensors",
    "run/checkpoints/000000000064/new.png", "run/samples/new.png", "run/logs/x", "run/samples/../checkpoints/x",
    "link/config.yaml", "shards/rank00000.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("refuse", [refuse_output, refuse_directory])
@pytest.mark.parametrize("path", OWN)
def test_a_runs_own_files_are_not_replaced(path, refuse):
    os.symlink("run", "link")
    os.symlink("run/checkpoints/000000000064", "shards")
    problem = "belongs to the run .*; give a path outside the run$"
    if refuse is refuse_directory:
        problem = f"({problem}|must be a directory, got )"
    with pytest.raises(UserError, match=f"^--out: (.* )?{problem}"):
        refuse(Path(path), "--out")


KINDS = {
    ".png": b"\x89PNG\r\n", ".gif": b"GIF89a", ".npz": b"PK\3\4", ".pt2": b"PK\3\4", ".onnx": b"\x08\x0a",
    ".safetensors": b"\x10\0\0\0\0\0\0\0{}", "trace.json": b' {\n    "schemaVersion": 1,',
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_not_replaced(kind):
    for content, may in ((KINDS[kind], True), (b"", True), (b"out: run\n", False), (b"\xff\xd8\xff\xe0", False)):
        Path("file").write_bytes(content)
        if may:
            refuse_output(Path("file"), kind=kind)
            continue
        with pytest.raises(UserError, match=f"^--out: must be a new file, or one that is a {kind} file already, got"):
            refuse_output(Path("file"), kind=kind)
        assert Path("file").read_bytes() == content


COMMANDS = {
    "sample --run run --out notes.png": "--out: must be a new file, or one that is a .png file already, got",
    "export --run run --out recipe.yaml": "--out: must be a new file, or one that is a .safetensors file already, got",
    "export --run run --out notes.pt2": "--out: must be a new file, or one that is a .pt2 file already, got",
    "bench profile --out traces": "--out: must be a new file, or one that is a trace.json file already, got",
    "data prepare images recipe.yaml --resolution 8 --format zip": "DST: 'recipe.yaml' exists, and was not made by",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_replaces_what_it_did_not_write(command, capsys):
    for name in ("recipe.yaml", "notes", "notes.png", "notes.npz", "notes.gif", "notes.pt2", "traces/trace.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("mine")
    Path("images").mkdir()
    Image.new("L", (8, 8)).save("images/a.png")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert cli.main(command.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"bigsgan: {COMMANDS[command]}")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_other_places_may_be_written():
    Path("other/samples").mkdir(parents=True)
    Path("other/config.yaml").write_text("of another program")
    Path("old.png").write_text("old")
    for path in ("new.png", "old.png", "run/grid.png", "other/samples/x.png", "other/metrics.jsonl"):
        refuse_output(Path(path))
    for path in ("new", "new/below", "other", "run/files", "run"):
        refuse_directory(Path(path), "--out")


@pytest.mark.parametrize("format", ["zip", "tar", "folder"])
def test_prepared_data_does_not_go_into_a_run(format):
    Path("images").mkdir()
    with pytest.raises(UserError, match=r"^DST: 'run/checkpoints/x' belongs to the run run; "):
        prepare(origin(Path("images")), Path("run/checkpoints/x"), format, 1)


def test_imported_weights_and_runs_do_not_replace_what_is_no_directory(capsys):
    make_fifo("fifo")
    with pytest.raises(UserError, match=r"^--out: must be a directory, got 'fifo'; "):
        importing.main("r3gan", Path("missing.pth"), None, Path("fifo"))
    for out, problem in (("fifo", "must be a directory, got 'fifo'"), ("run/checkpoints", "belongs to the run run")):
        assert cli.main(["train", "--dry-run", f"out={out}"]) == 2
        assert problem in capsys.readouterr().err
    assert cli.main(["bench", "profile", "--out", "fifo"]) == 2
    assert "--out: must be a directory, got 'fifo'" in capsys.readouterr().err


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_leaves(mask, mode):
    before = os.umask(mask)
    try:
        with atomic.replacing(Path("x.safetensors")) as unfinished:
            save_file({"x": torch.zeros(1)}, unfinished)
        atomic.write_text(Path("x.txt"), "text")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(os.stat(name).st_mode) for name in ("x.safetensors", "x.txt")] == [mode, mode]


def test_an_unfinished_file_is_not_written_through_a_link_or_into_a_pipe():
    Path("kept").write_text("kept")
    os.symlink("kept", "x.tmp")
    with pytest.raises(OSError, match=r"x\.tmp"):
        atomic.write_text(Path("x"), "new")
    assert Path("kept").read_text() == "kept"
    assert os.path.islink("x.tmp")
    make_fifo("y.tmp")
    with pytest.raises(OSError, match=r"y\.tmp"):
        atomic.write_text(Path("y"), "new")
    Path("z.tmp").write_text("left by a process that was killed")
    atomic.write_text(Path("z"), "new")
    assert Path("z").read_text() == "new"
    assert not Path("z.tmp").exists()


def test_metrics_of_another_program_are_not_cut():
    Path("out").mkdir()
    refuse_foreign_metrics(Path("out"))
    Path("out/metrics.jsonl").write_text("")  # as a run leaves it that is killed before its recipe is kept
    refuse_foreign_metrics(Path("out"))
    Path("out/metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(UserError, match=r"^out: must be a run directory or a new one, got 'out'"):
        refuse_foreign_metrics(Path("out"))
    refuse_foreign_metrics(Path("run"))
    Path("out/metrics.jsonl").rename("out/metrics.csv")
    refuse_foreign_metrics(Path("out"), ["tensorboard"])
    with pytest.raises(UserError, match=r"\(it has a metrics.csv and no"):
        refuse_foreign_metrics(Path("out"), ["csv"])


@pytest.mark.parametrize("out", ["images", "images/runs/new", "link/new"])
def test_a_run_does_not_begin_among_its_images(place, out):
    (place / "images").mkdir()
    (place / "link").symlink_to("images")
    with pytest.raises(UserError, match=r"^out: must lie outside data.root \(images\), got '.*sample grids would"):
        refuse_among_images(Path(out), Data(kind="folder", root="images"))
    pairs = Data(kind="paired_folders", root="other", input_root="images", resolution=256, num_classes=0)
    with pytest.raises(UserError, match=r"^out: must lie outside data.input_root \(images\)"):
        refuse_among_images(Path(out), pairs)
    refuse_among_images(Path("images-2/new"), Data(kind="folder", root="images"))
    refuse_among_images(Path("images/.runs/new"), Data(kind="folder", root="images"))  # which no listing has
    refuse_among_images(Path(out), Data(kind="tar", root="images"))  # which only reads shards there


@pytest.mark.parametrize(
    "content, is_ours",
    [
        ("", True),
        ("nimg,na", True),
        ("nimg,name,value\n", True),
        ("nimg,name,value\n8,loss,0.5\n", True),
        ("nimg,name,values\n", False),
        ("step,loss\n1,0.5\n", False),
    ],
)
def test_a_table_beside_a_recipe_is_a_run_s_or_stays(content, is_ours):
    Path("run/metrics.csv").write_text(content)
    refuse_foreign_metrics(Path("run"), ["tensorboard"])
    if is_ours:
        refuse_foreign_metrics(Path("run"), ["csv"])
        CSV(Path("run/metrics.csv"), 8).close()
        return
    with pytest.raises(UserError, match=r"^out: 'run' has a metrics.csv that no run wrote; move that file away, or"):
        refuse_foreign_metrics(Path("run"), ["csv"])


def test_a_save_removes_what_killed_saves_left_and_nothing_else():
    shutil.rmtree("run")
    directory = Path("run/checkpoints")
    left = ["000000000032.partial", "000000000016.old.partial", "000000000008.damaged.partial"]
    others = ["download.partial", "mine.old.partial", "32.partial.partial"]
    for name in left + others:
        (directory / name).mkdir(parents=True)
    (directory / "000000000001.partial").write_text("a file")
    saver = Saver(directory, SingleProcess(), Checkpoints(background=False))
    assert saver.save(64, {}, Description({}, {}, {}))
    assert json.loads((directory / "000000000064/manifest.json").read_text())["nimg"] == 64
    kept = {path.name for path in directory.iterdir()}
    assert kept == {*others, "000000000001.partial", "000000000064", "latest"}
