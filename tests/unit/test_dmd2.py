"""D of distribution matching distillation against two generators with its weights, and the formulas of the paper."""

import pytest
import torch
import torch.nn.functional as F

from bigsgan import plugins
from bigsgan.bench.variants import VARIANTS, plan_variants
from bigsgan.config.families.dmd2 import name_in_generator
from bigsgan.doctor.games import DMD2, FLOW
from bigsgan.engines.frozen import check_frozen, hold_frozen, tell_frozen
from bigsgan.errors import UserError
from bigsgan.models import noise
from bigsgan.models.build import build_network, network_on_meta
from bigsgan.models.frozen import convert, whole_frozen
from bigsgan.models.network import initialize
from bigsgan.plan import describe_networks
from bigsgan.planner.counting import count_work
from bigsgan.training.initial_weights import check_freezing
from tests.tiny import awake, both, tiny_plan, tiny_recipe

SEEDS, LABELS = torch.tensor([3, 1, 4, 15]), torch.tensor([0, 2, 1, 0])


def networks(tmp_path, guidance=1):
    """D, and generators with the weights of its fake score and of its teacher."""
    recipe = tiny_recipe(tmp_path, *(each.replace("guidance: 1", f"guidance: {guidance}") for each in DMD2))
    found = []
    with awake():
        d = build_network(recipe, "discriminator")
        initialize(d, 0)
        for of_teacher in (False, True):
            found.append(build_network(recipe, "generator"))
            given = {
                name_in_generator(recipe.discriminator, name): tensor
                for name, tensor in d.state_dict().items()
                if (".real." in name) == of_teacher and ".head." not in name
            }
            found[-1].load_state_dict(given)
    return d, *found


