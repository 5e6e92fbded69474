"""The commands of the README and of the guides as they stand there: each is parsed by the program that it names.

Those of the first run are run too, in a directory that holds what a clone does, with overrides behind them that make
the training short.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from deepspeed.launcher import runner
from PIL import Image
from safetensors import safe_open
from torch.distributed import run as torchrun

from bigsgan import cli
from bigsgan.commands import choosing, train
from bigsgan.config import load_recipe
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FIRST_RUN = (ROOT / "docs" / "tutorials" / "first-run.md").read_text()
IMPORTING = (ROOT / "docs" / "how-to" / "import-export.md").read_text()
GUIDES = [
    README,
    *(path.read_text() for kind in ("tutorials", "how-to") for path in (ROOT / "docs" / kind).glob("*.md")),
]
PROGRAMS = {"bigsgan", "deepspeed", "mkdocs", "pip", "pytest", "tensorboard", "torchrun"}
SHORT = ["total_nimg=64", "generator.channels=2", "discriminator.channels=2"]


def commands(page: str, inline: bool = False) -> list[list[str]]:
    """The words of every command in a shell block; if asked, also of those with arguments that stand in sentences."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [shlex.split(part) for line in lines for part in line.partition("#")[0].split("&&")]
    if inline:
        prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
        spans = [shlex.split(part) for text in re.findall(r"`([^`]+)`", prose) for part in text.split("&&")]
        found += [words for words in spans if words and words[0] in PROGRAMS and words[1:]]
    return [words for words in found if words]


