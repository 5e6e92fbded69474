"""Sweep files: a line of overrides for each task of a job array."""

from __future__ import annotations

import os

import pytest
import yaml

from bigsgan import cli
from bigsgan.config.sweep import own_overrides, read_sweep
from bigsgan.errors import UserError
from tests.tiny import tiny_recipe

TEXT = """\
# what's compared

out=first seed=11
out='second run' "generator={channels: 4, latent_size: 12}"   # it's wider
   # out=never
out=runs/a#b seed=13
"""


@pytest.fixture
def sweep(tmp_path):
    path = tmp_path / "sweep.txt"
    path.write_text(TEXT)
    return path


def test_lines_are_quoted_and_commented(sweep):
    assert read_sweep(sweep) == [
        ["out=first", "seed=11"],
        ["out=second run", "generator={channels: 4, latent_size: 12}"],
        ["out=runs/a#b", "seed=13"],
    ]


def test_a_task_has_its_line_before_the_overrides_of_all(sweep, tmp_path, monkeypatch, capsys):
    tiny_recipe(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    command = ["train", "--config", str(tmp_path / "tiny.yaml"), "--sweep", str(sweep)]
    assert cli.main([*command, "--dry-run", "batch=16"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert (recipe["out"], recipe["seed"], recipe["batch"]) == ("runs/a#b", 13, 16)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert cli.main([*command, "--print", "out"]) == 0
    assert capsys.readouterr().out == "second run\n"


@pytest.mark.parametrize(
    "task, message",
    [
        ("4", "has 3 lines of overrides, none for task 4; submit with `sbatch --array 1-3`"),
        ("", "needs a task of a job array; submit with `sbatch --array 1-3`"),
    ],
)
def test_a_task_without_a_line(sweep, task, message):
    with pytest.raises(UserError) as caught:
        own_overrides(sweep, {"SLURM_ARRAY_TASK_ID": task})
    assert str(caught.value) == (f"--sweep: '{sweep}' {message}" if task else f"--sweep: {message}")


@pytest.mark.parametrize("task", ["1" * 5000, "١", "-1", "1 "])
def test_a_number_of_a_task_that_is_none(sweep, task):
    with pytest.raises(UserError, match=r"none for task .*; submit with `sbatch --array 1-3`"):
        own_overrides(sweep, {"SLURM_ARRAY_TASK_ID": task})


@pytest.mark.parametrize(
    "text, message",
    [
        ("out=a\nout='b\n", ":2' cannot be split: No closing quotation; close the quotes"),
        ("# out=a\n\n", "' has no line of overrides; write a line for each task"),
        (None, "' cannot be read: "),
    ],
)
def test_a_file_that_is_not_in_order(tmp_path, text, message):
    path = tmp_path / "sweep.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_sweep(path)
    assert str(caught.value).startswith(f"--sweep: '{path}{message}")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "large"])
def test_a_file_without_an_end_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("out=a\n" * 1_000_000)
    with pytest.raises(UserError, match=r"--sweep: .* cannot be read: .*; give a text file"):
        read_sweep(tmp_path / name)


def test_a_copy_takes_the_place_of_the_data(sweep, tmp_path, monkeypatch, capsys):
    """Though the sweep's line, or the command line, names the data too, of which a line tells."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lines.txt").write_text("data.kind=folder data.root=/shared/images\n")
    arguments = ["train", "--print", "data.root", "--data-root", "~/copy", "--sweep", "~/lines.txt"]
    assert cli.main(arguments) == 0
    told = f"no effect with --data-root {tmp_path}/copy: data.root=/shared/images\n"
    assert capsys.readouterr() == (f"{tmp_path}/copy\n", told)
    command = ["train", "--print", "data.root", "--data-root", "x"]
    for data in (["data.kind=folder", "data.root=/images"], ["data={kind: folder, root: /images}"]):
        assert cli.main([*command, *data]) == 0
        assert capsys.readouterr() == ("x\n", "no effect with --data-root x: data.root=/images\n")
    for others in ([], ["data.root=x"]):
        assert cli.main([*command, "data.kind=folder", *others]) == 0
        assert capsys.readouterr() == ("x\n", "")


@pytest.mark.parametrize("root", ["/copy #1", "/a: b", "123", "~", "[x", "/größe 😀"])
@pytest.mark.parametrize("given", ["data.root=/shared", "data.root = /shared", "data.num_classes=0"])
def test_a_copy_may_have_any_name(root, given, capsys):
    command = ["train", "--print", "data.root", "data.kind=folder", "--data-root", root, given]
    assert cli.main(command) == 0
    assert capsys.readouterr().out == f"{os.path.expanduser(root)}\n"


def test_a_key_that_cannot_be_printed(tmp_path, capsys):
    tiny_recipe(tmp_path)
    assert cli.main(["train", "--config", str(tmp_path / "tiny.yaml"), "--print", "data"]) == 2
    assert "must be a key of the recipe with a value, got 'data'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, message",
    [
        ("seed=a", "bigsgan: seed: must be an integer, got 'a' (line 3 of sweep.txt); write an integer"),
        ("batch=63 accumulation=2", "(2 micro-batches on 1 rank for the generator; line 3 of sweep.txt); set batch="),
        ("data.knd=zip", "bigsgan: data.knd: unknown key (line 3 of sweep.txt); did you mean data.kind?"),
    ],
)
def test_a_mistake_in_a_line_names_it(tmp_path, monkeypatch, capsys, line, message):
    tiny_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.txt").write_text(f"# one\nout=a\n{line}\n")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    for command in (["train", "--dry-run"], ["submit", "--tasks-per-node", "1", "--dry-run"]):
        assert cli.main([*command, "--config", "tiny.yaml", "--sweep", "sweep.txt"]) == 2
        found = capsys.readouterr().err
        assert message in found
        assert "line 3 of sweep.txt" in found
