"""Losses and terms from outside: what they may be, and what is refused before training."""

import pytest
import torch

from bigsgan import plugins
from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective
from bigsgan.adversarial.terms import due, image_gradient, stateless_terms
from bigsgan.adversarial.terms.own import adversarial_loss, own_terms
from bigsgan.errors import UserError
from bigsgan.monitor import Statistics
from tests.own_losses import Wing
from tests.tiny import TINY_GAMES, tiny_recipe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def given(monkeypatch):
    monkeypatch.setattr(plugins, "_given", {f"tests.own_losses:{name}" for name in NAMES})


NAMES = ["Margins", "PairedMargins", "Wing", "Features", "bounded", "diversity", "noisy", "not_reduced"]
NAMES += ["of_reals", "of_two", "Slopes", "of_gradients_and_logits", "without_gradient", "of_both", "of_pixels"]
NAMES += ["broken", "F", "Largest", "LargestBesideMore", "Several", "of_labels"]
NAMES += ["Counting", "Drawn", "shifted_in_place", "contrast"]


def terms(tmp_path, section, *overrides):
    return own_terms(tiny_recipe(tmp_path, *overrides, f"objective.terms=[{{use: 'tests.own_losses:{section}}}]"), CPU)


def test_moments_of_a_batch_are_no_means_at_any_resolution(tmp_path):
    with pytest.raises(UserError, match="is no mean over samples"):
        terms(tmp_path, "contrast'", "data.resolution=128")


def test_weights_that_a_constructor_draws_follow_the_seed(tmp_path):
    def weight(seed):
        torch.manual_seed(torch.seed())  # as a process begins
        (term,) = terms(tmp_path, "Drawn'", "data.image_channels=1", f"seed={seed}")
        return term.value.layer.weight

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


@pytest.mark.parametrize(
    "section, message",
    [
        ("diversity'", "is no mean over samples, so that it depends on how ranks and micro-batches share a batch"),
        ("Largest', network: discriminator", "has a method means that returns no mean over samples"),
        ("Several'", "must return a tensor of floats of one shape from its method means, returns [tensor("),
        ("not_reduced'", "must return a scalar tensor, returns a tensor of shape (2,) and torch.float32"),
        ("of_reals'", "has no gradient"),  # of G's: the images are not its own
        ("of_gradients_and_logits', network: discriminator", "must read images and their labels, what D returns, or"),
        ("Slopes', arguments: {scale: 1.0}", "cannot be called: its call takes real_gradients"),
        ("bounded'", "cannot be called: its call takes real_logits"),
        ("Counting'", "keeps calls from one call to the next"),
        ("shifted_in_place'", "changes real_images in place"),
        ("broken'", "fails for random samples: RuntimeError: shape '[-1, 7]' is invalid"),
        ("Features', arguments: {channels: 3}", "fails for random samples: RuntimeError: Given groups=1"),
    ],
)
def test_what_is_no_term_is_refused(tmp_path, section, message):
    with pytest.raises(UserError) as caught:
        terms(tmp_path, section)
    assert caught.value.field == "objective.terms.0.use"
    assert caught.value.problem.startswith(message)


def test_a_term_of_logits_and_labels_is_told_what_it_reads(tmp_path):
    with pytest.raises(UserError, match=r"images and their labels, .*\(its call takes labels, fake_logits\)"):
        terms(tmp_path, "of_labels'")


@pytest.mark.parametrize(
    "section, field",
    [
        ("Wing', arguments: {widht: 1.0}", "objective.terms.0.arguments.widht"),
        ("Wing'", "objective.terms.0.arguments.width"),
        ("of_pixels'", "objective.terms.0.arguments.pixels"),
        ("Slopes', network: discriminator, arguments: {scale: 1.0}", "objective.terms.0.differentiates"),
        ("bounded', network: discriminator, arguments: {power: 1}", "objective.terms.0.arguments.power"),
    ],
)
def test_arguments_are_those_of_the_signature(tmp_path, section, field):
    with pytest.raises(UserError, match=f"^{field}: "):
        terms(tmp_path, section)


def test_names_differ(tmp_path):
    with pytest.raises(UserError, match="is the name of another part of the losses"):
        terms(tmp_path, "Wing', name: l1, arguments: {width: 1.0}")


