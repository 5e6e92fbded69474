"""StyleGAN2 against its published sizes and equations, and the rules that every flat layer list keeps."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bigsgan.config import load_recipe, plan_run
from bigsgan.config.data import Data
from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models.build import build_network
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.stylegan2 import HALF_TYPES, discriminator_layers, generator_layers
from bigsgan.models.stylegan2_layers import Conv2d, SynthesisLayer, ToRGB
from tests import REPOSITORY
from tests.networks import carried, filled, numel
from tests.tiny import tiny_recipe

META = torch.device("meta")
ARCHITECTURES = [("skip", "resnet"), ("resnet", "skip"), ("orig", "orig")]
SMALL: dict[str, Any] = {"channel_base": 128, "channel_max": 12, "mapping_layers": 2}


def generator(resolution: int = 16, num_classes: int = 3, image_channels: int = 3, **section: Any) -> LayerStack:
    config = StyleGAN2Generator(**{**SMALL, "latent_size": 6, "w_size": 8, **section})
    config.check(Data(resolution=resolution))
    return LayerStack(generator_layers(config, Size.of(resolution), image_channels, num_classes))


def discriminator(resolution: int = 16, num_classes: int = 3, image_channels: int = 3, **section: Any) -> LayerStack:
    config = StyleGAN2Discriminator(**{**SMALL, **section})
    config.check(Data(resolution=resolution))
    return LayerStack(discriminator_layers(config, Size.of(resolution), image_channels, num_classes))


def inputs_of(num: int = 4, num_classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.arange(num) % max(num_classes, 1)
    return torch.randn(num, 6), labels, torch.arange(100, 100 + num)


def layer_of(network: LayerStack, index: int) -> Any:
    return network.layers[str(index)]


def noisy_layers(network: LayerStack) -> list[SynthesisLayer]:
    return [module for module in network.modules() if isinstance(module, SynthesisLayer)]


# --- sizes ---


@pytest.mark.parametrize(
    "resolution, channel_base, g_millions, d_millions",
    [(256, 16_384, 24.77, 24.00), (512, 32_768, 30.28, 28.98), (1024, 32_768, 30.37, 29.01)],
)
def test_published_sizes(resolution, channel_base, g_millions, d_millions):
    with META:
        g = LayerStack(generator_layers(StyleGAN2Generator(channel_base=channel_base), Size.of(resolution), 3, 0))
        d = LayerStack(
            discriminator_layers(StyleGAN2Discriminator(channel_base=channel_base), Size.of(resolution), 3, 0)
        )
    assert round(numel(g) / 1e6, 2) == g_millions
    assert round(numel(d) / 1e6, 2) == d_millions


def test_the_size_for_cifar():
    """Counted by hand: 512 channels at 4, 8, 16 and 32, two layers of mapping in G and eight in D, 10 classes."""
    recipe = load_recipe(Path(REPOSITORY) / "launch" / "recipes" / "stylegan2_cifar.yaml", [])
    square, conv, embedding = 512 * 512 + 512, 512 * 512 * 9 + 512, 10 * 512 + 512  # each with its bias
    synthesis, image = conv + square + 1, 3 * 512 + 3 + square  # with the affine map of the style, and noise
    mapping = embedding + (512 + 512) * 512 + 512 + square
    with META:
        g, d = build_network(recipe, "generator"), build_network(recipe, "discriminator")
    assert numel(g) == mapping + 16 * 512 + 7 * synthesis + 4 * image
    head = conv + 512 * 9 + 16 * 512 * 512 + 512 + square  # of which one map is the deviation
    assert numel(d) == 3 * 512 + 512 + 6 * conv + head + embedding + 8 * square


@pytest.mark.parametrize("resolution, num_classes", [(8, 0), (16, 3), (32, 0)])
def test_shapes_and_entries_of_the_carry(resolution, num_classes):
    _, labels, seeds = inputs_of()
    with META:
        g, d = generator(resolution, num_classes, 1), discriminator(resolution, num_classes, 1)
        carry: tuple[Tensor, ...] = (torch.zeros(4, 6), labels.to("meta"), seeds.to("meta"))
        blocks = int(math.log2(resolution)) - 1
        for i, layer in enumerate(g.layers.values()):
            carry = layer(*carry)
            assert len(carry) == (2 if i == 0 else 1 if i == blocks else 4)
            if 0 < i < blocks:
                assert carry[0].shape == (4, layer_of(g, i).conv1.weight.shape[0], 2 ** (i + 1), 2 ** (i + 1))
                assert carry[1].shape == (4, 1, 2 ** (i + 1), 2 ** (i + 1))
            if i < blocks:
                assert carry[-2].shape == (4, 2 * blocks, 8)  # the style vectors, first after the first layer
        assert carry[0].shape == (4, 1, resolution, resolution)
        assert d(carry[0], labels.to("meta")).shape == (4,)


@pytest.mark.parametrize("num_classes", [0, 3])
@pytest.mark.parametrize("half", [0, 2])
@pytest.mark.parametrize("architectures", ARCHITECTURES)
def test_every_float_in_the_carry_has_a_gradient_and_a_use(num_classes, half, architectures):
    g = generator(16, num_classes, half_resolutions=half, architecture=architectures[0])
    d = discriminator(16, num_classes, half_resolutions=half, architecture=architectures[1])
    latents, labels, seeds = inputs_of(num_classes=num_classes)
    for network, inputs in ((g, (latents, labels, seeds)), (d, (torch.randn(4, 3, 16, 16), labels))):
        filled(network)
        output, sent = carried(network, *inputs)
        output.sum().backward()
        assert all(entry.grad is not None and entry.grad.any() for entry in sent)
        assert all(parameter.grad is not None for parameter in network.parameters())


# --- noise ---


def test_noise_is_a_function_of_the_sample_and_differs_between_layers():
    g = filled(generator(style_mixing=0))
    latents, labels, seeds = inputs_of()
    images = g(latents, labels, seeds)
    assert torch.equal(g(latents, labels, seeds), images)
    assert_close(g(latents[2:], labels[2:], seeds[2:]), images[2:])
    assert (g(latents, labels, seeds + 1000) - images).abs().amax(dim=(1, 2, 3)).min() > 1e-3
    streams = [layer.stream for layer in noisy_layers(g)]
    assert len({0, 1, *streams}) == len(streams) + 2  # 0 and 1 are the mapping's
    for layer in noisy_layers(g):
        layer.noise_mode = "none"
    quiet = g(latents, labels, seeds)
    assert torch.equal(g(latents, labels, seeds + 1000), quiet)
    for layer in noisy_layers(g):
        layer.noise_mode = "random"
        layer.noise_strength.data.zero_()
    assert_close(g(latents, labels, seeds), quiet)


# --- whole networks ---


def test_every_layer_listens_to_its_own_style():
    g = filled(generator(16, style_mixing=0)).eval()
    latents, labels, seeds = inputs_of()
    ws = layer_of(g, 0)(latents, labels, seeds)[0]
    rest = g.part(1, len(g.layers))
    images = rest(ws, seeds)
    assert_close(images, g(latents, labels, seeds))
    for i in range(ws.shape[1]):
        changed = ws.clone()
        changed[:, i] += 1
        assert (rest(changed, seeds) - images).abs().amax(dim=(1, 2, 3)).min() > 1e-4


@pytest.mark.parametrize("architecture", ["resnet", "orig", "skip"])
def test_the_discriminator_looks_at_image_label_and_group(architecture):
    d = filled(discriminator(architecture=architecture, mbstd_group=2))
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 0])
    logits = d(images, labels)
    assert logits.dtype == torch.float32
    assert (d(images, (labels + 1) % 3) - logits).abs().min() > 1e-6
    changed = images.clone()
    changed[0] = torch.randn(3, 16, 16)
    difference = (d(changed, labels) - logits).abs()
    assert difference[:2].min() > 1e-7
    assert not difference[2:].any()
    assert_close(torch.cat([d(images[:2], labels[:2]), d(images[2:], labels[2:])]), logits)
    alone = filled(discriminator(architecture=architecture, mbstd_channels=0))
    assert_close(torch.cat([alone(images[i : i + 1], labels[i : i + 1]) for i in range(4)]), alone(images, labels))


@pytest.mark.parametrize("architectures", ARCHITECTURES)
@pytest.mark.parametrize("half_type, tolerance", [("fp16", 0.01), ("bf16", 0.08)])
def test_half_precision_is_close(half_type, tolerance, architectures):
    latents, labels, seeds = inputs_of()
    images = torch.randn(4, 3, 16, 16)
    found: list[list[Tensor]] = []
    for half in ({}, {"half_resolutions": 2, "half_type": half_type}):
        g = filled(generator(**half, style_mixing=0, architecture=architectures[0]))
        d = filled(discriminator(**half, architecture=architectures[1]))
        types = {layer.half_type for layer in noisy_layers(g)}
        assert types == {None} | (
            {getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[half_type])} if half else set()
        )
        made, logits = g(latents, labels, seeds), d(images, labels)
        assert made.dtype == logits.dtype == torch.float32
        (made.square().mean() + logits.mean()).backward()
        grads = torch.cat([p.grad.flatten() for n in (g, d) for p in n.parameters()])  # type: ignore[union-attr]
        found.append([made.detach(), logits.detach(), grads])
    for plain, short in zip(*found, strict=True):
        error = (short - plain).norm() / plain.norm()
        assert 1e-5 < error < tolerance


@pytest.mark.parametrize("half_type", HALF_TYPES)
def test_the_highest_resolutions_alone_are_half_and_all_activations_limited(half_type):
    latents, labels, seeds = inputs_of()
    section: dict[str, Any] = {"half_resolutions": 1, "half_type": half_type, "conv_clamp": 1.0}
    g, d = filled(generator(style_mixing=0, **section)), filled(discriminator(**section))
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        outputs[name] = output.detach()

    for network, prefix in ((g, "g"), (d, "d")):
        for name, module in network.named_modules():
            if isinstance(module, Conv2d | SynthesisLayer | ToRGB):
                module.register_forward_hook(partial(keep, name.replace("layers", prefix)))
    d(10 * g(latents, labels, seeds), labels)
    half = {n for n, y in outputs.items() if torch.equal(y, y.to(HALF_TYPES[half_type]).to(y.dtype))}
    assert half == {"g.3.conv0", "g.3.conv1", "g.3.torgb", "d.0.fromrgb", "d.0.conv0", "d.0.conv1", "d.0.skip"}
    for name, y in outputs.items():
        assert (y.dtype == HALF_TYPES[half_type]) == (name in half - {"g.3.torgb"})  # whose image is a float32 sum
        limit = torch.tensor(math.sqrt(0.5) if name in ("d.0.conv1", "d.1.conv1") else 1.0).to(y.dtype)
        assert (y.abs().max() == limit) == (not name.endswith("skip"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_engine_may_cast_all_parameters(dtype):
    latents, labels, seeds = inputs_of()
    g, d = filled(generator(style_mixing=0)), filled(discriminator())
    with torch.no_grad():
        expected = g(latents, labels, seeds)
        logits = d(expected, labels)
    for network in (g, d):
        for parameter in network.parameters():  # buffers stay float32
            parameter.data = parameter.data.to(dtype)
    images = g(latents, labels, seeds)
    judged = d(expected, labels)
    assert images.dtype == judged.dtype == torch.float32
    assert (images - expected).norm() / expected.norm() < 0.06
    assert (judged - logits).norm() / logits.norm() < 0.06
    judged.sum().backward()
    images.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for n in (g, d) for p in n.parameters())


@pytest.mark.parametrize("name", ["generator", "discriminator"])
def test_checkpointing_changes_nothing(name):
    found = []
    for checkpointing in (False, True):
        network = filled(generator() if name == "generator" else discriminator())
        network.checkpointing = checkpointing
        torch.manual_seed(1)
        inputs = inputs_of() if name == "generator" else (torch.randn(4, 3, 16, 16), torch.arange(4) % 3)
        with moving_state(network.stateful_layers(), True):
            output = network(*inputs)
        output.square().sum().backward()
        found.append((output, [p.grad for p in network.parameters()], dict(network.named_buffers())))
    assert_close(found[1], found[0], rtol=0, atol=0)


def test_initial_values():
    g, d = generator(32, channel_max=32, channel_base=1024, mapping_layers=3), discriminator(32)
    for network in (g, d):
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data.fill_(math.nan)
        initialize(network, 0)
        assert all(tensor.isfinite().all() for tensor in (*network.parameters(), *network.buffers()))
    assert abs(layer_of(g, 0).network.fc[2].weight.std() - 100) < 15  # 1 / 0.01
    assert abs(layer_of(g, 3).conv0.weight.std() - 1) < 0.05
    assert abs(layer_of(g, 1).const.std() - 1) < 0.1
    assert (layer_of(g, 2).conv0.affine.bias == 1).all()
    assert not layer_of(g, 2).conv0.noise_strength.any()
    assert not layer_of(g, 2).conv0.bias.any()
    assert abs(layer_of(g, 4).conv0.noise_const.std() - 1) < 0.1
    assert not torch.equal(layer_of(g, 4).conv0.noise_const, layer_of(g, 4).conv1.noise_const)
    # Equalized: the first images and logits have a size that training can begin from.
    latents, labels, seeds = torch.randn(8, 6), torch.arange(8) % 3, torch.arange(8)
    assert 0.1 < g(latents, labels, seeds).std() < 10


# --- recipes ---


def test_a_recipe_builds_both_networks(tmp_path):
    tiny = [
        "generator={family: stylegan2, latent_size: 6, w_size: 8, channel_base: 64, channel_max: 8, mapping_layers: 2}",
        "discriminator={family: stylegan2, channel_base: 64, channel_max: 8, mbstd_group: 4}",
        "data.resolution=16",
    ]
    recipe = tiny_recipe(tmp_path, *tiny)
    assert recipe.generator.draws
    g, d = filled(build_network(recipe, "generator")), filled(build_network(recipe, "discriminator"))
    latents, labels, seeds = inputs_of()
    assert d(g(latents, labels, seeds), labels).shape == (4,)
    plan_run(recipe, 2)
    with pytest.raises(UserError, match=r"discriminator.mbstd_group: must divide the 2 images of a micro-batch on one"):
        plan_run(recipe, 4)
    plan_run(tiny_recipe(tmp_path, *tiny, "discriminator.mbstd_channels=0"), 4)


@pytest.mark.parametrize(
    "network, section, resolution, message",
    [
        ("g", {}, 34, "data.resolution: must be a multiple of 8 with StyleGAN2, got 34"),
        ("g", {"channel_base": 31}, 32, "generator.channel_base: must be at least 32, the resolution, got 31; set"),
        ("d", {"mbstd_channels": 3}, 16, "discriminator.mbstd_channels: must divide the 512 channels at 4x4, got 3"),
    ],
)
def test_sections_that_do_not_fit_are_refused(network, section, resolution, message):
    config = StyleGAN2Generator(**section) if network == "g" else StyleGAN2Discriminator(**section)
    with pytest.raises(UserError, match=message):
        config.check(Data(resolution=resolution))


# Batch, group, channel base, learning rate, R1's weight, half-life, mapping layers, half resolutions.
PUBLISHED = {
    "256": (64, 8, 16_384, 0.0025, 1.0, 20_000, 8, 4),
    "512": (64, 8, 32_768, 0.0025, 0.5, 20_000, 8, 4),
    "1024": (32, 4, 32_768, 0.002, 2.0, 10_000, 8, 4),
    "cifar": (64, 32, 32_768, 0.0025, 0.01, 500_000, 2, 3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_have_the_published_numbers(name):
    recipe: Any = load_recipe(Path(REPOSITORY) / "launch" / "recipes" / f"stylegan2_{name}.yaml", [])
    g, d, adam = recipe.generator, recipe.discriminator, recipe.optimizer.discriminator
    found = (recipe.batch, d.mbstd_group, d.channel_base, adam.lr, recipe.objective.r1.weight)
    found += (recipe.ema.half_life_nimg, g.mapping_layers, d.half_resolutions)
    assert found == PUBLISHED[name]
    assert recipe.optimizer.generator == adam
    assert (adam.betas, recipe.objective.r1.every, g.channel_base, g.half_resolutions) == (
        [0.0, 0.99], 16, d.channel_base, d.half_resolutions,
    )  # fmt: skip
    assert (d.architecture, g.style_mixing) == (("orig", 0.0) if name == "cifar" else ("resnet", 0.9))
