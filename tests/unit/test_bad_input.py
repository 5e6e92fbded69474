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
    "bathc=64": ("bathc", "unknown key", "did you mean batch?"),
    "lr=1": ("lr", "unknown key", "did you mean optimizer.generator.lr or optimizer.discriminator.lr?"),
    "optimizer.generator.learning_rate=1": (
        "optimizer.generator.learning_rate",
        "unknown key",
        "the keys of this section are kind, lr,",
    ),
    "data.colour=red": ("data.colour", "unknown key", "the keys of this section are kind, root,"),
    "batch=sixty": ("batch", "must be an integer, got 'sixty'", "write an integer such as 64"),
    "batch='64'": ("batch", "must be an integer, got '64'", "write an integer"),
    "batch=64.5": ("batch", "must be an integer, got 64.5", "write an integer"),
    "total_nimg=1e6": ("total_nimg", "must be an integer, got 1000000.0", "write 1000000"),
    "batch=true": ("batch", "must be an integer, got true", "write an integer"),
    "batch=0": ("batch", "must be greater than 0, got 0", "give a larger number"),
    "batch=-64": ("batch", "must be greater than 0, got -64", "give a larger number"),
    "batch=": ("batch", "must be an integer, got null", "write an integer"),
    "batch={size: 64}": ("batch", "must be a single value, got a section", "write the value alone"),
    "batch.size=64": ("batch.size", "unknown key: batch is a value, not a section", "override batch"),
    "accumulation=3": ("batch", "must be a multiple of 3, got 64 (3 micro-batches on 1 ranks", "set batch=66"),
    "engines.discriminator.accumulation=128": (
        "batch",
        "must be a multiple of 128, got 64 (128 micro-batches on 1",
        "set batch=128",
    ),
    "seed=-1": ("seed", "must be at least 0, got -1", "give a larger number"),
    "seed=9223372036854775808": (
        "seed",
        "must be at most 9223372036854775807, got 9223372036854775808",
        "give a smaller number",
    ),
    f"seed={'9' * 400}": ("seed", "must be at most 9223372036854775807, got 999", "give a smaller number"),
    f"seed={'9' * 5000}": ("seed", "must be a YAML value", "fix or quote it"),
    "batch=1048577": ("batch", "must be at most 1048576, got 1048577", "give a smaller number"),
    "batch=9223372036854775807": ("batch", "must be at most 1048576, got 9223372036854775807", "give a smaller number"),
    "data.resolution=4611686018427387904": (
        "data.resolution",
        "must be at most 16384, got 4611686018427387904",
        "give a smaller number",
    ),
    "data.crop_from=4611686018427387904": (
        "data.crop_from",
        "must be at most 16384, got 4611686018427387904",
        "give a smaller number",
    ),
    "data={kind: synthetic, num_images: 4611686018427387904}": (
        "data.num_images",
        "must be at most 100000000, got 4611686018427387904",
        "give a smaller number",
    ),
    "data.prefetch=4611686018427387904": (
        "data.prefetch",
        "must be at most 1024, got 4611686018427387904",
        "give a smaller number",
    ),
    "monitor=[csv, tensorbord]": (
        "monitor.1",
        "must be 'tensorboard', 'wandb' or 'csv', got 'tensorbord'",
        "choose one of these",
    ),
    "monitor=wandb": ("monitor", "must be a list, got 'wandb'", "write [wandb]"),
    "objective.d_steps=4611686018427387904": (
        "objective.d_steps",
        "must be at most 1000, got 4611686018427387904",
        "give a smaller number",
    ),
    "hang_timeout_seconds=9223372036854775807": (
        "hang_timeout_seconds",
        "must be at most 100000000, got 9223372036854775807",
        "give a smaller number",
    ),
    "generator={family: stylegan2, half_resolutions: 4611686018427387904}": (
        "generator.half_resolutions",
        "must be at most 16, got 4611686018427387904",
        "give a smaller number",
    ),
    "discriminator={family: pix2pix, depth: 4611686018427387904}": (
        "discriminator.depth",
        "must be at most 64, got 4611686018427387904",
        "give a smaller number",
    ),
    "out=~nobody_of_that_name/x": ("out", "names a home directory that does not exist (~nobody", "the whole path"),
    "data.root=~nobody_of_that_name": ("data.root", "names a home directory that does not", "write the whole path"),
    "engines.generator.ds_config=~nobody_of_that_name/x": ("engines.generator.ds_config", "names a home", "whole path"),
    f"a={BOMB.partition(': ')[2]}": ("a", "must be a YAML value", "fix or quote it"),
    "{0: &a [1,1], b: [*a, *a]}": (
        "override",
        "must have the form dotted.key=value, got '{0: &a [1,1], b:",
        "write it like",
    ),
    "batch=!!map [1]": ("batch", "must be a YAML value, got '!!map [1]' (!!map must tag a", "fix or quote it"),
    "batch=\x1b[31m": ("batch", "must be a YAML value, got '\\x1b[31m' (unacceptable character", "quote it"),
    "out=\udcff": ("out", "must be a YAML value, got '\\udcff' (unacceptable character", "fix or quote it"),
    "\x1b[2J=1": ("\\x1b[2J", "unknown key", "the keys of this section are out, seed,"),
    "out=": ("out", "must be a string, got null", "put the text in quotes"),
    "out=''": ("out", "must be a directory, got ''", "give the run directory, such as out=runs/digits"),
    "out=5": ("out", "must be a string, got 5", "in quotes"),
    'out="a\\0b"': ("out", "must be a directory, got 'a\\x00b'", "give the run directory"),
    "data=": ("data", "must be a section, got null", "write its keys below it"),
    "data=folder": ("data", "must be a section, got 'folder'", "write its keys below it"),
    "data.kind=imagenet": (
        "data.kind",
        "must be 'digits', 'folder', 'zip', 'tar', 'torchvision',",
        "choose one of these",
    ),
    "data.kind=folder": ("data.root", "must be given with data.kind=folder", "give the path of the directory"),
    "data={kind: torchvision, root: x}": (
        "data.dataset",
        "must be given with data.kind=torchvision",
        "such as CIFAR10",
    ),
    "data.image_channels=3": (
        "data.image_channels",
        "must be 1 with data.kind=digits, got 3 (the digits are",
        "set data.image_channels=1",
    ),
    "data.image_channels=2": (
        "data.image_channels",
        "must be 1 or 3, got 2",
        "set data.image_channels=1 for greyscale or",
    ),
    "data.image_channels=true": ("data.image_channels", "must be an integer, got true", "write an integer"),
    "data.num_classes=1000": (
        "data.num_classes",
        "must be 0 or 10 with data.kind=digits, got 1000",
        "set data.num_classes=10, or 0 to train",
    ),
    "data.resolution=48": (
        "data.resolution",
        "must be one of [16, 32, 64, 128, 256, 512] with BigGAN, got 48",
        "set data.resolution=64",
    ),
    "data.resolution=16.0": ("data.resolution", "must be an integer, got 16.0", "write 16"),
    "data.crop_from=16": (
        "data.crop_from",
        "must be greater than data.resolution (16), got 16",
        "give a larger number, or remove it",
    ),
    "data.horizontal_flip=1": ("data.horizontal_flip", "must be true or false, got 1", "write true or false"),
    "data.horizontal_flip=yes": ("data.horizontal_flip", "must be true or false, got 'yes'", "write true or false"),
    "data.num_workers=100000": ("data.num_workers", "must be at most 256, got 100000", "give a smaller number"),
    "generator.family=progan": (
        "generator.family",
        "must be 'biggan', 'biggan_deep', 'dcgan', 'gat', 'mlp', 'pix2pix',",
        "choose one of these",
    ),
    "generator.channels=1000000000": (
        "generator.channels",
        "must be at most 65536, got 1000000000",
        "give a smaller number",
    ),
    "generator.latent_size=61": (
        "generator.latent_size",
        "must be a multiple of 3, got 61 (it is split into chunks for",
        "latent_size=60 or",
    ),
    "generator.attention=8": ("generator.attention", "must be a list, got 8", "write a list"),
    "generator.attention=[64]": (
        "generator.attention",
        "must be resolutions of feature maps, [8, 16], got [64]",
        "choose from these",
    ),
    "generator.attention=[8.0]": ("generator.attention.0", "must be an integer, got 8.0", "write 8"),
    "discriminator.attention=[8, 8]": (
        "discriminator.attention",
        "must name each resolution once, got [8, 8]",
        "remove the second",
    ),
    "objective.loss=hing": (
        "objective.loss",
        "must be 'hinge', 'non_saturating', 'least_squares',",
        "choose one of these",
    ),
    "objective.r1=10": ("objective.r1", "must be a section, got 10", "write its keys below it"),
    "objective.r1={every: 2}": ("objective.r1.weight", "must be given", "add it to the recipe"),
    "objective.r1={wieght: 2}": ("objective.r1.wieght", "unknown key", "did you mean objective.r1.weight?"),
    "optimizer.generator.lr=0": ("optimizer.generator.lr", "must be greater than 0, got 0", "give a larger number"),
    "optimizer.generator.lr=.inf": (
        "optimizer.generator.lr",
        "must be a finite number, got inf",
        "write a number such as 1e-4",
    ),
    "optimizer.generator.lr=.nan": (
        "optimizer.generator.lr",
        "must be a finite number, got nan",
        "write a number such as 1e-4",
    ),
    "optimizer.generator.lr='1e-4'": (
        "optimizer.generator.lr",
        "must be a number, got '1e-4'",
        "a number such as 1e-4",
    ),
    "optimizer.generator.lr=true": ("optimizer.generator.lr", "must be a number, got true", "write a number"),
    "optimizer.generator.betas=[0.0]": (
        "optimizer.generator.betas",
        "must have at least 2 entries, got [0.0]",
        "add entries",
    ),
    "optimizer.generator.betas=[1.0, 0.9]": (
        "optimizer.generator.betas.0",
        "must be less than 1, got 1.0",
        "give a smaller number",
    ),
    "optimizer.generator.betas=0.9": ("optimizer.generator.betas", "must be a list, got 0.9", "such as [0.0, 0.999]"),
    "optimizer.generator.kind=lamb": (
        "optimizer.generator.kind",
        "must be 'adam', 'adamw', 'sgd' or 'rmsprop', got 'lamb'",
        "choose one of these",
    ),
    "optimizer.generator.momentum=0.9": (
        "optimizer.generator.momentum",
        "must be 0 with kind=adam, got 0.9",
        "betas, or",
    ),
    "optimizer.generator.final_lr=1e-5": (
        "optimizer.generator.final_lr",
        "must be unset with decay=constant, got 1e-05",
        "linear or cosine",
    ),
    "optimizer.generator.final_beta2=0.99": (
        "optimizer.generator.final_beta2",
        "must be unset with decay=constant, got 0.99",
        "cosine",
    ),
    "optimizer.generator.decay_nimg=9": (
        "optimizer.generator.decay_nimg",
        "must be unset with decay=constant, got 9",
        "cosine",
    ),
    "optimizer.generator={lr: 1, kind: sgd, decay: linear, final_beta2: 0.9}": (
        "optimizer.generator.final_beta2",
        "must be unset with kind=sgd, got 0.9",
        "set optimizer.generator.kind=adam",
    ),
    "optimizer.generator={lr: 1, decay: cosine, warmup_nimg: 9, decay_nimg: 9}": (
        "optimizer.generator.decay_nimg",
        "must be greater than warmup_nimg (9), got 9",
        "raise it, or lower",
    ),
    "objective.r1={weight: 1, decay_nimg: 9}": (
        "objective.r1.decay_nimg",
        "must be unset without final_weight, got 9",
        "give objective.r1.final_weight",
    ),
    "optimizer.generator.warmup_nimg=1000": (
        "optimizer.generator.warmup_nimg",
        "must be less than total_nimg (1000), got 1000",
        "shorten",
    ),
    "optimizer=": ("optimizer", "must be a section, got null", "write its keys below it"),
    "engines.generator.ds_config=ds_configs/none.json": (
        "engines.generator.ds_config",
        "'ds_configs/none.json' does not exist",
        "give the path of a DeepSpeed JSON",
    ),
    "engines.generator.ds_config=.": ("engines.generator.ds_config", "'.' does not exist", "give the path"),
    "engines.generator.stages=2": (
        "engines.generator.stages",
        "unknown key",
        "the keys of this section are ds_config,",
    ),
    "engines.generator.pipeline_stages=0": (
        "engines.generator.pipeline_stages",
        "must be greater than 0, got 0",
        "give a larger number",
    ),
    "engines.generator.pipeline_stages=2": (
        "engines.generator.pipeline_stages",
        "must divide the number of ranks (1), got 2",
        "a multiple of 2 ranks",
    ),
    "engines.generator.partition=time": (
        "engines.generator.partition",
        "must be 'parameters', 'uniform' or 'profile', got 'time'",
        "choose one",
    ),
    "pipeline.generator_phase=hold": (
        "pipeline.generator_phase",
        "must be 'keep' or 'recompute', got 'hold'",
        "choose one of these",
    ),
    "pipeline.schedule=gpipe": ("pipeline.schedule", "must be 'joint' or 'phases', got 'gpipe'", "choose one of these"),
    "sample_statistics=none": ("sample_statistics", "must be 'running' or 'batch', got 'none'", "choose one of these"),
    "batch": (
        "override",
        "must have the form dotted.key=value, got 'batch'",
        "write it like optimizer.generator.lr=1e-4",
    ),
    "=64": ("override", "must have the form dotted.key=value, got '=64'", "write it like"),
    "my.yaml": ("override", "must have the form dotted.key=value, got 'my.yaml'", "write --config my.yaml"),
    "data.root=[1,": ("data.root", "must be a YAML value, got '[1,' (expected the node content,", "fix or quote it"),
    "data.root=!!python/name:os.system x": (
        "data.root",
        "must be a YAML value, got '!!python/name:os.system x' (could",
        "fix or quote it",
    ),
}

