"""Recipes: defaults, overrides, micro-batches, and that a printed recipe reads back as the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bigsgan.config import Recipe, load_recipe, plan_run
from bigsgan.config.data import Data
from bigsgan.config.families.biggan import (
    BIGGAN_DISCRIMINATOR,
    BIGGAN_GENERATOR,
    BigGANGenerator,
    biggan_discriminator_resolutions,
)
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from tests import REPOSITORY

RECIPES = sorted((REPOSITORY / "launch" / "recipes").glob("*.yaml"))

LEAST = """
out: runs/x
total_nimg: 1000
batch: 24
report_nimg: 100
sample_nimg: 100
checkpoint_nimg: 100
data: {}
generator: {latent_size: 60}
discriminator: {}
optimizer: {generator: {lr: 1}, discriminator: {lr: 2e-4}}
ema: {half_life_nimg: 10}
"""


def least(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "least.yaml"
    path.write_text(LEAST)
    return load_recipe(path, list(overrides))


def refused(tmp_path: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        least(tmp_path, *overrides)
    return caught.value


def test_defaults_are_filled_in(tmp_path):
    adam = {
        "kind": "adam", "reference_width": None, "betas": [0.0, 0.999], "eps": 1e-8, "momentum": 0.0, "muon": None,
        "weight_decay": 0.0, "weight_decay_on": "all", "clip_norm": None,
        "warmup_nimg": 0, "decay": "constant", "final_lr": 0.0, "final_beta2": None,
        "decay_from_nimg": None, "decay_nimg": None, "groups": [],
    }  # fmt: skip
    engine = {
        "ds_config": "ds_configs/zero0.json", "accumulation": None, "activation_checkpointing": False,
        "compile": "none", "cuda_graphs": False, "pipeline_stages": 1, "ranks": None,
        "partition": "parameters",
        "frozen": dict.fromkeys(("precision", "sharded", "offload", "persistence_threshold")),
    }  # fmt: skip
    scale = {"width": 1.0, "depth": 1, "block": "standard", "groups": 8, "expansion": 4}
    assert yaml.safe_load(least(tmp_path).to_yaml()) == {
        "out": "runs/x",
        "seed": 0,
        "total_nimg": 1000,
        "batch": 24,
        "accumulation": 1,
        "report_nimg": 100,
        "monitor": ["tensorboard"],
        "sample_nimg": 100,
        "sample_statistics": "running",
        "checkpoint_nimg": 100,
        "checkpoints": {"keep": 3, "keep_every_nimg": None, "keep_best": None, "background": True},
        "hang_timeout_seconds": 300,
        "deterministic": False,
        "max_rollbacks": 10,
        "statistics": "every_update",
        "batch_statistics": "global",
        "data": {
            "kind": "digits", "arguments": {}, "root": None, "input_root": None, "input_side": "left",
            "input_channels": 3, "dataset": None, "split": None, "image_key": None, "label_key": None,
            "resolution": 16, "fit": "crop", "image_channels": 1,
            "range": None, "num_classes": 10, "multi_label": False, "condition_size": 0,
            "condition_dropout": 0.0, "missing_labels": "refuse", "labels_file": None, "class_names": None,
            "num_images": 50_000, "crop_from": None, "horizontal_flip": False,
            "num_workers": 4, "prefetch": 4, "max_ignored": None, "max_corrupt": None, "truncated": "skip",
            "codec": {
                "kind": "pixels", "block": 2, "path": None, "factor": 8, "channels": 4, "scale": None,
            },
        },
        "generator": {
            "family": "biggan", "channels": 96, "latent_size": 60, "embedding_size": 128, "hierarchical": True,
            "shared_embedding": True, "norm_eps": 1e-5, "output_norm_eps": 1e-5,
            "attention": [], "multiples": None, **scale,
        },
        "discriminator": {
            "family": "biggan", "channels": 96, "attention": [], "rectified_shortcut": False, **scale,
        },
        "objective": {
            "loss": "hinge", "d_steps": 1, "schedule": "exact", "reuse_fakes": False, "pool": 0,
            "fake_labels": "uniform", "l1": 0.0, "l2": 0.0, "huber": None, "perceptual": None,
            "feature_matching": 0.0, "kl": 0.0, "codebook": None, "cycle": 0.0, "identity": 0.0,
            "consistency": None, "r1": None, "r2": None,
            "gradient_penalty": None, "lecam": None, "centering": 0.0, "transport": None, "flow": None,
            "distribution_matching": None, "path_length": None, "teacher": None,
            "orthogonal": {"generator": 0.0, "discriminator": 0.0}, "terms": [], "discriminator_from_nimg": 0,
            "adversarial": {"weight": 1.0, "from_nimg": 0, "ramp_nimg": 0, "adaptive": None, "normalize": None},
        },
        "augmentation": None,
        "metrics": None,
        "callbacks": [],
        "init_from": None,
        "optimizer": {"generator": {**adam, "lr": 1.0}, "discriminator": {**adam, "lr": 2e-4}},
        "ema": {
            "half_life_nimg": 10, "start_nimg": 0, "ramp": None, "warmup_nimg": 0, "reset_nimg": None,
            "reset_from_nimg": 0, "power": None,
        },
        "engines": {"generator": engine, "discriminator": engine, "stock_deepspeed": "neither"},
        "pipeline": {"generator_phase": "keep", "schedule": "joint"},
    }  # fmt: skip


def test_overrides_reach_every_depth(tmp_path):
    recipe = least(
        tmp_path, "batch=48", "data.kind=synthetic", "objective.r1.weight=10", "engines.generator.accumulation=4"
    )
    assert (recipe.batch, recipe.data.kind, recipe.accumulation_of("generator")) == (48, "synthetic", 4)
    assert recipe.objective.r1 is not None
    assert (recipe.objective.r1.weight, recipe.objective.r1.every, recipe.objective.r1.form) == (10.0, 1, "exact")


def test_an_integer_is_a_number_and_becomes_a_float(tmp_path):
    lr = least(tmp_path).optimizer.generator.lr
    assert lr == 1.0
    assert type(lr) is float


def test_a_recipe_cannot_be_changed_after_it_was_checked(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        least(tmp_path).batch = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    "world_size, overrides, generator, discriminator",
    [
        (1, [], 24, 24),
        (2, [], 12, 12),
        (3, ["accumulation=2"], 4, 4),
        (2, ["accumulation=2", "engines.generator.accumulation=6"], 2, 6),
        (1, ["engines.discriminator.accumulation=24"], 24, 1),
    ],
)
def test_micro_batches_follow_from_batch_accumulation_and_ranks(
    tmp_path, world_size, overrides, generator, discriminator
):
    plan = plan_run(least(tmp_path, *overrides), world_size)
    assert plan.engines["generator"].micro_batch_size == generator
    assert plan.engines["discriminator"].micro_batch_size == discriminator


@pytest.mark.parametrize(
    "world_size, overrides, network, remedy",
    [
        (5, [], "generator", "set batch=25"),
        (2, ["engines.discriminator.accumulation=5"], "discriminator", "set batch=30"),
        (1, ["accumulation=48"], "generator", "set batch=48"),
        (5, ["discriminator={family: stylegan2, mbstd_group: 4}"], "generator", "set batch=40"),  # 5 on a rank of 25
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(tmp_path, world_size, overrides, network, remedy):
    with pytest.raises(UserError) as caught:
        plan_run(least(tmp_path, *overrides), world_size)
    assert str(caught.value).startswith("batch: must be a multiple of ")
    assert ", got 24 (" in str(caught.value)
    assert f"on {world_size} rank{'s' if world_size > 1 else ''} for the {network}); " in str(caught.value)
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize(
    "world_size, overrides, generator, discriminator",
    [
        (4, [], range(4), range(4)),
        (4, ["engines.generator.ranks=1"], range(1), range(1, 4)),
        (4, ["engines.discriminator.ranks=1"], range(3), range(3, 4)),
        (8, ["engines.generator.ranks=0.4"], range(3), range(3, 8)),
        (8, ["engines.generator.ranks=0.4", "engines.generator.pipeline_stages=2"], range(4), range(4, 8)),
        (3, ["engines.generator.ranks=1", "engines.discriminator.ranks=2"], range(1), range(1, 3)),
        (3, ["engines.generator.ranks=0.01"], range(1), range(1, 3)),
    ],
)
def test_each_network_has_the_ranks_that_it_asks_for(tmp_path, world_size, overrides, generator, discriminator):
    plan = plan_run(least(tmp_path, "batch=120", *overrides), world_size)
    assert plan.placement("generator").ranks == generator
    assert plan.placement("discriminator").ranks == discriminator
    assert plan.is_split == (generator != discriminator)


@pytest.mark.parametrize(
    "world_size, overrides, text",
    [
        (1, ["generator.ranks=1"], "engines.generator.ranks: must be null on one rank, got 1; "),
        (2, ["discriminator.ranks=5"], "engines.discriminator.ranks: must be less than the number of ranks (2), got"),
        (4, ["generator.ranks=1", "discriminator.ranks=2"], "engines.discriminator.ranks: must be 3, the ranks that"),
        (4, ["generator.ranks=1", "discriminator.pipeline_stages=2"], "engines.discriminator.pipeline_stages: must"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(tmp_path, world_size, overrides, text):
    with pytest.raises(UserError) as caught:
        plan_run(least(tmp_path, "batch=120", *(f"engines.{option}" for option in overrides)), world_size)
    assert str(caught.value).startswith(text)


def test_a_key_of_another_section_is_found_there(tmp_path):
    assert refused(tmp_path, "lr=1").remedy == "did you mean optimizer.generator.lr or optimizer.discriminator.lr?"
    assert refused(tmp_path, "generator.resolution=32").remedy == (
        "did you mean data.resolution or objective.teacher.resolution?"
    )
    assert refused(tmp_path, "objective.r1={weight: 1, evry: 2}").remedy == "did you mean objective.r1.every?"
    keys = "half_life_nimg, start_nimg, ramp, warmup_nimg, reset_nimg, reset_from_nimg, power"
    assert refused(tmp_path, "ema.xyz=1").remedy == f"the keys of this section are {keys}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_are_valid_and_print_as_themselves(tmp_path, path):
    recipe = load_recipe(path, [])
    printed = tmp_path / "printed.yaml"
    printed.write_text(recipe.to_yaml())
    plan_run(recipe, 1)
    assert load_recipe(printed, []) == recipe
    assert yaml.load(printed.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) == recipe.model_dump()


def test_the_tables_of_blocks_agree_with_the_resolutions():
    for resolution, generator in BIGGAN_GENERATOR.items():
        assert 4 * 2 ** (len(generator) - 1) == resolution  # from 4x4, each block doubles
        sizes = biggan_discriminator_resolutions(Size.of(resolution))
        assert len(sizes) == len(BIGGAN_DISCRIMINATOR[resolution])
        assert sizes[-1] == {16: 4, 32: 8}.get(resolution, 4)
        assert all(before in (after, 2 * after) for before, after in zip([resolution, *sizes], sizes, strict=False))


def test_chunks_of_a_hierarchical_latent():
    data = Data(resolution=128)
    BigGANGenerator(latent_size=120).check(data)  # the paper's: 6 chunks of 20
    with pytest.raises(
        UserError, match=r"latent_size: must be a multiple of 6, got 128 .*; set generator.latent_size=126"
    ):
        BigGANGenerator(latent_size=128).check(data)
    BigGANGenerator(latent_size=128, hierarchical=False).check(data)
