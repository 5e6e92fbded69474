"""Generators that read times, and flow matching, where the generator learns alone."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigsgan import cli
from bigsgan.adversarial import SampleDraws, build_source
from bigsgan.adversarial.latents import LatentSource
from bigsgan.adversarial.terms.flow import velocity_error
from bigsgan.config.families.outside import OutsideGenerator
from bigsgan.data import LabelledImages, Slice
from bigsgan.doctor.games import DMD2, FLOW
from bigsgan.draws import Draws
from bigsgan.engines.phases import game_of, phases_of
from bigsgan.errors import UserError
from bigsgan.inference.sheets import Sampler
from bigsgan.inference.trained import open_trained, set_steps
from bigsgan.models import noise
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.models.steps import in_steps
from bigsgan.planner.counting import count_work
from tests.runs import make_run
from tests.tiny import TINY_GAMES, awake, tiny_plan, tiny_recipe, zero

CPU = torch.device("cpu")
NUM, SIZE = 8, 288
FEW_STEPS = ["generator.steps=3", "objective.reuse_fakes=true"]
"""Overrides for a student of a few steps."""


def timed(steps, **keys):
    """The section of a generator with steps."""
    return OutsideGenerator(family="nets:G", latent_size=3, times=True, steps=steps, **keys)


def test_many_steps_follow_the_flow_of_a_normal_distribution():
    """Data of deviation s: E[x | x_t] is linear in x_t, and the flow ends at s z (Lipman et al. 2023, theorem 3)."""
    s, z = 0.3, torch.linspace(-2, 2, 12).view(3, 4)

    def estimate(noisy, labels, times):
        t = times[:, None]
        return ((1 - t) * s**2 / ((1 - t) ** 2 * s**2 + t**2) * noisy).view(3, 1, 2, 2)

    found = in_steps(estimate, timed(400))(z, torch.zeros(3))
    torch.testing.assert_close(found.flatten(1), s * z, rtol=0, atol=1e-2)


def test_steps_are_those_of_eulers_method():
    seen = []

    def estimate(noisy, labels, times, seeds):
        seen.append(float(times[0]))
        return (noisy.sin() * times[:, None] + labels[:, None] + seeds[:, None]).view(2, 1, 1, 3)

    z, y, seeds = torch.randn(2, 3), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])
    x = z.clone()
    for t in (1.0, 0.75, 0.5, 0.25):
        velocity = (x - estimate(x, y, torch.full((2,), t), seeds).flatten(1)) / t
        x = x - 0.25 * velocity
    del seen[:]
    found = in_steps(estimate, timed(4, seeds=True))(z, y, seeds)
    assert seen == [1.0, 0.75, 0.5, 0.25]
    torch.testing.assert_close(found.flatten(1), x)


def test_guidance_moves_estimates_from_those_of_null_labels():
    z, y = torch.randn(2, 3), torch.eye(2)

    def estimate(noisy, labels, times):
        return (noisy.cos() + labels.sum(1, keepdim=True) * noisy.sin() * times[:, None]).view(2, 1, 1, 3)

    def guided(noisy, labels, times):
        null = estimate(noisy, 0 * labels, times)
        return null + 1.7 * (estimate(noisy, labels, times) - null)

    torch.testing.assert_close(in_steps(estimate, timed(3, guidance=1.7))(z, y), in_steps(guided, timed(3))(z, y))


@pytest.mark.parametrize("sampler", ["ode", "sde"])
def test_steps_go_to_later_times_with_the_noise_of_before_or_with_fresh_noise(sampler):
    """As the public lists of times for four steps, 1, 0.9375, 0.8333 and 0.625, have it (shift 5)."""
    z, y, seeds = torch.randn(2, 3), torch.tensor([0, 1]), torch.tensor([5, 7])
    times = [1, 15 / 16, 5 / 6, 5 / 8, 0]

    def estimate(noisy, labels, t):
        return (noisy * (2 + labels[:, None]) * t[:, None].cos()).view(2, 3, 1, 1)

    noisy = z
    for step in range(4):
        images = estimate(noisy, y, torch.full((2,), times[step])).flatten(1)
        drawn = (noisy - (1 - times[step]) * images) / times[step]
        if sampler == "sde":
            drawn = noise.normal(seeds, 2**33 + step, (3,))
        noisy = (1 - times[step + 1]) * images + times[step + 1] * drawn
    made = in_steps(estimate, timed(4, sampler=sampler, time_shift=5))(z, y, seeds)
    torch.testing.assert_close(made.flatten(1), noisy)


def built(tmp_path, *more, network="generator"):
    with awake():
        found = build_network(tiny_recipe(tmp_path, *FLOW, *more), network)
        initialize(found, 0)
    return found


def test_an_estimate_is_what_it_reads_minus_t_times_a_velocity(tmp_path):
    """So at time 0 it is what it reads, and its change with the velocity's last bias is -t."""
    network = built(tmp_path)
    noisy, labels, t = torch.randn(2, SIZE), torch.tensor([0, 2]), torch.tensor([1e-9, 0.3])
    images = network(noisy, labels, t)
    torch.testing.assert_close(images[0].flatten(), noisy[0], atol=1e-6, rtol=0)
    with torch.no_grad():
        network.layers["3"].linear.bias += 1
    moved = network(noisy, labels, t) - images
    torch.testing.assert_close(moved[1], torch.full_like(moved[1], -0.3), atol=1e-5, rtol=0)