SEVERAL: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "twice": (
        ["batch=64", "seed=1", "batch=32"],
        ("batch", "must be given once, got two overrides", "remove one of them"),
    ),
    "around an option": (
        ["batch=64", "--dry-run", "batch=32"],
        ("batch", "must be given once, got two overrides", "remove one of them"),
    ),
    "a section after its key": (
        ["data.kind=digits", "data={}"],
        ("data", "replaces the earlier override data.kind", "before data.kind"),
    ),
    "relativistic": (
        ["objective.loss=relativistic", "engines.generator.accumulation=2"],
        (
            "objective.loss",
            "'relativistic' needs equal accumulation in both networks: it",
            "remove accumulation from engines.generator",
        ),
    ),
    "reuse_fakes": (
        ["objective.reuse_fakes=true", "engines.generator.accumulation=2"],
        (
            "objective.reuse_fakes",
            "needs equal accumulation in both networks",
            "remove accumulation from engines.generator",
        ),
    ),
    "r1 and r2": (
        ["objective.r1={weight: 1, every: 2}", "objective.r2={weight: 1}"],
        ("objective.r2", "must have the form and every of objective.r1 (exact, every", "give both the same form"),
    ),
}

FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ("out", "must be given", "add it to the recipe")),
    "a key is missing": (RECIPE.replace("ema:", "# "), ("ema", "must be given", "add it to the recipe")),
    "a key is misspelt": (RECIPE.replace("batch:", "bathc:"), ("bathc", "unknown key", "did you mean batch?")),
    "a key stands twice": (
        RECIPE + "seed: 1\nseed: 2\n",
        ("bad.yaml", "must be valid YAML: duplicate key 'seed' (line 16, column 1)", "fix that line"),
    ),
    "a list": ("- out: run\n", ("bad.yaml", "must be a mapping, got [{'out': 'run'}]", "write `key: value` lines")),
    "no YAML": ("out: [\n", ("bad.yaml", "must be valid YAML: expected the node content, but found", "fix that line")),
    "a recursive anchor": (
        RECIPE + "engines: &e {generator: *e}\n",
        ("bad.yaml", "must be valid YAML: an anchor holds an alias of itself (line", "fix that line"),
    ),
    "an alias bomb": (
        RECIPE + BOMB,
        ("bad.yaml", "it holds more than 10000 values, aliases counted each time", "fix that line"),
    ),
    "an alias bomb as a key": (
        RECIPE + BOMB + "? *a29\n: 1\n",
        ("bad.yaml", "it holds more than 10000 values, aliases counted each time", "fix that line"),
    ),
    "a mapping that is a list": (
        "data: !!map [1, 2]\n",
        ("bad.yaml", "must be valid YAML: !!map must tag a mapping (line 1, column", "fix that line"),
    ),
    "a number that is a list": (
        "batch: !!int [1, 2]\n",
        ("bad.yaml", "expected a scalar node, but found seq", "fix that line"),
    ),
    "a number that is a mapping": ("batch: !!float {a: b}\n", ("bad.yaml", "expected a scalar node", "fix that line")),
    "true that is a list": ("batch: !!bool [true]\n", ("bad.yaml", "expected a scalar node", "fix that line")),
    "a large file": ("# " + "x" * 300_000 + "\n", ("--config", "larger than 256 KiB", "give a readable text file")),
    "a large key": ("k" * 500 + ": 1\n", ("k" * 400 + "...", "unknown key", "the keys of this section are")),
}

