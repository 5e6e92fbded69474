"""What becomes of modules from outside that keep buffers, have batch norm, or in which samples meet."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from bigsgan import plugins
from bigsgan.errors import UserError
from bigsgan.models.batch_norm import GlobalBatchNorm, global_batch_norms
from bigsgan.models.build import build_network
from bigsgan.models.layers import StatefulLayer, moving_state
from bigsgan.models.network import initialize
from bigsgan.models.outside import Foreign, _prepared
from bigsgan.models.outside_check import check_outside
from bigsgan.models.stylegan2_layers import MinibatchDeviation
from tests.tiny import tiny_recipe


def recipe_of_d(directory, kind, **section):
    plugins.give([family := f"{__name__}:{kind}"])
    return tiny_recipe(directory, f"discriminator={json.dumps({'family': family, **section})}")


class Momentum(nn.Module):
    """A frozen copy of a layer, which follows it."""

    def __init__(self):
        super().__init__()
        self.linear, self.copy = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        self.copy.weight.lerp_(self.linear.weight.detach(), 0.5)
        return self.linear(x) + self.copy(x)


def test_frozen_tensors_that_code_moves_move_in_half_precision():
    module = _prepared(Momentum())
    layer, before = Foreign(module, "generator", is_last=True), module.copy.weight.clone()
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16()
    layer(torch.randn(6, 4))
    expected = (before + module.linear.weight.detach()) / 2
    torch.testing.assert_close(module.copy.weight, expected, rtol=0.02, atol=0.01)


class Averages(nn.Module):
    """Keeps a moving mean of what it reads, and a constant."""

    def __init__(self):
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("constant", torch.tensor([1.001]))
        self.register_buffer("count", torch.tensor([0.0]))  # which another tensor replaces

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.5)
        self.count = self.count + 1
        return self.linear(x) * self.constant


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffers_move_in_half_precision(dtype):
    torch.manual_seed(0)
    module = Averages()
    layer, x = Foreign(module, "generator", is_last=True).train(), torch.randn(6, 4)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    u = module.linear.parametrizations.weight[0]._u
    before = u.clone()
    layer(x)
    torch.testing.assert_close(module.mean, x.mean(0) / 2, rtol=0.02, atol=0.01)
    layer(x)
    torch.testing.assert_close(module.mean, 0.75 * x.mean(0), rtol=0.02, atol=0.01)
    assert not torch.equal(u, before)
    assert module.count.item() == 2
    assert module.constant.item() == torch.tensor(1.001).item()  # which is rounded only where code reads it
    assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}


def test_so_do_those_of_compiled_code():
    module = Averages()
    layer, x = Foreign(module, "generator", is_last=True).train().bfloat16(), torch.randn(6, 4)
    for buffer in layer.buffers():
        buffer.data = buffer.data.float()
    module.constant.fill_(1.001)
    torch.compile(layer, backend="eager")(x)
    torch.testing.assert_close(module.mean, x.mean(0) / 2, rtol=0.02, atol=0.01)
    assert module.constant.item() == torch.tensor(1.001).item()
    assert module.count.item() == 1


class Scaled(nn.BatchNorm2d):
    def forward(self, x):
        return 3 * super().forward(x)


class Named(nn.BatchNorm2d):
    """With another default alone."""

    def __init__(self, channels):
        super().__init__(channels, eps=0.1)


class Conditional(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels, affine=False)
        self.gain = nn.Embedding(3, channels)


class Frozen(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


def hooked():
    module = nn.BatchNorm2d(3)
    module.register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


@pytest.mark.parametrize(
    "make, is_replaced",
    [
        (lambda: nn.BatchNorm2d(3), True),
        (lambda: nn.SyncBatchNorm(3), True),
        (lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False), True),
        (lambda: Named(3), True),
        (lambda: Scaled(3), False),
        (lambda: Conditional(3), False),
        (lambda: Frozen(3), False),
        (hooked, False),
        (lambda: nn.BatchNorm2d(3, momentum=None), False),
    ],
)
def test_only_batch_norm_that_is_torchs_is_replaced(make, is_replaced):
    holder = nn.Sequential(nn.Conv2d(3, 3, 1), make())
    norm = holder[1]
    assert isinstance(global_batch_norms(holder)[1], GlobalBatchNorm) == is_replaced
    assert (holder[1] is norm) != is_replaced


def test_batch_norm_of_two_names_is_replaced_under_both():
    holder = nn.Module()
    holder.first = holder.second = nn.BatchNorm2d(3)
    holder.inner = nn.Sequential(holder.first)
    made = global_batch_norms(holder)
    assert made.first is made.second is made.inner[0]
    assert isinstance(made.first, GlobalBatchNorm)


class Deviation(nn.Module):
    """Logits of features, and of their deviation over the batch, as StyleGAN has it."""

    def __init__(self, image_channels):
        super().__init__()
        self.features, self.last = nn.Conv2d(image_channels, 4, 4, 4), nn.Linear(4 * 16 + 1, 1)

    def forward(self, images, labels):
        h = self.features(images).flatten(1)
        return self.last(torch.cat([h, h.std(0).mean().expand(len(h), 1)], dim=1))


class TorchsNorm(Deviation):
    def __init__(self, image_channels):
        super().__init__(image_channels)
        self.features = nn.Sequential(self.features, nn.BatchNorm2d(4))


class Ours(Deviation):
    def __init__(self, image_channels):
        super().__init__(image_channels)
        self.deviation, self.last = MinibatchDeviation(None, 1), nn.Linear(5 * 16, 1)

    def forward(self, images, labels):
        return self.last(self.deviation(self.features(images)).flatten(1))


class OwnNorm(Deviation):
    def __init__(self, image_channels):
        super().__init__(image_channels)
        self.norm, self.last = Scaled(4), nn.Linear(4 * 16, 1)

    def forward(self, images, labels):
        return self.last(self.norm(self.features(images)).flatten(1))


@pytest.mark.parametrize("kind", ["Deviation", "Ours", "OwnNorm", "TorchsNorm"])
def test_real_and_generated_images_do_not_meet(tmp_path, kind):
    """On one rank it is refused, too, or D computes both apart."""
    with pytest.raises(UserError, match=r"depend on the others beside it.*set discriminator\.exact=false"):
        check_outside(recipe_of_d(tmp_path, kind), 1)
    recipe = recipe_of_d(tmp_path, kind, exact=False)
    check_outside(recipe, 1)
    network = build_network(recipe, "discriminator")
    initialize(network, 0)
    (layer,) = network.layers.values()
    alone = copy.deepcopy(layer.module)
    real, fake = torch.randn(2, 4, 1, 16, 16) * torch.tensor([1.0, 3.0]).view(2, 1, 1, 1, 1)
    labels = torch.zeros(4, dtype=torch.int64)
    with moving_state(network.stateful_layers(), True):
        both = network(torch.cat([real, fake]), labels.repeat(2), segments=2)
    with moving_state([each for each in alone.modules() if isinstance(each, StatefulLayer)], True):
        first = alone(real, labels)
    statistics = dict(alone.named_buffers()) if kind == "TorchsNorm" else {}
    torch.testing.assert_close(both, torch.cat([first, alone(fake, labels)]))
    for name, each in statistics.items():  # which real images move alone
        torch.testing.assert_close(layer.module.get_buffer(name), each)


class Orthogonal(nn.Module):
    def __init__(self, image_channels):
        super().__init__()
        self.first = parametrizations.orthogonal(nn.Conv2d(image_channels, 4, 4, 4))
        self.last = parametrizations.orthogonal(nn.Linear(4 * 16, 1))

    def forward(self, images, labels):
        return self.last(self.first(images).flatten(1))


def test_orthogonal_weights(tmp_path):
    recipe = recipe_of_d(tmp_path, "Orthogonal")
    check_outside(recipe, 2)
    network = build_network(recipe, "discriminator")
    initialize(network, 0)
    (layer,) = network.layers.values()
    torch.testing.assert_close(layer.module.last.weight.norm().item(), 1.0)
    weight = layer.module.first.weight[:, 0]
    torch.testing.assert_close(weight @ weight.mT, torch.eye(4).expand(4, -1, -1))


class TwoMaps(Deviation):
    def forward(self, images, labels):
        h = self.features(images).flatten(1)
        return h[:, :1], h[:, :10]


def test_a_tuple_of_maps_is_told(tmp_path):
    assert check_outside(recipe_of_d(tmp_path, "TwoMaps"), 2) == [
        "the discriminator returns 2 maps of logits: 1, 10 of an image"
    ]


@pytest.mark.parametrize("kind, exact", [("TorchsNorm", True), ("Deviation", False)])
def test_no_penalty_takes_a_part_of_a_batch_whose_samples_meet(tmp_path, kind, exact):
    plugins.give([family := f"{__name__}:{kind}"])
    section = f"discriminator={json.dumps({'family': family, 'exact': exact})}"
    with pytest.raises(UserError, match=r"objective\.r1\.batch_shrink: must be 1 with .*this D compares images"):
        build_network(tiny_recipe(tmp_path, section, "objective.r1={weight: 1, batch_shrink: 2}"), "discriminator")


class Counts(Deviation):
    """Keeps a number, and a buffer that another replaces."""

    def __init__(self, image_channels):
        super().__init__(image_channels)
        self.last, self.calls = nn.Linear(4 * 16, 1), 0
        self.register_buffer("factor", torch.ones(()))

    def forward(self, images, labels):
        self.calls, self.factor = self.calls + 1, self.factor * 0.9
        return self.last(self.features(images).flatten(1)) * self.factor


def test_state_of_passes_is_no_meeting_of_samples(tmp_path):
    check_outside(recipe_of_d(tmp_path, "Counts"), 1)
    with pytest.raises(UserError, match=r"module\.calls changes") as caught:
        check_outside(recipe_of_d(tmp_path, "Counts"), 2)
    assert "samples of a batch meet" not in str(caught.value)