@pytest.mark.parametrize("guidance", [1, 3])
def test_it_returns_a_logit_an_error_and_the_gradient_of_the_paper(tmp_path, guidance):
    d, fake, teacher = networks(tmp_path, guidance)
    images = torch.randn(4, 3, 8, 12, requires_grad=True)
    logits, errors, matching = d(images, LABELS, SEEDS).split(1, dim=1)

    times = (0.2 + 0.78 * noise.uniform(SEEDS, 0, (1,))).squeeze(1)
    drawn, t = noise.normal(SEEDS, 1, (3, 8, 12)), times[:, None, None, None]
    noisy = (1 - t) * images + t * drawn
    of_fake = fake(noisy.flatten(1), LABELS, times)
    velocity = (noisy - of_fake) / t
    expected = F.mse_loss(velocity, drawn - images, reduction="none").mean((1, 2, 3))
    torch.testing.assert_close(errors[:, 0], expected, rtol=1e-4, atol=1e-5)

    features = F.layer_norm(fake.part(0, 3).fold(noisy.flatten(1), LABELS, times)[0], (16,), eps=1e-6).mean(1)
    torch.testing.assert_close(logits, features @ d.layers["3"].head.weight.T, rtol=1e-4, atol=1e-5)

    real = teacher(noisy.flatten(1), LABELS, times)
    null = teacher(noisy.flatten(1), torch.zeros(4, 3), times)
    real = null + guidance * (real - null)
    direction = (of_fake - real) / (images - real).abs().mean((1, 2, 3), keepdim=True)  # DMD, equations 7 and 8
    (grad,) = torch.autograd.grad(matching.sum(), images)
    torch.testing.assert_close(grad, (direction / direction[0].numel()).detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(matching[:, 0], direction.square().mean((1, 2, 3)) / 2, rtol=1e-4, atol=1e-6)


def test_a_teacher_in_bf16_computes_in_it(tmp_path):
    d, fake, teacher = networks(tmp_path)
    convert(d, torch.bfloat16)
    images = torch.randn(4, 3, 8, 12, requires_grad=True)
    *_, matching = d(images, LABELS, SEEDS).split(1, dim=1)

    times = 0.2 + 0.78 * noise.uniform(SEEDS, 0, (1, 1, 1))
    noisy = torch.lerp(images, noise.normal(SEEDS, 1, (3, 8, 12)), times)
    real = teacher.bfloat16()(noisy.flatten(1), LABELS, times.flatten())
    direction = fake(noisy.flatten(1), LABELS, times.flatten()) - real
    direction = direction / (images - real).abs().mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(matching[:, 0], direction.square().mean((1, 2, 3)) / 2, rtol=1e-4, atol=1e-6)
    assert {tensor.dtype for tensor in whole_frozen(d).values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "game, changes, message",
    [
        (DMD2, ["compile=layers", "frozen.sharded=true"], "sharded: must be unset with .*compile=layers, whose code"),
        (DMD2, ["compile=layers", "frozen.offload=cpu"], "offload: must be unset with .*compile=layers, whose code"),
        (FLOW, ["frozen.precision=bf16"], "precision: must be unset with .*=dit, which has no frozen parameters"),
        (FLOW, ["frozen.persistence_threshold=0"], "persistence_threshold: must be unset with .* no frozen parameters"),
        (DMD2, ["compile=layers", "frozen.persistence_threshold=0"], "persistence_threshold: must be unset with"),
    ],
)
def test_settings_of_frozen_parameters_without_effect_are_refused(tmp_path, game, changes, message):
    network = "discriminator" if game is DMD2 else "generator"
    with pytest.raises(UserError, match=rf"engines\.{network}\.frozen\.{message}"):
        tiny_recipe(tmp_path, *game, *(f"engines.{network}.{each}" for each in changes))


@pytest.mark.parametrize(
    "exact, message",
    [
        (True, "frozen.precision: must be unset, as the generator has no frozen parameters, got 'bf16'; remove it"),
        (False, "frozen.precision: must be unset with generator.exact=false, whose code may change them, got 'bf16'"),
    ],
)
def test_so_are_those_of_a_network_from_outside(tmp_path, exact, message):
    family = "tests.outside:Generator"
    plugins.give([family])
    own = [f'generator={{family: "{family}", latent_size: 12, exact: {str(exact).lower()}}}']
    with pytest.raises(UserError) as caught:
        check_frozen(tiny_plan(tmp_path, 1, [*own, "engines.generator.frozen.precision=bf16"], both(1)), "generator")
    assert str(caught.value).startswith(f"engines.generator.{message}")


@pytest.mark.parametrize(
    "changes, reason",
    [
        (["offload=cpu"], "offload on these layers: no matrix has more than 100,000 numbers"),
        (
            ["sharded=true", "offload=cpu", "persistence_threshold=5000"],
            "sharded and offload on these layers: no matrix has more than 5,000 numbers",
        ),
        (["persistence_threshold=0"], "persistence_threshold on these layers: each rank has all"),
        (["sharded=true", "persistence_threshold=0"], ""),
    ],
)
def test_a_teacher_that_stays_whole_though_asked_otherwise_is_told(tmp_path, caplog, changes, reason):
    overrides = [f"engines.discriminator.frozen.{each}" for each in changes]
    plan = tiny_plan(tmp_path, 2, [*DMD2, *overrides], both(1))
    caplog.set_level("INFO")
    stack = network_on_meta(plan.recipe, "discriminator")
    hold_frozen(plan, "discriminator", stack, 1, lambda whole, own: None, torch.device("meta"))
    tell_frozen(plan, "discriminator", stack)
    assert caplog.messages == ([f"engines.discriminator.frozen: no effect of {reason}"] if reason else [])


@pytest.mark.parametrize(
    "game, changes, message",
    [
        (FLOW, ["steps=1"], "generator.noised: must be reals with objective.flow, got 'samples'"),
        (DMD2, ["steps=1"], "generator.noised: must be unset with a generator that makes images in one step"),
        (DMD2, ["steps=2", "times=false"], "generator.steps: needs a generator that reads times"),
        ([*DMD2, "objective.schedule=overlapped"], ["steps=2"], "objective.schedule: must be exact or generator_first"),
        ([*DMD2, "objective.l1=1"], ["steps=2"], "objective.l1: must be 0 with generator.steps=2, got 1.0"),
        ([*DMD2, "objective.feature_matching=1"], ["steps=2"], "objective.feature_matching: must be 0 with"),
        (
            [*DMD2, "objective.perceptual={path: x.pt}", "data.codec={kind: dct}"],
            ["steps=2"],
            "objective.perceptual: must be null with data.codec.kind=dct, got 'weight=1.0' (G's images are not pixels)",
        ),
    ],
)
def test_images_of_steps_before_that_do_not_fit_are_refused(tmp_path, game, changes, message):
    with pytest.raises(UserError) as caught:
        tiny_recipe(tmp_path, *game, "generator.noised=samples", *(f"generator.{each}" for each in changes))
    assert str(caught.value).startswith(message)


def test_only_layers_that_learn_may_be_kept(tmp_path):
    given = [each.replace("init_from.run=unset", "init_from={run: x, freeze_discriminator: 4}") for each in DMD2]
    with pytest.raises(UserError, match=r"init_from\.freeze_discriminator: must be less than 4, .* got 4"):
        check_freezing(tiny_recipe(tmp_path, *given))


def test_a_bench_has_variants_of_it(tmp_path):
    (planned,) = plan_variants(tiny_recipe(tmp_path, *DMD2), [VARIANTS["zero1"]], 1)
    assert planned.plan.recipe.init_from.run == "unset"


def test_its_teacher_is_not_trained_and_is_left_out_where_d_learns(tmp_path):
    d, _, teacher = networks(tmp_path)
    trained = {name for name, _ in d.named_parameters()}
    assert len(trained) == len(teacher.state_dict()) + 1
    assert not any(".real." in name for name in trained)
    for layer in list(d.layers.values())[5:]:
        layer.real.forward = None
    assert torch.equal(d(torch.randn(4, 3, 8, 12), LABELS, SEEDS)[:, 2], torch.zeros(4))


MATCHING, D = "objective.distribution_matching: ", "discriminator={family: dmd2"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"init_from": ""}, "init_from.run: must be given with discriminator.family=dmd2; name the teacher's run"),
        ({"objective": "objective={}"}, f"{MATCHING}must be given with discriminator.family=dmd2"),
        ({"discriminator": "discriminator={family: dit}"}, f"{MATCHING}'weight=0.7' needs a discriminator with"),
        (
            {"objective": "objective={distribution_matching: {}, adversarial: {normalize: {}}}"},
            f"{MATCHING}must be null",
        ),
        ({"init_from": "init_from={run: x}\naugmentation={kind: diffaugment}"}, "augmentation.kind: must be null with"),
        ({"discriminator": f"{D}, first_time: 0.5, last_time: 0.5}}"}, "discriminator.first_time: must be below"),
        (
            {
                "data": "data={kind: synthetic, resolution: [8, 12], image_channels: 3, num_classes: 0}",
                "discriminator": f"{D}, guidance: 2}}",
            },
            "discriminator.guidance: must be 1 without labels, got 2.0; remove it",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, changes, message):
    given = [changes.get(each.partition("=")[0].partition(".")[0], each) for each in DMD2]
    given = [override for each in given for override in each.splitlines()]
    with pytest.raises(UserError) as caught:
        tiny_recipe(tmp_path, *filter(None, given))
    assert message in str(caught.value)


def test_a_plan_tells_how_large_the_teacher_is(tmp_path):
    plan = tiny_plan(tmp_path, 1, DMD2, both(0))
    counted = count_work(plan)
    num = counted["discriminator"]["frozen_parameters"]
    assert num == counted["generator"]["parameters"]
    assert f"and {num:,} frozen parameters" in describe_networks(plan, counted)
