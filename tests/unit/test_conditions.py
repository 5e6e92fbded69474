"""Labels that are vectors: where they come from, and what networks make of them."""

import csv
import io
import json
import re
import shlex
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bigsgan import plugins
from bigsgan.cli import main
from bigsgan.config import Recipe
from bigsgan.config.data import Data
from bigsgan.data import build_dataset
from bigsgan.data.conditions import conditions_of
from bigsgan.data.shards import keep_indices
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from tests.networks import filled
from tests.tiny import TINY_GAMES, tiny_recipe

NAMES = ["a.png", "b.png", "sub/c.png"]
VECTORS = [[0.5, -1.0, 2.0], [1.5, 0.0, 0.25], [0.0, 3.0, -2.0]]


def images(root: Path, names=NAMES):
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 40 * number).save(root / name)
    return root


def listed(root: Path, labels):
    (root / "dataset.json").write_text(json.dumps({"labels": labels}))
    return root


def section(root: Path, **keys):
    return Data(kind="zip" if root.suffix == ".zip" else "folder", root=str(root), **{"num_classes": 0, **keys})


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_vectors_of_dataset_json(tmp_path, kind):
    root = listed(images(tmp_path / "data"), [*zip(NAMES, VECTORS, strict=True)])
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
            for path in sorted(root.rglob("*.*")):
                archive.write(path, path.relative_to(root))
        root = tmp_path / "data.zip"
    dataset = build_dataset(section(root, condition_size=3))
    np.testing.assert_array_equal(dataset.labels, np.array(VECTORS, np.float32))
    image, label = dataset[2]
    assert int(image[0, 0, 0]) == 80
    np.testing.assert_array_equal(label, np.float32(VECTORS[2]))
    other = build_dataset(section(listed(images(tmp_path / "x"), [[n, [9, 9, 9]] for n in NAMES]), condition_size=3))
    assert dataset.fingerprint().classes != other.fingerprint().classes


