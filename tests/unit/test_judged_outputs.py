"""What a discriminator from outside returns after its logits: who reads it, who does not, and what is refused."""

import pytest
import torch
from torch import nn

from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective, InputGradients
from bigsgan.adversarial.terms import Termed, build_terms
from bigsgan.adversarial.terms.own import Own
from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.models.network import LastImage, LayerStack, initialize
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
        kinds |= {"list": (h, mean, [means]), "of no batch": (h, mean, h.sum())}
        if images.requires_grad:
            kinds["compared"] = (h, mean, means - means.mean(0))
        return kinds.get(self.kind, kinds["whole"])


class Linear(nn.Module):
    def __init__(self, image_channels):
        super().__init__()
        self.layer = nn.Linear(image_channels, 1)

    def forward(self, images, labels):
        h = self.layer(images.mean((2, 3)))
        return h[:, 0], h


def ours_last(image_channels):
    """Layers of which the last is of bigsgan's kind."""
    return LayerStack([Judge(image_channels), LastImage(1)])


def small(fake_mean, real_means):
    return fake_mean.square().mean() + 2 * real_means.square().mean()


def joint(fake_logits, fake_mean):
    """A term of logits (n, P) and of an output (n, 1)."""
    return (fake_logits * fake_mean).mean()


def across(fake_logits, fake_mean):
    """No mean over samples, if there is one logit, (n, 1)."""
    return (fake_logits[:, None] * fake_mean).mean()


def near(fake_means):
    return fake_means.abs().mean()


def judge(kind="whole", outputs="[mean, means]"):
    return f"discriminator={{family: '{__name__}:Judge', arguments: {{kind: {kind}}}, outputs: {outputs}}}"


LINEAR = f"discriminator={{family: '{__name__}:Linear', outputs: [mean]}}"
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
    assert outputs.shape == (4, 48 + 1 + 3)
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


def test_finite_differences_and_lecam_read_logits_alone(tmp_path):
    finite = "{weight: 2, form: finite_difference, sigma: 0.1, check_every: 1}"
    terms, outputs, images, labels, h = game(tmp_path, f"loss: hinge, r1: {finite}, lecam: {{weight: 4, decay: 0}}")
    objective = DiscriminatorObjective(terms, Statistics(CPU), 0)
    assert (objective.num_segments, len(objective.checked)) == (3, 1)
    outputs = torch.cat([outputs, outputs[:2] + 1])  # of real images that are perturbed
    ours = objective(outputs, (images, labels))
    real, fake = h.chunk(2)
    maps = [(real[:, :1], fake[:, :1]), (real[:, 1:], fake[:, 1:])]
    hinge = sum((1 - r).relu().mean() + (1 + f).relu().mean() for r, f in maps)
    term = fake.mean((1, 2, 3)).square().mean() + 2 * real.mean((2, 3)).square().mean()
    torch.testing.assert_close(ours, hinge + 3 * term + (48 / 0.1) ** 2)  # each of 48 logits is larger by 1
    objective.note_slopes(outputs)
    for each in terms:
        each.finish_update(0, True)
    again = DiscriminatorObjective(terms, Statistics(CPU), 0)(outputs, (images, labels))
    far = (real - fake.mean()).relu().square().mean() + (real.mean() - fake).relu().square().mean()
    torch.testing.assert_close(again - ours, 4 * far, atol=0.1, rtol=0)


def test_terms_read_them_beside_logits(tmp_path):
    (term,) = Own.of(tiny_recipe(tmp_path, LINEAR, f"objective={{terms: [{{use: '{__name__}:joint'}}]}}"), CPU).terms
    assert term.reads == ("fake_logits", "fake_mean")


def test_float64_stays(tmp_path):
    network = build_network(tiny_recipe(tmp_path, judge()), "discriminator")
    initialize(network, 5)
    assert network.double()(torch.rand(2, 1, 16, 16).double(), torch.arange(2)).dtype == torch.float64


GIVEN = "objective.terms.0.arguments.real_means"


@pytest.mark.parametrize(
    "overrides, field, problem",
    [
        ([judge(outputs="[mean]")], "discriminator.outputs", "must be the names of the 2 tensors that Judge returns"),
        ([judge("logits alone")], "discriminator.outputs", "the 0 tensors that Judge returns after the logits, got"),
        ([judge("list")], "discriminator.outputs", "must be a tensor, Judge returns list, got 'means'"),
        ([judge(outputs="[mean, behind_logits]")], "discriminator.outputs.1", "is the name of something else"),
        ([judge("compared"), "accumulation=2"], "discriminator.family", "the samples of a batch meet in 0 (Judge)"),
        (
            [LINEAR.replace("Linear", "ours_last")],
            "discriminator.outputs",
            "must be empty with a last layer of bigsgan",
        ),
        (
            [judge(), f"objective={{terms: [{{use: '{__name__}:near'}}], adversarial: {{normalize: {{}}}}}}"],
            "objective.terms.0.use",
            "must read images or outputs of G with objective.adversarial.normalize",
        ),
        ([LINEAR, f"objective={{terms: [{{use: '{__name__}:across'}}]}}"], "objective.terms.0.use", "is no mean over"),
        ([judge("of no batch")], "discriminator.family", "cannot compute"),
        ([judge(outputs="[mean, mean]")], "discriminator.outputs.1", "is the name of something else that terms read"),
        ([judge("one map", "[mean, other]"), f"objective={{{TERMS}}}"], GIVEN, "must be given"),
        ([judge(), f"objective={{terms: [{{use: '{__name__}:small', weight: 3}}]}}"], GIVEN, "must be given"),
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
