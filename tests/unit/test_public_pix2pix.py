"""pix2pix's networks as the public PyTorch project saves them: its keys, and biases where that project has them.

The modules below are written from that project's description of its networks, and from lists of keys that its users
gave (its issue 1214): a convolution that a batch norm follows, or nothing at all, has no bias, and one before an
instance norm has; the outermost enlarging convolution, and the first and last of a PatchGAN, always have one.
"""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bigsgan.cli import main
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

NORMS = {
    "batch": nn.BatchNorm2d,
    "instance": nn.InstanceNorm2d,  # without gain and bias, and without running statistics
    "none": lambda channels: nn.Identity(),
}


def numbered(**entries):
    """Modules under the numbers that the public project's lists give them: _1=conv is ``1``."""
    return nn.Sequential(OrderedDict((name.strip("_"), module) for name, module in entries.items()))


class Level(nn.Module):
    """A level of the U-Net below the outermost, with the levels below it inside."""

    def __init__(self, outer, inner, inside, norm):
        super().__init__()
        bias = norm == "instance"
        down = nn.Conv2d(outer, inner, 4, 2, 1, bias=bias)
        up = nn.ConvTranspose2d(inner if inside is None else 2 * inner, outer, 4, 2, 1, bias=bias)
        before, after = NORMS[norm](inner), NORMS[norm](outer)
        if inside is None:
            self.model = numbered(_0=nn.LeakyReLU(0.2), _1=down, _2=nn.ReLU(), _3=up, _4=after)
        else:
            self.model = numbered(
                _0=nn.LeakyReLU(0.2), _1=down, _2=before, _3=inside, _4=nn.ReLU(), _5=up, _6=after
            )  # fmt: skip

    def forward(self, x):
        return torch.cat([x, self.model(x)], 1)


class UNet(nn.Module):
    def __init__(self, levels, channels, norm, colours=(3, 3)):
        super().__init__()
        widths = [channels * min(2**i, 8) for i in range(levels)]
        inside = None
        for i in range(levels - 1, 0, -1):
            inside = Level(widths[i - 1], widths[i], inside, norm)
        self.model = nn.Module()
        self.model.model = numbered(
            _0=nn.Conv2d(colours[0], channels, 4, 2, 1, bias=norm == "instance"),
            _1=inside,
            _2=nn.ReLU(),
            _3=nn.ConvTranspose2d(2 * channels, colours[1], 4, 2, 1),
            _4=nn.Tanh(),
        )

    def forward(self, x):
        return self.model.model(x)


class Residual(nn.Module):
    def __init__(self, channels, norm, dropout):
        super().__init__()
        first = [
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3, bias=norm == "instance"),
            NORMS[norm](channels),
        ]
        again = [
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3, bias=norm == "instance"),
            NORMS[norm](channels),
        ]
        self.conv_block = nn.Sequential(*first, nn.ReLU(), *([nn.Dropout(0.5)] if dropout else []), *again)

    def forward(self, x):
        return x + self.conv_block(x)


