"""BigGAN-deep against the published sizes, a count of its own, and the rules of flat layer lists.

What its layers compute is compared with another implementation in ``test_weights_biggan_pytorch.py``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from bigsgan.config.data import Data
from bigsgan.config.families.biggan_deep import BigGANDeepDiscriminator, BigGANDeepGenerator
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models.biggan_deep import discriminator_layers, generator_layers
from bigsgan.models.layers import SelfAttention
from bigsgan.models.network import LayerStack
from tests.networks import D_MAPS, D_WIDTHS, G_MAPS, G_WIDTHS, RESOLUTIONS, attention_numel, carried, numel

META = torch.device("meta")


def generator(resolution: int, num_classes: int = 10, image_channels: int = 3, **section: Any) -> LayerStack:
    config = BigGANDeepGenerator(**{"channels": 8, "latent_size": 5, "embedding_size": 6, **section})
    config.check(Data(resolution=resolution))
    return LayerStack(generator_layers(config, Size.of(resolution), image_channels, num_classes))


def discriminator(resolution: int, num_classes: int = 10, image_channels: int = 3, **section: Any) -> LayerStack:
    config = BigGANDeepDiscriminator(**{"channels": 8, **section})
    config.check(Data(resolution=resolution))
    return LayerStack(discriminator_layers(config, Size.of(resolution), image_channels, num_classes))


def conv(in_channels: int, out_channels: int, kernel: int) -> int:
    return (in_channels * kernel**2 + 1) * out_channels


def bottleneck(before: int, inner: int, after: int) -> int:
    return conv(before, inner, 1) + 2 * conv(inner, inner, 3) + conv(inner, after, 1)


@pytest.mark.parametrize("resolution, g_millions, d_millions", [(128, 50.24, 34.59), (256, 55.74, 38.25)])
def test_published_sizes(resolution, g_millions, d_millions):
    with META:
        g = generator(resolution, 1000, channels=128, latent_size=128, embedding_size=128, attention=[64])
        d = discriminator(resolution, 1000, channels=128, attention=[64])
    assert round(numel(g) / 1e6, 2) == g_millions
    assert round(numel(d) / 1e6, 2) == d_millions


@pytest.mark.parametrize("num_classes, colours, depth", [(0, 1, 1), (10, 3, 3)])
@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_parameter_counts(resolution, num_classes, colours, depth):
    with META:
        g = generator(resolution, num_classes, colours, depth=depth, attention=G_MAPS[resolution])
        d = discriminator(resolution, num_classes, colours, depth=depth, attention=D_MAPS[resolution])
    widths = [8 * m for m in G_WIDTHS[resolution]]
    total = max(num_classes, 1) * 6 + (11 + 1) * 16 * widths[0]
    for before, after in pairwise(widths):
        blocks = [(before, before)] * (depth - 1) + [(before, after)]
        for a, b in blocks:
            total += bottleneck(a, a // 4, b) + 2 * 11 * (a + 3 * (a // 4))
        total += attention_numel(after)
    assert numel(g) == total + 2 * widths[-1] + conv(widths[-1], colours, 3)
    widths = [8 * m for m in D_WIDTHS[resolution]]
    total = conv(colours, widths[0], 3)
    for i, (before, after) in enumerate(pairwise(widths)):
        total += bottleneck(before, after // 4, after) + (depth - 1) * bottleneck(after, after // 4, after)
        total += conv(before, after - before, 1) if after > before else 0
        total += attention_numel(after) * (i < len(D_MAPS[resolution]))
    assert numel(d) == total + widths[-1] + 1 + num_classes * widths[-1]
    for network, maps in ((g, G_MAPS), (d, D_MAPS)):
        assert sum(isinstance(m, SelfAttention) for m in network.modules()) == len(maps[resolution])


@pytest.mark.parametrize("num_classes", [0, 10])
@pytest.mark.parametrize(
    "resolution", [RESOLUTIONS[0], *(pytest.param(r, marks=pytest.mark.slow) for r in RESOLUTIONS[1:])]
)
def test_the_carry_keeps_its_rules(resolution, num_classes):
    with META:
        g = generator(resolution, num_classes, attention=G_MAPS[resolution])
        d = discriminator(resolution, num_classes, attention=D_MAPS[resolution])
        labels = torch.zeros(2, dtype=torch.int64)
        latents, images = torch.zeros(2, 5), torch.zeros(2, 3, resolution, resolution)
    for network, inputs, shape in ((g, (latents, labels), images.shape), (d, (images, labels), (2,))):
        output, sent = carried(network, *inputs)
        assert (output.shape, output.dtype) == (shape, torch.float32)
        output.sum().backward()
        assert all(entry.grad is not None for entry in sent)


def test_too_narrow_a_bottleneck_is_refused():
    with pytest.raises(UserError, match=r"generator.channels: must be at least 2, got 1 .*channels=2 or more"):
        generator(128, channels=1)
    with pytest.raises(UserError, match=r"discriminator.channels: must be at least 4, got 3 .*channels=4 or more"):
        discriminator(512, channels=3)
    with pytest.raises(UserError, match=r"must be a multiple of 16 with BigGAN-deep, got 100 .*resolution=96"):
        generator(100)
