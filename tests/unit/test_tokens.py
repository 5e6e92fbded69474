"""Conditions that are tokens: read from shards, padded with a mask, given to networks from outside, and dropped."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bigsgan import plugins
from bigsgan.adversarial.latents import LatentSource, SampleDraws
from bigsgan.config.data import Data
from bigsgan.data import RealImages, Slice, build_dataset
from bigsgan.data.conditions import checked_vectors, conditions_of, read_vectors, some_conditions
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.reading import CorruptImage
from bigsgan.models.build import build_network, example_labels
from bigsgan.models.network import initialize
from bigsgan.models.outside_check import check_outside
from tests.archives import png, write_tar
from tests.autoencoders import latents, write_latents
from tests.outside import TOKENS
from tests.tiny import tiny_recipe

T, W = 5, 3
LENGTHS = [2, 5, 1, 4]


def array(numbers: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, numbers)
    return file.getvalue()


def tokens_of(number: int, dtype: type = np.float16) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(LENGTHS[number % 4], W)).astype(dtype)


def reference(tokens: np.ndarray) -> np.ndarray:
    """Padded by numpy, with a mask behind."""
    marked = np.concatenate([tokens.astype(np.float32), np.ones((len(tokens), 1), np.float32)], axis=1)
    return np.pad(marked, [(0, T - len(tokens)), (0, 0)])


def shards(root: Path, contents: list[bytes | None], field: str = "npy") -> Path:
    """Two shards of latents, or of images, with the tokens' files."""
    for shard in range(2):
        members = []
        for number in range(shard, len(contents), 2):
            first = array(np.full((4, 8, 8), number, np.float32)) if field == "npy" else png(number, 16)
            members.append((f"{number:03}.{field}", first))
            if contents[number] is not None:
                members.append((f"{number:03}.tokens.npy", contents[number]))
            members.append((f"{number:03}.txt", b"a caption"))
        write_tar(root / f"shard-{shard}.tar", members)
    return root


def section(tmp_path: Path, **more) -> Data:
    return latents(tmp_path, **{"root": str(tmp_path / "shards"), "num_classes": 0, "condition_size": [T, W], **more})


@pytest.mark.parametrize("kind", ["latents", "tar"])
def test_shards_hold_tokens_beside_each_sample(tmp_path, kind):
    root = shards(tmp_path / "shards", [array(tokens_of(n)) for n in range(8)], "npy" if kind == "latents" else "png")
    data = section(tmp_path)
    if kind == "tar":
        data = Data(kind="tar", root=str(root), resolution=16, num_classes=0, condition_size=[T, W])
    for _ in range(2):  # the second time from the index of the shards
        dataset = build_dataset(data)
        assert dataset.labels is None
        for place, number in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            sample, label = dataset[place]
            assert sample.flatten()[0] == number
            assert label.dtype == np.float32
            np.testing.assert_array_equal(label, reference(tokens_of(number)))
    if kind == "latents":
        expected = np.stack([reference(tokens_of(number)) for number in [0, 2, 4, 6, 1, 3, 5, 7]])
        for found in (some_conditions(data, dataset), conditions_of(data, dataset)):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("form", ["loose", "listed", "zip"])
def test_tokens_are_in_shards(tmp_path, form):
    write_latents(tmp_path / "data", 2, posterior=False)
    if form == "loose":
        (tmp_path / "data" / "dataset.json").unlink()
    root, message = "data", r"must have shards with data.condition_size=\[5, 3\].*; encode the images again with"
    if form == "zip":
        (tmp_path / "data.zip").write_bytes(b"")
        root, message = "data.zip", "; give the directory with tar shards$"
    with pytest.raises(UserError, match=message):
        build_dataset(section(tmp_path, root=str(tmp_path / root)))


