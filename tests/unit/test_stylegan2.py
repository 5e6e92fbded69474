"""StyleGAN2 against its published sizes and equations, and the rules that every flat layer list keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from bigsgan.config import load_recipe, plan_run
from bigsgan.config.deepspeed_file import REPOSITORY
from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator, stylegan2_channels
from bigsgan.config.sections import Data
from bigsgan.errors import UserError
from bigsgan.models import noise
from bigsgan.models.build import build_network
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.stylegan2 import Mapping, SynthesisBlock, discriminator_layers, generator_layers
from bigsgan.models.stylegan2_layers import (
    Conv2d,
    FullyConnected,
    LabelEmbedding,
    MappingNetwork,
    MinibatchDeviation,
    SynthesisLayer,
    ToRGB,
)
from tests.tiny import tiny_recipe

META = torch.device("meta")
SMALL: dict[str, Any] = {"channel_base": 128, "channel_max": 12, "mapping_layers": 2}


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def generator(resolution: int = 16, num_classes: int = 3, image_channels: int = 3, **section: Any) -> LayerStack:
    config = StyleGAN2Generator(**{**SMALL, "latent_size": 6, "w_size": 8, **section})
    config.check(Data(resolution=resolution))
    return LayerStack(generator_layers(config, resolution, image_channels, num_classes))


def discriminator(resolution: int = 16, num_classes: int = 3, image_channels: int = 3, **section: Any) -> LayerStack:
    config = StyleGAN2Discriminator(**{**SMALL, **section})
    config.check(Data(resolution=resolution))
    return LayerStack(discriminator_layers(config, resolution, image_channels, num_classes))


@torch.no_grad()
def filled(network: Any, seed: int = 0) -> Any:
    """Initialise, and give what begins at 0 other values."""
    initialize(network, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if name.endswith(("bias", "noise_strength")):
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return network


def inputs_of(num: int = 4, num_classes: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    labels = torch.arange(num) % max(num_classes, 1)
    return torch.randn(num, 6), labels, torch.arange(100, 100 + num)


def layer_of(network: LayerStack, index: int) -> Any:
    return network.layers[str(index)]


def noisy_layers(network: LayerStack) -> list[SynthesisLayer]:
    return [module for module in network.modules() if isinstance(module, SynthesisLayer)]


def numel(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


# --- sizes ---


@pytest.mark.parametrize(
    "resolution, channel_base, g_millions, d_millions",
    [(256, 16_384, 24.77, 24.00), (512, 32_768, 30.28, 28.98), (1024, 32_768, 30.37, 29.01)],
)
def test_published_sizes(resolution, channel_base, g_millions, d_millions):
    with META:
        g = LayerStack(generator_layers(StyleGAN2Generator(channel_base=channel_base), resolution, 3, 0))
        d = LayerStack(discriminator_layers(StyleGAN2Discriminator(channel_base=channel_base), resolution, 3, 0))
    assert round(numel(g) / 1e6, 2) == g_millions
    assert round(numel(d) / 1e6, 2) == d_millions


def test_widths_take_the_generator_past_a_billion():
    config = StyleGAN2Generator(channel_base=32_768 * 8, channel_max=4_096)
    with META:
        assert numel(LayerStack(generator_layers(config, 512, 3, 0))) > 1_000_000_000


def test_channels():
    assert stylegan2_channels(256, 16_384, 512) == {4: 512, 8: 512, 16: 512, 32: 512, 64: 256, 128: 128, 256: 64}


@pytest.mark.parametrize("num_classes", [0, 3])
@pytest.mark.parametrize("resolution", [8, 16, 32])
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
def test_every_float_in_the_carry_has_a_gradient_and_a_use(num_classes, half):
    g, d = generator(16, num_classes, half_resolutions=half), discriminator(16, num_classes, half_resolutions=half)
    latents, labels, seeds = inputs_of(num_classes=num_classes)
    for network, inputs in ((g, (latents, labels, seeds)), (d, (torch.randn(4, 3, 16, 16), labels))):
        filled(network)
        carry: tuple[Tensor, ...] = inputs
        sent: list[Tensor] = []
        for layer in network.layers.values():
            carry = layer(*carry)
            for entry in carry:
                if entry.is_floating_point():
                    assert entry.requires_grad
                    entry.retain_grad()
                    sent.append(entry)
                else:
                    assert entry.dtype == torch.int64
        carry[0].sum().backward()
        assert len(sent) >= len(network.layers)
        assert all(entry.grad is not None and entry.grad.any() for entry in sent)
        assert all(parameter.grad is not None for parameter in network.parameters())


# --- layers against their equations, in float64 ---


def doubled(layer: Any) -> Any:
    return filled(layer).double()


def test_fully_connected_layers_scale_their_weights_where_they_use_them():
    layer, x = doubled(FullyConnected(6, 5, activated=True, lr_multiplier=0.01)), torch.randn(3, 6).double()
    linear = x @ (layer.weight * 0.01 / math.sqrt(6)).T + 0.01 * layer.bias
    assert_close(layer(x), torch.where(linear > 0, linear, 0.2 * linear) * math.sqrt(2))
    embedding = doubled(LabelEmbedding(4, 5))
    labels = torch.tensor([3, 0, 0])
    assert_close(embedding(labels), F.one_hot(labels, 4).double() @ embedding.weight.T / 2 + embedding.bias)


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("mode", ["random", "const", "none"])
def test_a_synthesis_layer_equals_a_weight_for_each_sample(up, mode):
    """Equations 1 to 3 of Karras et al. 2020: modulate, demodulate, and convolve each sample by its own weight."""
    layer = doubled(SynthesisLayer(3, 5, 4, 8, up, stream=7, clamp=1.5, half=None))
    layer.noise_mode = mode
    size = 4 if up else 8
    x, w, seeds = torch.randn(2, 3, size, size).double(), torch.randn(2, 4).double(), torch.tensor([5, 9])
    expected = []
    for i in range(2):
        weight = layer.weight * (w[i] @ layer.affine.weight.T / 2 + layer.affine.bias)[None, :, None, None]
        weight = weight / torch.sqrt(weight.square().sum(dim=(1, 2, 3), keepdim=True) + 1e-8)
        if up:  # zeros after each pixel, full convolution, and the filter times 4 over that
            sparse = torch.zeros(1, 3, 8, 8).double()
            sparse[:, :, ::2, ::2] = x[i]
            taps = torch.tensor([1.0, 3.0, 3.0, 1.0]).double() / 8
            kernel = 4 * torch.outer(taps, taps).expand(5, 1, 4, 4)
            # The weight was trained as what a transposed convolution takes: flipped, for a correlation.
            y = F.conv2d(F.pad(sparse, (2, 2, 2, 2)), weight.flip(2, 3))[:, :, :9, :9]
            y = F.conv2d(F.pad(y, (1, 1, 1, 1)), kernel, groups=5)
        else:
            y = F.conv2d(F.pad(x[i : i + 1], (1, 1, 1, 1)), weight)
        if mode == "random":
            y = y + layer.noise_strength * noise.normal(seeds, 7, (1, 8, 8))[i].double()
        elif mode == "const":
            y = y + layer.noise_strength * layer.noise_const
        y = y + layer.bias[None, :, None, None]
        expected.append((torch.where(y > 0, y, 0.2 * y) * math.sqrt(2)).clamp(-1.5, 1.5))
    assert_close(layer(x, w, seeds), torch.cat(expected))
    assert (layer(x, w, seeds).abs() == 1.5).any()


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("down", [False, True])
def test_a_convolution_of_the_discriminator(kernel, down):
    layer, x = doubled(Conv2d(3, 5, kernel, down=down, clamp=1.0)), torch.randn(2, 3, 8, 8).double()
    weight = layer.weight / math.sqrt(3 * kernel**2)
    if down:  # filter, convolve, and keep every second pixel
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0]).double() / 8
        padding = 1 + kernel // 2
        filtered = F.conv2d(F.pad(x, (padding,) * 4), torch.outer(taps, taps).expand(3, 1, 4, 4), groups=3)
        y = F.conv2d(filtered, weight)[:, :, ::2, ::2]
    else:
        y = F.conv2d(x, weight, padding=kernel // 2)
    y = y + layer.bias[None, :, None, None]
    expected = (torch.where(y > 0, y, 0.2 * y) * math.sqrt(2) * 0.5).clamp(-0.5, 0.5)
    assert_close(layer(x, gain=0.5), expected)
    assert (expected.abs() == 0.5).any()
    plain = doubled(Conv2d(3, 5, kernel, activated=False, down=down))
    plain.weight.data.copy_(layer.weight)
    assert_close(plain(x, gain=0.5), 0.5 * (y - layer.bias[None, :, None, None]))


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


class _Sized(nn.Module):
    """Calls a block with a fixed integer, which the numerical check leaves alone."""

    def __init__(self, layer: nn.Module, integers: Tensor) -> None:
        super().__init__()
        self.layer, self.integers = layer, integers

    def forward(self, *floats: Tensor) -> Any:
        return self.layer(*floats, self.integers)


SEEDS = torch.tensor([1, 2])
TWICE: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "fully connected": (lambda: FullyConnected(3, 2, activated=True), [(2, 3)]),
    "mapping": (lambda: _Sized(MappingNetwork(3, 2, 3, 2), SEEDS - 1), [(2, 3)]),
    "synthesis": (lambda: _Sized(SynthesisLayer(2, 2, 3, 4, False, 0, None, None), SEEDS), [(2, 2, 4, 4), (2, 3)]),
    "synthesis up": (lambda: _Sized(SynthesisLayer(2, 2, 3, 4, True, 0, None, None), SEEDS), [(2, 2, 2, 2), (2, 3)]),
    "to RGB": (lambda: ToRGB(2, 1, 3, None, None), [(2, 2, 3, 3), (2, 3)]),
    "convolution": (lambda: Conv2d(2, 2, 3), [(1, 2, 4, 4)]),
    "convolution down": (lambda: Conv2d(2, 2, 3, down=True), [(1, 2, 4, 4)]),
    "skip": (lambda: Conv2d(2, 2, 1, activated=False, down=True), [(1, 2, 4, 4)]),
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

    assert torch.autograd.gradcheck(function, inputs + parameters)
    assert torch.autograd.gradgradcheck(function, inputs + parameters)


# --- mapping ---


def mapping(style_mixing: float = 0.5, num_ws: int = 8, num_classes: int = 0) -> Any:
    layer = Mapping(6, num_classes, 4, 2, num_ws, style_mixing)
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


def test_mixing_follows_the_sample_and_not_its_place():
    layer = mapping(style_mixing=1.0, num_classes=3)
    latents, labels, seeds = inputs_of(6)
    ws = layer(latents, labels, seeds)[0]
    backwards = layer(latents.flip(0), labels.flip(0), seeds.flip(0))[0]
    assert_close(backwards.flip(0), ws)


def test_the_average_of_styles_moves_when_told_to_and_over_all_ranks():
    layer = mapping()
    latents, labels, seeds = torch.randn(8, 6), torch.zeros(8, dtype=torch.int64), torch.arange(8)
    layer(latents, labels, seeds)
    assert not layer.w_avg.any()
    mean = layer.network(latents, labels).mean(dim=0)
    with moving_state([layer], True):
        layer(latents, labels, seeds)
        assert_close(layer.w_avg, 0.002 * mean)
        layer(latents, labels, seeds)
    assert_close(layer.w_avg, (0.002 + 0.002 * 0.998) * mean)
    halves = mapping()
    halves.average_over_ranks = lambda tensor: (tensor + other) / 2
    other = halves.network(latents[4:], labels[4:]).mean(dim=0).detach()
    with moving_state([halves], True):
        halves(latents[:4], labels[:4], seeds[:4])
    assert_close(halves.w_avg, 0.002 * mean)


def test_truncation_draws_styles_towards_their_mean():
    layer = mapping()
    latents, labels, seeds = inputs_of(num_classes=0)
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


def test_the_length_of_paths_can_be_penalised():
    """The gradient by the style vectors is itself differentiable (Karras et al. 2020, section 3.2)."""
    g = filled(generator(style_mixing=0.9))
    latents, labels, seeds = inputs_of()
    ws, seeds = g.part(0, 1).fold(latents, labels, seeds)
    images = g.part(1, len(g.layers))(ws, seeds)
    (grads,) = torch.autograd.grad((images * torch.randn_like(images)).sum() / 16, ws, create_graph=True)
    lengths = grads.square().sum(dim=2).mean(dim=1).sqrt()
    (lengths - 0.1).square().mean().backward()
    missing = {name for name, p in g.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    assert missing <= {name for name, _ in g.named_parameters() if name.endswith("torgb.bias")}  # only added
    assert all(layer.weight.grad.any() for layer in noisy_layers(g))  # type: ignore[union-attr]


@pytest.mark.parametrize("architecture", ["resnet", "orig"])
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


@pytest.mark.parametrize("half_type, tolerance", [("fp16", 0.01), ("bf16", 0.08)])
def test_half_precision_is_close(half_type, tolerance):
    latents, labels, seeds = inputs_of()
    images = torch.randn(4, 3, 16, 16)
    found: list[list[Tensor]] = []
    for half in (0, 2):
        g = filled(generator(half_resolutions=half, half_type=half_type, style_mixing=0))
        d = filled(discriminator(half_resolutions=half, half_type=half_type))
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


def test_half_precision_survives_large_weights_and_styles():
    layer = filled(SynthesisLayer(8, 8, 4, 8, True, 0, 256.0, torch.float16))
    x, w = torch.randn(2, 8, 4, 4), torch.randn(2, 4)
    before = layer(x, w, SEEDS)
    with torch.no_grad():
        layer.weight.mul_(1e4)
        layer.affine.weight.mul_(1e4)
        layer.affine.bias.mul_(1e4)
    assert_close(layer(x, w, SEEDS), before, rtol=0.01, atol=0.01)


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
    # Equalised: the first images and logits have a size that training can begin from.
    latents, labels, seeds = torch.randn(8, 6), torch.arange(8) % 3, torch.arange(8)
    assert 0.1 < g(latents, labels, seeds).std() < 10


def test_blocks_own_their_filters():
    block = SynthesisBlock(4, 4, 3, 8, 8, 1, False, None, None)
    initialize(block, 0)
    assert_close(block.resample_filter.sum(), torch.tensor(1.0))
    assert torch.equal(block.resample_filter, block.conv0.resample_filter)


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
    with pytest.raises(
        UserError, match=r"mbstd_group: 4 does not divide the 2 images .* set discriminator\.mbstd_group=2"
    ):
        plan_run(recipe, 4)
    plan_run(tiny_recipe(tmp_path, *tiny, "discriminator.mbstd_channels=0"), 4)


@pytest.mark.parametrize(
    "network, section, resolution, message",
    [
        ("g", {}, 24, "data.resolution: 24 is no power of two from 8 on.*set data.resolution=16"),
        ("d", {}, 4, "data.resolution: 4 is no power of two.*set data.resolution=8"),
        ("g", {"channel_base": 31}, 32, "generator.channel_base: 31 leaves no channel at 32x32.*32 or more"),
        ("d", {"half_resolutions": 3}, 16, "discriminator.half_resolutions: 3 is more than the 2 .*half_resolutions=2"),
        ("d", {"mbstd_channels": 3}, 16, "mbstd_channels: 3 does not divide the 512 channels.*mbstd_channels=1"),
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
