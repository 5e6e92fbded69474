"""R3GAN: published sizes, what the published code computed from the same weights, and layers against their formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from bigsgan.config import load_recipe
from bigsgan.config.data import Data
from bigsgan.config.families.r3gan import R3GANDiscriminator, R3GANGenerator
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models import r3gan
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from bigsgan.weights.r3gan import discriminator_section, discriminator_state, generator_section, generator_state
from tests import REPOSITORY
from tests.networks import carried, numel, part

META = torch.device("meta")
RECORDS = Path(__file__).resolve().parents[1] / "data"
"""Weights, inputs and outputs of the networks of github.com/brownvc/R3GAN at widths of 4 to 12."""


def generator(resolution: int, num_classes: int, **section: Any) -> LayerStack:
    config = R3GANGenerator.model_validate(section)
    config.check(Data(resolution=resolution))
    return LayerStack(r3gan.generator_layers(config, Size.of(resolution), 3, num_classes))


def discriminator(resolution: int, num_classes: int, **section: Any) -> LayerStack:
    config = R3GANDiscriminator.model_validate(section)
    config.check(Data(resolution=resolution))
    return LayerStack(r3gan.discriminator_layers(config, Size.of(resolution), 3, num_classes))


@pytest.mark.parametrize(
    "recipe, g_millions, d_millions",
    [
        ("r3gan_cifar10", 20.78, 21.28),
        ("r3gan_ffhq256", 23.06, 23.01),
        ("r3gan_imagenet32", 82.91, 86.55),
        ("r3gan_imagenet64", 103.57, 107.21),
    ],
)
def test_published_sizes(recipe, g_millions, d_millions):
    loaded = load_recipe(REPOSITORY / "launch" / "recipes" / f"{recipe}.yaml", [])
    with META:
        assert round(numel(build_network(loaded, "generator")) / 1e6, 2) == g_millions
        assert round(numel(build_network(loaded, "discriminator")) / 1e6, 2) == d_millions


def record(name: str) -> dict[str, Tensor]:
    return load_file(RECORDS / f"r3gan_{name}.safetensors")


def without_kernels(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not name.endswith("Resampler.Kernel")}


def imported(record: dict[str, Tensor], bf16_stages: int = 0) -> tuple[LayerStack, LayerStack]:
    """Our two networks with the recorded weights, of the sizes that their shapes tell."""
    theirs = part(record, "generator."), part(record, "discriminator.")
    embedding = theirs[0].get("Model.EmbeddingLayer.weight")
    num_classes = 0 if embedding is None else embedding.shape[1]
    resolution = record["io.images"].shape[-1]
    g = generator(resolution, num_classes, **generator_section(theirs[0]), bf16_stages=bf16_stages)
    d = discriminator(resolution, num_classes, **discriminator_section(theirs[1]), bf16_stages=bf16_stages)
    g.load_state_dict(generator_state(theirs[0]))
    d.load_state_dict(discriminator_state(theirs[1]))
    return g, d


@pytest.mark.parametrize("name", ["unconditional", "conditional"])
def test_the_published_weights_give_the_published_outputs(name):
    recorded = record(name)
    io = part(recorded, "io.")
    g, d = imported(recorded)
    images = g(io["latents"], io["labels"])
    assert images.dtype == torch.float32
    assert_close(images, io["images"], rtol=1e-4, atol=1e-5)
    images = io["images"].requires_grad_()
    logits = d(images, io["labels"])
    assert_close(logits, io["logits"], rtol=1e-4, atol=1e-6)
    (grads,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    assert_close(grads, io["image_grads"], rtol=1e-4, atol=1e-4 * float(io["image_grads"].abs().max()))
    penalty = grads.square().sum(dim=(1, 2, 3))
    assert_close(penalty, io["penalty"], rtol=1e-4, atol=0)
    penalty.mean().backward()
    theirs = part(recorded, "discriminator.")
    ours = dict(zip(without_kernels(theirs), discriminator_state(theirs), strict=True))
    expected = part(recorded, "penalty_grad.")
    assert len(expected) == 3
    for name, grad in expected.items():
        found = d.get_parameter(ours[name]).grad
        assert found is not None
        assert_close(found, grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()))


def test_vectors_are_to_the_published_networks_what_they_are_here():
    """The same weights, whose ``c_dim`` numbers are no one-hot vectors."""
    recorded, given = record("conditional"), record("vectors")
    io = part(recorded, "io.")
    g, d = imported(recorded)
    assert_close(g(io["latents"], given["labels"]), given["made"], rtol=1e-4, atol=1e-5)
    assert_close(d(io["images"], given["judged_labels"]), given["logits"], rtol=1e-4, atol=1e-6)
    assert (given["made"] - io["images"]).abs().max() > 0.1
    assert (given["logits"] - io["logits"]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["unconditional", "conditional"])
def test_bf16_stages_compute_as_published(name):
    recorded = record(name)
    io = part(recorded, "io.")
    num_stages = len(generator_section(part(recorded, "generator."))["widths"])
    g, d = imported(recorded, num_stages - 1)
    images, logits = g(io["latents"], io["labels"]), d(io["images"], io["labels"])
    assert images.dtype == logits.dtype == torch.float32
    # Both round to 8 bits after each operation, and the same ones.
    assert_close(images, io["half_images"].float(), rtol=0.02, atol=0.01 * float(io["images"].abs().max()))
    assert_close(logits, io["half_logits"], rtol=0.02, atol=0.01 * float(io["logits"].abs().max()))
    assert (images - io["images"]).abs().max() > 1e-4  # they do round


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_engines_type_wins_over_bf16_stages(dtype):
    sizes = {"widths": [8, 8], "cardinalities": [2, 2], "blocks": [1, 1]}
    found = []
    for bf16_stages in (0, 1):
        g, d = generator(8, 3, **sizes, bf16_stages=bf16_stages), discriminator(8, 3, **sizes, bf16_stages=bf16_stages)
        for network in (g, d):
            initialize(network, 0)
            network.to(dtype)
        latents, labels = torch.linspace(-1, 1, 128).view(2, 64), torch.tensor([0, 2])
        images = g(latents, labels)
        found.append((images, d(images, labels)))
    assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_block_begins_as_the_identity_and_keeps_the_scale_of_its_branch():
    num_blocks = 8
    block = r3gan.ResidualBlock(256, 8, 2, num_blocks, bf16=False)
    initialize(block, 0)
    h = torch.randn(2, 256, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(h)[0], h)
    gain = math.sqrt(2 / 1.04) * num_blocks**-0.25
    assert float(block.expand.weight.detach().std()) == pytest.approx(gain / math.sqrt(256), rel=0.02)
    assert float(block.conv.weight.detach().std()) == pytest.approx(gain / math.sqrt(512 // 8 * 9), rel=0.02)
    assert not block.activation1.bias.any()
    assert not block.contract.weight.any()


def test_initial_scales_outside_of_blocks():
    sizes = {"widths": [512, 256], "cardinalities": [8, 8], "blocks": [1, 1]}
    g = generator(8, 100, **sizes, latent_size=36, embedding_size=64)
    d = discriminator(8, 100, **sizes, embedding_size=400)
    for network in (g, d):
        initialize(network, 0)
    g_input, up, head = g.layers["0"], g.layers["2"], list(d.layers.values())[-1]
    expected = [
        (g_input.basis, 1.0), (g_input.embedding.weight, 0.1), (g_input.linear.weight, 0.1),
        (up.conv.weight, 512**-0.5), (d.layers["2"].conv.weight, 1 / 16),
        (head.basis.weight, 1 / 4), (head.linear.weight, 512**-0.5), (head.embedding.weight, 0.1 / 20),
    ]  # fmt: skip
    for parameter, std in expected:
        assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("num_classes", [0, 4])
def test_the_carry_has_gradients_and_parameters_a_use(num_classes):
    sizes = {"widths": [6, 6, 4], "cardinalities": [2, 3, 1], "blocks": [1, 2, 1]}
    g, d = generator(16, num_classes, **sizes, embedding_size=3), discriminator(16, num_classes, **sizes)
    labels = torch.tensor([0, 3]) if num_classes else torch.zeros(2, dtype=torch.int64)
    for network, first in ((g, torch.ones(2, 64)), (d, torch.ones(2, 3, 16, 16))):
        initialize(network, 0)
        for layer in network.modules():
            if isinstance(layer, r3gan.ResidualBlock):
                layer.contract.weight.data.fill_(0.1)
        output, sent = carried(network, first, labels)
        output.square().sum().backward()
        assert all(entry.grad is not None for entry in sent)
        assert all(p.grad is not None and p.grad.any() for p in network.parameters())


@pytest.mark.parametrize(
    "change, field, problem",
    [
        ({"widths": [8, 8]}, "widths", "must have 3 entries, one for each resolution from 4x4 to 16x16, got"),
        ({"cardinalities": [2, 2]}, "cardinalities", "must have 3 entries, as"),
        ({"blocks": [1]}, "blocks", "must have 3 entries, as"),
        ({"cardinalities": [2, 3, 2]}, "cardinalities", "3 does not divide a block's 16 channels"),
        ({"bf16_stages": 4}, "bf16_stages", "must be at most 3, the number of stages, got 4"),
    ],
)
@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_sections_that_do_not_fit_are_refused(network, change, field, problem):
    section = {"widths": [8, 8, 8], "cardinalities": [2, 2, 2], "blocks": [1, 1, 1], **change}
    kind = R3GANGenerator if network == "generator" else R3GANDiscriminator
    with pytest.raises(UserError) as caught:
        kind.model_validate(section).check(Data(resolution=16))
    assert caught.value.field == f"{network}.{field}"
    assert problem in str(caught.value)


def test_a_generator_needs_no_wrapper_around_its_names():
    g = part(record("conditional"), "generator.")
    bare = {name.removeprefix("Model."): value for name, value in g.items()}
    assert generator_section(bare) == generator_section(g)


@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_other_state_dicts_are_refused(network):
    recorded = record("conditional")
    convert = generator_state if network == "generator" else discriminator_state
    whole = part(recorded, f"{network}.")
    other = part(recorded, "discriminator." if network == "generator" else "generator.")
    extra = {**whole, "extra": torch.zeros(1)}
    lacking = [{k: v for k, v in whole.items() if key not in k} for key in ("Layers.1.NonLinearity1", "Basis")]
    for state in (other, {"conv.weight": torch.zeros(1)}, {}, extra, *lacking):
        with pytest.raises(UserError, match=f"not those of an R3GAN {network}"):
            convert(state)
