"""StyleGAN2's layers against their equations, in float64, and the mapping network's mixing, average and truncation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bigsgan.config.families.stylegan2 import StyleGAN2Generator
from bigsgan.images.size import Size
from bigsgan.models import noise
from bigsgan.models.layers import moving_state
from bigsgan.models.network import initialize
from bigsgan.models.stylegan2 import Mapping
from bigsgan.models.stylegan2_layers import (
    Conv2d,
    FullyConnected,
    MappingNetwork,
    MinibatchDeviation,
    SynthesisLayer,
    ToRGB,
)
from tests.networks import filled


def doubled(layer: Any) -> Any:
    return filled(layer).double()


@pytest.mark.parametrize("up", [False, True])
def test_random_noise_is_drawn_for_each_sample(up):
    """What a layer does with constant noise, ``test_stylegan_options.py`` compares with the equations."""
    layer = doubled(SynthesisLayer(3, 5, 4, Size.of(8), up, stream=7, clamp=1.5, half=None))
    size = 4 if up else 8
    x, w, seeds = torch.randn(2, 3, size, size).double(), torch.randn(2, 4).double(), torch.tensor([5, 9])
    found = layer(x, w, seeds)
    layer.noise_mode = "const"
    for i, drawn in enumerate(noise.normal(seeds, 7, (8, 8))):
        layer.noise_const.copy_(drawn)
        assert_close(found[i], layer(x, w, seeds)[i])
    assert (found.abs() == 1.5).any()


def minibatch_deviation(x: Tensor, group: int, channels: int) -> Tensor:
    added = []
    for i in range(0, len(x), group):
        maps = []
        for part in x[i : i + group].chunk(channels, dim=1):
            deviation = torch.sqrt(part.var(dim=0, correction=0) + 1e-8).mean()
            maps.append(deviation.expand(group, 1, *x.shape[2:]))
        added.append(torch.cat(maps, dim=1))
    return torch.cat([x, torch.cat(added)], dim=1)


@pytest.mark.parametrize("group, channels", [(2, 1), (3, 2), (6, 1), (1, 1)])
def test_minibatch_deviation(group, channels):
    x, layer = torch.randn(6, 4, 3, 3), MinibatchDeviation(group, channels)
    assert_close(layer(x), minibatch_deviation(x, group, channels))
    # Ranks and segments whose images are multiples of the group see what the whole batch does.
    if group < 6:
        assert_close(torch.cat([layer(x[:group]), layer(x[group:])]), layer(x))
    with pytest.raises(ValueError, match="5 images do not divide into groups of 4"):
        MinibatchDeviation(4, 1)(x[:5])


@pytest.mark.parametrize("group, segments, taken", [(None, 1, 6), (8, 1, 6), (None, 2, 3), (None, 3, 2)])
def test_minibatch_deviation_of_all_images(group, segments, taken):
    """No group, or one larger than the images: all of them, but without a group never of two segments."""
    x, layer = torch.randn(6, 4, 3, 3), MinibatchDeviation(group, 2)
    layer.segments = segments
    assert_close(layer(x), minibatch_deviation(x, taken, 2))


class _Sized(nn.Module):
    """Calls a block with a fixed integer, which the numerical check leaves alone."""

    def __init__(self, layer: nn.Module, integers: Tensor) -> None:
        super().__init__()
        self.layer, self.integers = layer, integers

    def forward(self, *floats: Tensor) -> Any:
        return self.layer(*floats, self.integers)


MAP = Size(4, 4)
SEEDS = torch.tensor([1, 2])
TWICE: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "fully connected": (lambda: FullyConnected(3, 2, activated=True), [(2, 3)]),
    "mapping": (lambda: _Sized(MappingNetwork(3, 2, 3, 2), SEEDS - 1), [(2, 3)]),
    "synthesis": (lambda: _Sized(SynthesisLayer(2, 2, 3, MAP, False, 0, None, None), SEEDS), [(2, 2, 4, 4), (2, 3)]),
    "synthesis up": (lambda: _Sized(SynthesisLayer(2, 2, 3, MAP, True, 0, None, None), SEEDS), [(2, 2, 2, 2), (2, 3)]),
    "to RGB": (lambda: ToRGB(2, 1, 3, None, None), [(2, 2, 3, 3), (2, 3)]),
    "convolution": (lambda: Conv2d(2, 2, 3), [(1, 2, 4, 4)]),
    "convolution down": (lambda: Conv2d(2, 2, 3, resamples=True), [(1, 2, 4, 4)]),
    "skip": (lambda: Conv2d(2, 2, 1, activated=False, resamples=True), [(1, 2, 4, 4)]),
    "deviation": (lambda: MinibatchDeviation(2, 1), [(4, 2, 2, 2)]),
}


@pytest.mark.parametrize("name", TWICE)
def test_layers_are_differentiable_twice(name):
    build, shapes = TWICE[name]
    layer = doubled(build())
    inputs = tuple(torch.randn(shape).double().requires_grad_() for shape in shapes)
    parameters = tuple(layer.parameters())

    def function(*tensors: Tensor) -> Tensor:
        state = dict(zip([n for n, _ in layer.named_parameters()], tensors[len(inputs) :], strict=True))
        return torch.func.functional_call(layer, state, tensors[: len(inputs)])

    assert torch.autograd.gradcheck(function, inputs + parameters, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs + parameters, fast_mode=True)


def mapping(style_mixing: float = 0.5, num_ws: int = 8, num_classes: int = 0) -> Any:
    config = StyleGAN2Generator(latent_size=6, w_size=4, mapping_layers=2, style_mixing=style_mixing)
    layer = Mapping(config, num_classes, num_ws)
    initialize(layer, 0)
    return layer


def test_styles_mix_in_training_alone():
    layer, num = mapping(), 4000
    latents, labels, seeds = torch.randn(num, 6), torch.zeros(num, dtype=torch.int64), torch.arange(num)
    ws, kept = layer(latents, labels, seeds)
    assert torch.equal(kept, seeds)
    w = layer.network(latents, labels)
    second = layer.network(noise.normal(seeds, 0, (6,)), labels)
    own = (ws == w[:, None]).all(dim=2)
    assert torch.equal(ws, torch.where(own[:, :, None], w[:, None], second[:, None]))
    count = own.sum(dim=1)
    assert torch.equal(own, torch.arange(8) < count[:, None])  # coarse layers keep, fine layers change
    assert own[:, 0].all()
    shares = torch.bincount(count, minlength=9) / num
    assert abs(shares[8] - 0.5) < 0.03  # not mixed
    assert (shares[1:8] - 0.5 / 7).abs().max() < 0.015  # uniform over the crossovers
    layer.eval()
    assert torch.equal(layer(latents, labels, seeds)[0], w[:, None].expand(-1, 8, -1))


def test_the_average_of_styles_moves_when_told_to_and_over_all_ranks():
    layer = mapping()
    latents, labels, seeds = torch.randn(8, 6), torch.zeros(8, dtype=torch.int64), torch.arange(8)
    layer(latents, labels, seeds)
    assert not layer.w_avg.any()
    mean = layer.network(latents, labels).mean(dim=0)
    with moving_state([layer], True):
        layer(latents, labels, seeds)
        assert_close(layer.w_avg, 0.005 * mean)
        layer(latents, labels, seeds)
    assert_close(layer.w_avg, (0.005 + 0.005 * 0.995) * mean)
    halves = mapping()
    halves.average_over_ranks = lambda tensor: (tensor + other) / 2
    other = halves.network(latents[4:], labels[4:]).mean(dim=0).detach()
    with moving_state([halves], True):
        halves(latents[:4], labels[:4], seeds[:4])
    assert_close(halves.w_avg, 0.005 * mean)


def test_truncation_draws_styles_towards_their_mean():
    layer = mapping()
    latents, labels, seeds = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64), torch.arange(4)
    layer.w_avg.copy_(torch.randn(4))
    w = layer.network(latents, labels)
    layer.truncation_psi = 0.3
    layer.style_mixing = 0.0
    assert_close(layer(latents, labels, seeds)[0], w[:, None].expand(-1, 8, -1))  # not in training
    layer.eval()
    drawn_in = layer.w_avg + 0.3 * (w - layer.w_avg)
    assert_close(layer(latents, labels, seeds)[0], drawn_in[:, None].expand(-1, 8, -1))
    layer.truncation_cutoff = 3
    ws = layer(latents, labels, seeds)[0]
    assert_close(ws[:, :3], drawn_in[:, None].expand(-1, 3, -1))
    assert_close(ws[:, 3:], w[:, None].expand(-1, 5, -1))


def test_half_precision_survives_large_weights_and_styles():
    layer = filled(SynthesisLayer(8, 8, 4, Size.of(8), True, 0, 256.0, torch.float16))
    x, w = torch.randn(2, 8, 4, 4), torch.randn(2, 4)
    before = layer(x, w, SEEDS)
    with torch.no_grad():
        layer.weight.mul_(1e6)  # past fp16's range
        layer.affine.weight.mul_(1e6)
        layer.affine.bias.mul_(1e6)
    assert_close(layer(x, w, SEEDS), before, rtol=0.01, atol=0.01)
