"""Classes and channels that a recipe leaves to its data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from bigsgan import Recipe, cli
from bigsgan.config import NETWORKS, plan_run
from bigsgan.config.recipe import parse_recipe
from bigsgan.data.found import with_found
from bigsgan.errors import UserError
from bigsgan.planner.balance import plan_balanced

OWN = ("own_32", "own_64", "own_256")
LABELS = {"labels": [["a.png", 0], ["b.png", 4]]}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(*names: str, mode: str = "L") -> None:
    for number, name in enumerate(names):
        path = Path("photos", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (9, 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(path)


def own(*overrides: str, root: str = "photos") -> Recipe:
    return Recipe.read("own_32", f"data.root={root}", *overrides)


def found(*overrides: str, root: str = "photos") -> tuple[int, int]:
    data = with_found(own(*overrides, root=root))[0].data
    assert not data.left_to_data
    return data.num_classes, data.image_channels


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("b/1.png", "a/x/2.png", "c/3.png"), 3),
        (tuple(f"{number}/1.png" for number in range(10)), 10),
        (("1.png", "2.png"), 0),
        (("a/1.png", "a/2.png"), 0),
        (("a/1.png", "2.png"), 0),
    ],
    ids=["folders", "ten folders", "loose", "one folder", "one folder beside loose ones"],
)
def test_folders_are_the_classes_if_there_are_several(names, expected):
    write(*names)
    assert found() == (expected, 1)
    assert found("data.num_classes=0") == (0, 1)
    assert found("data.image_channels=3") == (expected, 3)
    shutil.make_archive("photos", "zip", "photos")
    assert found("data.kind=zip", root="photos.zip") == (expected, 1)
    what = f"{expected} classes" if expected else "no classes"
    assert with_found(own())[2].startswith(f"photos has {what}")


def test_files_of_labels_tell_the_classes():
    write("a.png", "b.png")
    Path("labels.csv").write_text("a.png,cat\nb.png,dog\n")
    assert found("data.labels_file=labels.csv") == (2, 1)
    Path("photos/dataset.json").write_text(json.dumps(LABELS))
    assert found() == (5, 1)
    Path("photos/dataset.json").write_text('{"labels": null}')
    assert found() == (0, 1)


def test_one_image_in_colour_makes_three_channels():
    write("1.png", "2.png", "3.png")
    write("4.png", mode="RGB")
    assert found() == (0, 3)


def test_unreadable_images_do_not_count():
    write("1.png")
    Path("photos/0.png").write_text("no image")
    assert found() == (0, 1)


def test_what_was_found_is_told_and_is_a_recipe_of_numbers(capsys):
    write("cat/1.png", "dog/2.png")
    recipe, keys, text = with_found(own())
    assert keys == ["data.num_classes=2", "data.image_channels=1"]
    assert text == f"photos has 2 classes (cat, dog) and 1 channel: {' '.join(keys)}"
    assert recipe == own(*keys)
    assert with_found(recipe) == (recipe, [], "")
    assert plan_balanced(own(), 1) == (plan_run(recipe, 1, on_gpus=True), text)
    assert cli.main(["train", "--config", "own_32", "data.root=photos", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[0] == text
    assert yaml.safe_load(printed.out)["data"] == yaml.safe_load(recipe.to_yaml())["data"]


@pytest.mark.parametrize("name", OWN)
def test_recipes_of_ones_own_images_stay_open_without_data(name, capsys):
    recipe = Recipe.read(name)
    assert recipe.data.left_to_data == ["num_classes", "image_channels"]
    assert recipe.data.resolution.value == int(name.removeprefix("own_"))
    assert (recipe.data.num_classes, recipe.data.image_channels) == (0, 3)
    assert parse_recipe(yaml.safe_load(recipe.to_yaml())).data.left_to_data == recipe.data.left_to_data
    assert with_found(recipe) == (recipe, [], "")
    assert cli.main(["train", "--config", name, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "data.root: 'data/own' does not exist" in printed.err
    assert yaml.safe_load(printed.out)["data"]["num_classes"] == "auto"
    # StyleGAN2-ADA's `auto`: R1 by the pixels over the batch, an EMA of 10 batches in 32,000 images
    assert recipe.objective.r1 is not None
    assert recipe.objective.r1.weight == pytest.approx(2e-4 * recipe.data.resolution.num_pixels / recipe.batch)
    assert recipe.batch == min(4096 // recipe.data.resolution.height, 32)
    assert recipe.ema.half_life_nimg == recipe.batch * 10_000 / 32
    assert {getattr(recipe, network).channel_base for network in NETWORKS} == {16_384}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data.kind=tar"], "data.num_classes: must be a number with data.kind=tar, got 'auto'"),
        (["data.multi_label=true"], "data.num_classes: must be a number with data.multi_label, got 'auto'"),
        (["data.range=[0,4095]"], "data.image_channels: must be a number with data.range, got 'auto'"),
        (["data.num_classes=automatic"], "data.num_classes: must be an integer, got 'automatic'"),
        (["data.class_names=[a,b,c]"], "data.class_names: must be 2 different names, as many as data.num_classes"),
        (["generator.mapping_layers=0"], "generator.mapping_layers: must be at least 1 with classes"),
    ],
)
def test_a_recipe_that_does_not_fit(overrides, text):
    write("cat/1.png", "dog/2.png")
    with pytest.raises(UserError) as caught:
        with_found(own(*overrides))
    assert str(caught.value).startswith(text)


def test_images_beside_folders_are_no_class():
    write("cat/1.png", "dog/2.png", "3.png")
    with pytest.raises(UserError) as caught:
        with_found(own())
    assert str(caught.value) == (
        "data.num_classes: must be given where images lie beside folders (3.png); set data.num_classes=0 to train "
        "without classes, or move these images"
    )
    assert found("data.num_classes=0") == (0, 1)


def test_labels_of_fakes_may_follow_classes_that_are_found():
    write("cat/1.png", "dog/2.png")
    assert with_found(own("objective.fake_labels=frequencies"))[0].objective.fake_labels == "frequencies"
    shutil.rmtree("photos")
    write("1.png")
    with pytest.raises(UserError, match=r"objective\.fake_labels: must be uniform with data\.num_classes=0"):
        with_found(own("objective.fake_labels=frequencies"))
