"""Names of classes: from the data to the run, its exports and its samples."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import bigsgan
from bigsgan import cli
from bigsgan.config.class_names import with_class_names
from bigsgan.config.data import Data
from bigsgan.config.run_directory import read_saved_recipe, write_recipe
from bigsgan.data import build_dataset
from bigsgan.data.datasets import images_of_classes
from bigsgan.data.outside import names_of
from bigsgan.errors import UserError
from tests.tiny import tiny_recipe


@pytest.fixture
def photographs(tmp_path):
    for i in range(6):
        folder = tmp_path / "photographs" / ("cat", "dog", "eel")[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 40 * i, dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "photographs"


def prepare(source, made, kind="tar"):
    options = ["--resolution", "8", "--format", kind, "--workers", "1"]
    assert cli.main(["data", "prepare", str(source), str(made), *options]) == 0


def section(kind, root, num_classes=3) -> Data:
    return Data(kind=kind, root=str(root), resolution=8, num_classes=num_classes, num_workers=0)


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_folders_name_the_classes_and_so_does_what_is_made_of_them(tmp_path, photographs, kind):
    made = tmp_path / ("made.zip" if kind == "zip" else "made")
    prepare(photographs, made, kind)
    for data in (section("folder", photographs), section(kind, made)):
        assert list(build_dataset(data).class_names) == ["cat", "dog", "eel"]
        assert with_class_names(data, build_dataset(data).class_names).class_names == ["cat", "dog", "eel"]


def test_a_damaged_list_of_names_is_refused(tmp_path, photographs):
    prepare(photographs, tmp_path / "made")
    (tmp_path / "made/classes.json").write_text('{"cat": 0}')
    with pytest.raises(UserError, match=r"has a classes.json that cannot be read: it is no list of names; write"):
        build_dataset(section("tar", tmp_path / "made"))


def test_classes_with_numbers_alone_have_no_names(tmp_path, photographs):
    labels = [[str(path.relative_to(photographs)), 1] for path in photographs.rglob("*.png")]
    (photographs / "dataset.json").write_text(json.dumps({"labels": labels}))
    prepare(photographs, tmp_path / "made")
    assert not (tmp_path / "made/classes.json").exists()
    assert build_dataset(section("folder", photographs, 2)).class_names == []


def write_listing(root, suffix="png", **about):
    """Four images, or latents, of classes 0 and 1 in turn."""
    root.mkdir(exist_ok=True)
    for i in range(4):
        if suffix == "png":
            Image.new("L", (8, 8)).save(root / f"{i}.png")
        else:
            np.save(root / f"{i}.npy", np.zeros((4, 1, 1), np.float32))
    listed = {"labels": [[f"{i}.{suffix}", i % 2] for i in range(4)], **about}
    (root / "dataset.json").write_text(json.dumps(listed))
    return root


@pytest.mark.parametrize("kind", ["folder", "zip", "labels_file", "latents", "latents in a zip file"])
def test_a_listing_names_the_classes(tmp_path, kind):
    """By number: not in alphabetical order, and also a class without an image."""
    suffix, keys = ("png", {}) if "latents" not in kind else ("npy", {"codec": {"kind": "dct", "block": 2}})
    root = write_listing(tmp_path / "listed", suffix, class_names=["dog", "cat", "eel"])
    keys |= {"kind": kind.split()[0], "root": str(root), "resolution": 2, "image_channels": 1}
    if kind == "labels_file":
        (root / "dataset.json").rename(tmp_path / "labels.json")
        keys |= {"kind": "folder", "labels_file": str(tmp_path / "labels.json")}
    if "zip" in kind:
        keys |= {"root": shutil.make_archive(str(root), "zip", root)}
    dataset = build_dataset(Data(**keys, num_classes=3))
    assert dataset.class_names == ["dog", "cat", "eel"]
    assert dataset.labels.tolist() == [0, 1, 0, 1]
    with pytest.raises(UserError, match=r"data\.num_classes: must be 3 with this data, got 2 .* 3 classes in"):
        build_dataset(Data(**keys, num_classes=2))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["cat"], "has 1 name in class_names of its dataset.json, and images of class 1; name each class, or"),
        ({"cat": 0}, 'has class_names in its dataset.json that are no list of different texts; write "class_names": '),
        (["cat", "cat"], "has class_names in its dataset.json that are no list of different texts; write"),
        (["cat", "\ud800"], "has class_names in its dataset.json that are no list of different texts; write"),
        (["cat", ""], "has class_names in its dataset.json that are no list of different texts; write"),
    ],
)
def test_names_in_a_listing_that_do_not_fit_are_refused(tmp_path, names, problem):
    root = write_listing(tmp_path / "listed", class_names=names)
    with pytest.raises(UserError) as caught:
        build_dataset(section("folder", root, 2))
    assert str(caught.value).startswith(f"data.root: '{root}' {problem}")
    assert build_dataset(section("folder", root, 0)).class_names == []


def test_names_in_a_listing_are_no_must(tmp_path):
    for about in ({}, {"class_names": None}, {"class_names": []}):
        assert build_dataset(section("folder", write_listing(tmp_path / "listed", **about), 2)).class_names == []
    root = write_listing(tmp_path / "listed", labels=None, class_names=["dog", "cat"])
    assert build_dataset(section("folder", root, 1)).class_names == []


def test_what_is_made_of_a_listing_has_its_names(tmp_path):
    root = write_listing(tmp_path / "listed", class_names=["dog", "cat", "eel"])
    prepare(root, tmp_path / "made")
    assert build_dataset(section("tar", tmp_path / "made")).class_names == ["dog", "cat", "eel"]


@pytest.mark.parametrize(
    "classes, names",
    [
        (["cat", "dog"], ["cat", "dog"]),
        ([("tench", "Tinca tinca"), ("goldfish",)], ["tench", "goldfish"]),
        ([("crane", "a bird"), ("tench",), ("crane", "a machine")], ["crane, a bird", "tench", "crane, a machine"]),
        ({"cat": 0, "dog": 1}, ["cat", "dog"]),
        ([1, 2], []),
        (None, []),
    ],
)
def test_names_of_other_data_sets(classes, names):
    assert names_of(SimpleNamespace(classes=classes)) == names
    assert names_of(SimpleNamespace(categories=classes)) == names


def test_given_names_count_and_their_order_is_that_of_the_data():
    given = Data(kind="synthetic", num_classes=2, class_names=["house cat", "dog"])
    assert with_class_names(given, ["cat", "dog"]) == given
    assert with_class_names(given, []) == given
    with pytest.raises(UserError, match=r"data.class_names: must have 'dog' as class 0, as the data has, got 'house"):
        with_class_names(given, ["dog", "house cat"])
    plain = Data(kind="synthetic", num_classes=2)
    assert with_class_names(plain, ["cat", "cat"]) == plain  # no names
    assert with_class_names(plain, ["cat"]) == plain
    folders = Data(kind="synthetic", num_classes=3)  # class 1 is folder 10, and class 2 is folder 2
    assert with_class_names(folders, ["1", "10", "2"]).class_names == ["1", "10", "2"]


@pytest.mark.parametrize(
    "names",
    [
        ["a" * 201],
        ["a\udce9"],
        [""],
        ["a\nb"],
        ["0", "1", "2"],
        ["00", "01"],
        [str(i) + "x" for i in range(5_001)],
        ["é" * 190 + str(i) for i in range(900)],
    ],
    ids=["long", "no UTF-8", "empty", "two lines", "numbers", "with zeros", "many", "too much text"],
)
def test_names_that_a_recipe_cannot_hold_are_left_out(tmp_path, names):
    data = Data(kind="synthetic", num_classes=len(names))
    assert with_class_names(data, names).class_names is None


def test_as_many_names_as_a_recipe_holds_are_read_again(tmp_path):
    names = [f"{i} {'é' * 9}" for i in range(5_000)]
    recipe = tiny_recipe(tmp_path, "data={kind: synthetic, resolution: 16, num_classes: 5000, num_images: 5000}")
    data = with_class_names(recipe.data, names)
    assert data.class_names == names
    write_recipe(recipe.model_copy(update={"data": data}), tmp_path / "run", {})
    assert read_saved_recipe(tmp_path / "run").data.class_names == names


@pytest.mark.parametrize("names", [["cat"], ["cat", "cat"], ["cat", "dog", "eel"]])
def test_each_class_has_a_name_of_its_own(names):
    with pytest.raises(UserError, match=r"data.class_names: must be 2 different names, as many as data.num_classes"):
        Data(kind="synthetic", num_classes=2, class_names=names)


def test_real_images_stand_below_each_other_by_class(tmp_path, photographs):
    """Two of each class, black where there is no third; images tell by their grey which they are: 40 i of file i."""
    data = section("folder", photographs)
    (photographs / "eel/5.png").write_bytes(b"not an image")
    found = images_of_classes(build_dataset(data), data, [0, 1, 2], 3)
    greys = ((found[:, 0, 0, 0] + 1) * 127.5).round().view(3, 3)
    assert greys.tolist() == [[0, 40, 80], [120, 160, 0], [0, 0, 0]]
    plain = section("folder", photographs, 0)
    assert images_of_classes(build_dataset(plain), plain, [0], 3) is None
    digits = Data(kind="digits", resolution=8)
    columns = images_of_classes(build_dataset(digits), digits, [3, 7], 2)
    straight = build_dataset(digits)
    threes = [straight[i][0] for i in range(len(straight)) if straight[i][1] == 3]
    assert torch.equal(columns[0], threes[0].float() / 127.5 - 1)
    assert torch.equal(columns[2], threes[len(threes) // 2].float() / 127.5 - 1)


@pytest.mark.slow
def test_names_travel_with_the_run(tmp_path, photographs, capsys, caplog):
    out, options = tmp_path / "run", ["generator.channels=4", "discriminator.channels=4", "metrics=null", "batch=8"]
    data = f"data={{kind: folder, root: {photographs}, resolution: 16, num_classes: 3, num_workers: 0}}"
    lengths = ["total_nimg=16", "report_nimg=8", "sample_nimg=16", "checkpoint_nimg=16"]
    assert cli.main(["train", "--config", "digits_dcgan", data, f"out={out}", *options, *lengths]) == 0
    assert "class_names: [cat, dog, eel]" in (out / "config.yaml").read_text()
    (manifest,) = (out / "checkpoints").rglob("manifest.json")
    assert json.loads(manifest.read_text())["recipe"]["data"]["class_names"] == ["cat", "dog", "eel"]
    resumed = ["train", "--config", "digits_dcgan", data, f"out={out}", *options, "total_nimg=32", *lengths[1:]]
    caplog.clear()
    assert cli.main(resumed) == 0  # which does not name the classes
    assert not [text for text in caplog.messages if "class_names" in text and "recipe:" not in text]
    assert cli.main(["export", "--run", str(out), "--format", "hub", "--out", str(tmp_path / "hub")]) == 0
    assert "| classes | 3: 0 cat, 1 dog, 2 eel |" in (tmp_path / "hub/README.md").read_text()
    assert bigsgan.load(tmp_path / "hub").recipe.data.class_names == ["cat", "dog", "eel"]
    sample = ["sample", "--run", str(out), "--num", "2", "--out"]
    assert cli.main([*sample, str(tmp_path / "a.png"), "--class", "dog"]) == 0
    assert cli.main([*sample, str(tmp_path / "b.png"), "--classes", "1"]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    capsys.readouterr()
    assert cli.main([*sample, str(tmp_path / "c.png"), "--class", "dgo"]) == 2
    assert "--classes: must be a class, got 'dgo'; did you mean dog?" in capsys.readouterr().err
