"""Recipes: defaults, overrides, micro-batches, and that a printed recipe reads back as the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bigsgan import shipped
from bigsgan.config import Recipe, load_recipe, plan_run
from bigsgan.errors import UserError
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


def test_a_directory_hides_no_built_in_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert shipped.found_recipe("digits") == shipped.recipe("digits")
    (tmp_path / "digits.yaml").write_text("")
    assert shipped.found_recipe("digits.yaml") == Path("digits.yaml")