DEEPSPEED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "not JSON": ("{'stage': 1}", ("engines.generator.ds_config", "must be valid JSON, got", "fix the file")),
    "optimizer": (
        {"optimizer": {}},
        ("{path}: optimizer", "must be unset, as the recipe owns it", "use optimizer.gen"),
    ),
    "batch": (
        {"train_batch_size": 32},
        ("{path}: train_batch_size", "must be 64, as in the recipe, got 32 (named by", "the recipe's batch"),
    ),
    "clipping": (
        {"gradient_clipping": 1.0},
        ("{path}: gradient_clipping", "must be 0.0, as in the recipe, got 1.0 (named by", "clip_norm"),
    ),
    "misspelt": (
        {"zero_optimisation": {}},
        ("{path}: zero_optimisation", "unknown key", "did you mean zero_optimization?"),
    ),
    "stage": (
        {"zero_optimization": {"stage": 7}},
        ("{path}: zero_optimization.stage", "must be 0, 1, 2 or 3, got 7", "choose one of these"),
    ),
    "fp16": (
        {"fp16": {"enabled": True}},
        ("{path}: fp16.enabled", "must be false at ZeRO stage 0, got true (DeepSpeed 0.19 does", "stage to 1"),
    ),
    "offload": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        (
            "{path}: zero_optimization.offload_param.device",
            "must be none at ZeRO stage 2, got 'cpu'",
            "zero_optimization.stage to 3",
        ),
    ),
}