def test_a_loss_has_both_sides(tmp_path):
    recipe = tiny_recipe(tmp_path, "objective.loss={use: 'tests.own_losses:Wing', arguments: {width: 1.0}}")
    with pytest.raises(UserError, match="has no method discriminator"):
        adversarial_loss(recipe, CPU)


def test_a_loss_that_reads_real_logits_says_so(tmp_path):
    with pytest.raises(UserError, match="its method generator takes real_logits"):
        adversarial_loss(tiny_recipe(tmp_path, "objective.loss=tests.own_losses:PairedMargins"), CPU)


def test_a_loss_of_logits(tmp_path):
    recipe = tiny_recipe(tmp_path, "objective.loss={use: 'tests.own_losses:Margins', arguments: {margin: 2.0}}")
    assert not recipe.objective.pairs
    loss = adversarial_loss(recipe, CPU)
    real, fake = torch.tensor([1.0, 4.0]), torch.tensor([-2.0, 0.0])
    assert loss.discriminator(real, fake) == (1 + 4) / 2 + (0 + 4) / 2
    assert loss.generator(real, fake) == (16 + 4) / 2


def test_the_inputs_of_pairs_are_read(tmp_path):
    section = "Wing', weight: 2.0, arguments: {width: 0.5}"
    (term,) = terms(tmp_path, section, *TINY_GAMES["pix2pix"])
    assert term.reads == ("images", "real_images")
    statistics = Statistics(CPU)
    images, targets = torch.full((2, 1, 2, 2), 0.25), torch.zeros(2, 1, 2, 2)
    found = image_gradient([term], {"images": images, "real_images": targets}, statistics)
    # d/dx 0.5 log(1 + x / 2) = 0.25 / (1 + x / 2), on the average of 8 pixels
    torch.testing.assert_close(found, torch.full((2, 1, 2, 2), 2 * 0.25 / 1.125 / 8))
    assert statistics.reduce(lambda sums: sums) == {"loss/Wing": pytest.approx(float(Wing(0.5)(images, targets)))}


@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_a_lazy_term_counts_so_many_times_in_its_turns_and_not_at_all_between_them(tmp_path, network):
    overrides = ["objective.loss=relativistic", "objective.d_steps=2"]
    section = f"bounded', network: {network}, weight: 0.5, every: 3"
    own = terms(tmp_path, section, *overrides)
    ours = stateless_terms(tiny_recipe(tmp_path, *overrides).objective)
    logits = torch.tensor([1.0, -2.0, 0.5, 3.0])
    whole = 0.5 * ((1 + logits[:2] ** 2).log().mean() + (1 + logits[2:] ** 2).log().mean())

    def value(found, number):
        statistics = Statistics(CPU)
        if network == "discriminator":
            return DiscriminatorObjective(found, statistics, number)(logits, ())
        return GeneratorObjective(found, statistics, number, pairs=True)(logits, ())

    shares = [float((value([*ours, *own], number) - value(ours, number)) / whole) for number in range(7)]
    assert shares == pytest.approx([3, 0, 0, 3, 0, 0, 3], abs=1e-5)


def test_a_lazy_term_of_images_counts_so_many_times(tmp_path):
    images, found = torch.full((2, 1, 4, 4), 0.5), []
    for every in (1, 4):
        own = terms(tmp_path, f"Wing', every: {every}, arguments: {{width: 0.25}}")
        assert [bool(due(own, "generator", update)) for update in range(5)] == [u % every == 0 for u in range(5)]
        read = {"images": images, "real_images": torch.zeros_like(images)}
        found.append(image_gradient(own, read, Statistics(CPU)))
    torch.testing.assert_close(found[1], 4 * found[0])


@pytest.mark.parametrize(
    "loss, text",
    [
        ("hing", "objective.loss: must be 'hinge', .* or 'relativistic' or a section, got 'hing'; did you mean hinge?"),
        ("{use: 'a:b', pair: true}", "objective.loss.pair: unknown key; did you mean objective.loss.pairs?"),
        ("{pairs: true}", "objective.loss.use: must be given"),
        ("3", "objective.loss: must be 'hinge', .* or a section, got 3; choose one of these"),
    ],
)
def test_what_is_no_loss_is_told_by_its_key(tmp_path, loss, text):
    with pytest.raises(UserError, match=f"^{text}".replace("?", "[?]")):
        tiny_recipe(tmp_path, f"objective.loss={loss}")
