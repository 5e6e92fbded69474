"""Classes and channels that a recipe leaves to its data."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import ExifTags, Image

from bigsgan import Recipe, cli
from bigsgan.config import NETWORKS, plan_run
from bigsgan.config.recipe import parse_recipe
from bigsgan.config.run_directory import write_recipe
from bigsgan.data import build_dataset, shards
from bigsgan.data.found import with_found
from bigsgan.errors import UserError
from bigsgan.planner.balance import plan_balanced
from tests.archives import png, write_tar

OWN = ("own_32", "own_64", "own_256")
LABELS = {"labels": [["a.png", 0], ["b.png", 4]]}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(*names: str, mode: str = "L", size: tuple[int, int] = (9, 7), **saved: Any) -> None:
    for number, name in enumerate(names):
        path = Path("photos", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(path, **saved)


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


def write_rows(kind: str, labels: list[int] | None, mode: str = "L") -> None:
    """Images with these labels in tar shards, an HDF5 file, or a data set of Hugging Face, which names its classes."""
    channels = 1 if mode == "L" else 3
    if kind == "tar":
        for number in range(6):
            members = {f"{number}.png": png(np.full((4, 4, channels), number, np.uint8).squeeze())}
            members |= {} if labels is None else {f"{number}.cls": str(labels[number]).encode()}
            write_tar(Path("photos", f"{number}.tar"), members)
    elif kind == "hdf5":
        with pytest.importorskip("h5py").File("photos", "w") as file:
            file["imgs"] = np.zeros((6, channels, 4, 4), np.uint8)
            if labels is not None:
                file["labels"] = np.array(labels)
    else:
        datasets = pytest.importorskip("datasets")
        columns: dict = {"image": [Image.new(mode, (4, 4))] * 6}
        features = {"image": datasets.Image()}
        if labels is not None:
            columns["label"], features["label"] = labels, datasets.ClassLabel(names=["cat", "dog", "eel", "fox"])
        datasets.Dataset.from_dict(columns, datasets.Features(features)).save_to_disk("photos")


@pytest.mark.parametrize("kind", ["tar", "hdf5", "huggingface"])
@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_shards_and_tables_tell_their_classes_and_channels(kind, mode, channels):
    write_rows(kind, [0, 2, 1, 0, 2, 1], mode)
    num = 4 if kind == "huggingface" else 3  # of the names that it has
    assert found(f"data.kind={kind}") == (num, channels)
    assert found(f"data.kind={kind}", "data.num_classes=0") == (0, channels)
    assert found(f"data.kind={kind}", "data.image_channels=3") == (num, 3)
    recipe = with_found(own(f"data.kind={kind}", "data.num_workers=0"))[0]
    assert sorted(build_dataset(recipe.data).labels.tolist()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", ["tar", "hdf5", "huggingface"])
@pytest.mark.parametrize("labels", [None, [0] * 6])
def test_shards_and_tables_without_several_classes(kind, labels):
    write_rows(kind, labels)
    assert found(f"data.kind={kind}")[0] == (4 if kind == "huggingface" and labels else 0)


def test_headers_of_shards_are_read_once(monkeypatch):
    """Finding the classes and opening the data is one start."""
    write_rows("tar", [0, 1, 0, 1, 0, 1])
    paths, real = [], shards.read_headers
    monkeypatch.setattr(shards, "read_headers", lambda data, path: (paths.append(path), real(data, path))[1])
    recipe = with_found(own("data.kind=tar"))[0]
    assert len(build_dataset(recipe.data)) == len(paths) == 6


def test_names_beside_shards_count_the_classes():
    write_rows("tar", [0, 1, 0, 1, 0, 1])
    Path("photos/classes.json").write_text('["cat", "dog", "eel"]')
    assert with_found(own("data.kind=tar"))[2].startswith(
        "photos has 3 classes (cat, dog, eel), 1 channel and images of 4x4"
    )


def test_shards_with_images_without_a_class_are_refused():
    write_rows("tar", [0, 1, 0, 1, 0, 1])
    write_tar(Path("photos/9.tar"), {"9.png": png(0)})
    with pytest.raises(UserError, match=r"has 1 of 7 images without a label \(such as 9\.png in 9\.tar\)"):
        found("data.kind=tar")
    assert found("data.kind=tar", "data.num_classes=0") == (0, 1)


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_data_without_images_is_refused(kind):
    """Of .npy files, with what lets them be read."""
    Path("photos").mkdir()
    np.save("photos/a.npy", np.zeros((4, 4)))
    root = "photos"
    if kind == "zip":
        root = shutil.make_archive("photos", "zip", "photos")
    if kind == "tar":
        write_tar(Path("photos/0.tar"), {"a.npy": Path("photos/a.npy").read_bytes()})
    with pytest.raises(UserError, match=r"contains no images .*; set data\.range to the values that are black and"):
        found(f"data.kind={kind}", root=root)


def test_files_of_labels_tell_the_classes():
    write("a.png", "b.png")
    Path("labels.csv").write_text("a.png,cat\nb.png,dog\n")
    assert found("data.labels_file=labels.csv") == (2, 1)
    Path("photos/dataset.json").write_text(json.dumps(LABELS))
    assert found() == (5, 1)
    Path("photos/dataset.json").write_text('{"labels": null}')
    assert found() == (0, 1)


def test_grey_numbers_make_one_channel():
    write("a.png")
    Image.fromarray(np.zeros((9, 7), np.float32)).save("photos/b.tif")
    assert found() == (0, 1)


def test_one_image_in_colour_makes_three_channels():
    write("1.png", "2.png", "3.png")
    write("4.png", mode="RGB")
    assert found() == (0, 3)


def test_unreadable_images_do_not_count():
    write("1.png")
    Path("photos/0.png").write_text("no image")
    assert found() == (0, 1)


@pytest.mark.parametrize(
    ("size", "largest", "expected"),
    [
        ((32, 32), 64, 32),
        ((24, 40), 64, [24, 40]),
        ((24, 40), 32, [24, 40]),  # fewer pixels than 32x32
        ((50, 50), 64, 48),
        ((64, 48), 64, [64, 48]),
        ((270, 480), 64, [48, 80]),
        ((480, 270), 256, [320, 192]),
        ((9, 70), 64, [10, 70]),
        ((3, 3), 8, 8),
        ((90, 9), 8, 8),  # which leaves 2 of 8 pixels
    ],
)
def test_the_size_is_near_that_of_the_images(size, largest, expected):
    write("1.png", "2.png", size=size)
    recipe, keys, text = with_found(own(f"data.resolution=auto {largest}", "generator.channel_base=512"))
    assert recipe.data.resolution.value == expected
    assert keys[2] == f"data.resolution={expected}".replace(" ", "")
    assert text.startswith(f"photos has no classes, 1 channel and images of {size[0]}x{size[1]}")
    if size == (50, 50):
        assert "images of 50x50 (data.resolution must be a multiple of 8 with StyleGAN2): data" in text
    assert recipe == own(*keys, "generator.channel_base=512")
    images = [image for image, _ in build_dataset(recipe.data)]
    assert {image.shape[1:] for image in images} == {tuple(recipe.data.resolution)}


def test_images_of_several_sizes_become_squares():
    write("1.png", "2.png", size=(240, 400))
    write("3.png", size=(480, 800))
    write("5.png", size=(400, 668))  # as a thumbnail is rounded
    recipe, _, text = with_found(own("data.resolution=auto 64"))
    assert recipe.data.resolution.value == [48, 80]
    assert "images of 240x400 to 480x800: " in text
    write("4.png", size=(400, 240))
    recipe, _, text = with_found(own("data.num_classes=0", "data.image_channels=1"))
    assert recipe.data.resolution.value == 32
    assert text == "photos has images of several proportions or sizes: data.resolution=32"


def test_a_size_is_that_of_an_upright_image():
    for name, orientation in (("1.jpg", 6), ("2.png", 7), ("3.tif", 8)):
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        write(name, size=(24, 40), exif=exif)
    recipe = with_found(own("data.resolution=auto 64"))[0]
    assert recipe.data.resolution.value == [40, 24]


def test_a_run_keeps_the_size_that_it_began_with(tmp_path):
    """Also when an image of another size has come; what it cannot keep is told as ever."""
    write("1.png", "2.png", size=(24, 40))
    recipe = own("data.resolution=auto 32", "out=run")
    write_recipe(with_found(recipe)[0], Path("run"), {})
    write("3.png", size=(9, 90))
    assert with_found(recipe)[0].data.resolution.value == 32  # no checkpoint is there
    Path("run/checkpoints/000000000064").mkdir(parents=True)
    assert with_found(own("data.resolution=auto 16", "out=run"))[0].data.resolution.value == 16
    found_recipe, keys, text = with_found(recipe)
    assert found_recipe.data.resolution.value == [24, 40]
    assert keys == ["data.image_channels=1", "data.resolution=[24,40]", "data.num_classes=0"]
    assert text.splitlines()[0] == "run began with data.image_channels=1 data.resolution=[24,40]"
    Path("run/config.yaml").write_text("no recipe")
    assert with_found(recipe)[0].data.resolution.value == 32


def test_an_unreadable_image_has_no_size():
    write("1.png", size=(24, 40))
    Path("photos/0.png").write_text("no image")
    assert with_found(own("data.resolution=auto 64"))[0].data.resolution.value == [24, 40]
    Path("photos/1.png").write_text("no image")
    assert "no readable images: " in with_found(own("data.resolution=auto 64"))[2]
    write("1.tif", size=(24, 40))
    Path("photos/1.tif").write_bytes(Path("photos/1.tif").read_bytes()[:-100])
    kept = with_found(own("data.resolution=auto 64", "data.truncated=accept"))[0]
    assert kept.data.resolution.value == [24, 40]


@pytest.mark.parametrize("kind", ["tar", "hdf5", "huggingface"])
def test_shards_and_tables_tell_their_size(kind):
    write_rows(kind, None)
    recipe = with_found(own(f"data.kind={kind}", "data.resolution=auto 16", "generator.channel_max=8"))[0]
    assert recipe.data.resolution.value == 8  # of 4x4, which StyleGAN2 does not double


def test_what_was_found_is_told_and_is_a_recipe_of_numbers(capsys):
    write("cat/1.png", "dog/2.png")
    recipe, keys, text = with_found(own())
    assert keys == ["data.num_classes=2", "data.image_channels=1", "data.resolution=[10,8]"]
    what = "2 classes (cat, dog), 1 channel and images of 9x7 (data.resolution must be at least 8 with StyleGAN2)"
    assert text == f"photos has {what}: {' '.join(keys)}"
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
    assert recipe.data.left_to_data == ["num_classes", "image_channels", "resolution"]
    assert recipe.data.resolution.value == int(name.removeprefix("own_"))
    assert (recipe.data.num_classes, recipe.data.image_channels) == (0, 3)
    assert parse_recipe(yaml.safe_load(recipe.to_yaml())).data.left_to_data == recipe.data.left_to_data
    assert with_found(recipe) == (recipe, [], "")
    assert cli.main(["train", "--config", name, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "data.root: 'data/own' does not exist" in printed.err
    assert yaml.safe_load(printed.out)["data"]["num_classes"] == "auto"
    assert yaml.safe_load(printed.out)["data"]["resolution"] == "auto " + name.removeprefix("own_")
    # StyleGAN2-ADA's `auto`: R1 by the pixels over the batch, an EMA of 10 batches in 32,000 images
    assert recipe.objective.r1 is not None
    assert recipe.objective.r1.weight == pytest.approx(2e-4 * recipe.data.resolution.num_pixels / recipe.batch)
    assert recipe.batch == min(4096 // recipe.data.resolution.height, 32)
    assert recipe.ema.half_life_nimg == recipe.batch * 10_000 / 32
    assert {getattr(recipe, network).channel_base for network in NETWORKS} == {16_384}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data.kind=torchvision", "data.dataset=CIFAR10"], "data.num_classes: must be a number with"),
        (["data.multi_label=true"], "data.num_classes: must be a number with data.multi_label, got 'auto'"),
        (
            ["data.kind=hdf5", "data.num_classes=0", "data.image_channels=1", "data.range=auto"],
            "data.range: must be two numbers with data.kind=hdf5, got 'auto'; set data.range to the values of black",
        ),
        (["data.kind=huggingface", "data.num_classes=0", "data.range=[0,9]"], "data.image_channels: must be a number"),
        (["data.range=automatic"], "data.range: must be"),
        (["data.crop_from=64"], "data.resolution: must be a size with data.crop_from, got 'auto 32'"),
        (
            ["data.kind=hdf5", "data.num_classes=0", "data.image_channels=1", "data.range=[0,9]"],
            "data.resolution: must be a size with data.kind=hdf5, got 'auto 32'; set data.resolution to the pixels of",
        ),
        (
            ["data.resolution=auto"],
            "data.resolution: must be one number, a height and a width, or auto and the largest side, got 'auto'; give "
            "one such as 64, [48, 64] or 'auto 64'",
        ),
        (["data.resolution=auto 0"], "data.resolution: must be greater than 0, got 0"),
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
    with pytest.raises(UserError, match=r"^data\.num_classes: .* where images lie beside folders \(3\.png\)"):
        with_found(own())
    assert found("data.num_classes=0") == (0, 1)


def test_labels_of_fakes_may_follow_classes_that_are_found():
    write("cat/1.png", "dog/2.png")
    assert with_found(own("objective.fake_labels=frequencies"))[0].objective.fake_labels == "frequencies"
    shutil.rmtree("photos")
    write("1.png")
    with pytest.raises(UserError, match=r"objective\.fake_labels: must be uniform with data\.num_classes=0"):
        with_found(own("objective.fake_labels=frequencies"))


def on_arrays(*overrides: str, kind: str = "folder", root: str = "photos") -> Recipe:
    return Recipe.read("digits_dcgan", "data.kind=" + kind, f"data.root={root}", "data.num_classes=0", *overrides)


def write_arrays(num: int = 5, channels: int = 4) -> np.ndarray:
    """Signed numbers, of which the extremes are in images of their own: (N, H, W, C)."""
    arrays = np.random.default_rng(0).uniform(-900, 2000, (num, 20, 20, channels)).astype(np.float32)
    arrays[1, 3, 4, 0], arrays[num - 1, 19, 19, channels - 1] = -1000.25, 3000
    Path("photos").mkdir()
    for number, array in enumerate(arrays):
        np.save(f"photos/{number}.npy", array)
    return arrays


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_the_range_is_that_of_all_values(kind):
    arrays = write_arrays()
    root = shutil.make_archive("photos", "zip", "photos") if kind == "zip" else "photos"
    recipe, keys, text = with_found(on_arrays("data.range=auto", "data.image_channels=auto", kind=kind, root=root))
    assert recipe.data.range == [arrays.min(), arrays.max()] == [-1000.25, 3000]
    assert recipe.data.image_channels == 4
    assert keys == ["data.image_channels=4", "data.range=[-1000.25,3000]"]
    size = with_found(
        on_arrays("data.range=[0,1]", "data.image_channels=4", "data.resolution=auto 32", kind=kind, root=root)
    )
    assert size[1] == ["data.resolution=20"]
    assert size[2] == f"{root} has images of 20x20: data.resolution=20"
    assert text == f"{root} has 4 channels and values from -1000.25 to 3000: {' '.join(keys)}"
    assert recipe == on_arrays(*keys, kind=kind, root=root)
    assert yaml.safe_load(recipe.to_yaml())["data"]["range"] == [-1000.25, 3000]
    given = on_arrays("data.range=[0,10]", "data.image_channels=auto", kind=kind, root=root)
    assert with_found(given)[1] == ["data.image_channels=4"]


def test_values_become_those_between_black_and_white():
    arrays = write_arrays()
    data = with_found(on_arrays("data.range=auto", "data.image_channels=4", "data.resolution=20"))[0].data
    images = torch.stack([image for image, _ in build_dataset(data)])
    expected = torch.from_numpy(arrays).double().permute(0, 3, 1, 2)
    expected = 2 * (expected - expected.min()) / (expected.max() - expected.min()) - 1
    torch.testing.assert_close(images.double(), expected, atol=1e-6, rtol=0)
    assert (images.min(), images.max()) == (-1, 1)


def test_unreadable_images_have_no_values():
    write_arrays(channels=1)
    np.save("photos/5.npy", np.full((20, 20), np.nan))
    Path("photos/6.npy").write_bytes(b"no array")
    np.save("photos/labels.npy", np.arange(10_000))
    np.save("photos/stack.npy", np.full((2, 20, 20, 1), 9999))
    (both,) = [with_found(on_arrays("data.range=auto", "data.image_channels=auto"))[0].data]
    assert (both.range, both.image_channels) == ([-1000.25, 3000], 1)


def test_pictures_of_8_bits_have_values_too():
    write("1.png", "2.png", mode="RGB")
    found = with_found(on_arrays("data.range=auto", "data.image_channels=auto"))[0].data
    pixels = [np.asarray(Image.open(f"photos/{number}.png")) for number in (1, 2)]
    assert (found.range, found.image_channels) == ([np.min(pixels), np.max(pixels)], 3)


NO_RANGE = {
    "data.range: must be two numbers where all values are 5, got 'auto'; give": [np.full((20, 20), 5)] * 3,
    "data.image_channels: must be a number for images of 1 and 2 channels, got 'auto'; give": [
        np.zeros((20, 20)),
        np.ones((20, 20, 2)),
    ],
    "data.root: 'photos' contains no readable images; repair": [np.full((20, 20), np.inf)],
}


@pytest.mark.parametrize("message", NO_RANGE)
def test_data_that_tells_no_range(message):
    Path("photos").mkdir()
    for number, array in enumerate(NO_RANGE[message]):
        np.save(f"photos/{number}.npy", array)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        with_found(on_arrays("data.range=auto", "data.image_channels=auto"))


def test_a_range_stays_open_without_data(capsys):
    recipe = on_arrays("data.range=auto")
    assert recipe.data.left_to_data == ["range"]
    assert parse_recipe(yaml.safe_load(recipe.to_yaml())).data.left_to_data == ["range"]
    assert with_found(recipe) == (recipe, [], "")
    words = ["data", "prepare", "photos", "made", "--format", "zip", "--resolution", "8", "data.range=auto"]
    assert cli.main(words) == 2
    assert "data.range: must be two numbers here, got 'auto'; give" in capsys.readouterr().err