WRONG = {
    "wider": (array(np.zeros((2, W + 2))), r"the shape \(2, 5\), not \(t, 3\) with t up to 5"),
    "too long": (array(np.zeros((T + 1, W))), r"the shape \(6, 3\), not \(t, 3\) with t up to 5"),
    "one token alone": (array(np.zeros(W)), r"the shape \(3,\), not \(t, 3\)"),
    "no mask": (array(np.full((2, W + 1), 0.5)), "its mask, the last number of each token, is not 0 or 1"),
    "not finite": (array(np.float16([[np.inf] * W])), "a number that is not finite"),
    "empty": (array(np.zeros((0, W))), "it is missing"),
    "all masked": (array(np.zeros((2, W + 1))), "it is missing"),
    "texts": (array(np.array([["a"] * W])), "the type <U1, and not numbers"),
    "cut off": (array(np.zeros((2, W)))[:-1], "it is cut off"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tokens_that_do_not_fit(tmp_path, name):
    content, message = WRONG[name]
    shards(tmp_path / "shards", [content])
    with pytest.raises(CorruptImage, match=message) as caught:
        build_dataset(section(tmp_path))[0]
    assert "000.npy: its tokens do not fit: " in str(caught.value)


def test_no_tokens_fit(tmp_path):
    shards(tmp_path / "shards", [array(np.zeros((2, 4)))] * 3)
    data = section(tmp_path, condition_size=[T, 2])
    with pytest.raises(UserError, match=r"no readable images \(.* shape \(2, 4\), not \(t, 2\).*; correct its tok"):
        some_conditions(data, build_dataset(data))


def test_missing_tokens(tmp_path):
    shards(tmp_path / "shards", [None, array(tokens_of(1)), array(np.zeros((0, W)))])
    with pytest.raises(UserError, match=r"1 of 3 images without a label.*<key>\.tokens\.npy"):
        build_dataset(section(tmp_path))
    dataset = build_dataset(section(tmp_path, missing_labels="accept"))
    assert not dataset[0][1].any()  # no file, no token
    assert not dataset[1][1].any()
    np.testing.assert_array_equal(dataset[2][1], reference(tokens_of(1)))
    shards(tmp_path / "none", [None, None])
    with pytest.raises(UserError, match=r"has no tokens in <key>\.tokens\.npy"):
        build_dataset(section(tmp_path, root=str(tmp_path / "none")))
    assert len(build_dataset(section(tmp_path, condition_size=0))) == 3  # files of tokens are no latents


class Own:
    """A data set of one's own: images, and arrays of tokens."""

    def __init__(self, condition_size: list):
        self.size = condition_size

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int):
        return torch.full((1, 16, 16), number, dtype=torch.uint8), torch.from_numpy(tokens_of(number, np.float32))


def test_a_data_set_of_ones_own():
    plugins.give([f"{__name__}:Own"])
    data = Data(kind=f"{__name__}:Own", num_classes=0, condition_size=[T, W])
    dataset = build_dataset(data)
    assert dataset.labels is None
    for number in range(4):
        np.testing.assert_array_equal(dataset[number][1], reference(tokens_of(number, np.float32)))
    with pytest.raises(UserError, match=r"label does not fit: it has the shape \(2, 3\), not \(t, 4\)"):
        build_dataset(data.model_copy(update={"condition_size": [T, 4]}))


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.num_classes=3"], r"data.num_classes: must be 0 with data.condition_size=\[5, 3\], got 3"),
        (["data.kind=torchvision"], r"data.condition_size: must be one number with data.kind=torchvision"),
        (["data.condition_size=[65536, 65536]"], r"data.condition_size: must be T and W with T \* \(W \+ 1\) up to"),
        (["data.condition_size=[3]"], "data.condition_size: must be an integer or must have at least 2 entries"),
        (["data.condition_size=[0, 3]"], r"data.condition_size.0: must be greater than 0, got 0; give a larger number"),
        (["data.condition_size=[5, true]"], r"data.condition_size.1: must be an integer, got true"),
        (["objective.fake_labels=uniform"], r"objective.fake_labels: must be data with data.condition_size"),
        (["generator=null"], r"generator.family: must be a network of your own with data.condition_size"),
        (["data.condition_size=0"], "data.condition_dropout.*must be unset with data.num_classes=0"),
        (["data.condition_size=0", "data.num_classes=3"], "data.condition_dropout: 0.25 needs labels that can be null"),
    ],
)
def test_recipes_that_cannot_have_tokens(tmp_path, overrides, message):
    given = {"kind": "synthetic", "num_classes": 0, "condition_size": [T, W], "condition_dropout": 0.25}
    rest = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key.startswith("data."):
            given[key.removeprefix("data.")] = json.loads(value) if value[0] in "[0123456789" else value
        elif key == "generator":
            rest = ["generator={family: dcgan, channels: 8}"]
        else:
            rest.append(override)
    if given["kind"] == "torchvision":
        given |= {"dataset": "CIFAR10", "root": "x"}
    own = [each for each in TOKENS[2:] if each.partition("=")[0] not in {word.partition("=")[0] for word in rest}]
    with pytest.raises(UserError, match=message):
        tiny_recipe(tmp_path, f"data={json.dumps(given)}", *own, *rest)


class Recording(nn.Module):
    """Makes images of 0, and keeps what it gets."""

    def __init__(self, resolution: int, image_channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(image_channels, resolution, resolution))

    def forward(self, latents, tokens, mask):
        self.got = latents, tokens, mask
        return self.weight.expand(len(latents), -1, -1, -1) + tokens.sum((1, 2)).view(-1, 1, 1, 1)


def test_networks_get_tokens_and_a_mask(tmp_path):
    recipe = tiny_recipe(
        tmp_path, *TOKENS[:2], f'generator={{family: "{__name__}:Recording", latent_size: 4}}', *TOKENS[3:]
    )
    network = build_network(recipe, "generator")
    initialize(network, 0)
    labels = torch.from_numpy(np.stack([reference(tokens_of(number)) for number in range(4)]))
    network(torch.zeros(4, 4), labels)
    _, tokens, mask = network.layers["0"].module.got
    assert mask.dtype == torch.bool
    for number in range(4):
        own = tokens_of(number).astype(np.float32)
        np.testing.assert_array_equal(tokens[number, : len(own)], own)
        assert not tokens[number, len(own) :].any()
        assert mask[number].tolist() == [place < len(own) for place in range(T)]


