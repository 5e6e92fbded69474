"""Penalties on a part of D's batch: which images, the equations, what is refused, and what is predicted of them."""

from fractions import Fraction

import pytest
import torch

from bigsgan.adversarial.latents import SampleDraws
from bigsgan.adversarial.objectives import InputGradients
from bigsgan.adversarial.segments import Division
from bigsgan.data import Slice
from bigsgan.draws import Draws
from bigsgan.engines.phases import Checks, DifferentiatesImages, Trains, game_of, phases_of
from bigsgan.engines.pipeline.layout import build_on_meta
from bigsgan.engines.zero import Pass, Root
from bigsgan.errors import UserError
from bigsgan.models import dual
from bigsgan.models.build import network_on_meta
from bigsgan.planner.activations import Traces
from tests.bad_input import check_refused
from tests.tiny import TINY_GAMES, both, stages, tiny_plan, tiny_recipe
from tests.unit.test_slopes import made, means, network

N, K = 6, 3
USED = [0, 3]
SIGMA = 0.3
FINITE = {"form": "finite_difference", "sigma": SIGMA}
PENALTIES = {
    "r1": {"r1": {"weight": 3.0, "every": 4}},
    "r2": {"r2": {"weight": 0.5}},
    "r1 and r2": {"r1": {"weight": 3.0}, "r2": {"weight": 0.5}},
    "finite differences": {"r1": {"weight": 3.0, **FINITE}, "r2": {"weight": 0.5, "antithetic": True, **FINITE}},
    "gradient penalty": {"gradient_penalty": {"weight": 7.0}},
    "both forms": {"r1": {"weight": 3.0, **FINITE}, "gradient_penalty": {"weight": 7.0}},
}


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_join_inverts_split(at):
    """Of N real images 0 to 5 and fake ones 6 to 11, two of each are used, and all of what penalties add."""
    division, whole = Division(4, at, K), torch.arange(2 * N + 4)
    first, rest = division.split(whole)
    assert first.tolist() == [0, 3, 6, 9, 12, 13, 14, 15][: 2 * at]
    assert torch.equal(division.join(first, rest), whole)
    assert division.join(first).tolist() == [x if x in first.tolist() else 0 for x in whole.tolist()]


def norm_expected(d, name, section, images, e):
    weight = section.get("every", 1) * section["weight"] / 2
    if section.get("form"):
        ahead, behind = images + SIGMA * e, images - SIGMA * e if section.get("antithetic") else images
        slopes = (d(ahead) - d(behind)) / (SIGMA * (2 if section.get("antithetic") else 1))
        return weight * slopes.square().mean()
    images = images.clone().requires_grad_()
    (g,) = torch.autograd.grad(d(images).sum(), images, create_graph=True)
    return weight * g.square().sum(dim=(1, 2, 3)).mean()


