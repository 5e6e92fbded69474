"""Light convolutions against torch's own and dense matrices, and what width and depth make of BigGAN."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from bigsgan.config import load_recipe
from bigsgan.config.data import Data
from bigsgan.config.families.biggan import BigGANDiscriminator, BigGANGenerator
from bigsgan.config.families.blocks import BlockSection
from bigsgan.config.families.dcgan import DCGANDiscriminator, DCGANGenerator
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models import biggan, dcgan, spectral
from bigsgan.models.build import build_network
from bigsgan.models.layers import SpectralConv2d, moving_state
from bigsgan.models.light import Makers, SqueezeAndExcitation, pair, single
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.plain import Conv2d, ConvTranspose2d, Linear
from tests import REPOSITORY
from tests.networks import attention_numel, numel

META = torch.device("meta")
FORMS = ["standard", "depthwise_separable", "grouped", "inverted_residual"]


def dense(layer: SpectralConv2d, weight: Tensor) -> Tensor:
    """The weight of a grouped convolution as the block-diagonal matrix that it stands for."""
    return torch.block_diag(*weight.flatten(1).chunk(layer.groups))


@pytest.mark.parametrize("groups", [2, 4, 12])
def test_a_grouped_weight_is_divided_by_the_norm_of_its_block_diagonal_matrix(groups):
    layer = SpectralConv2d(12, 24, 3, groups=groups)
    initialize(layer, 0)
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    x = torch.randn(2, 12, 5, 5)
    with torch.no_grad():
        for _ in range(2000):
            layer.u, layer.v = spectral.iterated(layer.as_matrix(layer.weight), layer.u, layer.eps)
    norm = torch.linalg.matrix_norm(dense(layer, layer.weight), 2)
    assert_close(layer.normalized_weight(), layer.weight / norm, rtol=1e-4, atol=1e-5)
    assert_close(layer(x), F.conv2d(x, layer.weight / norm, layer.bias, padding=1, groups=groups), rtol=1e-4, atol=1e-4)


def test_moving_is_one_power_iteration_on_the_block_diagonal_matrix():
    layer = SpectralConv2d(6, 12, 3, groups=3)
    initialize(layer, 0)
    nn.init.normal_(layer.weight)
    u, matrix = layer.u.clone(), dense(layer, layer.weight)
    with moving_state([layer], True):
        weight = layer.normalized_weight()
    v = F.normalize(matrix.T @ u, dim=0)
    u = F.normalize(matrix @ v, dim=0)
    assert_close(layer.v, v)
    assert_close(layer.u, u)
    assert_close(weight, layer.weight / (u @ matrix @ v))


@pytest.mark.parametrize("channels, groups", [((12, 24), 3), ((24, 12), 3), ((8, 8), 8)])
def test_groups_start_orthogonal(channels, groups):
    layer = SpectralConv2d(*channels, 3, groups=groups)
    initialize(layer, 0)
    matrix = dense(layer, layer.weight)
    gram = matrix @ matrix.T if channels[1] // groups <= 9 * channels[0] // groups else matrix.T @ matrix
    assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-5)
    assert_close(matrix @ layer.v, layer.u, rtol=0, atol=1e-5)
    assert_close(matrix.T @ layer.u, layer.v, rtol=0, atol=1e-5)


def test_orthogonal_regularization_compares_filters_of_one_group():
    layer = SpectralConv2d(6, 12, 3, groups=3)
    initialize(layer, 0)
    nn.init.normal_(layer.weight)
    x = torch.randn(2, 6, 4, 4)
    layer(x).sum().backward()
    plain = layer.weight.grad.clone()
    layer.weight.grad, layer.orthogonal = None, 0.01
    layer(x).sum().backward()
    weight = layer.weight.detach().clone().requires_grad_()
    penalty = sum(((m @ m.T) * (1 - torch.eye(len(m)))).square().sum() for m in weight.flatten(1).chunk(3))
    (0.01 * penalty).backward()
    assert_close(layer.weight.grad - plain, weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_plain_grouped_convolutions_are_torchs(groups):
    x = torch.randn(2, 8, 6, 6)
    for ours, theirs in (
        (Conv2d(8, 12, 4, 0.1, 2, 1, groups=groups), nn.Conv2d(8, 12, 4, 2, 1, groups=groups)),
        (ConvTranspose2d(8, 12, 4, 0.1, 2, 1, groups=groups), nn.ConvTranspose2d(8, 12, 4, 2, 1, groups=groups)),
    ):
        initialize(ours, 0)
        theirs.load_state_dict(ours.state_dict())
        assert_close(ours(x), theirs(x))


def plain_makers() -> Makers:
    return Makers(
        lambda before, after, groups: Conv2d(before, after, 3, 0.3, 1, 1, groups=groups),
        lambda before, after: Conv2d(before, after, 1, 0.3, 1, 0),
        lambda before, after: Linear(before, after, 0.3),
    )


def test_squeeze_and_excitation_is_the_papers():
    layer = SqueezeAndExcitation(32, lambda before, after: Linear(before, after, 0.5))
    initialize(layer, 0)
    x = torch.randn(3, 32, 4, 5)
    squeezed = torch.einsum("nchw->nc", x) / 20
    inner = (squeezed @ layer.squeeze.weight.T + layer.squeeze.bias).clamp(min=0)
    scale = 1 / (1 + (-(inner @ layer.excite.weight.T + layer.excite.bias)).exp())
    assert inner.shape == (3, 2)
    assert_close(layer(x), x * scale[:, :, None, None])
    assert layer(x.bfloat16().float()).dtype == torch.float32


@pytest.mark.parametrize("block", FORMS)
def test_forms_are_differentiable_twice(block):
    first, second, _ = pair(BlockSection(block=block, groups=2, expansion=2), plain_makers(), 2, 4)
    for i, module in enumerate((first, second)):
        initialize(module, i)
        module.double()
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return second(torch.tanh(first(x)))

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_what_each_form_is_made_of():
    c, o = 8, 16
    bias = {"standard": o, "grouped": o}
    sizes = {block: numel(single(BlockSection(block=block, groups=4), plain_makers(), c, o)) for block in FORMS}
    assert sizes["standard"] == 9 * c * o + bias["standard"]
    assert sizes["grouped"] == 9 * c * o // 4 + bias["grouped"]
    assert sizes["depthwise_separable"] == (9 + 1) * c + (c + 1) * o
    inside = 4 * o
    narrowing = (9 + 1) * inside + (inside + 1) * 4 + (4 + 1) * inside + (inside + 1) * o
    assert sizes["inverted_residual"] == (c + 1) * inside + narrowing
    first, second, between = pair(BlockSection(block="inverted_residual"), plain_makers(), c, o)
    assert (numel(first), numel(second), between) == ((c + 1) * inside, narrowing, inside)


def networks(family: str, block: str, resolution: int = 32) -> tuple[LayerStack, LayerStack]:
    data = Data(kind="synthetic", resolution=resolution, image_channels=3)
    form: dict[str, Any] = {"block": block, "channels": 8, **({"groups": 4} if block == "grouped" else {})}
    if family == "biggan":
        g, d = BigGANGenerator(latent_size=8, hierarchical=False, depth=2, **form), BigGANDiscriminator(depth=2, **form)
        module: Any = biggan
    else:
        norm: Any = family.removeprefix("dcgan_")
        g, d, module = DCGANGenerator(latent_size=8, **form), DCGANDiscriminator(norm=norm, **form), dcgan
    g.check(data), d.check(data)
    return LayerStack(module.generator_layers(g, Size.of(resolution), 3, 10)), LayerStack(
        module.discriminator_layers(d, Size.of(resolution), 3, 10)
    )


@pytest.mark.parametrize(
    "family, block",
    [
        *(("biggan", block) for block in FORMS),
        ("dcgan_batch", "standard"), ("dcgan_batch", "grouped"), ("dcgan_none", "depthwise_separable"),
        ("dcgan_spectral", "grouped"), ("dcgan_spectral", "inverted_residual"),
    ],
)  # fmt: skip
def test_networks_train_in_every_form(family, block):
    g, d = networks(family, block)
    initialize(g, 0), initialize(d, 1)
    labels = torch.arange(4)
    images = g(torch.randn(4, 8), labels)
    logits = d(images, labels)
    assert (images.shape, logits.shape) == ((4, 3, 32, 32), (4,))
    assert images.std() > 1e-3
    (grad,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    assert grad.abs().max() > 1e-8
    (logits.sum() + grad.square().sum()).backward()  # R1's double backward
    for network in (g, d):
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    "family, block",
    [
        *(pytest.param("biggan", block, marks=pytest.mark.slow) for block in FORMS),
        ("dcgan_batch", "standard"), ("dcgan_batch", "depthwise_separable"),
        ("dcgan_spectral", "grouped"), ("dcgan_spectral", "inverted_residual"),
    ],
)  # fmt: skip
def test_bf16_parameters_give_about_the_same(family, block):
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        g, d = networks(family, block)
        for seed, network in enumerate((g, d)):
            initialize(network, seed)
            for parameter in network.parameters():
                parameter.data = parameter.data.to(dtype)  # buffers stay float32
        torch.manual_seed(1)
        latents, labels = torch.randn(4, 8), torch.arange(4)
        images = g(latents, labels)
        outputs.append((images, d(torch.randn(4, 3, 32, 32), labels)))
        assert outputs[-1][0].dtype == outputs[-1][1].dtype == torch.float32
    for full, half in zip(*outputs, strict=True):
        assert (full - half).norm() < 0.05 * full.norm() + 1e-6


def test_width_rounds_to_multiples_of_8():
    assert BigGANGenerator(channels=96, width=1.0).widths([16, 1]) == [1536, 96]
    assert BigGANGenerator(channels=2).widths([4, 1]) == [8, 2]
    assert BigGANGenerator(channels=96, width=0.05).widths([16, 2, 1]) == [80, 8, 8]
    assert BigGANGenerator(channels=96, width=2.6).widths([16, 1]) == [3992, 248]


def test_depth_adds_blocks_that_keep_their_size():
    with META:
        for depth in (1, 3):
            g = BigGANGenerator(channels=8, latent_size=8, hierarchical=False, depth=depth, attention=[8])
            d = BigGANDiscriminator(channels=8, depth=depth, attention=[8])
            found_g, found_d = (
                biggan.generator_layers(g, Size.of(16), 3, 10),
                biggan.discriminator_layers(d, Size.of(16), 3, 10),
            )
            assert (len(found_g), len(found_d)) == (3 + 2 * depth, 2 + 3 * depth)
            # Attention stands behind all blocks of its resolution.
            assert isinstance(found_g[1 + depth], biggan.CarriedAttention)
            assert isinstance(found_d[depth], biggan.CarriedAttention)
            extra = [m for m in (*found_g, *found_d) if getattr(m, "shortcut", True) is None]
            assert len(extra) == 2 * (depth - 1) + (3 * (depth - 1) + 1)  # and D's last block, as published


def test_groups_that_do_not_divide_are_refused():
    data = Data(kind="synthetic", resolution=64, image_channels=3)
    with pytest.raises(UserError, match=r"generator.groups: must divide the 12 channels of a feature map, got 8"):
        DCGANGenerator(block="grouped", channels=12).check(data)
    with pytest.raises(UserError, match=r"discriminator\.groups: must divide the 96 channels"):
        BigGANDiscriminator(block="grouped", groups=5).check(data)
    BigGANDiscriminator(block="depthwise_separable", channels=5).check(data)


G_WIDTHS, D_WIDTHS = [16, 16, 8, 8, 4, 2, 1], [1, 2, 4, 8, 8, 16, 16]


def conv(in_channels: int, out_channels: int, kernel: int) -> int:
    return (in_channels * kernel**2 + 1) * out_channels


def scaled(multiplier: int, width: float) -> int:
    return 8 * round(96 * multiplier * width / 8)


def generator_numel(width: float, depth: int) -> int:
    """Of BigGAN at 256x256 with latents of 7 x 20, an embedding of 128 and attention at 64."""
    widths, condition = [scaled(m, width) for m in G_WIDTHS], 128 + 20
    total = 1000 * 128 + (20 + 1) * 16 * widths[0] + attention_numel(widths[4])
    for before, after in pairwise(widths):
        total += 2 * condition * (before + after) + conv(before, after, 3) + conv(after, after, 3)
        total += conv(before, after, 1) + (depth - 1) * (4 * condition * after + 2 * conv(after, after, 3))
    return total + 2 * widths[-1] + conv(widths[-1], 3, 3)


def discriminator_numel(width: float, depth: int) -> int:
    """Of BigGAN at 256x256 with attention at 64."""
    widths = [3, *(scaled(m, width) for m in D_WIDTHS)]
    total = widths[-1] + 1 + 1000 * widths[-1] + attention_numel(widths[2])
    for i, (before, after) in enumerate(pairwise(widths)):
        total += conv(before, after, 3) + conv(after, after, 3) + (depth - 1) * 2 * conv(after, after, 3)
        total += conv(before, after, 1) if i < 6 else 0
    return total


@pytest.mark.parametrize(
    "name, billions, generator, discriminator",
    [("biggan_xl_1b", 1, (2.6, 2), (2.2, 2)), ("biggan_xl_8b", 8, (5.375, 4), (4.375, 4))],
)
def test_the_largest_recipes(name, billions, generator, discriminator):
    recipe = load_recipe(REPOSITORY / "launch" / "recipes" / f"{name}.yaml", [])
    with META:
        g, d = numel(build_network(recipe, "generator")), numel(build_network(recipe, "discriminator"))
    assert g == generator_numel(*generator)
    assert d == discriminator_numel(*discriminator)
    assert billions * 1e9 < g < 1.03 * billions * 1e9
    assert billions * 1e9 < d < 1.03 * billions * 1e9