class Averaging(nn.Module):
    """Divides by the number of tokens, which may be 0."""

    def __init__(self, condition_size: list, resolution: int, image_channels: int):
        super().__init__()
        self.shape = image_channels, resolution, resolution
        self.linear = nn.Linear(condition_size[1], image_channels * resolution**2)

    def forward(self, latents, tokens, mask):
        return self.linear(tokens.sum(1) / mask.sum(1, keepdim=True)).unflatten(1, self.shape)


def test_a_network_without_an_answer_to_null_is_refused(tmp_path):
    own = f'generator={{family: "{__name__}:Averaging", latent_size: 4}}'
    recipe = tiny_recipe(tmp_path, *TOKENS[:2], own, *TOKENS[3:])
    assert not example_labels(recipe.data, 4)[0].any()
    with pytest.raises(UserError, match=r"numbers that are not finite in 0 \(Averaging\)"):
        check_outside(recipe, 1)
    check_outside(tiny_recipe(tmp_path, TOKENS[0], own, *TOKENS[3:]), 1)  # where no condition is null


def read(dataset, data, parts: list[Slice], start: int = 0) -> torch.Tensor:
    """Labels of two phases by position, from each replica's micro-batches."""
    replicas = [RealImages(dataset, data, Draws(7), part, torch.device("cpu"), start=(start, ())) for part in parts]
    phases = []
    for _ in range(2):
        found = [replica.next_phase() for replica in replicas]
        phases += [each.labels for micro_batches in zip(*found, strict=True) for each in micro_batches]
    return torch.cat(phases)


@pytest.mark.parametrize("kind", ["tokens", "vectors"])
def test_dropped_conditions_are_the_same_in_any_layout(kind):
    size = [T, W] if kind == "tokens" else 3
    data = Data(kind="synthetic", num_images=64, num_classes=0, condition_size=size, condition_dropout=0.25)
    whole = data.model_copy(update={"condition_dropout": 0.0})
    dataset = build_dataset(data)
    one = read(dataset, data, [Slice(512, 1, 0, 1)])
    full = read(dataset, whole, [Slice(512, 1, 0, 1)])
    dropped = (one == 0).flatten(1).all(1)
    assert not (full == 0).flatten(1).all(1).any()
    assert torch.equal(one, torch.where(dropped.view(-1, *[1] * (one.dim() - 1)), 0.0, full))
    assert 0.2 < dropped.float().mean() < 0.3  # 1,024 positions: a deviation is 0.0135
    parts = [Slice(512, 2, replica, 2) for replica in range(2)]
    assert torch.equal(read(dataset, data, parts), one)
    assert torch.equal(read(dataset, data, [Slice(512, 1, 0, 1)], 512)[:512], one[512:])  # a resumed run


def test_drawn_vectors_are_dropped_alike_for_both_networks():
    conditions = np.arange(1, 31, dtype=np.float32).reshape(10, 3)
    draws = SampleDraws(Draws(3), torch.device("cpu"))
    source, never = (LatentSource(draws, 4, conditions, dropout=p) for p in (0.25, 0.0))
    slices = {"generator": Slice(400, 1, 0, 1), "discriminator": Slice(400, 2, 1, 2)}
    inputs = source.inputs("discriminator", (5, 0), slices, list)
    labels = inputs.generator(0)[1]
    judged = [inputs.conditions(index)[0] for index in range(2)]
    assert torch.equal(torch.cat(judged), torch.cat([labels[100:200], labels[300:400]]))
    full = never.inputs("discriminator", (5, 0), slices, list).generator(0)[1]
    dropped = (labels == 0).all(1)
    assert torch.equal(labels, torch.where(dropped[:, None], 0.0, full))
    assert 0.18 < dropped.float().mean() < 0.32


def test_conditions_that_a_user_gives():
    data = Data(kind="synthetic", num_classes=0, condition_size=[T, W])
    tokens = tokens_of(0)[None]
    expected = reference(tokens[0])[None]
    np.testing.assert_array_equal(checked_vectors(data, tokens, "--conditions", "x.npy"), expected)
    np.testing.assert_array_equal(checked_vectors(data, expected, "--conditions", "x.npy"), expected)
    for wrong in (tokens[0], tokens[:0], np.zeros((1, T + 1, W)), np.zeros((1, 2, W + 2)), np.array([["a"]])):
        with pytest.raises(UserError, match=r"^--conditions: must hold the tokens of labels, got 'x.npy'"):
            checked_vectors(data, wrong, "--conditions", "x.npy")
    with pytest.raises(UserError, match=r"give a .npy file \(M, t, W\)$"):
        read_vectors(data, Path("none.npy"), "--conditions")