COMMANDS = commands(README, inline=True)
FIRST = commands(FIRST_RUN)
GUIDED = {shlex.join(words): words for page in GUIDES for words in commands(page)}
TRAINING = [words for words in GUIDED.values() if "launch/train.py" in words]
TWO_RANKS = [words for words in FIRST if "launch/train.py" in words and "2" in words]
OURS = [words[words.index("bigsgan") + 1 :] for words in GUIDED.values() if "bigsgan" in words]


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A directory that may be written, and in which the README's paths exist as they do in a clone."""
    for name in ("launch", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def execute(words: list[str]) -> str:
    """Run a command with this interpreter's programs, and return what it printed."""
    program, *rest = words
    if program in ("deepspeed", "torchrun"):
        rest = ["--master_port", str(free_port()), *rest]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([program, *rest], env={**os.environ, "PATH": path}, timeout=300, **pipes)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_commands_are_found():
    assert {words[0] for words in COMMANDS + FIRST} == PROGRAMS
    assert [words[0] for words in COMMANDS[:4]] == ["pip", "deepspeed", "pip", "pytest"]
    assert FIRST[:2] == COMMANDS[:2]
    assert len(TRAINING) > 10
    assert len(TWO_RANKS) == 2
    assert len(OURS) > 30
    assert ["tensorboard", "--logdir", "runs"] in FIRST
    assert not any("\\" in word for words in GUIDED.values() for word in words)


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_launchers_and_our_parser_take_the_arguments(words, clone, monkeypatch, capsys):
    launcher, *rest = words
    if launcher == "deepspeed":
        options = runner.parse_args(rest)
        script, overrides, num_ranks = options.user_script, options.user_args, max(options.num_gpus, 1)
    else:
        options = torchrun.parse_args(rest)
        script, overrides, num_ranks = options.training_script, options.training_script_args, options.nproc_per_node
    assert Path(script).samefile(ROOT / "launch" / "train.py")
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    if any(word.startswith("runs/") for word in overrides):  # the recipe of an import that is not made here
        assert choosing.parse(["train", *overrides]).overrides
        return
    monkeypatch.setattr(train, "_check", lambda plan, options: None)  # the guides' data is not here
    assert cli.main(["train", *overrides, "--dry-run"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    for override in overrides:
        key, is_override, value = override.partition("=")
        if is_override:
            found = functools.reduce(operator.getitem, key.split("."), recipe)
            assert found == yaml.safe_load(value) or (key.endswith(".ranks") and value == "auto" and found > 0)


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_our_parser_and_recipes_take_the_arguments(words, clone):
    options = choosing.parse(words[: words.index(">")] if ">" in words else words)
    if "overrides" in options and words[0] not in ("evaluate", "data"):
        config = Path(options.config or "launch/recipes/digits.yaml")
        load_recipe(config if config.exists() else Path("launch/recipes/digits.yaml"), options.overrides)


def test_what_pip_is_asked_to_install_exists():
    _, _, optional = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")
    extras = re.findall(r"^(\w+) = \[$", optional.partition("\n[")[0], re.MULTILINE)
    for words in [*COMMANDS, *GUIDED.values()]:
        if words[0] == "pip":
            assert words[1:3] == ["install", "-e"]
            assert words[3] in {".", *(f".[{extra}]" for extra in extras)}


@pytest.mark.slow
def test_a_dry_run_prints_what_was_overridden(clone):
    (words,) = [words for words in FIRST if "--dry-run" in words]
    printed = yaml.safe_load(execute(words))
    overrides = [word.partition("=") for word in words if "=" in word]
    assert overrides
    assert all(printed[key] == yaml.safe_load(value) for key, _, value in overrides)
    assert list(clone.glob("runs")) == []


@pytest.mark.slow
def test_train_look_sample_and_export(clone, capsys):
    printed = execute([*COMMANDS[1], *SHORT])
    assert "training: images 0 to 64, " in printed
    assert "done: 64 images" in printed
    (tensorboard,) = [words for words in FIRST if words[0] == "tensorboard"]
    assert "loss/generator" in execute([*tensorboard, "--inspect"])  # which ends, where the server does not
    rest = [words for words in FIRST if words[0] == "bigsgan" and "--dry-run" not in words]
    rest += [words for words in commands(IMPORTING) if words[:2] == ["bigsgan", "import"] or "universal" in words]
    rest = [words for words in rest if "sit" not in words]  # whose file test_weights_sit.py writes
    assert {words[1] for words in rest} == {"plan", "sample", "evaluate", "export", "import"}
    shutil.copy(ROOT / "tests" / "data" / "stylegan2" / "snapshot.pkl", clone / "ffhq.pkl")
    for words in rest:
        assert cli.main(words[1:]) == 0
        if words[1] == "plan":
            printed = {"--pipeline": "expected bubble", "--gpu-memory": "cheapest that fits"}
            (expected,) = [text for flag, text in printed.items() if flag in words] or ["parameters"]
            assert expected in capsys.readouterr().out
            continue
        if words[1] == "evaluate":
            names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[-5:-1]]
            assert names == ["fid2k", "kid2k", "pr2k_precision", "pr2k_recall"]
            continue
        out = words[words.index("--out") + 1]
        if words[1] == "sample":
            num = int(words[words.index("--num") + 1])
            image = Image.open(out)
            if out.endswith(".gif"):
                frames = int(words[words.index("--interpolate") + 1])
                assert (image.n_frames, image.size) == (frames, (num * 18 + 2, 20))
            else:
                assert image.size == (10 * 18 + 2, num // 10 * 18 + 2)
        elif words[1] == "import":
            assert (clone / out / "config.yaml").exists()
        elif "universal" in words:
            assert (clone / out / "latest_universal").exists()
        else:
            with safe_open(out, framework="pt") as file:
                header = file.metadata()
            network = "discriminator" if "discriminator" in words else "generator"
            assert (header["network"], header["nimg"]) == (network, "64")
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="deepspeed starts no two ranks on a single GPU")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=words[0], marks=pytest.mark.slow if words[0] == "deepspeed" else pytest.mark.nightly)
        for words in TWO_RANKS
    ],
)
def test_two_ranks(words, clone):
    execute([*words, *SHORT])
    (out,) = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    manifest = json.loads((clone / out / "checkpoints/000000000064/manifest.json").read_text())
    assert (manifest["world_size"], manifest["nimg"]) == (2, 64)


def test_the_example_of_bad_input(capsys):
    (line,) = [line for line in FIRST_RUN.splitlines() if line.startswith("bigsgan: ")]
    assert cli.main(["train", "bathc=3"]) == 2
    assert capsys.readouterr().err == f"{line}\n"
