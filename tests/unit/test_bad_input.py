"""Bad input: exit status 2, one line that names the field, the value and the remedy, and nothing on disk harmed.

Here is what is found out before torch is imported; test_bad_runs.py has the rest.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bigsgan import cli, errors
from bigsgan.commands import choosing
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.errors import UserError
from tests import REPOSITORY

RECIPE = """
out: run
total_nimg: 1000
batch: 64
report_nimg: 100
sample_nimg: 100
checkpoint_nimg: 100
data: {kind: digits, resolution: 16}
generator: {channels: 4, latent_size: 60}
discriminator: {channels: 4}
optimizer:
  generator: {lr: 2e-4, betas: [0.0, 0.999]}
  discriminator: {lr: 2e-4}
ema: {half_life_nimg: 10}
"""

BOMB = "a0: &a0 [1, 1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}, *a{i}]\n" for i in range(29))


class WentOnError(AssertionError):
    """The command would have gone on."""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Work in an empty directory, with a recipe, without a launcher and without a way past the checks."""

    def go_on(name: str, import_module: Any = importlib.import_module) -> Any:
        if name == "bigsgan.commands.choosing":
            return import_module(name)
        raise WentOnError(f"{name} was imported")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib, "import_module", go_on)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def check(capsys, arguments: list[str], field: str, *parts: str) -> None:
    before = sorted(Path().iterdir())
    assert cli.main(arguments) == 2
    printed, message = capsys.readouterr()
    assert printed == ""
    (line,) = message.splitlines()
    assert line.startswith(f"bigsgan: {field}: "), line
    problem, _, remedy = line.partition("; ")
    for part in parts[:-1]:
        assert part in problem, line
    assert parts[-1] in remedy, line
    assert "Traceback" not in line
    assert sorted(Path().iterdir()) == before