def expected_loss(d, section, real, fake, noise):
    """The loss on all logits, and the penalties at images 0 and 3 alone."""
    r, f = d(real), d(fake)
    total = (torch.nn.functional.softplus(-r) + torch.nn.functional.softplus(f)).mean()
    for name, images in (("r1", real), ("r2", fake)):
        if name in section:
            total = total + norm_expected(d, name, section[name], images[USED], noise.get(name))
    if "gradient_penalty" in section:
        share = noise["gradient_penalty"]
        between = (share * real[USED] + (1 - share) * fake[USED]).requires_grad_()
        (g,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
        total = total + 7.0 * (g.flatten(1).norm(dim=1) - 1).square().mean()
    return total


@pytest.mark.parametrize("method", ["double_backward", "forward_mode"])
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_is_that_of_its_images(name, method):
    """Its gradient too, with all images in the loss on logits; what is recorded is its mean over these images."""
    d, section, draw = network(), PENALTIES[name], torch.Generator().manual_seed(3)
    objective, statistics = made(8, loss="non_saturating", **{n: {**s, "batch_shrink": K} for n, s in section.items()})
    real, fake = (torch.randn(N, 2, 3, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    noise = {n: torch.randn(2, 2, 3, 3, generator=draw, dtype=torch.float64) for n in ("r1", "r2")}
    noise["gradient_penalty"] = torch.rand(2, 1, 1, 1, generator=draw, dtype=torch.float64)
    expected = expected_loss(d, section, real, fake, noise)
    batch = objective.batch((real,), (fake,), noise)
    assert len(batch[0]) == 2 * N + 2 * (objective.num_segments - 2)
    exact = objective.differentiates_inputs
    if method == "forward_mode" and exact:
        inputs = objective.differentiated(batch if objective.num_differentiated > 1 else (real,))
        assert len(inputs[0]) == 2 * objective.num_differentiated
        images = inputs[0].requires_grad_()
        (grads,) = torch.autograd.grad(InputGradients(1)(d(images), inputs), images)
        found = d.fold_dual(dual.begin(batch, objective.slopes(grads / InputGradients.scale)))
        outputs, along = dual.end(found)
        value = objective(outputs, batch, tangents=along)
    else:
        (value,) = Root(d)(batch, Pass(loss=objective))
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(each, list(d.parameters())) for each in (value, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    if name == "r1":
        (penalty,) = (v for k, v in means(statistics).items() if k == "penalty/r1")
        assert penalty == pytest.approx(norm_expected(d, "r1", {"weight": 3.0}, real[USED], None).item(), rel=1e-5)


@pytest.mark.parametrize("accumulation, ranks", [(1, 2), (2, 1), (2, 2)])
def test_images_and_draws_follow_from_positions_in_the_batch(accumulation, ranks):
    """All parts of a batch of 24, one after the other, are those of the whole batch."""
    section = {"r1": {"weight": 1.0, "batch_shrink": K, **FINITE}}
    objective, draws = made(**section)[0], SampleDraws(Draws(0), torch.device("cpu"))
    real = torch.arange(24.0).view(-1, 1, 1, 1)

    def ahead(part, j):
        positions = part.positions(j)
        own = real[positions.start : positions.stop]
        noise = objective.noise(draws, (0, 0), positions, own, own)
        (images,) = objective.batch((own,), (own,), noise)
        return images[2 * len(own) :]

    whole = ahead(Slice(24, 1, 0, 1), 0)
    assert torch.equal((whole / 3).round(), torch.arange(8.0).view(-1, 1, 1, 1))
    parts = [ahead(Slice(24, accumulation, rank, ranks), j) for j in range(accumulation) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_check_of_a_finite_difference_is_of_the_same_images():
    d, draw = network(0.3), torch.Generator().manual_seed(3)
    section = {"weight": 2.0, "batch_shrink": K, "form": "finite_difference", "sigma": 1e-4}
    objective, statistics = made(r1=section)
    assert objective.checked
    real, fake, e = (torch.randn(n, 2, 3, 3, generator=draw, dtype=torch.float64) for n in (N, N, 2))
    batch = objective.batch((real,), (fake,), {"r1": e})
    images = batch[0].requires_grad_()
    logits = d(images)
    objective.note_slopes(logits)
    (grads,) = torch.autograd.grad(logits.sum(), images)
    objective.note_gradients(images.detach(), grads)
    exact, found = norm_expected(d, "r1", {"weight": 2.0}, real[USED], None).item(), means(statistics)
    assert found["penalty/r1_exact"] == pytest.approx(exact, rel=1e-5)
    assert found["slope/r1"] == pytest.approx(found["slope/r1_exact"], rel=1e-2)
    assert found["slope/r1_exact"] == pytest.approx(
        (grads[USED] * e).sum(dim=(1, 2, 3)).square().mean().item(), rel=1e-5
    )


PART = "objective.r1={weight: 1, batch_shrink: 4%s}"
BAD = {
    "an odd part": (["objective.r1={weight: 1, batch_shrink: 3}"], "objective.r1.batch_shrink",
        "must divide the 4 images of a micro-batch on one rank, got 3", "set each penalty's batch_shrink=1"),
    "two parts": ([PART % "", "objective.gradient_penalty={batch_shrink: 2}"],
        "objective.gradient_penalty.batch_shrink", "must be that of objective.r1 (4), got 2 (D's penalties share",
        "give all the same batch_shrink, or none"),
    "own terms": ([PART % "", "objective.terms=[{use: 'a.b:c', network: discriminator, differentiates: [real]}]"],
        "objective.r1.batch_shrink", "must be 1 with objective.terms.0.differentiates, got 4", "remove it"),
    "batch norm": ([*TINY_GAMES["dcgan"], PART % ""], "objective.r1.batch_shrink",
        "must be 1 with discriminator.family=dcgan, got 4 (this D compares images)", "remove it, or give"),
    "minibatch deviation": ([*TINY_GAMES["stylegan2"], PART % ""], "objective.r1.batch_shrink",
        "must be 1 with discriminator.family=stylegan2, got 4", "remove it, or give D neither batch norm nor"),
    "a teacher": ([*TINY_GAMES["gat"], "objective.teacher={path: a.pt}", PART % ""], "objective.r1.batch_shrink",
        "must be 1 with objective.teacher, got 4 (D is", "remove it, or set form=finite_difference"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_part_that_does_not_fit_is_refused(name, tmp_path):
    check_refused(tmp_path, *BAD[name])


def normed(image_channels):
    return torch.nn.BatchNorm2d(image_channels)


def test_batch_norm_from_outside_is_seen_where_it_is_built(tmp_path):
    name = "tests.unit.test_part_of_batch:normed"
    recipe = tiny_recipe(tmp_path, f"discriminator={{family: '{name}'}}", PART % "", "data.num_classes=0")
    with pytest.raises(UserError, match=rf"^objective.r1.batch_shrink: must be 1 with {name}, got 4 \(this D compares"):
        network_on_meta(recipe, "discriminator")


def test_a_teacher_goes_with_finite_differences_of_a_part(tmp_path):
    tiny_recipe(tmp_path, *TINY_GAMES["gat"], "objective.teacher={path: a.pt}", PART % ", form: finite_difference")


def test_phases_have_the_samples_of_a_part(tmp_path):
    """Of 16 images on two ranks, in two micro-batches: 4 real, 4 fake, and 1 for each segment of a penalty."""
    batch = ["batch=16", "accumulation=2"]
    finite = "objective={r1: {weight: 1, batch_shrink: 4, antithetic: true, form: finite_difference}}"
    plan = tiny_plan(tmp_path, 2, [*batch, finite], both(0))
    sizes = {type(phase): phase.num_samples for phase in phases_of(plan, game_of(plan, 0))}
    assert (sizes[Checks], sizes[Trains]) == (10, 10)
    for more, at in (("", 1), (", r2: {weight: 1, batch_shrink: 4}", 2)):
        exact = f"objective={{r1: {{weight: 1, batch_shrink: 4, method: %s}}{more}}}"
        plan = tiny_plan(tmp_path, 4, [*batch, exact % "forward_mode", *stages(2, 2)], both(0))
        sizes = {type(phase): phase.num_samples for phase in phases_of(plan, game_of(plan, 0))}
        assert (sizes[DifferentiatesImages], sizes[Trains]) == (at, 8)
        plan = tiny_plan(tmp_path, 2, [*batch, exact % "double_backward"], both(0))
        (trains,) = (phase for phase in phases_of(plan, game_of(plan, 0)) if isinstance(phase, Trains))
        assert (trains.num_samples, trains.num_twice) == (8, at)


@pytest.mark.slow
def test_memory_of_a_pass_is_that_of_its_samples(tmp_path):
    """Of 8 real and 8 fake images and 2 more, as of 18 images of which none is a part of another segment."""
    finite = "objective={r1: {weight: 1, batch_shrink: 4, form: finite_difference}}"
    plan, traces = tiny_plan(tmp_path, 1, [finite], both(0)), Traces()
    layers = 0, len(build_on_meta(plan, "discriminator").layers)
    found = traces.passes(plan, "discriminator", "train", Fraction(9, 4), 8, layers)
    expected = traces.passes(plan, "discriminator", "train", 1, 18, layers)
    assert (found.forward.peak, found.kept, found.backward.peak) == (
        expected.forward.peak,
        expected.kept,
        expected.backward.peak,
    )


@pytest.mark.slow
def test_a_double_backward_of_a_part_needs_less_memory(tmp_path):
    peaks = []
    for shrink in (1, 4):
        exact = f"objective={{r1: {{weight: 1, batch_shrink: {shrink}, method: double_backward}}}}"
        plan = tiny_plan(tmp_path, 1, [exact, "batch=32"], both(0))
        peaks.append(Traces().penalized(plan, "discriminator", 32).backward.peak)
    plain = Traces().passes(plan, "discriminator", "train", 2, 32, (0, 4)).kept
    assert plain < peaks[1] < 0.8 * peaks[0]
