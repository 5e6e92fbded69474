"""D of latent adversarial diffusion distillation against torch's layers and a generator with its weights."""

import pytest
import torch
from torch import nn

from bigsgan.doctor.games import LADD
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models import noise
from bigsgan.models.build import build_network
from bigsgan.models.frozen import whole_frozen
from bigsgan.models.ladd import Head
from bigsgan.models.network import LayerStack, initialize
from bigsgan.training.initial_weights import check_freezing
from tests.tiny import awake, tiny_recipe

SEEDS, LABELS = torch.tensor([3, 1, 4, 15]), torch.tensor([0, 2, 1, 0])
D = "discriminator={family: ladd, depth: 2, width: 16, heads: 2"


def with_d(text):
    return [f"{D}, {text}}}" if each.startswith("discriminator") else each for each in LADD]


def public_head(width):
    """The layers of FastGen's head for images."""
    groups, inside = {16: 2, 36: 3, 64: 8, 72: 18, 1152: 32}[width], width // 2  # theirs does not construct 36
    convolutions = nn.Conv2d(width, inside, 4, stride=2, padding=1), nn.Conv2d(inside, 1, 1)
    norm = nn.GroupNorm(groups, inside), nn.LeakyReLU(0.2)
    return nn.Sequential(convolutions[0], *norm, convolutions[1], nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten())


@pytest.mark.parametrize("deviation", [0, 2])
def test_each_head_judges_the_teachers_features_of_an_image_with_noise(tmp_path, deviation):
    game = with_d(f"judged: [1, 0], first_time: 0.1, last_time: 0.6, time_mean: -1, time_deviation: {deviation}")
    recipe = tiny_recipe(tmp_path, *game)
    with awake():
        d, teacher = build_network(recipe, "discriminator"), build_network(recipe, "generator")
        initialize(d, 0)
    own = {name: tensor for name, tensor in d.state_dict().items() if ".head." not in name}
    missing, unexpected = teacher.load_state_dict(own, strict=False)
    assert not unexpected
    assert {name.split(".")[1] for name in missing} == {"3"}  # the teacher's last layer
    images = torch.randn(4, 3, 8, 12, requires_grad=True)

    times = 0.1 + 0.5 * torch.sigmoid(-1 + deviation * noise.normal(SEEDS, 0, (1,)))
    noisy = (1 - times[..., None, None]) * images + times[..., None, None] * noise.normal(SEEDS, 1, (3, 8, 12))
    expected, carry = [], teacher.part(0, 1).fold(noisy.flatten(1), LABELS, times.flatten())
    for number in (1, 2):
        carry, head = teacher.part(number, number + 1).fold(*carry), public_head(16)
        head.load_state_dict(
            {
                f"{place}.{kind}": d.get_parameter(f"layers.{number}.head.{name}.{kind}")
                for place, name in ((0, "first"), (1, "norm"), (3, "last"))
                for kind in ("weight", "bias")
            }
        )
        expected.append(head(carry[0].mT.unflatten(2, (4, 6))))
    expected = torch.cat(expected, dim=1)
    logits = d(images, LABELS, SEEDS)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    found, wanted = (torch.autograd.grad(each.square().sum(), images)[0] for each in (logits, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [16, 36, 64, 72, 1152])
def test_a_head_has_the_groups_and_begins_with_the_deviations_of_the_public_one(width):
    head, public = Head(width, Size(4, 6)), public_head(width)
    initialize(LayerStack([head]), 0)
    assert head.norm.num_groups == public[1].num_groups
    for own, theirs in ((head.first, public[0]), (head.last, public[3])):
        bound = 1 / theirs.weight[0].numel() ** 0.5  # of a uniform distribution, as torch draws it
        assert own.std == pytest.approx(bound / 3**0.5)


def test_a_frozen_teacher_ends_behind_the_last_head_and_is_not_trained(tmp_path):
    recipe = tiny_recipe(tmp_path, *with_d("judged: [0]"))
    d = build_network(recipe, "discriminator")
    assert list(d.layers) == ["0", "1"]
    assert {name.split(".")[2] for name, _ in d.named_parameters()} == {"head"}
    assert not d.matrices()
    of_teacher = {
        name for name in build_network(recipe, "generator").state_dict() if name[:9] in ("layers.0.", "layers.1.")
    }
    assert whole_frozen(d).keys() <= of_teacher


def test_a_teacher_that_learns_is_trained_whole(tmp_path):
    recipe = tiny_recipe(tmp_path, *with_d("trains_teacher: true"))
    d = build_network(recipe, "discriminator")
    assert not whole_frozen(d)
    assert list(d.layers) == ["0", "1", "2"]  # the middle of two blocks is the second
    assert len(d.matrices()) == 10


@pytest.mark.parametrize(
    "game, message",
    [
        (
            [each for each in LADD if not each.startswith("init_from")],
            "init_from.run: must be given with discriminator.family=ladd",
        ),
        (with_d("judged: [2]"), "discriminator.judged: must be below discriminator.depth=2, got [2]"),
        (with_d("judged: [1, 1]"), "discriminator.judged: [1, 1] has a block twice; remove one of them"),
        (with_d("judged: []"), "discriminator.judged: "),
        (with_d("patch: 8"), "discriminator.patch: must"),
        (with_d("first_time: 0.5, last_time: 0.5"), "discriminator.first_time: must be below discriminator.last_time"),
        ([*LADD, "optimizer.discriminator={kind: muon, lr: 1e-3}"], "optimizer.discriminator.kind: "),
        (
            [*LADD, "discriminator.trains_teacher=true", "engines.discriminator.frozen.sharded=true"],
            "engines.discriminator.frozen.sharded: must be unset with discriminator.trains_teacher=true, which has no",
        ),
        ([*LADD, "objective.distribution_matching={}"], "objective.distribution_matching: "),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, game, message):
    with pytest.raises(UserError) as caught:
        tiny_recipe(tmp_path, *game)
    assert str(caught.value).startswith(message)


def test_a_frozen_teachers_layers_cannot_be_frozen_again(tmp_path):
    given = [each.replace("init_from.run=unset", "init_from={run: x, freeze_discriminator: 1}") for each in LADD]
    with pytest.raises(UserError) as caught:
        check_freezing(tiny_recipe(tmp_path, *given))
    assert str(caught.value).startswith(
        "init_from.freeze_discriminator: must be 0 or at least 2, as the layers before do"
    )
