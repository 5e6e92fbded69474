"""The wheel, in an environment and a directory of its own; the packages that it needs are those of this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bigsgan import shipped
from bigsgan.cli import main
from tests import REPOSITORY


def test_recipes_are_known_by_name(capsys, tmp_path, monkeypatch):
    assert shipped.recipe_names() == sorted(path.stem for path in (REPOSITORY / "launch" / "recipes").iterdir())
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", "biggan128_imagenet", "--print", "total_nimg"]) == 0
    written = yaml.safe_load((REPOSITORY / "launch" / "recipes" / "biggan128_imagenet.yaml").read_text())
    assert int(capsys.readouterr().out) == written["total_nimg"]


def test_a_file_goes_before_a_recipe_of_its_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("digits").write_text(shipped.recipe("digits").read_text().replace("seed: 0", "seed: 192"))
    assert main(["train", "--config", "digits", "--print", "seed"]) == 0
    assert capsys.readouterr().out == "192\n"


@pytest.mark.parametrize("name", ["zero2_bf16", "zero2_bf16.json", "ds_configs/zero2_bf16.json"])
def test_deepspeed_files_are_known_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dry-run", f"engines.generator.ds_config={name}"]) == 0


def test_a_shell_completes_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    assert ended.value.code == 0
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    ask = f"{script}\nCOMP_WORDS=(bigsgan ex); COMP_CWORD=1; _shtab_bigsgan 2>/dev/null; echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", ask], text=True, capture_output=True).stdout.split() == ["export"]


def test_an_unknown_shell_is_refused(capsys):
    assert main(["--print-completion", "elvish"]) == 2
    assert "must be one of 'bash', 'zsh', 'tcsh', 'fish', 'powershell', got 'elvish'" in capsys.readouterr().err


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}


def docker_steps() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile, as keyword and rest."""
    text = (REPOSITORY / "launch" / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The bin directory of a virtual environment that the Dockerfile's commands make, but for those of apt-get."""
    place, source = tmp_path_factory.mktemp("package"), tmp_path_factory.mktemp("source")
    # Setuptools writes beside them.
    taken = ("bigsgan", "ds_configs", "launch", "LICENSE", "README.md", "pyproject.toml")
    subprocess.run(["cp", "-a", *taken, source], cwd=REPOSITORY, check=True)
    own = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {**plain_environment(), "PIP_NO_DEPS": "1", "PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}"}
    for keyword, rest in docker_steps():
        rest = rest.replace("/opt/bigsgan", str(place)).replace("/src", str(source))
        if keyword == "ENV":
            name, _, value = rest.partition("=")
            command = ["bash", "-c", f"echo {value}"]
            environment[name] = subprocess.check_output(command, env=environment, text=True).strip()
        if keyword == "RUN" and "apt-get" not in rest:
            subprocess.run(["bash", "-c", rest], check=True, timeout=300, env=environment)
        for packages in place.glob("lib/python*/site-packages"):
            (packages / "others.pth").write_text(f"{own}\n")  # behind its own
    return place / "bin"


EVERY_NAME = """
import contextlib
import io

from bigsgan.cli import main
from bigsgan.config import both_engines
from bigsgan.shipped import ROOT, recipe, recipe_names

for name in recipe_names():
    text, said = recipe(name).read_text(), io.StringIO()
    begins_with_a_run = "init_from: {run:" in text and "kind: digits" in text  # which is sought where data is there
    with contextlib.redirect_stderr(said):
        status = main(["train", "--dry-run", "--config", name])
    assert status == 2 * begins_with_a_run, name
    assert ("bigsgan: init_from.run: must be a run directory" in said.getvalue()) == begins_with_a_run, name
for path in (ROOT / "ds_configs").iterdir():
    files = both_engines(f"ds_config={path.stem}")
    assert main(["train", "--dry-run", *files]) == 0, path
"""


@pytest.mark.slow
def test_the_wheel_trains_in_an_empty_directory(installed, tmp_path):
    environment = plain_environment()
    environment["PATH"] = os.pathsep.join([str(installed), str(Path(sys.executable).parent), os.environ["PATH"]])

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    where = run(str(installed / "python"), "-c", "import bigsgan; print(bigsgan.__file__)")
    package = Path(where.strip()).parent
    assert package.is_relative_to(installed.parent)
    assert (package / "py.typed").is_file()
    assert (package / "shipped" / "slurm" / "job.sh").is_file()
    for room, original in (("recipes", REPOSITORY / "launch" / "recipes"), ("ds_configs", REPOSITORY / "ds_configs")):
        shipped_files = {path.name: path.read_bytes() for path in (package / "shipped" / room).iterdir()}
        assert shipped_files == {path.name: path.read_bytes() for path in original.iterdir()}
    printed = run(str(installed / "python"), "-c", EVERY_NAME)
    assert printed.count("\nout: runs/") + printed.startswith("out: runs/") == len(shipped.recipe_names()) - 2 + 14
    assert "_shtab_bigsgan" in run("bigsgan", "--print-completion", "zsh")
    assert run(str(installed / "python"), "-m", "bigsgan", "--version").startswith("bigsgan 0.")
    asked = ["engines.generator.ds_config=zero2_bf16", "data.kind=synthetic", "data.root=null"]
    assert "ds_config: zero2_bf16" in run("bigsgan", "train", "--dry-run", "--config", "biggan128_imagenet", *asked)
    assert "cheapest that fits: ZeRO" in run("bigsgan", "plan", "--gpus", "2", "--gpu-memory", "1")
    settings = ["report_nimg=64", "sample_nimg=128", "metrics=null"]
    assert "bigsgan train --config runs/digits/config.yaml" in run("bigsgan", "train", "total_nimg=128", *settings)
    run("deepspeed", "--no_python", "--num_gpus", "1", "bigsgan", "train", "total_nimg=192", *settings)
    rows = [json.loads(line) for line in (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()]
    assert [row["nimg"] for row in rows] == [64, 128, 192]