COMMANDS: dict[str, tuple[str, ...]] = {
    "": ("COMMAND", "must be given", "see `bigsgan --help`"),
    "trian": ("COMMAND", "must be one of 'train', 'submit', 'plan', 'sample',", "choose one of these"),
    "train --confg x": ("--confg", "unknown option of `bigsgan train`", "see `bigsgan train --help`"),
    "train --lr=1": ("--lr", "unknown option of `bigsgan train`", "see `bigsgan train --help`"),
    "train --config": ("--config", "expected one argument", "see `bigsgan train --help`"),
    "train --config missing.yaml": (
        "--config",
        "'missing.yaml' does not exist",
        "give the path of a recipe, or the name of a",
    ),
    "train --config .": ("--config", "'.' cannot be read", "give a readable text file"),
    "train --dry-run --config missing.yaml": (
        "--config",
        "'missing.yaml' does not exist",
        "give the path of a recipe, or the name of a",
    ),
    "train batch=63 --local_rank=0 accumulation=2": (
        "batch",
        "must be a multiple of 2, got 63 (2 micro-batches on 1 ranks",
        "batch=64",
    ),
    "train --config ~nobody_of_that_name/x": ("--config", "names a home directory that does not", "the whole path"),
    "sample --run ~nobody_of_that_name --out x": ("--run", "names a home directory that does not", "the whole path"),
    "export --run x --out ~nobody_of_that_name": ("--out", "names a home directory that does not", "the whole path"),
    "data prepare ~nobody_of_that_name y --resolution 8 --format zip": ("SRC", "names a home", "the whole path"),
    "evaluate --run x --features ~nobody_of_that_name": ("--features", "names a home", "write the whole path"),
    "train --stopped-status 256": ("--stopped-status", "must be 0 to 255, got 256", "give an exit status"),
    "plan --gpus 9223372036854775807": (
        "--gpus",
        "must be 1 to 1048576, got 9223372036854775807",
        "give a number in this range",
    ),
    "sample": ("--run, --out", "must be given", "see `bigsgan sample --help`"),
    "sample --run run": ("--out", "must be given", "see `bigsgan sample --help`"),
    "sample --run run --out x.png --num ten": ("--num", "must be an integer, got 'ten'", "write an integer such as 1"),
    "sample --run run --out x.png --num 1.5": ("--num", "must be an integer, got '1.5'", "write an integer"),
    "sample --run run --out x.png --truncation all": ("--truncation", "must be a number, got 'all'", "write a number"),
    "sample --run run --out x.png 10": (
        "argument",
        "'10' is not an argument of `bigsgan sample`",
        "see `bigsgan sample",
    ),
    "export --run run --out x --network both": (
        "--network",
        "must be one of 'generator', 'discriminator', got 'both'",
        "choose one of these",
    ),
    "export --run run --out x --format pickle": (
        "--format",
        "must be one of 'safetensors', 'hub', 'onnx', 'torch-export', 'universal', got 'pickle'",
        "choose one of these",
    ),
    "export --run run --out x --dtype int8": (
        "--dtype",
        "must be one of 'fp32', 'bf16', 'fp16', got 'int8'",
        "choose one of these",
    ),
    "export --run run --out x --ema --live": (
        "--live",
        "not allowed with argument --ema",
        "see `bigsgan export --help`",
    ),
}

ENVIRONMENTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no number": (
        {"WORLD_SIZE": "two"},
        ("WORLD_SIZE", "must be a whole number from 1 to 2147483647, got 'two' (an", "`unset WORLD_SIZE`"),
    ),
    "no ranks": (
        {"WORLD_SIZE": "0"},
        ("WORLD_SIZE", "must be a whole number from 1 to 2147483647, got '0' (an", "`unset WORLD_SIZE`"),
    ),
    "no rank": (
        {"WORLD_SIZE": "2"},
        ("WORLD_SIZE", "must be unset without RANK, got 2 (environment variables)", "deepspeed or torchrun"),
    ),
    "odd ranks": (
        {"WORLD_SIZE": "3", "RANK": "0"},
        ("batch", "must be a multiple of 3, got 64 (1 micro-batches on 3 ranks", "batch=66"),
    ),
    "no address": (
        {"WORLD_SIZE": "1", "RANK": "0"},
        ("MASTER_ADDR", "must be set in the environment, as RANK is", "`unset RANK`"),
    ),
    "rank": (
        {"RANK": "x", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("RANK", "must be a whole number from 0 to 2147483647, got 'x' (an", "`unset RANK`"),
    ),
    "port": (
        {"RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "http"},
        ("MASTER_PORT", "must be a whole number from 1 to 65535, got 'http' (an", "`unset MASTER_PORT`"),
    ),
    "local rank": (
        {"RANK": "0", "LOCAL_RANK": "-1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("LOCAL_RANK", "must be a whole number from 0 to 2147483647, got '-1' (an", "`unset LOCAL_RANK`"),
    ),
    "no local rank": (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("LOCAL_RANK", "must be set in the environment, as RANK is", "`unset RANK`"),
    ),
    "no number of ranks": (
        {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("WORLD_SIZE", "must be set in the environment, as RANK is", "`unset RANK`"),
    ),
    "no port": (
        {"RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "99999"},
        ("MASTER_PORT", "must be a whole number from 1 to 65535, got '99999' (an", "unset"),
    ),
    "many digits": (
        {"WORLD_SIZE": "9" * 5000},
        ("WORLD_SIZE", "must be a whole number from 1 to 2147483647", "`unset WORLD_SIZE`"),
    ),
    "many digits of a rank": ({"RANK": "9" * 5000}, ("RANK", "must be a whole number from 0 to", "`unset RANK`")),
    "many digits of Slurm": (
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "9" * 5000},
        ("SLURM_NODEID", "must be a whole number, got", "start with `srun`"),
    ),
    "many tasks of Slurm": (
        {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_NODEID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)",
        },
        ("SLURM_STEP_TASKS_PER_NODE", "must be as Slurm sets it, got '1(x999999999)'", "start with `srun`"),
    ),
    "accelerator": (
        {"DS_ACCELERATOR": "foo"},
        ("DS_ACCELERATOR", "must be one of cuda, cpu, xpu, npu, mps, hpu, mlu, sdaa,", "`unset DS_ACCELERATOR`"),
    ),
    "interface": (
        {"GLOO_SOCKET_IFNAME": "none7"},
        ("GLOO_SOCKET_IFNAME", "must be a network interface of ", "name one of them"),
    ),
    "host": (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "x" * 80, "MASTER_PORT": "1"},
        ("MASTER_ADDR", "can resolve, got 'xxx", "rank 0's host"),
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


def test_one_deepspeed_file_for_both_engines(capsys):
    assert cli.main(["train", "--dry-run", "--deepspeed", "--deepspeed_config", "zero2", "seed=7"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sum("{ds_config: zero2, " in line for line in printed) == 2
    assert "seed: 7" in printed
    assert cli.main(["train", "--dry-run", "--deepspeed_config=zero2", "engines.generator.ds_config=zero3"]) == 2
    assert capsys.readouterr().err.startswith("bigsgan: engines.generator.ds_config: must be given once")


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
        check(capsys, ["train", "--config", "missing.yaml"], "--config", "does not exist", "give the path of a recipe")
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
    assert result.stderr == "bigsgan: batch: must be an integer, got 'sixty'; write an integer such as 64\n"
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
            ("engines.discriminator.pipeline_stages", f"must be 1 with ZeRO stage {stage}, got 2", "use stage 1"),
        )
        for stage in (2, 3)
    },
    "offload": (
        ["engines.generator.ds_config=offload.json"],
        ("engines.generator.pipeline_stages", "must be 1 with offload, got 2 (in", "a file without offload"),
    ),
    **{
        f"{name} by a double backward": (
            [f"objective.{name}={{weight: 1, method: double_backward}}"],
            (
                f"objective.{name}.method",
                "must be auto or forward_mode with discriminator stages, got 'double_backward'",
                "remove it, or set engines.discriminator.pipeline_stages=1",
            ),
        )
        for name in ("r1", "r2")
    },
    "fp16 at stage 0": (
        ["engines.generator.ds_config=fp16.json"],
        (
            "{directory}/fp16.json: fp16.enabled",
            "must be false at ZeRO stage 0, got true (DeepSpeed 0.19 does",
            "zero_optimization.stage to 1",
        ),
    ),
    "DeepSpeed's timers": (
        ["engines.generator.ds_config=timers.json"],
        (
            "{directory}/timers.json: wall_clock_breakdown",
            "must be false with pipeline_stages, got true",
            "pipeline_trace.json",
        ),
    ),
    "float32 accumulation at stage 0": (
        ["engines.generator.ds_config=accumulation.json"],
        (
            "{directory}/accumulation.json: data_types.grad_accum_dtype",
            "must be bf16 at ZeRO stage 0, got 'fp32'",
            "stage to 1",
        ),
    ),
    "a batch for more replicas": (
        ["batch=9", "accumulation=2"],
        ("batch", "must be a multiple of 2, got 9 (2 micro-batches on 1 ranks", "batch=10"),
    ),
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
        ranks = f"must divide the number of ranks ({world_size}), got 2"
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
    check(capsys, arguments, "--gpus", "must be 1 to 1048576, got 0", "give a number in this range")


@pytest.mark.parametrize(
    "options, field, problem, remedy",
    [
        (["--gpu-memory", "0"], "--gpu-memory", "must be a positive size in GiB, got 0.0", "give a number such as 80"),
        (
            ["--gpu-memory", "-80"],
            "--gpu-memory",
            "must be a positive size in GiB, got -80.0",
            "give a number such as 80",
        ),
        (
            ["--gpu-memory", "nan"],
            "--gpu-memory",
            "must be a positive size in GiB, got nan",
            "give a number such as 80",
        ),
        (
            ["--gpu-memory", "inf"],
            "--gpu-memory",
            "must be a positive size in GiB, got inf",
            "give a number such as 80",
        ),
        (["--gpu-memory", "much"], "--gpu-memory", "must be a number, got 'much'", "write a number such as 1"),
        (["--gpu-memory", "80", "--gpus", "0"], "--gpus", "must be 1 to 1048576, got 0", "give a number in this range"),
        (
            ["--gpu-memory", "80", "--gpus", "8", "--nodes", "3"],
            "--nodes",
            "must divide the number of GPUs (8), got 3",
            "give a divisor of 8",
        ),
        (
            ["--gpu-memory", "80", "--nodes", "0"],
            "--nodes",
            "must divide the number of GPUs (1), got 0",
            "give a divisor of 1",
        ),
        (
            ["--gpu-memory", "80", "--host-memory", "0"],
            "--host-memory",
            "must be a positive size in GiB, got 0.0",
            "give a number such as 80",
        ),
        (
            ["--gpu-memory", "80", "--pipeline"],
            "--pipeline",
            "cannot be combined with --gpu-memory",
            "give only one of them",
        ),
        (["--nodes", "2"], "--nodes", "needs --gpu-memory", "add --gpu-memory 80"),
        (["engines.generator.ranks=1"], "--gpus", "must be given with engines.*.ranks", "add --gpus 8"),
        (
            ["--host-memory", "9"],
            "--host-memory",
            "needs --gpu-memory",
            "add --gpu-memory 80",
        ),
    ],
)
def test_memory_that_cannot_be_planned_for(capsys, options, field, problem, remedy):
    check(capsys, ["plan", "--config", "recipe.yaml", *options], field, problem, remedy)


@pytest.mark.parametrize("rank, size", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
def test_one_of_several_ranks_speaks_and_is_heard(monkeypatch, capsys, rank, size):
    """Under srun also before its tasks have the variables of the other launchers."""
    silent, slept = [], []
    monkeypatch.setattr(cli, "wait_for_termination", lambda: silent.append(True))
    monkeypatch.setattr(errors.time, "sleep", slept.append)
    monkeypatch.setenv(size, "2")
    for number in ("0", "1"):
        monkeypatch.setenv(rank, number)
        assert cli.main(["plan", "--gpus", "0"]) == 2
        assert len(silent) == int(number)
    assert "must be 1 to 1048576, got 0" in capsys.readouterr().err
    assert slept == [errors.FORWARDING_SECONDS] * 2
