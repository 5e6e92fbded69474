"""Labels that are vectors: where they come from, and what networks make of them."""

import csv
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bigsgan
from bigsgan import plugins
from bigsgan.cli import main
from bigsgan.config import Recipe
from bigsgan.config.data import Data
from bigsgan.data import build_dataset
from bigsgan.data.conditions import conditions_of, keep_labels, some_conditions
from bigsgan.data.shards import keep_indices
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from tests.archives import png, write_tar, write_zip
from tests.networks import filled
from tests.runs import make_run
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
        members = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.*"))}
        root = write_zip(tmp_path / "data.zip", members)
    dataset = build_dataset(section(root, condition_size=3))
    np.testing.assert_array_equal(dataset.labels, np.array(VECTORS, np.float32))
    image, label = dataset[2]
    assert int(image[0, 0, 0]) == 80
    np.testing.assert_array_equal(label, np.float32(VECTORS[2]))
    other = build_dataset(section(listed(images(tmp_path / "x"), [[n, [9, 9, 9]] for n in NAMES]), condition_size=3))
    assert dataset.fingerprint().classes != other.fingerprint().classes


# What the label is of an image in dataset.json, by the keys of the data section.
MARKED = {"num_classes": 3, "multi_label": True}
FORMS = {
    "a class": ({"num_classes": 3, "missing_labels": "accept"}, [2, 0, None], [[0, 0, 1], [1, 0, 0], [0, 0, 0]]),
    "several classes": (MARKED, [[1, 0, 1], 1, [0] * 3], [[1, 0, 1], [0, 1, 0], [0] * 3]),
    "a class and numbers": ({"num_classes": 2, "condition_size": 1}, *[[[1, 0, 0.5], [0, 1, 7], [1, 0, -2]]] * 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_labels(tmp_path, form):
    keys, labels, expected = FORMS[form]
    root = listed(images(tmp_path), [*zip(NAMES, labels, strict=True)])
    np.testing.assert_array_equal(build_dataset(section(root, **keys)).labels, np.float32(expected))


@pytest.mark.parametrize("labels", [[0.5, -2, 3], [[0.5], [-2], [3]]])
def test_one_number_needs_no_list(tmp_path, labels):
    root = listed(images(tmp_path), [*zip(NAMES, labels, strict=True)])
    np.testing.assert_array_equal(build_dataset(section(root, condition_size=1)).labels, np.float32([[0.5], [-2], [3]]))


NUMBERS = {"condition_size": 3}
WRONG = [
    (NUMBERS, None, "it is missing"),
    (NUMBERS, [1, 2], "it has 2 numbers, not 3"),
    (NUMBERS, 1, "it has 1 number, not 3"),
    (NUMBERS, [[1, 2, 3]], "it has the shape (1, 3), not 3"),
    (NUMBERS, [1, 2, float("inf")], "it has a number that is not finite"),
    (NUMBERS, [1, 2, 10**39], "it has a number that is not finite"),
    (NUMBERS, [1, 2, 10**400], "it is neither a number nor a list of numbers"),
    (NUMBERS, ["x", 2, 3], "it is neither a number nor a list of numbers"),
    (MARKED, [0, 2, 0], "its first 3 numbers are not 0 or 1"),
    (MARKED, 3, "it is 3.0, and not a class from 0 to 2"),
    ({"num_classes": 3, "missing_labels": "accept"}, [1, 1, 0], "it has 2 classes, not one"),
    ({"num_classes": 2, "condition_size": 1}, [0, 0, 1], "it has 0 classes, not one"),
]


@pytest.mark.parametrize("keys, label, problem", WRONG)
def test_labels_that_do_not_fit(tmp_path, keys, label, problem):
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
    "a mark of one class": ([["hat"], [-1], [1], [1]], {**MARKED, "num_classes": 1}, [[0], [1], [1]], ["hat"]),
    "attributes": (
        [["hat", "tie"], [-1, 1], [1, 1], [-1, -1]],
        *({**MARKED, "num_classes": 2}, [[0, 1], [1, 1], [0, 0]], ["hat", "tie"]),
    ),
    "numbers": ([["x", "y", "z"], *VECTORS], {"condition_size": 3}, VECTORS, []),
    "one number": ([["x"], [0.5], [-1], [2]], {"condition_size": 1}, [[0.5], [-1], [2]], []),
    "a missing row": (
        [["x", "y"], ["", ""], [1, 2], [3, 4]],
        *({"condition_size": 2, "missing_labels": "accept"}, [[0, 0], [1, 2], [3, 4]], []),
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
    "has an empty cell in the row of b.png": "a.png,1,2\nb.png,1,\nsub/c.png,1,2\n",
    "has two rows for one image": "a.png,1,2\na.png,1,2\n",
    "has rows of other lengths than its first one, or of one column, such as b.png,1": "a.png,1,2\nb.png,1\n",
    "has no image in its first column; write an image's path below data.root there, such as a.png": "",
    "has no image in its first column; write": "1,a.png\n1,b.png\n1,sub/c.png\n",
}


@pytest.mark.parametrize("problem", WRONG_FILES)
def test_files_of_labels_that_cannot_be_read(tmp_path, problem):
    path = tmp_path / "labels.csv"
    path.write_text(WRONG_FILES[problem])
    with pytest.raises(UserError, match=re.escape(problem)) as caught:
        build_dataset(section(images(tmp_path / "data"), labels_file=str(path), condition_size=2))
    assert caught.value.field == "data.labels_file"


@pytest.mark.parametrize(("separator", "suffix"), [(";", "csv"), ("\t", "csv"), ("\t", "tsv")])
def test_columns_may_have_other_separators(tmp_path, separator, suffix):
    root, path = images(tmp_path / "data", ["a, b.png", "c.png"]), tmp_path / f"labels.{suffix}"
    path.write_text(f'file{separator}kind\n"a, b.png"{separator}"dog, big"\nc.png{separator}cat\n')
    dataset = build_dataset(section(root, labels_file=str(path), num_classes=2))
    assert (dataset.labels.tolist(), dataset.class_names) == ([1, 0], ["cat", "dog, big"])


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_labels_of_other_files_are_no_missing_labels(tmp_path, suffix):
    """Such as those with the folder's own name before each."""
    path, other = tmp_path / f"labels.{suffix}", [f"data/{name}" for name in NAMES]
    path.write_text("".join(f"{name},0\n" for name in other))
    if suffix == "json":
        path.write_text(json.dumps({"labels": [[name, 0] for name in other]}))
    problem = "no image in its first column" if suffix == "csv" else "which its .* does not list .it lacks all images"
    with pytest.raises(UserError, match=problem) as caught:
        build_dataset(section(images(tmp_path / "data"), labels_file=str(path), num_classes=2, missing_labels="accept"))
    assert "missing_labels" not in str(caught.value)


def shard(root: Path, members) -> Path:
    return write_tar(root / "0.tar", members).parent


def test_vectors_of_shards(tmp_path):
    members = {f"{name}.png": png(value, 16) for name, value in (("a", 0), ("b", 40), ("c", 80))}
    members |= {"a.json": b'{"label": [1, 0, 1]}', "b.cls": b"1"}
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
        self.values = labels

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return torch.full((1, 16, 16), 40 * index % 256, dtype=torch.uint8), self.values[index]


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
    assert list(dataset.class_names) == ["hat", "tie"]
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


def test_a_first_row_of_an_image_is_no_head(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("\ufeffa.png,cat\nb.png,\nsub/c.png,owl\n")
    keys = {"num_classes": 2, "missing_labels": "accept", "labels_file": str(path)}
    dataset = build_dataset(section(images(tmp_path / "data"), **keys))
    np.testing.assert_array_equal(dataset.labels, np.float32([[1, 0], [0, 0], [0, 1]]))
    assert list(dataset.class_names) == ["cat", "owl"]
    with pytest.raises(UserError, match=r"must be 2 with this data"):
        build_dataset(section(tmp_path / "data", **{**keys, "num_classes": 3}))
    path.write_text("gone.png,1,0\na.png,0,1\nb.png,1,1\nsub/c.png,0,0\n")  # whose image is not there
    dataset = build_dataset(section(tmp_path / "data", num_classes=2, multi_label=True, labels_file=str(path)))
    np.testing.assert_array_equal(dataset.labels, np.float32([[0, 1], [1, 1], [0, 0]]))
    assert not dataset.class_names
    path.write_text("a.png,10\nb.png,9\nsub/c.png,x\n")
    with pytest.raises(UserError, match=r"has a cell that is no number in the row of sub/c\.png"):
        build_dataset(section(tmp_path / "data", **keys))


def test_a_vector_in_json_comes_before_a_class(tmp_path):
    members = {"a.png": png(0, 16), "a.json": b'{"label": [1, 0, 1]}', "a.cls": b"1"}
    keys = {"kind": "tar", "root": str(shard(tmp_path, members)), "num_classes": 3, "multi_label": True}
    np.testing.assert_array_equal(build_dataset(Data(**keys)).labels, np.float32([[1, 0, 1]]))


class Listed(Own):
    """With labels in an attribute, which are those of the images, or others."""

    def __init__(self, condition_size: int, num: int, wrong: bool):
        super().__init__(condition_size, [[number, -number] for number in range(num)])
        self.labels, self.num_read = [[5, 5]] * num if wrong else self.values, 0

    def __getitem__(self, index):
        self.num_read += 1
        return super().__getitem__(index)


def test_labels_in_an_attribute_are_not_read_from_images():
    plugins.give([f"{__name__}:Listed"])
    keys = {"kind": f"{__name__}:Listed", "num_classes": 0, "condition_size": 2}
    data = Data(**keys, arguments={"num": 3_000, "wrong": False})
    dataset = build_dataset(data)
    np.testing.assert_array_equal(conditions_of(data, dataset), np.float32(dataset.source.values))
    assert dataset.source.num_read < 30
    data = Data(**keys, arguments={"num": 3_000, "wrong": True})
    with pytest.raises(UserError, match=r"has labels that only its images tell .*3000 images"):
        conditions_of(data, build_dataset(data))
    assert len(some_conditions(data, build_dataset(data))) == 256


def test_keys_without_labels_are_refused():
    for key, value in (("multi_label", True), ("missing_labels", "accept"), ("labels_file", "x.csv")):
        with pytest.raises(UserError, match=r"must be unset with data\.num_classes=0") as caught:
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


KEYS = ["data.kind=folder", "data.num_classes=2", "data.multi_label=true", "data.condition_size=1"]
LABELS = np.float32([[number % 2, number // 2 % 2, number / 8 - 1] for number in range(16)])


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """A run of BigGAN whose data are elsewhere; its labels are in its directory."""
    place = tmp_path_factory.mktemp("moved")
    run, _ = make_run(place, *KEYS, f"data.root={place}/away", "data.class_names=[hat, tie]")
    keep_labels(run, LABELS)
    return run


def samples(run: Path, *more: str) -> tuple[np.ndarray, np.ndarray]:
    out = run.parent / "samples.npz"
    assert main(["sample", "--run", str(run), "--out", str(out), *more]) == 0
    with np.load(out) as found:
        return found["arr_0"], found["arr_1"]


def test_samples_of_a_run_without_its_data(moved):
    images, labels = samples(moved, "--num", "12")
    np.testing.assert_array_equal(labels, LABELS[:12])
    (moved.parent / "rows.csv").write_text("0,1,0.5\n1,0,2\n")
    rows = ["--conditions", str(moved.parent / "rows.csv")]
    several, labels = samples(moved, "--num", "4", *rows)
    np.testing.assert_array_equal(labels, np.float32([[0, 1, 0.5], [1, 0, 2]] * 2))
    # Standing statistics are those of the run's labels, whatever the columns are.
    (moved.parent / "rows.csv").write_text("0,1,0.5\n")
    one, _ = samples(moved, "--num", "1", *rows)
    assert np.abs(one[0].astype(int) - several[0]).max() <= 1
    assert len(np.unique(images.reshape(12, -1), axis=0)) == 12


REFUSED = {
    "--conditions: needs a run whose labels are vectors": ["--conditions", "x.csv"],
    "--conditions: must hold vectors of 3 numbers, got 'two.csv' (it is float64 of ": ["--conditions", "two.csv"],
    "--conditions: 'nan.csv' has numbers that are not finite": ["--conditions", "nan.csv"],
    "--conditions: cannot be combined with --classes": ["--conditions", "two.csv", "--classes", "hat"],
    "--classes: cannot tell the other numbers of a label": ["--classes", "hat"],
    "--num: must be at least 2, the number of conditions": ["--conditions", "good.csv", "--num", "1"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_labels_that_no_sample_can_have(moved, message, monkeypatch, capsys):
    monkeypatch.chdir(moved.parent)
    for name, text in (("two", "1,2"), ("nan", "1,2,nan"), ("good", "0,1,2\n1,1,2")):
        Path(f"{name}.csv").write_text(text)
    run = moved
    if "needs" in message:
        (moved.parent / "other").mkdir()
        run, _ = make_run(moved.parent / "other")
    assert main(["sample", "--run", str(run), "--out", "x.png", *REFUSED[message]]) == 2
    assert message in capsys.readouterr().err


def test_several_classes_of_a_column(tmp_path):
    run, _ = make_run(tmp_path, *KEYS[:-1], f"data.root={tmp_path}", "data.class_names=[hat, tie]")
    keep_labels(run, LABELS[:, :2])
    _, labels = samples(run, "--num", "3", "--classes", "hat,hat+tie,1")
    np.testing.assert_array_equal(labels, np.float32([[1, 0], [1, 1], [0, 1]]))
    (tmp_path / "x").mkdir()
    single, _ = make_run(tmp_path / "x", *KEYS[:2], "data.missing_labels=accept", f"data.root={tmp_path}")
    keep_labels(single, LABELS[:, :2])
    assert main(["sample", "--run", str(single), "--out", str(tmp_path / "x.png"), "--classes", "0+1"]) == 2


def test_an_export_of_a_run_without_its_data(moved):
    assert main(["export", "--run", str(moved), "--format", "hub", "--out", str(moved.parent / "hub")]) == 0
    card = (moved.parent / "hub" / "README.md").read_text()
    assert "a 0 or 1 for each of 2 classes (any number of them) and 1 further number: 0 hat, 1 tie" in card
    network = bigsgan.load(moved.parent / "hub")
    latents = torch.zeros(2, network.recipe.latent_size)
    torch.testing.assert_close(network(latents), network(latents, torch.zeros(2, 3)))


def labelled_section(root: Path) -> str:
    """Write images with LABELS, and return the override of the section ``data`` that reads them."""
    names = [f"{number:02}.png" for number in range(len(LABELS))]
    data = listed(images(root, names), [*zip(names, LABELS.tolist(), strict=True)])
    return f"data={{kind: folder, root: {data}, resolution: 16, num_workers: 0, image_channels: 1}}"


@pytest.mark.slow
def test_standing_statistics_are_of_the_datas_vectors_where_fakes_have_those_of_reals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = labelled_section(tmp_path / "data")
    game = ["objective.fake_labels=data", "objective.reuse_fakes=true", "batch=8", "monitor=[]", "metrics=null"]
    small = ["generator.channels=8", "discriminator.channels=8", "total_nimg=16"]
    with bigsgan.Trainer(Recipe.read("digits_dcgan", "out=run", section, *game, *small, *KEYS[1:])) as trainer:
        labels = torch.cat([batch[1] for batch in trainer.build().standing]).cpu().numpy()
    assert {tuple(row) for row in labels} == {tuple(row) for row in LABELS}


@pytest.mark.slow
def test_a_run_on_vectors(tmp_path, monkeypatch):
    """It keeps labels, makes samples of those that are given, and lends its weights but for the labels'."""
    monkeypatch.chdir(tmp_path)
    section = labelled_section(tmp_path / "data")
    small = ["total_nimg=16", "batch=8", "monitor=[]", "metrics=null", "report_nimg=64", "sample_nimg=64"]
    options = ["generator.channels=8", "discriminator.channels=8", section, *small]
    with bigsgan.Trainer(Recipe.read("digits_dcgan", "out=run", *options, *KEYS[1:])) as trainer:
        for _ in trainer:
            pass
        one = torch.tensor([[1.0, 0.0, 0.5]])
        found = trainer.sample(3, conditions=torch.cat([one, 1 - one]))
        torch.testing.assert_close(found[:1], trainer.sample(1, conditions=one), atol=1e-5, rtol=0)
        for wrong in (one[0], one[:, :2], one / 0):
            with pytest.raises(UserError, match=r"^conditions: "):
                trainer.sample(1, conditions=wrong)
        assert trainer.sample(2).shape == (2, 1, 16, 16)
    np.testing.assert_array_equal(np.load("run/labels.npy"), LABELS)
    # As many numbers with another meaning: no row of an embedding is taken over.
    other = ["data.num_classes=0", "data.multi_label=false", "data.condition_size=3", "init_from.run=run"]
    with bigsgan.Trainer(Recipe.read("digits_dcgan", "out=other", *options, *other)) as trainer:
        for _ in trainer:
            pass
    assert "depend on the classes" in Path("other/logs/rank00000.log").read_text()