def test_the_error_is_that_of_the_velocity():
    x, z, velocity = torch.randn(3, 4, 2, 3, 3).unbind(1)[:3]
    t = torch.tensor([0.1, 0.5, 1.0])
    wide = t[:, None, None, None]
    estimate = torch.lerp(x, z, wide) - wide * velocity
    torch.testing.assert_close(velocity_error(estimate, x, t), F.mse_loss(velocity, z - x))


def source_of(tmp_path, *more):
    recipe = tiny_recipe(tmp_path, *FLOW, *more)
    return build_source(recipe, SampleDraws(Draws(recipe.seed), CPU), range(3))


def drawn(source, num_replicas, accumulation, update=5):
    """All samples of an update, in the order of the batch, whatever the division."""
    x = torch.arange(NUM * SIZE).view(NUM, 3, 8, 12) / 1000
    labels, found = torch.arange(NUM) % 3, {}
    for replica in range(num_replicas):
        part = Slice(NUM, accumulation, replica, num_replicas)
        at = [torch.tensor([*part.positions(j)]) for j in range(accumulation)]
        reals = [LabelledImages(x[own], labels[own]) for own in at]
        inputs = source.inputs(
            "generator", (update,), dict.fromkeys(("generator", "discriminator"), part), lambda r=reals: r
        )
        for j, own in enumerate(at):
            for place, *values in zip(own.tolist(), *inputs.generator(j), strict=True):
                found[place] = values
    return x.flatten(1), [torch.stack(each) for each in zip(*(found[place] for place in range(NUM)), strict=True)]


