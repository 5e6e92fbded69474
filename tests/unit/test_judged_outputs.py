"""What a discriminator from outside returns after its logits: who reads it, who does not, and what is refused."""

import pytest
import torch
from torch import nn

from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective, InputGradients
from bigsgan.adversarial.terms import JudgedOutputs, Termed, build_terms
from bigsgan.adversarial.terms.own import Own
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.models.outside_check import check_outside
from bigsgan.monitor import Statistics
from tests.tiny import tiny_recipe

CPU = torch.device("cpu")


class Judge(nn.Module):
    """Two maps of logits, a mean, and the channels' means; more by ``kind``."""

    def __init__(self, image_channels, kind: str = "whole"):
        super().__init__()
        self.layer, self.kind = nn.Conv2d(image_channels, 3, 4, stride=4), kind

    def forward(self, images, labels):
        h = self.layer(images)
        maps, mean, means = [h[:, :1], h[:, 1:]], h.mean((1, 2, 3)), h.mean((2, 3))
        kinds = {"whole": (maps, mean, means), "one map": (h, mean, means), "logits alone": h}
        return (kinds | {"of no batch": (h, mean, h.sum())})[self.kind]


def small(fake_mean, real_means):
    """A term of D."""
    return fake_mean.square().mean() + 2 * real_means.square().mean()


def near(fake_means):
    """A term of G."""
    return fake_means.abs().mean()


def judge(kind="whole", outputs="[mean, means]"):
    return f"discriminator={{family: '{__name__}:Judge', arguments: {{kind: {kind}}}, outputs: {outputs}}}"


TERMS = (
    f"terms: [{{use: '{__name__}:small', network: discriminator, weight: 3}}, {{use: '{__name__}:near', weight: 5}}]"
)


def game(tmp_path, objective):
    """D's network, the terms, and D's outputs for real and fake images with what they are made of."""
    recipe = tiny_recipe(tmp_path, judge(), f"objective={{{objective}, {TERMS}}}")
    network = build_network(recipe, "discriminator")
    initialize(network, 5)
    rank = Termed.of(network, Statistics(CPU), lambda sums: sums)
    terms = build_terms(recipe, recipe.objective, rank, Own.of(recipe, CPU))
    images = torch.rand(4, 1, 16, 16, requires_grad=True)
    labels = torch.zeros(4, dtype=torch.int64)
    (layer,) = network.layers.values()
    return terms, network(images, labels), images, labels, layer.module.layer(images)


def test_terms_read_them_and_the_loss_of_logits_does_not(tmp_path):
    terms, outputs, images, labels, h = game(tmp_path, "loss: hinge, r1: {weight: 2}")
    real, fake = h.chunk(2)
    ours = DiscriminatorObjective(terms, Statistics(CPU), 0)(outputs, (images, labels))
    maps = [(real[:, :1], fake[:, :1]), (real[:, 1:], fake[:, 1:])]
    hinge = sum((1 - r).relu().mean() + (1 + f).relu().mean() for r, f in maps)
    term = fake.mean((1, 2, 3)).square().mean() + 2 * real.mean((2, 3)).square().mean()
    (slopes,) = torch.autograd.grad(h.sum(), images, retain_graph=True)
    r1 = slopes[:2].square().sum((1, 2, 3)).mean()
    torch.testing.assert_close(ours, hinge + 3 * term + r1)
    of_g = GeneratorObjective(terms, Statistics(CPU))(outputs[2:], (images[2:], labels[2:]))
    torch.testing.assert_close(of_g, -(fake[:, :1].mean() + fake[:, 1:].mean()) + 5 * fake.mean((2, 3)).abs().mean())
    (found,) = torch.autograd.grad(
        InputGradients(2, judged=DiscriminatorObjective(terms, Statistics(CPU), 0).judged)(outputs, ()), images
    )
    torch.testing.assert_close(found / InputGradients.scale, slopes)


def test_real_ones_are_for_a_loss_of_g_that_reads_real_logits(tmp_path):
    terms, outputs, images, labels, h = game(tmp_path, "loss: relativistic")
    ours = GeneratorObjective(terms, Statistics(CPU), pairs=True)(outputs, (images, labels))
    real, fake = h.chunk(2)
    maps = [(real[:, :1], fake[:, :1]), (real[:, 1:], fake[:, 1:])]
    loss = sum(nn.functional.softplus(r - f).mean() for r, f in maps)
    torch.testing.assert_close(ours, loss + 5 * fake.mean((2, 3)).abs().mean())


def test_they_lie_behind_the_logits():
    judged = JudgedOutputs(["one", "two"], lambda: (1, 2))
    row = torch.arange(5.0)[None]
    found = {name: each.tolist() for name, each in judged.read("real", row).items()}
    assert found == {"real_logits": [[0, 1]], "real_one": [[2]], "real_two": [[3, 4]]}


@pytest.mark.parametrize(
    "overrides, field, problem",
    [
        ([judge(outputs="[mean]")], "discriminator.outputs", "must be the names of the 2 tensors that Judge returns"),
        ([judge("logits alone")], "discriminator.outputs", "must be the names of the 0 tensors that Judge returns"),
        ([judge("of no batch")], "discriminator.family", "cannot compute"),
        ([judge(outputs="[mean, mean]")], "discriminator.outputs.1", "is the name of something else that terms read"),
        ([judge(outputs="[mean, logits]")], "discriminator.outputs.1", "is the name of something else that terms read"),
        (
            [judge("one map", "[mean, other]"), f"objective={{{TERMS}}}"],
            "objective.terms.0.arguments.real_means",
            "must be given",
        ),
        (
            [judge(), f"objective={{terms: [{{use: '{__name__}:small', weight: 3}}]}}"],
            "objective.terms.0.arguments.real_means",
            "must be given",
        ),
    ],
)
def test_what_is_refused(tmp_path, overrides, field, problem):
    def begin():
        recipe = tiny_recipe(tmp_path, *overrides)
        check_outside(recipe, 1)
        Own.of(recipe, CPU)

    with pytest.raises(UserError) as caught:
        begin()
    assert caught.value.field == field
    assert problem in str(caught.value)