# What the label is of an image in dataset.json, by the keys of the data section.
FORMS = {
    "a class": ({"num_classes": 3, "missing_labels": "accept"}, [2, 0, None], [[0, 0, 1], [1, 0, 0], [0, 0, 0]]),
    "several classes": (
        {"num_classes": 3, "multi_label": True},
        [[1, 0, 1], 1, [0] * 3],
        [[1, 0, 1], [0, 1, 0], [0] * 3],
    ),
    "a class and numbers": (
        {"num_classes": 2, "condition_size": 1},
        [[1, 0, 0.5], [0, 1, 7], [1, 0, -2]],
        [[1, 0, 0.5], [0, 1, 7], [1, 0, -2]],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_labels(tmp_path, form):
    keys, labels, expected = FORMS[form]
    root = listed(images(tmp_path), [*zip(NAMES, labels, strict=True)])
    np.testing.assert_array_equal(build_dataset(section(root, **keys)).labels, np.float32(expected))


WRONG = {
    "it is missing": ({"condition_size": 3}, None),
    "it has 2 numbers, not 3": ({"condition_size": 3}, [1, 2]),
    "it has 1 number, not 3": ({"condition_size": 3}, 1),
    "it has a number that is not finite": ({"condition_size": 3}, [1, 2, float("inf")]),
    "it is neither a number nor a list of numbers": ({"condition_size": 3}, ["x", 2, 3]),
    "its first 3 numbers are not 0 or 1": ({"num_classes": 3, "multi_label": True}, [0, 2, 0]),
    "it has 2 classes, not one": ({"num_classes": 3, "missing_labels": "accept"}, [1, 1, 0]),
    "it has 0 classes, not one": ({"num_classes": 2, "condition_size": 1}, [0, 0, 1]),
    "it is 3, and not a class from 0 to 2": ({"num_classes": 3, "multi_label": True}, 3),
}


@pytest.mark.parametrize("problem", WRONG)
def test_labels_that_do_not_fit(tmp_path, problem):
    keys, label = WRONG[problem]
    good = [0] * (keys.get("num_classes", 0) + keys.get("condition_size", 0))
    good[0] = 1
    root = listed(images(tmp_path), [["a.png", good], ["b.png", label], ["sub/c.png", good]])
    with pytest.raises(UserError, match=re.escape(f"of b.png in dataset.json: {problem}")):
        build_dataset(section(root, **keys))


def test_images_without_a_label_are_null_by_choice(tmp_path):
    root = listed(images(tmp_path), [["a.png", [1, 2, 3]]])
    found = build_dataset(section(root, condition_size=3, missing_labels="accept")).labels
    np.testing.assert_array_equal(found, np.float32([[1, 2, 3], [0] * 3, [0] * 3]))
    with pytest.raises(UserError, match=r"has b.png, which its dataset.json does not list"):
        build_dataset(section(root, condition_size=3))


def test_images_beside_class_folders_are_null_by_choice(tmp_path):
    root = images(tmp_path, ["cat/a.png", "dog/b.png", "c.png"])
    dataset = build_dataset(section(root, num_classes=2, missing_labels="accept"))
    assert list(dataset.class_names) == ["cat", "dog"]
    np.testing.assert_array_equal(dataset.labels, np.float32([[1, 0], [0, 1], [0, 0]]))
    assert int(dataset[2][0][0, 0, 0]) == 80
    with pytest.raises(UserError, match="folders tell one class each"):
        build_dataset(section(root, num_classes=2, multi_label=True))


def write_csv(path: Path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


# Columns beside the name, keys, labels and names of classes.
TABLES = {
    "classes": ([["class"], [2], [0], [1]], {"num_classes": 3}, [2, 0, 1], []),
    "no head": ([[2], [0], [1]], {"num_classes": 3}, [2, 0, 1], []),
    "names": ([["class"], ["dog"], ["cat"], ["dog"]], {"num_classes": 2}, [1, 0, 1], ["cat", "dog"]),
    "attributes": (
        [["hat", "tie"], [-1, 1], [1, 1], [-1, -1]],
        {"num_classes": 2, "multi_label": True},
        [[0, 1], [1, 1], [0, 0]],
        ["hat", "tie"],
    ),
    "numbers": ([["x", "y", "z"], *VECTORS], {"condition_size": 3}, VECTORS, []),
    "one number": ([["x"], [0.5], [-1], [2]], {"condition_size": 1}, [[0.5], [-1], [2]], []),
    "a missing row": (
        [["x", "y"], ["", ""], [1, 2], [3, 4]],
        {"condition_size": 2, "missing_labels": "accept"},
        [[0, 0], [1, 2], [3, 4]],
        [],
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_labels_of_a_csv_file(tmp_path, table):
    rows, keys, expected, names = TABLES[table]
    heads = ["file"] * (len(rows) - len(NAMES))
    path = write_csv(tmp_path / "labels.csv", [[n, *row] for n, row in zip([*heads, *NAMES], rows, strict=True)])
    dataset = build_dataset(section(images(tmp_path / "data"), labels_file=path, **keys))
    np.testing.assert_array_equal(dataset.labels, np.array(expected, np.float32))
    assert list(dataset.class_names) == names


WRONG_FILES = {
    "has a cell that is no number in the row of b.png": "a.png,1,2\nb.png,1,x\nsub/c.png,1,2\n",
    "has two rows for one image": "a.png,1,2\na.png,1,2\n",
    "has rows of other lengths than its first one, or of one column, such as b.png,1": "a.png,1,2\nb.png,1\n",
    "has no rows": "",
}


@pytest.mark.parametrize("problem", WRONG_FILES)
def test_files_of_labels_that_cannot_be_read(tmp_path, problem):
    path = tmp_path / "labels.csv"
    path.write_text(WRONG_FILES[problem])
    with pytest.raises(UserError, match=re.escape(problem)) as caught:
        build_dataset(section(images(tmp_path / "data"), labels_file=str(path), condition_size=2))
    assert caught.value.field == "data.labels_file"


def shard(root: Path, members) -> Path:
    root.mkdir(exist_ok=True)
    with tarfile.open(root / "0.tar", "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return root


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (16, 16), value).save(file, "PNG")
    return file.getvalue()


def test_vectors_of_shards(tmp_path):
    members = {"a.png": png(0), "a.json": b'{"label": [1, 0, 1]}', "b.png": png(40), "b.cls": b"1", "c.png": png(80)}
    keys = {"kind": "tar", "root": str(shard(tmp_path, members)), "num_classes": 3, "multi_label": True}
    with pytest.raises(UserError, match="has 1 of 3 images without a label"):
        build_dataset(Data(**keys))
    expected = np.float32([[1, 0, 1], [0, 1, 0], [0, 0, 0]])
    for _ in range(2):  # the second time from the index
        dataset = build_dataset(Data(**keys, missing_labels="accept"))
        np.testing.assert_array_equal(dataset.labels, expected)
        keep_indices()
    np.testing.assert_array_equal(dataset[0][1], expected[0])
    with pytest.raises(UserError, match=r"has a label that does not fit \(it has 3 numbers, not 4\) in a.json"):
        build_dataset(Data(**keys, missing_labels="accept", condition_size=1))
    wrong = shard(tmp_path, {**members, "c.json": b'{"label": [1, 0, 2]}'})
    with pytest.raises(UserError, match=r"its first 3 numbers are not 0 or 1\) in c.json"):
        build_dataset(Data(**{**keys, "root": str(wrong)}))


class Own(torch.utils.data.Dataset):
    """Grey images whose label is a vector, a class, or None."""

    def __init__(self, condition_size: int, labels: list):
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.full((1, 16, 16), 40 * index, dtype=torch.uint8), self.labels[index]


def test_vectors_of_own_code():
    plugins.give([f"{__name__}:Own"])
    keys = {"kind": f"{__name__}:Own", "num_classes": 0, "condition_size": 2}
    data = Data(**keys, arguments={"labels": [[1, 2.5], None, [3, 4]]}, missing_labels="accept")
    dataset = build_dataset(data)
    np.testing.assert_array_equal(conditions_of(data, dataset), np.float32([[1, 2.5], [0, 0], [3, 4]]))
    with pytest.raises(UserError, match="has a first image whose label does not fit: it has 1 number, not 2"):
        build_dataset(Data(**keys, arguments={"labels": [3]}))


MAKE = {"zip": "prepare", "tar": "prepare", "folder": "prepare", "latents": "encode"}


@pytest.mark.parametrize("kind", MAKE)
def test_prepared_images_keep_their_vectors(tmp_path, capsys, kind):
    source = images(tmp_path / "source")
    rows = [["file", "hat", "tie", "x"], *([name, -1, 1, number] for number, name in enumerate(NAMES))]
    labels = write_csv(tmp_path / "labels.csv", rows)
    options = ["--codec", "dct", "--grey"] if kind == "latents" else ["--format", kind]
    keys = [f"data.labels_file={labels}", "data.num_classes=2", "data.multi_label=true", "data.condition_size=1"]
    made = tmp_path / ("made.zip" if kind == "zip" else "made")
    command = ["data", MAKE[kind], str(source), str(made), "--resolution", "16", "--workers", "1", *options, *keys]
    expected = np.float32([[0, 1, 0], [0, 1, 1], [0, 1, 2]])
    for _ in range(2):  # the second time finds all parts
        assert main(command) == 0
        told, overrides = capsys.readouterr().out.splitlines()[:2]
        assert "of labels of 3 numbers" in told
    recipe = Recipe.read("digits_dcgan", *shlex.split(overrides))
    dataset = build_dataset(recipe.data)
    np.testing.assert_array_equal(dataset.labels, expected)
    assert recipe.data.class_names == ["hat", "tie"] or list(dataset.class_names) == ["hat", "tie"]
    write_csv(Path(labels), [*rows[:-1], [NAMES[2], 1, 1, 2]])
    assert main(command) == 2
    assert "holds work on other images than SRC has now" in capsys.readouterr().err


def test_prepared_vectors_of_own_code(tmp_path, capsys):
    keys = ["data.condition_size=2", "data.missing_labels=accept", "data.arguments={labels: [[1, 2.5], null, [3, 4]]}"]
    made, options = str(tmp_path / "made"), ["--resolution", "16", "--format", "tar", "--workers", "1"]
    assert main(["data", "prepare", f"{__name__}:Own", made, *options, *keys]) == 0
    recipe = Recipe.read("digits_dcgan", *shlex.split(capsys.readouterr().out.splitlines()[1]))
    np.testing.assert_array_equal(build_dataset(recipe.data).labels, np.float32([[1, 2.5], [0, 0], [3, 4]]))
    assert main(["data", "prepare", f"{__name__}:Own", f"{made}2", *options, keys[0], keys[2]]) == 2
    assert "has a label that does not fit, of image 1 of" in capsys.readouterr().err


def test_keys_without_labels_are_refused():
    for key, value in (("multi_label", True), ("missing_labels", "accept")):
        with pytest.raises(UserError, match=r"with data\.num_classes=0") as caught:
            Data(kind="folder", root="x", num_classes=0, **{key: value})
        assert caught.value.field == f"data.{key}"


# One game of each family that reads classes.
FAMILIES = ["biggan_deep", "biggan_light", "biggan_unshared", "dcgan_light", "r3gan", "mlp"]
FAMILIES += ["stylegan2_architectures", "gat", "cat"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_a_one_hot_vector_is_its_class(tmp_path, name, network):
    by_class = tiny_recipe(tmp_path, *TINY_GAMES[name], "data.num_classes=10", "data.condition_size=0")
    data = by_class.data.model_copy(update={"multi_label": True})
    by_vector = by_class.model_copy(update={"data": data})
    stack = filled(build_network(by_class, network)).eval()
    same = build_network(by_vector, network).eval()
    same.load_state_dict(stack.state_dict())
    classes = torch.tensor([3, 0, 9, 5])
    one_hot = torch.zeros(4, 10).scatter_(1, classes[:, None], 1.0)
    draws, seeds = Draws(0), torch.arange(4)
    data = by_class.data
    first = torch.from_numpy(draws.normal("x", (0,), 0, 4, by_class.latent_size))
    if network == "discriminator":
        shape = (4, by_class.judged_channels, *data.network_size)
        first = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    draws_here = by_class.generator.draws if network == "generator" else by_class.discriminator_reads_seeds
    rest = (seeds,) if draws_here else ()
    torch.testing.assert_close(same(first, one_hot, *rest), stack(first, classes, *rest), rtol=1e-5, atol=1e-6)
    # Linear: the embedding of a sum is the sum of the embeddings, so a null vector differs from every class.
    assert not torch.allclose(same(first, torch.zeros(4, 10), *rest), stack(first, classes, *rest))


def test_what_samples_are_conditioned_on(tmp_path):
    root = listed(images(tmp_path), [*zip(NAMES, VECTORS, strict=True)])
    data = section(root, condition_size=3)
    np.testing.assert_array_equal(conditions_of(data, build_dataset(data)), np.float32(VECTORS))
    by_class = listed(images(tmp_path / "y"), [["a.png", 1], ["b.png", 1], ["sub/c.png", 0]])
    classes = section(by_class, num_classes=2)
    assert conditions_of(classes, build_dataset(classes)) == range(2)
    np.testing.assert_array_equal(conditions_of(classes, build_dataset(classes), as_often=True), [1, 1, 0])