@pytest.mark.parametrize("times", ["uniform", "logit_normal"])
def test_inputs_are_images_with_noise_however_ranks_divide_the_batch(tmp_path, times):
    source = source_of(tmp_path, f"objective.flow.times={times}")
    x, (noisy, labels, t) = drawn(source, 1, 1)
    for other in (drawn(source, 2, 1), drawn(source, 2, 2)):
        for ours, theirs in zip((noisy, labels, t), other[1], strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(labels, torch.arange(NUM) % 3)
    z = SampleDraws(Draws(1), CPU).noise("generator/latent", (5,), range(NUM), (SIZE,))
    torch.testing.assert_close(noisy, (1 - t[:, None]) * x + t[:, None] * z, rtol=1e-5, atol=1e-5)
    assert not torch.equal(drawn(source, 1, 1, update=6)[1][2], t)


def test_times_have_their_distribution(tmp_path):
    """A Kolmogorov-Smirnov distance below its 1 % point, 1.63 / sqrt(n)."""
    part = Slice(4000, 1, 0, 1)
    reals = [LabelledImages(torch.zeros(4000, 3, 8, 12), torch.zeros(4000, dtype=torch.int64))]
    distributions = {"uniform": lambda t: t, "logit_normal": lambda t: torch.special.ndtr(torch.logit(t))}
    for name, cumulative in distributions.items():
        source = source_of(tmp_path, f"objective.flow.times={name}")
        t = source.inputs("generator", (0,), {"generator": part}, lambda: reals).generator(0)[2].double().sort().values
        assert 1e-3 <= float(t[0]) <= float(t[-1]) <= 1
        distance = (cumulative(t) - torch.arange(1, 4001) / 4000).abs().max()
        assert float(distance) < 1.63 / math.sqrt(4000)


def test_beside_a_discriminator_times_are_those_of_the_steps(tmp_path):
    """Each as often, and each image has its own label."""
    recipe = tiny_recipe(tmp_path, *DMD2, "objective.reuse_fakes=true", "generator.steps=4", "generator.time_shift=5")
    source = build_source(recipe, SampleDraws(Draws(1), CPU), range(3))
    part, num = Slice(400, 1, 0, 1), 400
    reals = [LabelledImages(torch.randn(num, 3, 8, 12), torch.arange(num) % 3)]
    inputs = source.inputs("generator", (0,), {"generator": part, "discriminator": part}, lambda: reals)
    noisy, labels, t = inputs.generator(0)
    found, counts = t.unique(return_counts=True)
    torch.testing.assert_close(found, torch.tensor([5 / 8, 5 / 6, 15 / 16, 1]))
    assert counts.min() > 100 - 3 * math.sqrt(400 * 0.25 * 0.75)
    z = SampleDraws(Draws(1), CPU).noise("generator/latent", (0,), range(num), (SIZE,))
    x = reals[0].images.flatten(1)
    torch.testing.assert_close(noisy, (1 - t[:, None]) * x + t[:, None] * z, rtol=1e-5, atol=1e-5)
    assert torch.equal(labels, reals[0].labels)
    assert torch.equal(inputs.conditions(0)[0], reals[0].labels)


def test_noise_alone_has_time_1():
    source = LatentSource(SampleDraws(Draws(0), CPU), 5, range(3), seeded=True, timed=True)
    latents, labels, times, seeds = source.phase("generator", (0,), Slice(4, 1, 0, 1))(0)
    assert torch.equal(times, torch.ones(4))
    assert latents.shape == (4, 5)
    assert labels.shape == seeds.shape == (4,)


def test_an_update_has_one_phase_of_three_passes(tmp_path):
    plan = tiny_plan(tmp_path, 1, FLOW, {"generator": zero(0)})
    (phase,) = phases_of(plan, game_of(plan, 0))
    assert (phase.network, phase.step, phase.num_samples) == ("generator", True, 8)
    counted = count_work(plan)
    assert counted["update_flop"] == 3 * counted["generator"]["forward_flop"] > 0
    assert counted["discriminator"]["parameters"] == 0


def test_a_discriminator_may_have_the_backbone_of_a_generator(tmp_path):
    """All but the class token and the last layer; a clean image has time 0."""
    with awake():
        recipe = tiny_recipe(tmp_path, *TINY_GAMES["dit"], "generator.times=true", "discriminator.times=true")
        g, d = build_network(recipe, "generator"), build_network(recipe, "discriminator")
        initialize(g, 0), initialize(d, 1)
    ours, theirs = (dict(network.named_parameters()) for network in (d, g))
    others = {name for name, each in ours.items() if name not in theirs or theirs[name].shape != each.shape}
    assert others == {"layers.0.token", "layers.3.linear.weight"}
    images, labels = torch.randn(2, 3, 8, 12), torch.tensor([0, 2])
    _, c = d.layers["0"](images, labels)
    torch.testing.assert_close(c, d.layers["0"].embedding(labels) + d.layers["0"].times(torch.zeros(2)))


def test_exports_make_samples_in_the_same_steps(tmp_path):
    run, _ = make_run(tmp_path, *FLOW, "generator.steps=3")
    trained = open_trained(run, "generator", live=False, nimg=None, device=CPU)
    z, labels = torch.randn(2, SIZE), torch.tensor([1, 2])
    expected = in_steps(trained.network, timed(3))(z, labels)
    assert not torch.allclose(expected, in_steps(trained.network, timed(2))(z, labels))
    torch.testing.assert_close(trained.infer((z, labels)), expected)
    set_steps(trained, 2)
    torch.testing.assert_close(trained.infer((z, labels)), in_steps(trained.network, timed(2))(z, labels))
    for wrong in (0, 1001):
        with pytest.raises(UserError, match="--steps: must be 1 to 1000"):
            set_steps(trained, wrong)
    assert Sampler(trained, 0, 4, range(3)).grid(6, torch.arange(3), None).images.shape == (6, 3, 8, 12)


OF_DIT = "discriminator={family: dit, depth: 2, width: 16, heads: 2}"
WRONG = [
    ("objective.flow", [OF_DIT, "optimizer.discriminator.lr=0.1"]),
    ("optimizer.discriminator", [OF_DIT, "objective={}"]),
    ("objective", ["objective={}"]),
    ("objective.r1", ["objective={flow: {}, r1: {weight: 1}}"]),
    ("objective.loss", ["objective={flow: {}, loss: relativistic}"]),
    ("objective.transport", ["objective={flow: {}, transport: {weight: 1}}"]),
    ("objective.terms.0", ["objective={flow: {}, terms: [{use: 'a:b', network: discriminator}]}"]),
    ("augmentation", ["augmentation={kind: diffaugment}"]),
    ("engines.generator.ranks", ["engines.generator.ranks=1"]),
    ("generator.latent_size", ["generator={family: 'nets:G', latent_size: 12, times: true}"]),
    ("generator.guidance", ["generator={family: dit, latent_size: 288, times: true, guidance: 2}"]),
    ("objective.flow", ["generator={family: dit, latent_size: 288, depth: 2, width: 16, heads: 2}"]),
]


WRONG_STEPS = [
    ("objective.reuse_fakes", "objective.reuse_fakes=false", "must be true with generator.steps=3"),
    ("objective.fake_labels", "objective.fake_labels=frequencies", "must be uniform or data with generator.steps=3"),
    ("objective.transport", "objective.transport={weight: 1}", "must be null with generator.steps=3"),
    ("objective.schedule", "objective.schedule=overlapped", "must be exact with generator.steps=3"),
    ("generator.time_shift", "generator.time_shift=0", "must be greater than 0"),
    ("generator.sampler", "generator.sampler=euler", "must be 'ode' or 'sde'"),
]


@pytest.mark.parametrize("field, changed, message", WRONG_STEPS)
def test_keys_that_do_not_fit_several_steps_are_refused(tmp_path, field, changed, message):
    kept = [each for each in FEW_STEPS if each.partition("=")[0] != field]
    with pytest.raises(UserError, match=message) as caught:
        tiny_recipe(tmp_path, *FLOW[:2], TINY_GAMES["dit"][2], "init_from=null", *kept, changed)
    assert caught.value.field == field


BESIDE_D = [FLOW[0], TINY_GAMES["dit"][2], "optimizer.generator.lr=0.1", "optimizer.discriminator.lr=0.1"]
IN_ONE_STEP = "must be unset with a generator that makes images in one step"
WRONG_GAMES = [
    ("generator.steps", "needs a generator that reads times", [*BESIDE_D, FLOW[1].replace("times: true", "steps: 2")]),
    ("generator.sampler", IN_ONE_STEP, [*BESIDE_D, FLOW[1], "generator.sampler=sde"]),
    ("generator.time_shift", IN_ONE_STEP, [*BESIDE_D, FLOW[1].replace("times: true", "time_shift: 2")]),
    (
        "generator.steps",
        "must be 1 without objective.flow and a discriminator",
        [*FLOW[:3], FLOW[4], "generator.steps=2", "objective={terms: [{use: 'nets:own'}]}"],
    ),
    (
        "generator.steps",
        "needs a generator from latents",
        [
            *[each.replace("num_classes: 3", "num_classes: 0") for each in BESIDE_D],
            "generator={family: 'nets:G', reads: images, steps: 2}",
            "objective.reuse_fakes=true",
        ],
    ),
]


@pytest.mark.parametrize("field, message, game", WRONG_GAMES)
def test_steps_that_nothing_makes_are_refused(tmp_path, field, message, game):
    with pytest.raises(UserError, match=message) as caught:
        tiny_recipe(tmp_path, *game)
    assert caught.value.field == field


@pytest.mark.parametrize("field, changed", WRONG)
def test_keys_that_do_not_fit_are_refused(tmp_path, field, changed):
    keys = [each.partition("=")[0] for each in changed]
    with pytest.raises(UserError, match=f"^{field}: "):
        tiny_recipe(tmp_path, *(each for each in FLOW if each.partition("=")[0] not in keys), *changed)


@pytest.mark.slow
def test_metrics_take_the_steps_that_are_asked_for(tmp_path, capsys):
    """With fresh noise, of a run whose own samples take one step and no seeds."""
    generator = FLOW[1].replace("288", "256").replace("times: true", "times: true, sampler: sde")
    run, _ = make_run(tmp_path, "data={kind: digits, resolution: 16}", generator, *FLOW[2:])
    arguments = ["evaluate", "--run", str(run), "--metrics", "fid64", "--json"]
    assert cli.main([*arguments, "--steps", "3"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["steps"] == 3
    assert cli.main(["sample", "--run", str(run), "--out", str(tmp_path / "x.png"), "--steps", "3"]) == 0


class Own(nn.Module):
    """A generator that draws noise besides that of its steps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, noisy, labels, times, seeds):
        drawn = noise.normal(seeds, 0, (SIZE,))
        return (self.linear(noisy) + times[:, None] * drawn).view(-1, 3, 8, 12)


@pytest.mark.slow
def test_a_graph_of_steps_has_the_noise_of_a_network_of_ones_own(tmp_path):
    """The export compares the graph's images with the network's."""
    own = (
        f"generator={{family: '{__name__}:Own', latent_size: {SIZE}, times: true, seeds: true, steps: 3, sampler: sde}}"
    )
    run, _ = make_run(tmp_path, FLOW[0], own, *FLOW[2:])
    assert cli.main(["export", "--run", str(run), "--out", str(tmp_path / "x.pt2")]) == 0