# Overrides -> the field, what the message says of its value, and words of the remedy.
OVERRIDES: dict[str, tuple[str, ...]] = {
    "bathc=64": ("bathc", "64 is given for a key that does not exist", "did you mean batch?"),
    "lr=1": ("lr", "1 is given", "did you mean optimizer.generator.lr or optimizer.discriminator.lr?"),
    "optimizer.generator.learning_rate=1": ("optimizer.generator.learning_rate", "1 is given", "known keys here: kind"),
    "data.colour=red": ("data.colour", "'red' is given for a key", "known keys here: kind, root"),
    "batch=sixty": ("batch", "'sixty' is not an integer", "write an integer such as 64"),
    "batch='64'": ("batch", "'64' is not an integer", "write an integer"),
    "batch=64.5": ("batch", "64.5 is not an integer", "write an integer"),
    "total_nimg=1e6": ("total_nimg", "1000000.0 is not an integer", "write 1000000"),
    "batch=true": ("batch", "True is not an integer", "write an integer"),
    "batch=0": ("batch", "0 is too small", "give more than 0"),
    "batch=-64": ("batch", "-64 is too small", "give more than 0"),
    "batch=": ("batch", "null is not an integer", "write an integer"),
    "batch={size: 64}": ("batch", "is a section where a value belongs", "write the value alone"),
    "batch.size=64": ("batch.size", "64 goes below batch, which is a value", "override batch itself"),
    "accumulation=3": ("batch", "64 does not divide into 3 micro-batches on 1 ranks", "such as batch=66"),
    "engines.discriminator.accumulation=128": ("batch", "64 does not divide into 128", "such as batch=128"),
    "seed=-1": ("seed", "-1 is too small", "give at least 0"),
    "seed=9223372036854775808": ("seed", "9223372036854775808 is too large", "give at most 9223372036854775807"),
    f"seed={'9' * 400}": ("seed", "999... is too large", "give at most 9223372036854775807"),
    f"seed={'9' * 5000}": ("seed", "is not a YAML value", "quote it or mend it"),
    "batch=1048577": ("batch", "1048577 is too large", "give at most 1048576"),
    "batch=9223372036854775807": ("batch", "is too large", "give at most 1048576"),
    "data.resolution=4611686018427387904": ("data.resolution", "is too large", "give at most 16384"),
    "data.crop_from=4611686018427387904": ("data.crop_from", "is too large", "give at most 16384"),
    "data={kind: synthetic, num_images: 4611686018427387904}": ("data.num_images", "is too large", "most 100000000"),
    "data.prefetch=4611686018427387904": ("data.prefetch", "is too large", "give at most 1024"),
    "objective.d_steps=4611686018427387904": ("objective.d_steps", "is too large", "give at most 1000"),
    "hang_timeout_seconds=9223372036854775807": ("hang_timeout_seconds", "is too large", "give at most 100000000"),
    "generator={family: stylegan2, half_resolutions: 4611686018427387904}": (
        "generator.half_resolutions", "is too large", "give at most 16",
    ),
    "discriminator={family: pix2pix, depth: 4611686018427387904}": ("discriminator.depth", "is too large", "most 64"),
    "out=~nobody_of_that_name/x": ("out", "names a home directory that does not exist (~nobody", "the whole path"),
    "data.root=~nobody_of_that_name": ("data.root", "names a home directory that does not", "write the whole path"),
    "engines.generator.ds_config=~nobody_of_that_name/x": ("engines.generator.ds_config", "names a home", "whole path"),
    f"a={BOMB.partition(': ')[2]}": ("a", "is not a YAML value", "quote it or mend it"),
    "{0: &a [1,1], b: [*a, *a]}": ("override", "is not of the form", "write it like"),
    "batch=!!map [1]": ("batch", "is tagged as a mapping and is none", "quote it or mend it"),
    "batch=\x1b[31m": ("batch", "'\\x1b[31m' is not a YAML value", "quote it"),
    "out=\udcff": ("out", "'\\udcff' is not a YAML value", "quote it or mend it"),
    "\x1b[2J=1": ("\\x1b[2J", "1 is given for a key that does not exist", "known keys here"),
    "out=": ("out", "null is not a string", "write text"),
    "out=''": ("out", "'' is no directory", "give the run directory, such as out=runs/digits"),
    "out=5": ("out", "5 is not a string", "in quotes"),
    'out="a\\0b"': ("out", "is no directory", "give the run directory"),
    "data=": ("data", "null is not a section", "write its keys below it"),
    "data=folder": ("data", "'folder' is not a section", "write its keys below it"),
    "data.kind=imagenet": ("data.kind", "'imagenet' is none of the choices", "choose from 'digits', 'folder'"),
    "data.kind=folder": ("data.root", "is missing: kind folder reads from it", "give the directory"),
    "data={kind: torchvision, root: x}": ("data.dataset", "is missing: kind torchvision needs it", "such as CIFAR10"),
    "data.image_channels=3": ("data.image_channels", "3 but the digits are grey", "set data.image_channels=1"),
    "data.image_channels=2": ("data.image_channels", "2 is neither grey nor colour", "set 1 for grey or 3 for colour"),
    "data.image_channels=true": ("data.image_channels", "True is not an integer", "write an integer"),
    "data.num_classes=1000": ("data.num_classes", "1000 but there are 10 digits", "set 10, or 0"),
    "data.resolution=48": ("data.resolution", "48 is none of BigGAN's [16, 32,", "set data.resolution=64"),
    "data.resolution=16.0": ("data.resolution", "16.0 is not an integer", "write 16"),
    "data.crop_from=16": ("data.crop_from", "16 leaves no place to choose for a square", "raise it"),
    "data.horizontal_flip=1": ("data.horizontal_flip", "1 is not true or false", "write true or false"),
    "data.horizontal_flip=yes": ("data.horizontal_flip", "'yes' is not true or false", "write true or false"),
    "data.num_workers=100000": ("data.num_workers", "100000 is too large", "give at most 256"),
    "generator.family=progan": ("generator.family", "'progan' is none of the choices", "choose from 'biggan'"),
    "generator.channels=1000000000": ("generator.channels", "1000000000 is too large", "give at most 65536"),
    "generator.latent_size=61": ("generator.latent_size", "61 does not divide into 3 chunks", "latent_size=60 or"),
    "generator.attention=8": ("generator.attention", "8 is not a list", "write a list"),
    "generator.attention=[64]": ("generator.attention", "[64] names a feature map of 64", "choose from [8, 16]"),
    "generator.attention=[8.0]": ("generator.attention.0", "8.0 is not an integer", "write 8"),
    "discriminator.attention=[8, 8]": ("discriminator.attention", "[8, 8] names a resolution twice", "name each once"),
    "objective.loss=hing": ("objective.loss", "'hing' is none of the choices", "choose from 'hinge'"),
    "objective.r1=10": ("objective.r1", "10 is not a section", "write its keys below it"),
    "objective.r1={every: 2}": ("objective.r1.weight", "is missing", "add it to the recipe"),
    "objective.r1={wieght: 2}": ("objective.r1.wieght", "2 is given for a key", "did you mean objective.r1.weight?"),
    "optimizer.generator.lr=0": ("optimizer.generator.lr", "0 is too small", "give more than 0"),
    "optimizer.generator.lr=.inf": ("optimizer.generator.lr", "inf is not finite", "write a finite number"),
    "optimizer.generator.lr=.nan": ("optimizer.generator.lr", "nan is not finite", "write a finite number"),
    "optimizer.generator.lr='1e-4'": ("optimizer.generator.lr", "'1e-4' is not a number", "a number such as 1e-4"),
    "optimizer.generator.lr=true": ("optimizer.generator.lr", "True is not a number", "write a number"),
    "optimizer.generator.betas=[0.0]": ("optimizer.generator.betas", "[0.0] has too few entries", "give at least 2"),
    "optimizer.generator.betas=[1.0, 0.9]": ("optimizer.generator.betas.0", "1.0 is too large", "give less than 1"),
    "optimizer.generator.betas=0.9": ("optimizer.generator.betas", "0.9 is not a list", "such as [0.0, 0.999]"),
    "optimizer.generator.kind=lamb": ("optimizer.generator.kind", "'lamb' is none of", "'adam', 'sgd' or 'rmsprop'"),
    "optimizer.generator.momentum=0.9": ("optimizer.generator.momentum", "0.9 is not used by adam", "betas, or"),
    "optimizer.generator.final_lr=1e-5": ("optimizer.generator.final_lr", "1e-05 is not used by", "linear or cosine"),
    "optimizer.generator.final_beta2=0.99": ("optimizer.generator.final_beta2", "where decay is constant", "cosine"),
    "optimizer.generator.decay_nimg=9": ("optimizer.generator.decay_nimg", "9 is not used where decay is", "cosine"),
    "optimizer.generator={lr: 1, kind: sgd, decay: linear, final_beta2: 0.9}": (
        "optimizer.generator.final_beta2", "0.9 is not used by sgd", "set optimizer.generator.kind=adam",
    ),
    "optimizer.generator={lr: 1, decay: cosine, warmup_nimg: 9, decay_nimg: 9}": (
        "optimizer.generator.decay_nimg", "9 is not after the warm-up of 9 images", "raise it, or lower",
    ),
    "objective.r1={weight: 1, decay_nimg: 9}": (
        "objective.r1.decay_nimg", "9 is not used by a constant weight", "give objective.r1.final_weight",
    ),
    "optimizer.generator.warmup_nimg=1000": ("optimizer.generator.warmup_nimg", "1000 reaches total_nimg", "shorten"),
    "optimizer=": ("optimizer", "null is not a section", "write its keys below it"),
    "engines.generator.ds_config=ds_configs/none.json": (
        "engines.generator.ds_config", "'ds_configs/none.json' does not exist", "give the path of a DeepSpeed JSON",
    ),
    "engines.generator.ds_config=.": ("engines.generator.ds_config", "'.' does not exist", "give the path"),
    "engines.generator.stages=2": ("engines.generator.stages", "2 is given", "known keys here: ds_config"),
    "engines.generator.pipeline_stages=0": ("engines.generator.pipeline_stages", "0 is too small", "give more than 0"),
    "engines.generator.pipeline_stages=2": (
        "engines.generator.pipeline_stages", "2 times data-parallel ranks is to give the 1", "a multiple of 2 ranks",
    ),
    "engines.generator.partition=time": ("engines.generator.partition", "'time' is none of", "'profile'"),
    "pipeline.generator_phase=hold": ("pipeline.generator_phase", "'hold' is none of", "'keep'"),
    "pipeline.schedule=gpipe": ("pipeline.schedule", "'gpipe' is none of", "'joint'"),
    "sample_statistics=none": ("sample_statistics", "'none' is none of", "'running'"),
    "batch": ("override", "'batch' is not of the form", "write it like optimizer.generator.lr=1e-4"),
    "=64": ("override", "'=64' is not of the form", "write it like"),
    "my.yaml": ("override", "'my.yaml' is not of the form", "write --config my.yaml"),
    "data.root=[1,": ("data.root", "'[1,' is not a YAML value", "quote it or mend it"),
    "data.root=!!python/name:os.system x": ("data.root", "is not a YAML value", "quote it or mend it"),
}  # fmt: skip

