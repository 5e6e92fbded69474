"""StyleGAN2's less common options, imported, against networks written out on the original's names.

The functions below follow the papers: equalized learning rates, a weight for each sample, and zeros, padding and a
filter for each resampling, with filters of any length. Noise is the constant one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from bigsgan.adversarial.terms.path_length import PathLengthPenalty
from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator, StyleGAN2Generator
from bigsgan.config.objective import PathLength
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models.network import LayerStack
from bigsgan.models.stylegan2 import discriminator_layers, generator_layers
from bigsgan.monitor import Statistics
from bigsgan.weights.empty import sized
from bigsgan.weights.stylegan import (
    data_section,
    discriminator_section,
    discriminator_state,
    generator_section,
    generator_state,
)
from tests.networks import filled
from tests.tiny import tiny_recipe
from tests.unit.test_weights_stylegan import theirs

State = dict[str, Tensor]
SMALL: dict[str, Any] = {"channel_base": 64, "channel_max": 8, "mapping_lr_multiplier": 0.1, "conv_clamp": 3.0}
RESOLUTION, CLASSES = 8, 3


class Public:
    """The original's functions on its state, with a filter and the parts that have a ReLU."""

    def __init__(self, state: State, taps: list[float], relu: tuple[str, ...]) -> None:
        self.state, self.relu = state, relu
        self.taps = torch.tensor(taps, dtype=torch.float64) / sum(taps)

    def activated(self, part: str, x: Tensor, clamp: float | None = None, gain: float = 1.0) -> Tensor:
        x = F.leaky_relu(x, 0.0 if part in self.relu else 0.2) * math.sqrt(2) * gain
        return x if clamp is None else x.clamp(-clamp * gain, clamp * gain)

    def linear(self, name: str, x: Tensor, multiplier: float = 1.0) -> Tensor:
        weight = self.state[f"{name}.weight"]
        return F.linear(x, weight * multiplier / math.sqrt(weight.shape[1]), self.state[f"{name}.bias"] * multiplier)

    def filtered(self, x: Tensor, up: int, down: int, padding: tuple[int, int], gain: float = 1.0) -> Tensor:
        """Zeros after each pixel, padding that may be negative, the filter, and every ``down``-th pixel."""
        n, c, height, width = x.shape
        sparse = x.new_zeros(n, c, up * height, up * width)
        sparse[:, :, ::up, ::up] = x
        kernel = gain * torch.outer(self.taps, self.taps).flip(0, 1).expand(c, 1, -1, -1)
        return F.conv2d(F.pad(sparse, padding + padding), kernel, groups=c)[:, :, ::down, ::down]

    def doubled(self, x: Tensor) -> Tensor:
        size = len(self.taps)
        return self.filtered(x, 2, 1, ((size + 1) // 2, (size - 2) // 2), 4.0)

    def halved(self, x: Tensor, extra: int = 0, down: int = 2) -> Tensor:
        size = len(self.taps)
        return self.filtered(x, 1, down, ((size - 1) // 2 + extra, (size - 2) // 2 + extra))

    def mapped(self, parts: list[Tensor]) -> Tensor:
        x = torch.cat([p * torch.rsqrt(p.square().mean(1, keepdim=True) + 1e-8) for p in parts], 1)
        i = 0
        while f"mapping.fc{i}.weight" in self.state:
            x = self.activated("mapping", self.linear(f"mapping.fc{i}", x, SMALL["mapping_lr_multiplier"]))
            i += 1
        return x

    def modulated(self, name: str, x: Tensor, w: Tensor, up: bool = False) -> Tensor:
        """A convolution with a weight for each sample, demodulated unless it makes the image."""
        weight, images = self.state[f"{name}.weight"], []
        styles, is_image = self.linear(f"{name}.affine", w), name.endswith("torgb")
        for image, style in zip(x, styles, strict=True):
            own = weight * style[None, :, None, None]
            own = own / math.sqrt(len(style)) if is_image else own
            if not is_image:
                own = own * torch.rsqrt(own.square().sum((1, 2, 3), keepdim=True) + 1e-8)
            if up:  # zeros, convolution (not correlation) and filter: the paddings add up
                size = len(self.taps)
                sparse = image.new_zeros(1, len(image), 2 * image.shape[1], 2 * image.shape[2])
                sparse[0, :, ::2, ::2] = image
                before, after = (size + 1) // 2 + 1, (size - 2) // 2 + 1
                made = F.conv2d(F.pad(sparse, (before, after) * 2), own.flip(2, 3))
                kernel = 4 * torch.outer(self.taps, self.taps).flip(0, 1).expand(made.shape[1], 1, -1, -1)
                made = F.conv2d(made, kernel, groups=made.shape[1])
            else:
                made = F.conv2d(image[None], own, padding=weight.shape[2] // 2)
            images.append(made)
        x = torch.cat(images)
        if is_image:
            return (x + self.state[f"{name}.bias"][:, None, None]).clamp(-SMALL["conv_clamp"], SMALL["conv_clamp"])
        if f"{name}.noise_strength" in self.state:
            x = x + self.state[f"{name}.noise_const"] * self.state[f"{name}.noise_strength"]
        return self.activated("blocks", x + self.state[f"{name}.bias"][:, None, None], SMALL["conv_clamp"])

    def generator(self, z: Tensor, labels: Tensor) -> Tensor:
        parts = [z]
        if "mapping.embed.weight" in self.state:
            parts.append(self.linear("mapping.embed", F.one_hot(labels, CLASSES).double()))
        w = self.mapped(parts)
        x = self.modulated("synthesis.b4.conv1", self.state["synthesis.b4.const"].expand(len(z), -1, -1, -1), w)
        image = self.modulated("synthesis.b4.torgb", x, w)
        x = self.modulated("synthesis.b8.conv0", x, w, up=True)
        x = self.modulated("synthesis.b8.conv1", x, w)
        return self.doubled(image) + self.modulated("synthesis.b8.torgb", x, w)

    def conv(self, name: str, x: Tensor, part: str, clamp: float | None, gain: float = 1.0, down: bool = False) -> Any:
        weight = self.state[f"{name}.weight"]
        scaled, pad = weight / math.sqrt(weight[0].numel()), weight.shape[2] // 2
        x = self.halved(x, pad, down=1) if down else F.pad(x, (pad,) * 4)
        x = F.conv2d(x, scaled, stride=2 if down else 1)
        if name.endswith("skip"):
            return gain * x
        return self.activated(part, x + self.state[f"{name}.bias"][:, None, None], clamp, gain)

    def discriminator(self, images: Tensor, labels: Tensor) -> Tensor:
        half, clamp = math.sqrt(0.5), SMALL["conv_clamp"]
        x = self.conv("b8.fromrgb", images, "blocks", clamp)
        y = self.conv("b8.conv0", x, "blocks", clamp)
        x = self.conv("b8.skip", x, "", None, half, True) + self.conv("b8.conv1", y, "blocks", clamp, half, True)
        deviation = torch.sqrt((x - x.mean(0)).square().mean(0) + 1e-8).mean()
        x = torch.cat([x, deviation.expand(len(x), 1, 4, 4)], 1)
        x = self.activated("head", self.linear("b4.fc", self.conv("b4.conv", x, "head", clamp).flatten(1)))
        x = self.linear("b4.out", x)
        if "mapping.embed.weight" not in self.state:
            return x[:, 0]
        c = self.mapped([self.linear("mapping.embed", F.one_hot(labels, CLASSES).double())])
        return (x * c).sum(1) / math.sqrt(x.shape[1])


def drawn(kind: str, taps: list[float], **section: Any) -> State:
    """A state under the original's names, in float64, with random numbers and the filters that it would have."""
    data = {"resolution": RESOLUTION, "image_channels": 3, "num_classes": section.pop("num_classes", 0)}
    if kind == "generator":
        layers = generator_layers(
            StyleGAN2Generator(**{**SMALL, "latent_size": 6, "w_size": 6, **section}), **sized(data)
        )
    else:
        layers = discriminator_layers(StyleGAN2Discriminator(**{**SMALL, **section}), **sized(data))
    state = theirs(filled(LayerStack(layers)), kind)
    own = torch.tensor(taps) / sum(taps)
    square = torch.outer(own, own)
    return {name: (square if name.endswith("resample_filter") else tensor) for name, tensor in state.items()}


def kwargs_of(kind: str, relu: tuple[str, ...]) -> dict[str, Any]:
    """The original's arguments for ``SMALL`` and these ReLUs; all others are told by the state."""
    prefixes = {"mapping": "mapping_kwargs", "head": "epilogue_kwargs"}
    prefixes["blocks"] = "synthesis_kwargs" if kind == "generator" else "block_kwargs"
    kwargs: dict[str, Any] = {part: {} for part in prefixes.values()}
    for part in relu:
        kwargs[prefixes[part]]["activation"] = "relu"
    kwargs["mapping_kwargs"]["lr_multiplier"] = SMALL["mapping_lr_multiplier"]
    precision = {"num_fp16_res": 0, "conv_clamp": SMALL["conv_clamp"]}
    if kind == "generator":
        kwargs["synthesis_kwargs"] |= precision
        del kwargs["epilogue_kwargs"]
        return kwargs
    return {**kwargs, **precision}


def check(kind: str, state: State, taps: list[float], relu: tuple[str, ...]) -> dict[str, Any]:
    """Import the state; outputs, and gradients at the inputs and of all parameters, are the public ones."""
    read, convert, section, layers = (
        (generator_layers, generator_state, generator_section, StyleGAN2Generator)
        if kind == "generator"
        else (discriminator_layers, discriminator_state, discriminator_section, StyleGAN2Discriminator)
    )
    keys = section(state, kwargs_of(kind, relu))
    ours = LayerStack(read(layers(**keys), **sized(data_section(state))))
    ours.load_state_dict(convert(state))
    ours.double().eval()
    for module in ours.modules():
        if hasattr(module, "noise_mode"):
            module.noise_mode = "const"
    precise = {name: tensor.double().requires_grad_("resample" not in name) for name, tensor in state.items()}
    shape = (4, 6) if kind == "generator" else (4, 3, RESOLUTION, RESOLUTION)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    y, labels = x.detach().clone().requires_grad_(), torch.tensor([0, 2, 1, 2])
    public = Public(precise, taps, relu)
    expected = (public.generator if kind == "generator" else public.discriminator)(x, labels)
    found = ours(y, labels, labels) if kind == "generator" else ours(y, labels)
    assert expected.std() > 0.01
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).double()
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    assert_close(y.grad, x.grad, rtol=1e-4, atol=1e-6)
    grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in precise.items()}
    filters = {name: tensor for name, tensor in state.items() if name.endswith("resample_filter")}
    theirs_of = convert({**grads, **filters})
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, theirs_of[name], rtol=1e-4, atol=1e-5, msg=name)
    return keys


BINOMIAL = [1.0, 3.0, 3.0, 1.0]
FILTERS = [[1.0], [1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 2.0, 3.0, 5.0], [1.0, 4.0, 6.0, 4.0, 1.0], [2.0] + [1.0] * 6]


@pytest.mark.parametrize("taps", [BINOMIAL, *FILTERS], ids=str)
@pytest.mark.parametrize("kind", ["generator", "discriminator"])
def test_filters(kind, taps):
    keys = check(kind, drawn(kind, taps, mapping_layers=2), taps, ())
    even = [0.0] * (len(taps) % 2) + [tap / sum(taps) for tap in taps]
    assert keys.get("filter", [tap / 8 for tap in BINOMIAL]) == pytest.approx(even)
    assert ("filter" in keys) == (taps != BINOMIAL)


@pytest.mark.parametrize("relu", [("mapping",), ("blocks",), ("mapping", "blocks")])
def test_relus_of_a_generator(relu):
    keys = check("generator", drawn("generator", BINOMIAL, mapping_layers=2), BINOMIAL, relu)
    assert keys["relu"] == list(relu)


@pytest.mark.parametrize("relu", [("mapping",), ("blocks",), ("head",), ("mapping", "blocks", "head")])
def test_relus_of_a_discriminator(relu):
    state = drawn("discriminator", BINOMIAL, mapping_layers=2, num_classes=CLASSES)
    assert check("discriminator", state, BINOMIAL, relu)["relu"] == list(relu)


def test_a_generator_without_noise():
    state = drawn("generator", BINOMIAL, mapping_layers=2, noise=False)
    assert not any("noise" in name for name in state)
    assert check("generator", state, BINOMIAL, ())["noise"] is False


def test_a_generator_without_a_mapping_network():
    state = drawn("generator", BINOMIAL, mapping_layers=0)
    keys = check("generator", state, BINOMIAL, ())
    assert (keys["mapping_layers"], keys["latent_size"], keys["w_size"]) == (0, 6, 6)


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("features", [5, 20])
def test_a_projection_of_another_size(features, layers):
    section = {"mapping_layers": layers, "projection_size": features, "num_classes": CLASSES}
    keys = check("discriminator", drawn("discriminator", BINOMIAL, **section), BINOMIAL, ())
    assert keys["projection_size"] == features


@pytest.mark.parametrize(
    "taps, problem",
    [
        (torch.eye(4) / 4, "is not the outer product of taps whose sum is 1"),
        (torch.ones(4, 3), r"has the shape \(4, 3\), which is not supported"),
    ],
)
def test_other_filters_are_refused(taps, problem):
    state = drawn("discriminator", BINOMIAL, mapping_layers=2) | {"b8.conv1.resample_filter": taps}
    with pytest.raises(UserError, match=f"weights: 'resample_filter' {problem}"):
        discriminator_section(state)


def test_path_lengths_of_latents_that_are_styles():
    """They have a gradient although no parameter is behind them."""
    section = StyleGAN2Generator(**SMALL, latent_size=6, w_size=6, mapping_layers=0, style_mixing=0)
    network = filled(LayerStack(generator_layers(section, Size.of(RESOLUTION), 3, 0)))
    penalty = PathLengthPenalty(PathLength(batch_shrink=1), Statistics(torch.device("cpu")), torch.device("cpu"), sum)
    inputs = torch.randn(2, 6), torch.zeros(2, dtype=torch.int64), torch.arange(2)
    images, styles = penalty.forward(network, inputs)
    (grads,) = torch.autograd.grad(images.sum(), styles)
    assert grads.shape == (2, 4, 6)
    assert grads.norm() > 0.1


@pytest.mark.parametrize(
    "override, problem",
    [
        ("generator.mapping_layers=0", r"generator.w_size: must be generator.latent_size \(6\) with generator.mapping"),
        ("generator.filter=[1,-1]", r"generator.filter: must have a sum above 0, got \[1.0, -1.0\]"),
        ("generator.relu=[head]", r"generator.relu.0: must be "),
    ],
)
def test_sections_that_do_not_fit(tmp_path, override, problem):
    small = "family: stylegan2, channel_base: 64, channel_max: 8"
    options = [f"generator={{{small}, latent_size: 6, w_size: 8}}", f"discriminator={{{small}}}", "data.num_classes=0"]
    with pytest.raises(UserError, match=problem):
        tiny_recipe(tmp_path, *options, override)
