"""Bad overrides of a recipe: exit status 2, one line that names the field, the value and the remedy, nothing harmed.

What is found out before torch is imported is here and in test_bad_files.py, test_bad_commands.py and
test_bad_pipelines.py; test_bad_runs.py and test_bad_outputs.py have the rest.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bigsgan import cli
from bigsgan.config import Recipe, load_recipe
from bigsgan.config.messages import all_keys
from bigsgan.errors import UserError
from tests.bad_input import BOMB, WentOnError, check

pytestmark = pytest.mark.usefixtures("beside_a_recipe")

# Overrides -> the field, what the message says of its value, and words of the remedy.
OVERRIDES: dict[str, tuple[str, ...]] = {
    "bathc=64": ("bathc", "unknown key", "did you mean batch?"),
    "engines.generator.ranks=-1": ("engines.generator.ranks", "must be greater than 0 or 'auto', got -1", "give one"),
    "optimizer.generator.betas=[a, 0.9]": ("optimizer.generator.betas.0", "must be a number, got 'a'", "write a"),
    "optimizer.generator.eps=1e-300": ("optimizer.generator.eps", "must be 0 or of a size from", "give a larger"),
    "data.root=/data": ("data.root", "must be unset with data.kind=digits, got '/data'", "set data.root=null"),
    "batch=sixty": ("batch", "must be an integer, got 'sixty'", "write an integer such as 64"),
    "total_nimg=1e6": ("total_nimg", "must be an integer, got 1000000.0", "write 1000000"),
    "batch=0": ("batch", "must be greater than 0, got 0", "give a larger number"),
    "batch.size=64": ("batch.size", "unknown key: batch is a value, not a section", "override batch"),
    "accumulation=3": ("batch", "must be a multiple of 3, got 64 (3 micro-batches on 1 rank ", "set batch=66"),
    f"seed={'9' * 400}": ("seed", "must be at most 9223372036854775807, got 999", "give a smaller number"),
    f"seed={'9' * 5000}": ("seed", "must be a YAML value", "fix or quote it"),
    "monitor=[csv, tensorbord]": ("monitor.1", "must be 'tensorboard', 'wandb' or 'csv', got", "did you mean"),
    "monitor=[csv, csv]": ("monitor", "must name each once, got ['csv', 'csv']", "remove the second"),
    "monitor=3": ("monitor", "must be a list of 'tensorboard', 'wandb' or 'csv', got 3", "write a list such as"),
    "monitor=wandbs": ("monitor", "must be a list of 'tensorboard', ", "did you mean [wandb]?"),
    "objective.terms=3": ("objective.terms", "must be a list of sections, got 3", "write a list such as [{use: ...}]"),
    "objective.terms={use: a:b}": ("objective.terms", "must be a list of sections, got a section", "[{use: ...}]"),
    "objective.terms=[{use: a:b, name: a/b c}]": ("objective.terms.0.name",
        "must be letters, digits and _, a letter first, got 'a/b c'", "write a name such as brightness"),
    "callbacks=x:y": ("callbacks", "must be a list, got 'x:y'", "write [x:y]"),  # the name is short for a section
    "data.root=~nobody_of_that_name": ("data.root", "names a home directory that does not", "write the whole path"),
    f"a={BOMB.partition(': ')[2]}": ("a", "must be a YAML value", "fix or quote it"),
    "{0: &a [1,1], b: [*a, *a]}": ("override", "must have the form dotted.key=value, got '{0: &a", "write it like"),
    "batch=!!map [1]": ("batch", "must be a YAML value, got '!!map [1]' (!!map must tag a", "fix or quote it"),
    "batch=\x1b[31m": ("batch", "must be a YAML value, got '\\x1b[31m' (unacceptable character", "quote it"),
    "out=\udcff": ("out", "must be a YAML value, got '\\udcff' (unacceptable character", "fix or quote it"),
    "\x1b[2J=1": ("\\x1b[2J", "unknown key", "the keys of this section are out, seed,"),
    "out=''": ("out", "must be a directory, got ''", "give the run directory, such as out=runs/digits"),
    "out=5": ("out", "must be a string, got 5", "in quotes"),
    "data=folder": ("data", "must be a section, got 'folder'", "write its keys below it"),
    "data.kind=imagenet": ("data.kind", "must be 'digits', 'folder', 'zip', 'tar', 'torchvision',", "choose one of"),
    "data={kind: torchvision, root: x}": ("data.dataset", "must be given with", "such as CIFAR10"),
    "data.image_channels=3": ("data.image_channels", "must be 1 with data.kind=digits,", "set data.image_channels=1"),
    "data.resolution=50": ("data.resolution", "must be a multiple of 8 with BigGAN", "set data.resolution=48"),
    "data.crop_from=16": ("data.crop_from", "must be greater than data.resolution", "give a larger number, or remove"),
    "data.horizontal_flip=1": ("data.horizontal_flip", "must be true or false, got 1", "write true or false"),
    "generator.latent_size=61": ("generator.latent_size", "must be a multiple of 3, got 61", "latent_size=60 or"),
    "generator.attention=[64]": ("generator.attention", "must be resolutions of feature maps,", "choose from these"),
    "discriminator.attention=[8, 8]": ("discriminator.attention", "must name each resolution", "remove the second"),
    "objective.loss=hing": ("objective.loss", "must be 'hinge', 'non_saturating', 'least_squares',", "did you mean"),
    "optimizer.generator.lr=.nan": ("optimizer.generator.lr", "must be a finite number, got nan", "write a number"),
    "metrics={names: []}": ("metrics.names", "must have at least 1 entry,", "add entries"),
    "optimizer.generator.betas=[1.0, 0.9]": ("optimizer.generator.betas.0", "must be less than 1,", "give a smaller"),
    "optimizer.generator.momentum=0.9": ("optimizer.generator.momentum", "must be 0 with kind=adam, got", "betas, or"),
    "optimizer.generator.weight_decay_on=matrices": ("optimizer.generator.weight_decay_on",
        "must be unset with weight_decay=0, got 'matrices'", "set optimizer.generator.weight_decay, or remove it"),
    "optimizer.generator.groups=[{parameters: layers.0.*}]": ("optimizer.generator.groups.0.parameters",
        "must set lr_multiplier or frozen_from_nimg, got 'layers.0.*'", "set one, or remove the group"),
    "optimizer.generator={lr: 1, kind: sgd, decay: linear, final_beta2: 0.9}": ("optimizer.generator.final_beta2",
        "must be unset with kind=sgd, got 0.9", "set optimizer.generator.kind=adam"),
    "optimizer.generator={lr: 1, decay: cosine, warmup_nimg: 9, decay_nimg: 9}": ("optimizer.generator.decay_nimg",
        "must be greater than warmup_nimg (9), got 9", "raise it, or lower"),
    "objective.r1={weight: 1, decay_nimg: 9}": ("objective.r1.decay_nimg", "must be unset without final_weight, got 9",
        "give objective.r1.final_weight"),
    "optimizer.generator.warmup_nimg=1000": ("optimizer.generator.warmup_nimg", "must be less than", "shorten"),
    "engines.generator.ds_config=ds_configs/none.json": ("engines.generator.ds_config",
        "'ds_configs/none.json' does not exist", "give the path of a DeepSpeed JSON"),
    "my.yaml": ("override", "must have the form dotted.key=value, got 'my.yaml'", "write --config my.yaml"),
    "data.root=!!python/name:os.system x": ("data.root", "must be a YAML value, got", "fix or quote"),
    "optimizer.generator.final_beta2=0.99": ("optimizer.generator.final_beta2", "must be unset with", "cosine"),
}  # fmt: skip


SEVERAL: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "relativistic": (["objective.loss=relativistic", "engines.generator.accumulation=2"], ("objective.loss",
        "'relativistic' needs equal accumulation in both networks: it", "remove accumulation from engines.generator")),
    "reuse_fakes": (["objective.reuse_fakes=true", "engines.generator.accumulation=2"], ("objective.reuse_fakes",
        "needs equal accumulation in both networks", "remove accumulation from engines.generator")),
    "keep_best by a metric of two values": (
        ["metrics={names: [pr2k], every_nimg: 64}", "checkpoints.keep_best.metric=metrics/pr2k"],
        (
            "checkpoints.keep_best.metric",
            "must be a metric that metrics.names gives (pr2k_precision, pr2k_recall), got 'metrics/pr2k'",
            "set metrics/pr2k_precision, or change metrics.names",
        ),
    ),
    "r1 and r2": (["objective.r1={weight: 1, every: 2}", "objective.r2={weight: 1}"], ("objective.r2",
        "must have the form and every of objective.r1 (exact, every", "give both the same form")),
}  # fmt: skip


def test_the_recipe_itself_is_good(capsys):
    allowed = ["--allow-change", "batch", "--allow-change", "engines.generator.precision"]
    assert cli.main(["train", "--config", "recipe.yaml", "--dry-run", *allowed]) == 0
    assert capsys.readouterr().out.startswith("out: run\n")
    with pytest.raises(WentOnError, match=r"^bigsgan.trainer was imported"):
        cli.main(["train", "--config", "recipe.yaml"])


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: text[:40])
def test_overrides(override, capsys):
    check(capsys, ["train", "--config", "recipe.yaml", override], *OVERRIDES[override])


@pytest.mark.parametrize("name", SEVERAL)
def test_several_overrides(name, capsys):
    overrides, expected = SEVERAL[name]
    check(capsys, ["train", "--config", "recipe.yaml", *overrides], *expected)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["abc", "-1", "1.5", "[]", "{}", "null", "[x]", "{a: 1}", "1e-300"])
def test_messages_name_keys_as_the_recipe_writes_them(value):
    """Not pydantic's names for the choices of a key, as in `ranks.constrained-int`."""
    keys, wrong = set(all_keys(Recipe)), []
    for key in keys:
        try:
            load_recipe(Path("recipe.yaml"), [f"{key}={value}"])
        except UserError as error:
            field = re.sub(r"\.\d+", "", error.field)  # a place in a list
            if not (field in keys or error.problem.startswith("unknown key")):
                wrong.append(f"{key}={value}: {error}")
    assert wrong == []