SEVERAL: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "twice": (["batch=64", "seed=1", "batch=32"], ("batch", "32 is given twice", "give each override once")),
    "around an option": (["batch=64", "--dry-run", "batch=32"], ("batch", "32 is given twice", "each override once")),
    "a section after its key": (["data.kind=digits", "data={}"], ("data", "{} undoes data.kind", "before data.kind")),
    "relativistic": (
        ["objective.loss=relativistic", "engines.generator.accumulation=2"],
        ("objective.loss", "'relativistic' pairs each fake with a real", "remove accumulation from engines.generator"),
    ),
    "reuse_fakes": (
        ["objective.reuse_fakes=true", "engines.generator.accumulation=2"],
        ("objective.reuse_fakes", "True needs the same micro-batches", "remove accumulation from engines.generator"),
    ),
    "r1 and r2": (
        ["objective.r1={weight: 1, every: 2}", "objective.r2={weight: 1}"],
        ("objective.r2", "'exact, every 1' differs from objective.r1 (exact, every 2)", "give both the same form"),
    ),
}  # fmt: skip

FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ("out", "is missing", "add it to the recipe")),
    "a key is missing": (RECIPE.replace("ema:", "# "), ("ema", "is missing", "add it to the recipe")),
    "a key is misspelt": (RECIPE.replace("batch:", "bathc:"), ("bathc", "64 is given", "did you mean batch?")),
    "a key stands twice": (
        RECIPE + "seed: 1\nseed: 2\n",
        ("bad.yaml", "key 'seed' stands twice (line", "mend that line"),
    ),
    "a list": ("- out: run\n", ("bad.yaml", "[{'out': 'run'}] is no mapping", "write `key: value` lines")),
    "no YAML": ("out: [\n", ("bad.yaml", "is not valid YAML", "mend that line")),
    "a recursive anchor": (
        RECIPE + "engines: &e {generator: *e}\n",
        ("bad.yaml", "is not valid YAML: an anchor holds an alias of itself (line 15", "mend that line"),
    ),
    "an alias bomb": (
        RECIPE + BOMB,
        ("bad.yaml", "it holds more than 10000 values, aliases counted each time", "mend that line"),
    ),
    "an alias bomb as a key": (
        RECIPE + BOMB + "? *a29\n: 1\n",
        ("bad.yaml", "it holds more than 10000 values, aliases counted each time", "mend that line"),
    ),
    "a mapping that is a list": ("data: !!map [1, 2]\n", ("bad.yaml", "is tagged as a mapping and is none", "mend")),
    "a number that is a list": ("batch: !!int [1, 2]\n", ("bad.yaml", "expected a scalar node, but found seq", "mend")),
    "a number that is a mapping": ("batch: !!float {a: b}\n", ("bad.yaml", "expected a scalar node", "mend")),
    "true that is a list": ("batch: !!bool [true]\n", ("bad.yaml", "expected a scalar node", "mend")),
    "a large file": ("# " + "x" * 300_000 + "\n", ("--config", "larger than 256 KiB", "give a readable text file")),
    "a large key": ("k" * 500 + ": 1\n", ("k" * 400 + "...", "1 is given for a key that does not", "known keys here")),
}

