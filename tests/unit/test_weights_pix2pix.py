"""State dicts of the public pix2pix against networks written out here from its published description.

The functions below follow section 6 of Isola et al. 2017 with torch's own operations, and name weights as the public
PyTorch implementation does.
"""

import pytest
import torch
import torch.nn.functional as F

from bigsgan.config import load_recipe
from bigsgan.config.families.pix2pix import Pix2PixDiscriminator, Pix2PixGenerator
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.pix2pix import discriminator_layers, generator_layers
from bigsgan.weights.pix2pix import (
    data_section,
    discriminator_section,
    discriminator_state,
    generator_section,
    generator_state,
)
from tests import REPOSITORY


class Maker:
    """Draws tensors of a state dict when they are first read."""

    def __init__(self):
        self.state, self.generator = {}, torch.Generator().manual_seed(0)

    def conv(self, x, name, out_channels, bias, stride=2, transposed=False):
        shape = (x.shape[1], out_channels) if transposed else (out_channels, x.shape[1])
        weight = self.state[f"{name}.weight"] = 0.2 * torch.randn(*shape, 4, 4, generator=self.generator)
        b = None
        if bias:
            b = self.state[f"{name}.bias"] = torch.randn(out_channels, generator=self.generator)
        return (F.conv_transpose2d if transposed else F.conv2d)(x, weight, b, stride, 1)

    def norm(self, x, name):
        mean, gain, bias = (torch.randn(x.shape[1], generator=self.generator) for _ in range(3))
        var = 0.5 + torch.rand(x.shape[1], generator=self.generator)
        values = {"weight": gain, "bias": bias, "running_mean": mean, "running_var": var}
        self.state.update({f"{name}.{key}": value for key, value in values.items()})
        self.state[f"{name}.num_batches_tracked"] = torch.tensor(7)
        return F.batch_norm(x, mean, var, gain, bias)

    def level(self, x, prefix, levels, channels, out_channels):
        """One level of the U-Net below the outermost: what comes in, beside what goes through the levels below."""
        width, is_innermost = min(2 * x.shape[1], 8 * channels), levels == 1
        h = self.conv(F.leaky_relu(x, 0.2), f"{prefix}1", width, bias=False)
        if is_innermost:
            h = self.conv(F.relu(h), f"{prefix}3", out_channels, bias=False, transposed=True)
            return torch.cat([x, self.norm(h, f"{prefix}4")], dim=1)
        h = self.level(self.norm(h, f"{prefix}2"), f"{prefix}3.model.", levels - 1, channels, width)
        h = self.conv(F.relu(h), f"{prefix}5", out_channels, bias=False, transposed=True)
        return torch.cat([x, self.norm(h, f"{prefix}6")], dim=1)

    def unet(self, x, levels, channels, image_channels):
        h = self.conv(x, "model.model.0", channels, bias=False)
        h = self.level(h, "model.model.1.model.", levels - 1, channels, channels)
        return torch.tanh(self.conv(F.relu(h), "model.model.3", image_channels, bias=True, transposed=True))

    def patches(self, x, channels, depth):
        h = F.leaky_relu(self.conv(x, "model.0", channels, bias=True), 0.2)
        for i in range(1, depth + 1):
            width = channels * min(2**i, 8)
            h = self.conv(h, f"model.{3 * i - 1}", width, bias=False, stride=2 if i < depth else 1)
            h = F.leaky_relu(self.norm(h, f"model.{3 * i}"), 0.2)
        return self.conv(h, f"model.{3 * depth + 2}", 1, bias=True, stride=1)


@pytest.mark.parametrize("levels, colours", [(4, (3, 3)), (6, (1, 3))])
def test_the_generator_is_the_published_one(levels, colours):
    maker, size = Maker(), 2**levels
    images = torch.randn(2, colours[0], size, size, generator=torch.Generator().manual_seed(1))
    expected = maker.unet(images, levels, 2, colours[1])
    section, data = generator_section(maker.state), data_section(maker.state)
    assert section == {"family": "pix2pix", "architecture": "unet", "channels": 2, "norm": "batch"}
    assert data == {
        "resolution": size, "input_channels": colours[0], "image_channels": colours[1], "num_classes": 0
    }  # fmt: skip
    network = LayerStack(generator_layers(Pix2PixGenerator(**section), Size.of(size), colours[1], colours[0])).eval()
    network.load_state_dict(generator_state(maker.state))
    labels = torch.zeros(2, dtype=torch.int64)
    torch.testing.assert_close(network(images, labels, labels), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_the_discriminator_is_the_published_one(depth):
    maker, generator = Maker(), torch.Generator().manual_seed(1)
    inputs, images = (torch.randn(2, 3, 64, 64, generator=generator) for _ in range(2))
    expected = maker.patches(torch.cat([inputs, images], dim=1), 2, depth)
    section = discriminator_section(maker.state)
    assert section == {"family": "pix2pix", "architecture": "patches", "channels": 2, "depth": depth, "norm": "batch"}
    network = LayerStack(discriminator_layers(Pix2PixDiscriminator(**section), Size.of(64), 3, 3)).eval()
    network.load_state_dict(discriminator_state(maker.state))
    labels = torch.zeros(2, dtype=torch.int64)
    torch.testing.assert_close(network(images, labels, inputs), expected.flatten(1), atol=1e-5, rtol=1e-5)


def test_parameters_are_the_published_number():
    recipe = load_recipe(REPOSITORY / "launch" / "recipes" / "pix2pix_facades.yaml", [])
    with torch.device("meta"):
        networks = [build_network(recipe, network) for network in ("generator", "discriminator")]
    counts = [sum(p.numel() for p in network.parameters()) / 1e6 for network in networks]
    assert counts == [pytest.approx(54.41, abs=0.005), pytest.approx(2.77, abs=0.005)]


def test_dropout_is_drawn_from_the_samples_seeds():
    config = Pix2PixGenerator(channels=4)
    network = LayerStack(generator_layers(config, Size.of(64), 3, 3))
    generator = torch.Generator().manual_seed(0)
    initialize(network, 0)
    for parameter in network.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    images = torch.randn(1, 3, 64, 64, generator=generator).expand(3, -1, -1, -1)
    labels, seeds = torch.zeros(3, dtype=torch.int64), torch.tensor([5, 6, 5])
    one, other, again = network(images, labels, seeds)
    torch.testing.assert_close(one, again)
    assert (one - other).abs().max() > 0.01
    one, other, _ = network.eval()(images, labels, seeds)
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("describe", [generator_section, discriminator_section, data_section, generator_state])
def test_other_weights_are_refused(describe):
    with pytest.raises(UserError, match=r"weights: must be a pix2pix (generator|discriminator), which has "):
        describe({"layer.weight": torch.zeros(3)})
