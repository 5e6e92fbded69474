"""Augmentation layers: against outputs that the public code computed, and the rules that layers of D keep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from bigsgan.config.augmentation import ADA_PIPELINES, Augmentation
from bigsgan.models.augment import AdaptiveAugment, augmentation_layer
from bigsgan.models.augment_draws import AugmentationDraws
from bigsgan.models.build import build_network
from bigsgan.models.diff_augment import DiffAugment
from bigsgan.models.network import initialize
from tests.tiny import tiny_recipe

# Images and draws at random, and what training/augment.py of stylegan2-ada-pytorch (commit d72cc7d, every
# transformation on), DiffAugment_pytorch.py of data-efficient-gans and losses/diffaug.py of hse1032/GAT made of them.
DATA = Path(__file__).parents[1] / "data"


class RecordedDraws(AugmentationDraws):
    """The draws of the recorded run in place of those of the seeds."""

    def __init__(self, recorded: Mapping[str, np.ndarray]) -> None:
        self._recorded, self.dtype = recorded, torch.float32

    def uniform(self, name: str, *shape: int) -> Tensor:
        if f"draw_{name}" not in self._recorded:  # a grey image has neither hue nor saturation
            assert name.removeprefix("gate_") in ("hue", "saturation")
            return torch.full((len(self._recorded["images"]), *shape), 0.3)
        return torch.from_numpy(self._recorded[f"draw_{name}"]).float().view(-1, *shape)

    normal = uniform

    def gate(self, name: str) -> Tensor:
        return self.uniform(f"gate_{name}")


def recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / name) as file:
        return dict(file)


def images_of(record: Mapping[str, np.ndarray]) -> Tensor:
    return torch.from_numpy(record["images"]).float() / 127.5 - 1


def ada(pipeline: str, p: float, dtype: torch.dtype = torch.float32) -> AdaptiveAugment:
    layer = AdaptiveAugment(ADA_PIPELINES[pipeline], p)
    initialize(layer, 0)
    return layer.to(dtype)


@pytest.mark.parametrize("name", ["ada_rgb.npz", "ada_grey.npz"])
def test_ada_is_the_published_pipeline(name):
    record = recorded(name)
    images = images_of(record)
    found = ada("bgcfnc", float(record["p"])).augment(images, RecordedDraws(record))
    assert_close(found, torch.from_numpy(record["published"]), rtol=0, atol=1e-4)
    changed = (found - images).abs().amax(dim=(1, 2, 3))
    assert changed.min() > 0.1


@pytest.mark.parametrize(
    "name, channels, policy",
    [
        ("diffaugment_rgb.npz", 3, ["color", "translation", "cutout"]),
        ("diffaugment_grey.npz", 1, ["cutout", "color", "translation"]),
        ("diffaugment_gat.npz", 4, ["latent_color", "translation", "cutout", "flip"]),  # four images a sample
    ],
)
def test_diffaugment_is_the_published_one(name, channels, policy):
    record = recorded(name)
    found = DiffAugment(policy, channels).augment(images_of(record), RecordedDraws(record))
    assert_close(found, torch.from_numpy(record["published"]), rtol=0, atol=1e-5)


LAYERS = {"ada": lambda: ada("bgcfnc", 0.7), "diffaugment": lambda: DiffAugment(["color", "translation", "cutout"], 3)}


def batch(num: int = 6, channels: int = 3, size: tuple[int, int] = (12, 12)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(num, channels, *size, generator=generator) * 2 - 1
    return images, torch.arange(num), torch.arange(num) * 1_000_003 + 2**40


@pytest.mark.parametrize("channels, size", [(3, (12, 12)), (1, (16, 10)), (3, (7, 9))])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_sample_is_augmented_the_same_in_any_batch(kind, channels, size):
    layer = LAYERS[kind]()
    images, labels, seeds = batch(channels=channels, size=size)
    whole, passed = layer(images, labels, seeds)
    assert passed is labels
    assert whole.shape == images.shape
    assert whole.dtype == torch.float32
    alone = torch.cat([layer(images[i : i + 1], labels[i : i + 1], seeds[i : i + 1])[0] for i in range(6)])
    assert_close(alone, whole, rtol=0, atol=1e-5)
    assert torch.equal(layer(images, labels, seeds)[0], whole)  # as a recomputation finds it
    assert (layer(images, labels, seeds + 1)[0] - whole).abs().amax(dim=(1, 2, 3)).max() > 0.1


@pytest.mark.parametrize("pipeline", ADA_PIPELINES)
def test_ada_at_probability_0_is_the_identity(pipeline):
    images, labels, seeds = batch()
    assert_close(ada(pipeline, 0.0)(images, labels, seeds)[0], images, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_are_differentiable_twice(kind):
    layer = ada("bgcfnc", 1.0, torch.float64) if kind == "ada" else LAYERS[kind]()
    images, labels, seeds = batch(2, size=(4, 5))
    images = images.double().requires_grad_()

    def energy(x: Tensor) -> Tensor:
        return layer(x, labels, seeds)[0].pow(3)

    assert gradcheck(energy, (images,), fast_mode=True)
    assert gradgradcheck(energy, (images,), fast_mode=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_nothing_waits_for_the_device(kind):
    layer = LAYERS[kind]().to("meta")  # no tensor has values that the host could ask for
    images, labels, seeds = (each.to("meta") for each in batch())
    assert layer(images, labels, seeds)[0].shape == images.shape


@pytest.mark.parametrize("name", ["color", "translation", "cutout"])
def test_diffaugments_strengths_have_the_published_ranges(name):
    num = 4000
    layer = DiffAugment([name], 3)
    zeros = torch.zeros(num, dtype=torch.int64)
    if name == "color":
        pixels = torch.tensor([0.0, 0.3, 0.6])[None, :, None, None].expand(num, 3, 8, 8)
        out = layer(pixels, zeros, torch.arange(num))[0]
        brightness = out.mean(dim=(1, 2, 3)) - 0.3
        product = (out[:, 2, 0, 0] - out[:, 0, 0, 0]) / 0.6  # of saturation and contrast
        assert -0.5 <= brightness.min() < -0.49
        assert 0.49 < brightness.max() <= 0.5
        assert 0 <= product.min() < 0.05
        assert 2.7 < product.max() <= 3
        assert abs(product.mean() - 1) < 0.05
    elif name == "translation":
        place = torch.arange(16.0 * 24).view(1, 1, 16, 24).expand(num, 1, 16, 24) + 1
        middle = layer(place, zeros, torch.arange(num))[0][:, 0, 8, 12] - 1
        down, right = 8 - torch.div(middle, 24, rounding_mode="floor"), 12 - middle % 24
        for moved, farthest in ((down, 2), (right, 3)):
            counts = [int((moved == d).sum()) for d in range(-farthest, farthest + 1)]
            assert sum(counts) == num
            assert max(abs(count / num - 1 / len(counts)) for count in counts) < 0.04
    else:
        out = layer(torch.ones(num, 1, 8, 12), zeros, torch.arange(num))[0]
        rows, columns = (out == 0).any(dim=3).sum(dim=2), (out == 0).any(dim=2).sum(dim=2)
        # The middle is any of 0 ... 8, and of 0 ... 12.
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (2, 4, 3, 6)
        assert torch.equal((out == 0).sum(dim=(2, 3)), rows * columns)


def test_the_section_decides_the_layer():
    layer = augmentation_layer(Augmentation(pipeline="b", p=0.25), 3, False)
    initialize(layer, 0)
    assert isinstance(layer, AdaptiveAugment)
    assert layer.p.tolist() == [0.25]
    images, labels, seeds = batch()
    assert_close(layer(images, labels, seeds), ada("b", 0.25)(images, labels, seeds), rtol=0, atol=0)
    other: Any = augmentation_layer(Augmentation(kind="diffaugment", policy=["cutout"]), 3, False)
    assert_close(other(images, labels, seeds), DiffAugment(["cutout"], 3)(images, labels, seeds), rtol=0, atol=0)


def test_r3gan_halves_the_probability_of_colours():
    p = {name: multiplier for name, multiplier in ADA_PIPELINES["r3gan"].items() if multiplier != 1}
    assert p == dict.fromkeys(["brightness", "contrast", "luma_flip", "hue", "saturation"], 0.5)
    assert ADA_PIPELINES["r3gan"].keys() == ADA_PIPELINES["bgcfnc"].keys() - {"filter", "noise"}
    num = 4000
    layer = AdaptiveAugment({"brightness": 0.5}, 0.6)
    initialize(layer, 0)
    images = torch.zeros(num, 1, 4, 4)
    out = layer(images, torch.zeros(num, dtype=torch.int64), torch.arange(num))[0]
    assert abs((out != 0).any(dim=3).any(dim=2).double().mean() - 0.3) < 0.04


PARTS = [pytest.param(name, marks=pytest.mark.nightly) for name in ADA_PIPELINES if name not in ("bgcfnc", "r3gan")]
"""Of which ``bgcfnc`` has all augmentations."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diffaugment", "bgcfnc", "r3gan", *PARTS])
def test_augmentations_leave_a_compiled_network_one_graph(tmp_path, name):
    section = f"{{kind: ada, target: 0.6, pipeline: {name}}}" if name in ADA_PIPELINES else "{kind: diffaugment}"
    network = build_network(tiny_recipe(tmp_path, f"augmentation={section}"), "discriminator")
    initialize(network, 1)
    images = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    inputs = images, torch.arange(4), torch.arange(5, 9)
    torch.compiler.reset()
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    assert_close(compiled(*inputs), network(*inputs))
