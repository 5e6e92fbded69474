"""Bad recipes and DeepSpeed files, and files that are none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bigsgan import cli
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.errors import UserError
from tests.bad_input import BOMB, RECIPE, check

pytestmark = pytest.mark.usefixtures("beside_a_recipe")

FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ("out", "must be given", "add it to the recipe")),
    "a key is missing": (RECIPE.replace("ema:", "# "), ("ema", "must be given", "add it to the recipe")),
    "a recursive anchor": (RECIPE + "engines: &e {generator: *e}\n", ("bad.yaml", "must be valid", "fix that line")),
    "an alias bomb": (RECIPE + BOMB, ("bad.yaml", "it holds more than 10000 values, aliases counted", "fix that line")),
    "a mapping that is a list": ("data: !!map [1, 2]\n", ("bad.yaml", "must be valid YAML: !!map", "fix that line")),
    "a number that is a list": ("batch: !!int [1, 2]\n", ("bad.yaml", "expected a scalar node, but", "fix that line")),
    "a large file": ("# " + "x" * 300_000 + "\n", ("--config", "larger than 256 KiB", "give a readable text file")),
    "a large key": ("k" * 500 + ": 1\n", ("k" * 400 + "...", "unknown key", "the keys of this section are")),
}


DEEPSPEED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "not JSON": ("{'stage': 1}", ("engines.generator.ds_config", "must be valid JSON, got", "fix the file")),
    "clipping": ({"gradient_clipping": 1.0}, ("{path}: gradient_clipping", "must be 0.0, as in the", "clip_norm")),
}


@pytest.mark.parametrize("name", FILES)
def test_recipe_files(name, capsys):
    text, expected = FILES[name]
    Path("bad.yaml").write_text(text)
    check(capsys, ["train", "--config", "bad.yaml"], *expected)


@pytest.mark.parametrize("kind", ["pipe", "device", "loop"])
def test_recipes_that_are_no_files(kind, capsys):
    if kind == "pipe":
        os.mkfifo("bad.yaml")
    else:
        os.symlink("/dev/zero" if kind == "device" else "bad.yaml", "bad.yaml")
    problem = "Too many levels of symbolic links" if kind == "loop" else "a pipe, socket or device, not a regular file"
    check(capsys, ["train", "--config", "bad.yaml"], "--config", problem, "give a readable text file")


def test_a_hostile_runs_recipe(capsys):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(RECIPE + BOMB)
    with pytest.raises(UserError, match=r"run/config.yaml: must be a valid recipe .* more than 10000 values"):
        read_saved_recipe(Path("run"))


def test_anchors_are_shared_within_bounds(capsys):
    Path("good.yaml").write_text(
        RECIPE.replace("generator: {lr: 2e-4", "generator: &o {lr: 2e-4").replace(
            "discriminator: {lr: 2e-4, betas: [0.0, 0.999]}", "discriminator: *o"
        )
    )
    assert cli.main(["train", "--config", "good.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("lr: 0.0002") == 2


def test_home_directories(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "recipe.yaml").rename(tmp_path / "home" / "recipe.yaml")
    (tmp_path / "home" / "ds.json").write_text("{}")
    overrides = ["out=~/x", "data.kind=folder", "data.root=~/data", "init_from={run: ~/other}"]
    overrides += ["engines.generator.ds_config=~/ds.json"]
    assert cli.main(["train", "--config", "~/recipe.yaml", "--dry-run", *overrides]) == 0
    printed = capsys.readouterr().out
    for line in (f"out: {tmp_path}/home/x", f"root: {tmp_path}/home/data", f"run: {tmp_path}/home/other"):
        assert line in printed
    assert "~" not in printed
    assert not Path("~").exists()


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_files(name, tmp_path, capsys):
    content, (field, *parts) = DEEPSPEED[name]
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    arguments = ["train", "--config", "recipe.yaml", "engines.generator.ds_config=ds.json"]
    check(capsys, arguments, field.format(path=path), *parts)


def test_reports_of_deepspeed_that_do_not_fit_the_recipe(tmp_path, capsys):
    path = tmp_path / "profiler.json"
    path.write_text('{"flops_profiler": {"enabled": true}}')
    arguments = ["train", "--config", "recipe.yaml", "engines.generator={ds_config: profiler.json, compile: layers}"]
    problem = "must be false with engines.generator.compile=layers, got true (it counts calls"
    check(capsys, arguments, f"{path}: flops_profiler.enabled", problem, "set engines.generator.compile=none to")
    for name, rest in (("one", ""), ("two", ', "debug": true')):
        Path(f"{name}.json").write_text(f'{{"comms_logger": {{"enabled": true{rest}}}}}')
    arguments = ["train", "--config", "recipe.yaml", "engines.generator.ds_config=one.json"]
    problem = f"must be that of {tmp_path}/one.json (both networks have one log)"
    field = f"{tmp_path}/two.json: comms_logger"
    check(capsys, [*arguments, "engines.discriminator.ds_config=two.json"], field, problem, "give both files the same")
    assert cli.main([*arguments, "engines.discriminator.ds_config=one.json", "--dry-run"]) == 0


def test_one_deepspeed_file_for_both_engines(capsys):
    assert cli.main(["train", "--dry-run", "--deepspeed", "--deepspeed_config", "zero2", "seed=7"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed.count("    ds_config: zero2") == 2
    assert "seed: 7" in printed
    assert cli.main(["train", "--dry-run", "--deepspeed_config=zero2", "engines.generator.ds_config=zero3"]) == 2
    assert capsys.readouterr().err.startswith("bigsgan: engines.generator.ds_config: must be given once")
