"""Biases of BigGAN's residual blocks: added where pixels are few, and equal to one where each convolution ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from bigsgan.config import load_recipe
from bigsgan.config.families.biggan import BigGANGenerator
from bigsgan.config.families.blocks import BlockSection
from bigsgan.models import biggan_deep, convolutions
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.biggan import DiscriminatorBlock, GeneratorBlock
from bigsgan.models.build import build_network
from bigsgan.models.layers import SpectralConv2d, moving_state
from bigsgan.models.network import initialize
from tests import REPOSITORY
from tests.networks import derivatives

FORMS = ["standard", "grouped", "depthwise_separable", "inverted_residual"]


def convolve(branch: nn.Module, x: Tensor) -> Tensor:
    """Run a convolution, or a sequence of modules, each convolution with its own bias, added where it ends."""
    if not isinstance(branch, SpectralConv2d):
        parts = branch if isinstance(branch, nn.Sequential) else [branch]
        for part in parts:
            x = convolve(part, x) if isinstance(part, SpectralConv2d) else part(x)
        return x
    weight = branch.normalized_weight()
    return F.conv2d(x, weight, None, branch.stride, branch.padding, groups=branch.groups) + branch.bias[:, None, None]


def judged(block: DiscriminatorBlock, h: Tensor) -> Tensor:
    """Figure 15c as it is drawn."""
    x = convolve(block.conv2, F.relu(convolve(block.conv1, F.relu(h) if block.preactivation else h)))
    shortcut = h if block.shortcut is None else convolve(block.shortcut, h)
    return F.avg_pool2d(x + shortcut, 2) if block.downsample else x + shortcut


def generated(block: GeneratorBlock, h: Tensor, condition: Tensor) -> Tensor:
    """Figure 15b as it is drawn."""
    x = F.relu(block.norm1(h, condition))
    if block.upsample:
        x, h = F.interpolate(x, scale_factor=2), F.interpolate(h, scale_factor=2)
    x = convolve(block.conv2, F.relu(block.norm2(convolve(block.conv1, x), condition)))
    return x + (h if block.shortcut is None else convolve(block.shortcut, h))


def ready(block: nn.Module) -> nn.Module:
    """Initialize in float64, with biases other than 0."""
    initialize(block, 1)
    block.double()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return block


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("in_channels", "downsample"), [(8, True), (4, False), (8, False)])
def test_a_block_of_the_discriminator_is_the_one_that_is_drawn(form, in_channels, downsample):
    block = ready(DiscriminatorBlock(in_channels, 8, True, downsample, BlockSection(block=form, groups=2), False))
    h = torch.randn(3, in_channels, 8, 8, dtype=torch.float64, requires_grad=True)
    leaves = [h, *block.parameters()]
    y, expected = block(h, torch.zeros(3))[0], judged(block, h)
    assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert_close(derivatives(y, leaves), derivatives(expected, leaves), rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("upsample", [True, False])
def test_a_block_of_the_generator_is_the_one_that_is_drawn(form, upsample):
    config = BigGANGenerator(channels=8, latent_size=4, embedding_size=4, block=form, hierarchical=False)
    block = ready(GeneratorBlock(8, 8, 1, (4, 4), True, upsample, config)).eval()
    h = torch.randn(3, 8, 4, 4, dtype=torch.float64, requires_grad=True)
    condition = torch.randn(3, 4, dtype=torch.float64)
    leaves = [h, *(p for p in block.parameters())]
    y, expected = block(h, condition)[0], generated(block, h, condition)
    assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert_close(derivatives(y, leaves), derivatives(expected, leaves), rtol=1e-10, atol=1e-9)


class Biases(TorchDispatchMode):
    """Counts biases of convolutions, and the numbers that adding one apart, and its gradient, read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = self.apart = self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and isinstance(args[1], Tensor) and args[1].ndim == 3:
            self.apart += 1
            self.numbers += 3 * result.numel()  # its gradient's sum too
        if func is torch.ops.aten.convolution.default and args[2] is not None:
            self.forward += 1
            self.numbers += 2 * result.numel()
        if func is torch.ops.aten.convolution_backward.default and args[-1][2]:
            self.backward += 1
            self.numbers += args[0].numel()
        return result


@pytest.mark.parametrize(
    ("network", "num_whole", "num_pooled", "million_numbers"),
    [("generator", 16, 0, 331), ("discriminator", 12, 5, 222)],
)
def test_biases_of_biggan_128_are_counted(network, num_whole, num_pooled, million_numbers):
    recipe = load_recipe(REPOSITORY / "launch" / "recipes" / "biggan128_imagenet.yaml", [])
    shape = (16, 3, 128, 128) if network == "discriminator" else (16, recipe.generator.latent_size)
    with torch.device("meta"), Biases() as biases:
        stack = build_network(recipe, network)
        stack(torch.zeros(shape), torch.zeros(16, dtype=torch.int64)).sum().backward()
    assert (biases.forward, biases.backward, biases.apart) == (num_whole, num_whole, num_pooled)
    assert round(biases.numbers / 1e6) == million_numbers


def average(x: Tensor) -> Tensor:
    """That of two ranks which hold the same."""
    return x * 1.0


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("over_ranks", [None, average])
def test_batch_norm_takes_a_bias_away_and_keeps_it_in_the_running_mean(over_ranks, segments):
    x, bias = torch.randn(4, 3, 5, 5, dtype=torch.float64), torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    found = []
    for inputs, shift in ((x + bias.view(3, 1, 1), None), (x, bias)):
        norm = BatchStatistics(3)
        initialize(norm, 1)
        norm.double()
        norm.average_over_ranks, norm.num_ranks, norm.segments = over_ranks, 2, segments
        inputs = inputs.clone().requires_grad_()
        outputs = []
        for moving in (True, True, False):
            with moving_state([norm], moving):
                outputs.append(norm(inputs, shift))
        (grad,) = torch.autograd.grad(sum((y**3).sum() for y in outputs), inputs)
        found.append([*outputs, grad, *norm.buffers()])
    assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", [BigGANGenerator, None], ids=["biggan", "deep"])
def test_a_bias_before_batch_norm_costs_nothing_on_a_gpu(family, monkeypatch):
    monkeypatch.setattr(convolutions, "suits_tensor_cores", lambda device, dtype: True)
    if family is None:
        block: nn.Module = ready(biggan_deep.GeneratorBlock(16, 16, 4, True, True, 1e-5))
        convs = [block.conv1, block.conv2, block.conv3]
    else:
        config = BigGANGenerator(channels=8, latent_size=4, embedding_size=4, hierarchical=False)
        block = ready(GeneratorBlock(8, 8, 1, (4, 4), True, True, config))
        convs = [block.conv1]
    h, condition = (
        torch.randn(3, block.norm1.statistics.running_mean.numel(), 4, 4).double(),
        torch.randn(3, 4).double(),
    )
    with Biases() as biases:
        (y,) = block(h, condition)
        y.square().sum().backward()
    assert biases.forward == 0
    for conv in convs:
        assert torch.equal(conv.shift, conv.bias)
        assert not conv.bias.grad.any()
    block.eval()(h, condition)
    assert all(conv.shift is None for conv in convs)