DEEPSPEED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "not JSON": ("{'stage': 1}", ("engines.generator.ds_config", "ds.json' is not valid JSON", "mend the file")),
    "optimizer": (
        {"optimizer": {}},
        ("{path}: optimizer", "{} is set there, but the recipe owns it", "use optimizer.gen"),
    ),
    "batch": (
        {"train_batch_size": 32},
        ("{path}: train_batch_size", "32 contradicts the recipe", "the recipe's batch"),
    ),
    "clipping": ({"gradient_clipping": 1.0}, ("{path}: gradient_clipping", "1.0 contradicts the recipe", "clip_norm")),
    "misspelt": (
        {"zero_optimisation": {}},
        ("{path}: zero_optimisation", "{} is given", "did you mean zero_optimization?"),
    ),
    "stage": (
        {"zero_optimization": {"stage": 7}},
        ("{path}: zero_optimization.stage", "7 is no ZeRO stage", "0, 1, 2 or 3"),
    ),
    "fp16": (
        {"fp16": {"enabled": True}},
        ("{path}: fp16.enabled", "True does not train at ZeRO stage 0", "stage to 1"),
    ),
    "offload": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        ("{path}: zero_optimization.offload_param.device", "'cpu' needs ZeRO stage 3", "zero_optimization.stage to 3"),
    ),
}