class ResNet(nn.Module):
    def __init__(self, blocks, channels, norm, colours=(3, 3), dropout=False):
        super().__init__()
        bias, c = norm == "instance", channels
        layers = [nn.ReflectionPad2d(3), nn.Conv2d(colours[0], c, 7, bias=bias), NORMS[norm](c), nn.ReLU()]
        for _ in range(2):
            layers += [nn.Conv2d(c, 2 * c, 3, 2, 1, bias=bias), NORMS[norm](2 * c), nn.ReLU()]
            c *= 2
        layers += [Residual(c, norm, dropout) for _ in range(blocks)]
        for _ in range(2):
            up = nn.ConvTranspose2d(c, c // 2, 3, 2, 1, output_padding=1, bias=bias)
            layers += [up, NORMS[norm](c // 2), nn.ReLU()]
            c //= 2
        layers += [nn.ReflectionPad2d(3), nn.Conv2d(c, colours[1], 7), nn.Tanh()]
        self.model = nn.Sequential(*layers)

    def forward(self, x):
        return self.model(x)


class Patches(nn.Module):
    def __init__(self, depth, channels, norm):
        super().__init__()
        layers, before = [nn.Conv2d(6, channels, 4, 2, 1), nn.LeakyReLU(0.2)], channels
        for i in range(1, depth + 1):
            width = channels * min(2**i, 8)
            conv = nn.Conv2d(before, width, 4, 2 if i < depth else 1, 1, bias=norm == "instance")
            layers += [conv, NORMS[norm](width), nn.LeakyReLU(0.2)]
            before = width
        self.model = nn.Sequential(*layers, nn.Conv2d(before, 1, 4, 1, 1))

    def forward(self, x):
        return self.model(x)


class Pixels(nn.Module):
    def __init__(self, channels, norm):
        super().__init__()
        bias = norm == "instance"
        self.net = nn.Sequential(
            nn.Conv2d(6, channels, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, 2 * channels, 1, bias=bias),
            NORMS[norm](2 * channels),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * channels, 1, 1, bias=bias),
        )

    def forward(self, x):
        return self.net(x)


@torch.no_grad()
def filled(network):
    """Random numbers, in float64: a bias before an instance norm has a gradient of nothing but rounding."""
    network.double()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in network.state_dict().items():
        if name.endswith("running_var"):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
        elif tensor.is_floating_point():
            tensor.copy_((0.1 if tensor.dim() == 4 else 0.5) * torch.randn(tensor.shape, generator=generator))
    return network


def images_of(size, channels=3, num=2):
    return torch.randn(num, channels, size, size, generator=torch.Generator().manual_seed(1)).double()


def compare(theirs, ours, outputs, renamed):
    """Outputs and the gradients of all parameters agree to 1e-5."""
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(2))
    for output in outputs:
        (output * weights).sum().backward()
    assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
    expected = renamed({name: p.grad for name, p in theirs.named_parameters()})
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert_close(found[name], grad, atol=1e-5, rtol=1e-5)


def compare_generators(theirs, size, colours, training, **section):
    ours = LayerStack(generator_layers(Pix2PixGenerator(**section), Size.of(size), colours[1], colours[0])).double()
    ours.load_state_dict(generator_state(theirs.state_dict()))
    images, labels = images_of(size, colours[0]), torch.zeros(2, dtype=torch.int64)
    outputs = theirs.train(training)(images), ours.train(training)(images, labels, labels)
    statistics = {n: t for n, t in theirs.state_dict().items() if "running_" in n or "num_batches" in n}
    compare(theirs, ours, outputs, lambda grads: parameters_of(generator_state({**grads, **statistics})))


def parameters_of(state):
    return {name: tensor for name, tensor in state.items() if "running_" not in name}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("levels", [4, 6])
def test_a_u_net_is_the_public_one(levels, norm, training):
    theirs = filled(UNet(levels, 2, norm, (1, 3)))
    section = generator_section(theirs.state_dict())
    assert section == {"family": "pix2pix", "architecture": "unet", "channels": 2, "norm": norm}
    assert data_section(theirs.state_dict()) == {
        "resolution": 2**levels, "input_channels": 1, "image_channels": 3, "num_classes": 0
    }  # fmt: skip
    compare_generators(theirs, 2**levels, (1, 3), training, **section, dropout=False)


@pytest.mark.parametrize("levels", [7, 8])
def test_unet_128_and_256_have_the_keys_that_are_read(levels):
    with torch.device("meta"):
        state = UNet(levels, 64, "batch").state_dict()
        section, size = generator_section(state), 2**levels
        assert data_section(state)["resolution"] == size
        ours = LayerStack(generator_layers(Pix2PixGenerator(**section), Size.of(size), 3, 3)).state_dict()
    assert {n: t.shape for n, t in generator_state(state).items()} == {n: t.shape for n, t in ours.items()}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("blocks", [6, 9])
def test_a_resnet_is_the_public_one(blocks, norm, training):
    theirs = filled(ResNet(blocks, 2, norm, (3, 1)))
    section = generator_section(theirs.state_dict())
    assert section == {
        "family": "pix2pix", "architecture": "resnet", "num_blocks": blocks, "channels": 2, "norm": norm,
        "dropout": False,
    }  # fmt: skip
    assert data_section(theirs.state_dict()) == {
        "resolution": 256, "input_channels": 3, "image_channels": 1, "num_classes": 0
    }  # fmt: skip
    compare_generators(theirs, 16, (3, 1), training, **section)


def test_a_resnet_with_dropout_is_recognized_and_drops_in_training():
    theirs = filled(ResNet(6, 2, "batch", dropout=True))
    section = generator_section(theirs.state_dict())
    assert section["dropout"] is True
    compare_generators(theirs, 16, (3, 3), False, **section)
    ours = LayerStack(generator_layers(Pix2PixGenerator(**section), Size.of(16), 3, 3)).double()
    ours.load_state_dict(generator_state(theirs.state_dict()))
    images, labels, seeds = images_of(16)[:1].expand(3, -1, -1, -1), torch.zeros(3).long(), torch.tensor([5, 6, 5])
    one, other, again = ours(images, labels, seeds)
    assert_close(one, again)
    assert (one - other).abs().max() > 0.01


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("depth", [1, 3, 4, None], ids=lambda depth: f"{depth or 'pixels'}")
def test_a_discriminator_is_the_public_one(depth, norm, training):
    theirs = filled(Patches(depth, 2, norm) if depth else Pixels(2, norm))
    section = discriminator_section(theirs.state_dict())
    kind = {"architecture": "patches", "depth": depth} if depth else {"architecture": "pixels"}
    assert section == {"family": "pix2pix", "channels": 2, "norm": norm, **kind}
    ours = LayerStack(discriminator_layers(Pix2PixDiscriminator(**section), Size.of(64), 3, 3)).double()
    ours.load_state_dict(discriminator_state(theirs.state_dict()))
    inputs, images = images_of(64, 6).chunk(2, dim=1)
    logits = theirs.train(training)(torch.cat([inputs, images], 1)).flatten(1)
    outputs = logits, ours.train(training)(images, torch.zeros(2, dtype=torch.int64), inputs)
    statistics = {n: t for n, t in theirs.state_dict().items() if "running_" in n or "num_batches" in n}
    compare(theirs, ours, outputs, lambda grads: parameters_of(discriminator_state({**grads, **statistics})))


def test_statistics_of_an_instance_norm_are_dropped_as_the_public_code_drops_them():
    """Files from before torch 0.4 have them, without a gain beside them."""
    theirs = filled(ResNet(6, 2, "instance"))
    state = theirs.state_dict()
    old = {**state, "model.2.running_mean": torch.ones(2), "model.10.conv_block.2.running_var": torch.ones(8)}
    assert generator_section(old) == generator_section(state)
    assert all(torch.equal(tensor, generator_state(state)[name]) for name, tensor in generator_state(old).items())


OTHERS = {
    "pix2pixHD": lambda: {n.replace("model.1", "model.4"): t for n, t in ResNet(6, 2, "batch").state_dict().items()},
    "no blocks": lambda: {n: t for n, t in ResNet(6, 2, "batch").state_dict().items() if "conv_block" not in n},
    "another tensor": lambda: {**UNet(6, 2, "batch").state_dict(), "model.extra.weight": torch.zeros(2, 2, 1, 1)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_generators_are_refused(name):
    with pytest.raises(UserError, match=r"weights: .*pix2pix"):
        generator_state(OTHERS[name]())


@pytest.mark.parametrize("generator", [UNet(8, 1, "batch"), ResNet(9, 1, "batch")], ids=["unet", "resnet"])
@pytest.mark.parametrize(
    "discriminator", [None, Patches(3, 2, "batch"), Pixels(2, "batch")], ids=["none", "patches", "pixels"]
)
def test_the_files_of_the_public_project_become_a_run(generator, discriminator, tmp_path):
    torch.save(filled(generator).state_dict(), tmp_path / "latest_net_G.pth")
    arguments = ["import", "--from", "pix2pix", "--weights", str(tmp_path / "latest_net_G.pth")]
    if discriminator is not None:
        torch.save(filled(discriminator).state_dict(), tmp_path / "latest_net_D.pth")
        arguments += ["--discriminator", str(tmp_path / "latest_net_D.pth")]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0


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
    assert_close(one, again)
    assert (one - other).abs().max() > 0.01
    one, other, _ = network.eval()(images, labels, seeds)
    assert_close(one, other)


@pytest.mark.parametrize("describe", [generator_section, discriminator_section, data_section, generator_state])
def test_other_weights_are_refused(describe):
    with pytest.raises(UserError, match=r"weights: must be a pix2pix (generator|discriminator), which has "):
        describe({"layer.weight": torch.zeros(3)})