COMMANDS: dict[str, tuple[str, ...]] = {
    "": ("COMMAND", "is missing", "see `bigsgan --help`"),
    "trian": ("COMMAND", "'trian' is none of the choices", "choose from"),
    "train --confg x": ("--confg", "is no option of `bigsgan train`", "see `bigsgan train --help`"),
    "train --lr=1": ("--lr", "is no option of `bigsgan train`", "see `bigsgan train --help`"),
    "train --config": ("--config", "expected one argument", "see `bigsgan train --help`"),
    "train --config missing.yaml": (
        "--config",
        "'missing.yaml' does not exist",
        "give its path",
    ),
    "train --config .": ("--config", "'.' cannot be read", "give a readable text file"),
    "train --dry-run --config missing.yaml": (
        "--config",
        "'missing.yaml' does not exist",
        "give its path",
    ),
    "train batch=63 --local_rank=0 accumulation=2": ("batch", "63 does not divide into 2 micro-batches", "batch=64"),
    "train --config ~nobody_of_that_name/x": ("--config", "names a home directory that does not", "the whole path"),
    "sample --run ~nobody_of_that_name --out x": ("--run", "names a home directory that does not", "the whole path"),
    "export --run x --out ~nobody_of_that_name": ("--out", "names a home directory that does not", "the whole path"),
    "data prepare ~nobody_of_that_name y --resolution 8 --format zip": ("SRC", "names a home", "the whole path"),
    "evaluate --run x --features ~nobody_of_that_name": ("--features", "names a home", "write the whole path"),
    "train --stopped-status 256": ("--stopped-status", "256 is no exit status", "give 0 to 255"),
    "plan --gpus 9223372036854775807": ("--gpus", "is no number of ranks", "give 1 to 1048576"),
    "sample": ("--run, --out", "is missing", "see `bigsgan sample --help`"),
    "sample --run run": ("--out", "is missing", "see `bigsgan sample --help`"),
    "sample --run run --out x.png --num ten": ("--num", "'ten' is not an integer", "write an integer such as 1"),
    "sample --run run --out x.png --num 1.5": ("--num", "'1.5' is not an integer", "write an integer"),
    "sample --run run --out x.png --truncation all": ("--truncation", "'all' is not a number", "write a number"),
    "sample --run run --out x.png 10": ("argument", "'10' is not expected by `bigsgan sample`", "see `bigsgan sample"),
    "export --run run --out x --network both": ("--network", "'both' is none of the choices", "choose from"),
    "export --run run --out x --ema --live": (
        "--live",
        "not allowed with argument --ema",
        "see `bigsgan export --help`",
    ),
}

ENVIRONMENTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no number": ({"WORLD_SIZE": "two"}, ("WORLD_SIZE", "'two' is set in the environment", "`unset WORLD_SIZE`")),
    "no ranks": ({"WORLD_SIZE": "0"}, ("WORLD_SIZE", "'0' is set in the environment", "`unset WORLD_SIZE`")),
    "no rank": (
        {"WORLD_SIZE": "2"},
        ("WORLD_SIZE", "2 is set in the environment and RANK is not", "deepspeed or torchrun"),
    ),
    "odd ranks": (
        {"WORLD_SIZE": "3", "RANK": "0"},
        ("batch", "64 does not divide into 1 micro-batches on 3", "batch=66"),
    ),
    "no address": ({"WORLD_SIZE": "1", "RANK": "0"}, ("MASTER_ADDR", "is not set in the environment", "`unset RANK`")),
    "rank": (
        {"RANK": "x", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("RANK", "'x' is set in the environment", "`unset RANK`"),
    ),
    "port": (
        {"RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "http"},
        ("MASTER_PORT", "'http' is set in the environment", "`unset MASTER_PORT`"),
    ),
    "local rank": (
        {"RANK": "0", "LOCAL_RANK": "-1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("LOCAL_RANK", "'-1' is set in the environment", "`unset LOCAL_RANK`"),
    ),
    "no local rank": (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("LOCAL_RANK", "is not set in the environment and RANK is", "`unset RANK`"),
    ),
    "no number of ranks": (
        {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("WORLD_SIZE", "is not set in the environment and RANK is", "`unset RANK`"),
    ),
    "no port": (
        {"RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "99999"},
        ("MASTER_PORT", "'99999' is set in the environment and must be a whole number from 1 to 65535", "unset"),
    ),
    "many digits": (
        {"WORLD_SIZE": "9" * 5000},
        ("WORLD_SIZE", "must be a whole number from 1 to 2147483647", "`unset WORLD_SIZE`"),
    ),
    "many digits of a rank": ({"RANK": "9" * 5000}, ("RANK", "must be a whole number from 0 to", "`unset RANK`")),
    "many digits of Slurm": (
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "9" * 5000},
        ("SLURM_NODEID", "is no number", "start with `srun`"),
    ),
    "many tasks of Slurm": (
        {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_NODEID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)",
        },
        ("SLURM_STEP_TASKS_PER_NODE", "is not as Slurm writes it", "start with `srun`"),
    ),
    "accelerator": (
        {"DS_ACCELERATOR": "foo"},
        ("DS_ACCELERATOR", "'foo' is set in the environment and must be one of cuda, cpu, ", "`unset DS_ACCELERATOR`"),
    ),
    "interface": (
        {"GLOO_SOCKET_IFNAME": "none7"},
        ("GLOO_SOCKET_IFNAME", "'none7' is set in the environment, but", "name one of them"),
    ),
    "host": (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "x" * 80, "MASTER_PORT": "1"},
        ("MASTER_ADDR", "no host of that name is known on", "rank 0's host"),
    ),
}


def test_the_recipe_itself_is_good(capsys):
    assert cli.main(["train", "--config", "recipe.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("out: run\n")
    with pytest.raises(WentOnError, match=r"^bigsgan.train was imported"):
        cli.main(["train", "--config", "recipe.yaml"])


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: text[:40])
def test_overrides(override, capsys):
    check(capsys, ["train", "--config", "recipe.yaml", override], *OVERRIDES[override])


@pytest.mark.parametrize("name", SEVERAL)
def test_several_overrides(name, capsys):
    overrides, expected = SEVERAL[name]
    check(capsys, ["train", "--config", "recipe.yaml", *overrides], *expected)


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
    problem = "Too many levels of symbolic links" if kind == "loop" else "not a file but a pipe, a socket or a device"
    check(capsys, ["train", "--config", "bad.yaml"], "--config", problem, "give a readable text file")


def test_a_hostile_runs_recipe(capsys):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(RECIPE + BOMB)
    with pytest.raises(UserError, match=r"run/config.yaml: is not the recipe of a run .* more than 10000 values"):
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
    overrides = ["out=~/x", "data.root=~/data", "engines.generator.ds_config=~/ds.json", "init_from={run: ~/other}"]
    assert cli.main(["train", "--config", "~/recipe.yaml", "--dry-run", *overrides]) == 0
    printed = capsys.readouterr().out
    for line in (f"out: {tmp_path}/home/x", f"root: {tmp_path}/home/data", f"run: {tmp_path}/home/other"):
        assert line in printed
    assert "~" not in printed
    assert not Path("~").exists()


@pytest.mark.parametrize("lines", [0, 1])
def test_a_reader_that_goes_away_is_no_error(lines):
    script = f"bigsgan train --dry-run | head -n {lines} > first; echo ${{PIPESTATUS[0]}}"
    script = script.replace("bigsgan", f"{sys.executable} -c 'import sys, bigsgan.cli; sys.exit(bigsgan.cli.main())'")
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    assert run.stdout in ("141\n", "0\n")  # 0 where all was in the pipe before its reader had gone
    assert Path("first").read_text().count("\n") == lines


def test_names_that_are_no_utf_8_are_printed(monkeypatch, capsys):
    options = SimpleNamespace(run=lambda options: print("\udcff") or 0)
    monkeypatch.setattr(choosing, "parse", lambda arguments: options)
    assert cli.main([]) == 0
    assert capsys.readouterr().out == "\\udcff\n"


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed_files(name, tmp_path, capsys):
    content, (field, *parts) = DEEPSPEED[name]
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    arguments = ["train", "--config", "recipe.yaml", "engines.generator.ds_config=ds.json"]
    check(capsys, arguments, field.format(path=path), *parts)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines(command, capsys):
    check(capsys, command.split(), *COMMANDS[command])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments(name, monkeypatch, capsys):
    variables, expected = ENVIRONMENTS[name]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    check(capsys, ["train", "--config", "recipe.yaml"], *expected)


def test_overrides_stand_anywhere(capsys):
    assert cli.main(["train", "batch=32", "--config", "recipe.yaml", "seed=7", "--dry-run", "accumulation=2"]) == 0
    printed = capsys.readouterr().out
    assert {"batch: 32", "seed: 7", "accumulation: 2"} <= set(printed.splitlines())


def test_a_dry_run_is_printed_by_one_rank_and_knows_the_number_of_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["train", "--config", "recipe.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")
    check(capsys, ["train", "--config", "recipe.yaml", "--dry-run", "batch=63"], "batch", "on 2 ranks", "batch=64")


def test_other_ranks_wait_and_speak_only_where_rank_0_did_not_end_them(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(time, "sleep", lambda seconds: waits.append((seconds, len(said))))
    said: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", lambda text, write=sys.stderr.write: (said.append(text), write(text)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        check(capsys, ["train", "--config", "missing.yaml"], "--config", "does not exist", "give its path")
    (to_be_ended, before), (_, after), (to_be_forwarded, last) = waits
    assert before == 0 < after < last  # rank 1 before it speaks and behind that, rank 0 behind that
    assert to_be_ended > 10 * to_be_forwarded


def test_help_is_no_error(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "--help"])
    assert caught.value.code == 0
    assert "dotted.key=value" in capsys.readouterr().out


def test_the_script_ends_with_status_2_and_one_line(tmp_path):
    command = [sys.executable, str(REPOSITORY / "launch" / "train.py"), "batch=sixty"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "bigsgan: batch: 'sixty' is not an integer; write an integer such as 64\n"
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == [tmp_path / "recipe.yaml"]


def test_a_message_is_one_line_short_and_survives_the_way_between_ranks():
    error = UserError("path", "x" * 1000, "is wrong:\n  line 1\n  line 2", "mend it")
    assert str(error) == f"path: '{'x' * 119}... is wrong: line 1 line 2; mend it"
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.field, copy.value, copy.problem, copy.remedy) == (
        error.field,
        error.value,
        error.problem,
        error.remedy,
    )


STAGES = [f"engines.{network}.pipeline_stages=2" for network in ("generator", "discriminator")]
PIPELINES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    **{
        f"ZeRO {stage}": (
            [f"engines.discriminator.ds_config=ds_configs/zero{stage}.json"],
            ("engines.discriminator.pipeline_stages", f"2 does not go with ZeRO stage {stage}", "use stage 1"),
        )
        for stage in (2, 3)
    },
    "offload": (
        ["engines.generator.ds_config=offload.json"],
        ("engines.generator.pipeline_stages", "2 does not go with offloading", "a file without offload"),
    ),
    **{
        f"exact {name}": (
            [f"objective.{name}={{weight: 1}}"],
            (f"objective.{name}.form", "'exact' needs a double backward", f"objective.{name}.form=finite_difference"),
        )
        for name in ("r1", "r2")
    },
    "fp16 at stage 0": (
        ["engines.generator.ds_config=fp16.json"],
        ("{directory}/fp16.json: fp16.enabled", "does not train at ZeRO stage 0", "zero_optimization.stage to 1"),
    ),
    "DeepSpeed's timers": (
        ["engines.generator.ds_config=timers.json"],
        ("{directory}/timers.json: wall_clock_breakdown", "True does not go with", "pipeline_trace.json"),
    ),
    "float32 accumulation at stage 0": (
        ["engines.generator.ds_config=accumulation.json"],
        ("{directory}/accumulation.json: data_types.grad_accum_dtype", "'fp32' does not go with bf16", "stage to 1"),
    ),
    "a batch for more replicas": (["batch=9", "accumulation=2"], ("batch", "9 does not divide into 2", "batch=10")),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_what_a_pipeline_cannot_do(name, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    Path("offload.json").write_text('{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}')
    Path("fp16.json").write_text('{"fp16": {"enabled": true}}')
    Path("timers.json").write_text('{"wall_clock_breakdown": true}')
    Path("accumulation.json").write_text('{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}')
    overrides, (field, *parts) = PIPELINES[name]
    expected = (field.replace("{directory}", str(Path.cwd())), *parts)
    check(capsys, ["train", "--config", "recipe.yaml", "--dry-run", *STAGES, *overrides], *expected)


@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_stages_divide_the_ranks(network, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    field = f"engines.{network}.pipeline_stages"
    arguments = ["train", "--config", "recipe.yaml", "--dry-run", "batch=48", f"{field}=2"]
    for world_size in (1, 3):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        ranks = f"2 times data-parallel ranks is to give the {world_size} ranks that were started"
        check(capsys, arguments, field, ranks, "start a multiple of 2 ranks")
    for world_size in (2, 6):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        assert cli.main(arguments) == 0
        assert "pipeline_stages: 2" in capsys.readouterr().out


def test_a_penalty_of_a_discriminator_without_stages_may_be_exact(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["train", "--config", "recipe.yaml", "--dry-run", STAGES[0], "objective.r1={weight: 1}"]) == 0


def test_a_plan_is_of_some_ranks(capsys):
    arguments = ["plan", "--config", "recipe.yaml", "--pipeline", "--gpus", "0"]
    check(capsys, arguments, "--gpus", "0 is no number of ranks", "give 1 to 1048576")


@pytest.mark.parametrize(
    "options, field, problem, remedy",
    [
        (["--gpu-memory", "0"], "--gpu-memory", "0.0 is no size of a memory", "give GiB, such as 80"),
        (["--gpu-memory", "-80"], "--gpu-memory", "-80.0 is no size of a memory", "give GiB, such as 80"),
        (["--gpu-memory", "nan"], "--gpu-memory", "nan is no size of a memory", "give GiB, such as 80"),
        (["--gpu-memory", "inf"], "--gpu-memory", "inf is no size of a memory", "give GiB, such as 80"),
        (["--gpu-memory", "much"], "--gpu-memory", "'much' is not a number", "write a number such as 1"),
        (["--gpu-memory", "80", "--gpus", "0"], "--gpus", "0 is no number of ranks", "give 1 to 1048576"),
        (
            ["--gpu-memory", "80", "--gpus", "8", "--nodes", "3"],
            "--nodes",
            "3 does not divide the number of GPUs (8)",
            "divides 8",
        ),
        (["--gpu-memory", "80", "--nodes", "0"], "--nodes", "0 does not divide the number of GPUs (1)", "divides 1"),
        (["--gpu-memory", "80", "--host-memory", "0"], "--host-memory", "0.0 is no size of a memory", "give GiB"),
        (["--gpu-memory", "80", "--pipeline"], "--pipeline", "does not go with --gpu-memory", "ask for one of them"),
        (["--nodes", "2"], "--nodes", "2 is for --gpu-memory, which is not given", "give --gpu-memory 80"),
        (
            ["--host-memory", "9"],
            "--host-memory",
            "9.0 is for --gpu-memory, which is not given",
            "give --gpu-memory 80",
        ),
    ],
)
def test_memory_that_cannot_be_planned_for(capsys, options, field, problem, remedy):
    check(capsys, ["plan", "--config", "recipe.yaml", *options], field, problem, remedy)


@pytest.mark.parametrize("rank, size", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
def test_one_of_several_ranks_speaks_and_is_heard(monkeypatch, capsys, rank, size):
    """Under srun also before its tasks have the variables of the other launchers."""
    silent, slept = [], []
    monkeypatch.setattr(cli, "wait_to_be_ended", lambda: silent.append(True))
    monkeypatch.setattr(errors.time, "sleep", slept.append)
    monkeypatch.setenv(size, "2")
    for number in ("0", "1"):
        monkeypatch.setenv(rank, number)
        assert cli.main(["plan", "--gpus", "0"]) == 2
        assert len(silent) == int(number)
    assert "--gpus: 0 is no number of ranks; give 1 to 1048576" in capsys.readouterr().err
    assert slept == [errors.FORWARDING_SECONDS] * 2
