"""Objectives on discriminators whose gradients are known in closed form.

Shapes: images (n, 1, 2, 2), coefficients a (1, 2, 2) of D(x) = sum(a * x^2) or of D(x) = sum(a * x).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bigsgan.adversarial.latents import SampleDraws
from bigsgan.adversarial.objectives import DiscriminatorObjective, GeneratorObjective
from bigsgan.adversarial.terms import stateless_terms
from bigsgan.adversarial.terms.losses import LOSSES
from bigsgan.config.objective import Objective, Penalty
from bigsgan.draws import Draws
from bigsgan.engines.base import MicroBatch
from bigsgan.monitor import Statistics

SHAPE = (1, 2, 2)


def images(stream: str, num: int) -> Tensor:
    return torch.from_numpy(Draws(0).normal(stream, (), 0, num, 4)).view(num, *SHAPE)


def labelled(stream: str, num: int, label: int) -> MicroBatch:
    return images(stream, num), torch.full((num,), label)


def coefficients() -> Tensor:
    return torch.tensor([0.5, -1.0, 0.25, 2.0]).view(SHAPE).requires_grad_()


def quadratic(a: Tensor, x: Tensor) -> Tensor:
    return (a * x.square()).sum(dim=(1, 2, 3))


def linear(a: Tensor, x: Tensor) -> Tensor:
    return (a * x).sum(dim=(1, 2, 3))


def made(phase: int = 0, **section: object) -> tuple[DiscriminatorObjective, Statistics]:
    statistics = Statistics(torch.device("cpu"))
    return DiscriminatorObjective(stateless_terms(Objective.model_validate(section)), statistics, phase), statistics


def means(statistics: Statistics) -> dict[str, float]:
    return statistics.reduce(lambda vector: vector)


def penalized_loss(objective: DiscriminatorObjective, d: Callable[[Tensor], Tensor], batch: MicroBatch) -> Tensor:
    inputs = (batch[0].requires_grad_(objective.differentiates_inputs), batch[1])
    return objective(d(inputs[0]), inputs)


R1, R2 = Penalty(weight=3.0), Penalty(weight=0.5)


@pytest.mark.parametrize("penalties", [{"r1": R1}, {"r2": R2}, {"r1": R1, "r2": R2}], ids="+".join)
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("loss", ["hinge", "non_saturating"])
def test_exact_penalties(loss, every, penalties):
    penalties = {name: penalty.model_copy(update={"every": every}) for name, penalty in penalties.items()}
    objective, statistics = made(phase=8, loss=loss, **penalties)
    assert objective.differentiates_inputs
    assert objective.segments.trains == 2
    a, real, fake = coefficients(), labelled("real", 5, 1), labelled("fake", 5, 2)
    batch = objective.batch(real, fake, {})
    value = penalized_loss(objective, lambda x: quadratic(a, x), batch)
    expected = LOSSES[loss].discriminator(quadratic(a, real[0]), quadratic(a, fake[0]))
    plain = expected.item()
    squares = {}
    for name, segment in (("r1", real[0]), ("r2", fake[0])):
        squares[name] = (4 * a.square() * segment.square()).sum(dim=(1, 2, 3)).mean()  # |2 a x|^2
    for name, penalty in penalties.items():
        expected = expected + every * penalty.weight / 2 * squares[name]
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    grad, expected_grad = (torch.autograd.grad(v, a)[0] for v in (value, expected))
    assert torch.allclose(grad, expected_grad, rtol=1e-4)
    found = means(statistics)
    assert found["loss/discriminator"] == pytest.approx(plain, rel=1e-5)  # without the penalties
    for name, penalty in penalties.items():  # as they are, not multiplied by ``every``
        assert found[f"penalty/{name}"] == pytest.approx(penalty.weight / 2 * squares[name].item(), rel=1e-5)
    assert sum(key.startswith("penalty/") for key in found) == len(penalties)


def test_the_update_may_give_the_weights_of_penalties():
    real, fake = labelled("real", 5, 1), labelled("fake", 5, 2)
    found = {}
    for weights in ({}, {"r1": 6.0}, {"r1": 0.0, "r2": 0.0}):
        statistics = Statistics(torch.device("cpu"))
        terms = stateless_terms(Objective(r1=R1, r2=R2))
        for term in terms:
            term.begin_update(weights)
        objective = DiscriminatorObjective(terms, statistics, 0)
        penalized_loss(objective, lambda x: quadratic(coefficients(), x), objective.batch(real, fake, {}))
        found[len(found)] = means(statistics)
    assert found[1]["penalty/r1"] == pytest.approx(2 * found[0]["penalty/r1"])  # 3.0 in the section
    assert found[1]["penalty/r2"] == found[0]["penalty/r2"] > 0
    assert found[2]["penalty/r1"] == found[2]["penalty/r2"] == 0


def test_penalties_of_tiny_gradients_survive():
    objective, _ = made(loss="wasserstein", r1={"weight": 2.0})
    a = torch.full(SHAPE, 1e-5).requires_grad_()
    batch = objective.batch(labelled("real", 5, 0), labelled("real", 5, 0), {})
    value = penalized_loss(objective, lambda x: linear(a, x), batch)  # real = fake: nothing but the penalty is left
    assert value.item() == pytest.approx(4e-10, rel=1e-4)


def test_the_loss_is_plain_between_penalties():
    for phase in range(9):
        objective, statistics = made(phase, r1={"weight": 3.0, "every": 4})
        batch = objective.batch(labelled("real", 5, 0), labelled("fake", 5, 0), {})
        is_due = phase in (0, 4, 8)
        assert objective.differentiates_inputs == is_due
        if not is_due:
            a = coefficients()
            logits = quadratic(a, batch[0].detach())
            value = objective(logits, batch)
            assert value.item() == pytest.approx(LOSSES["hinge"].discriminator(*logits.chunk(2)).item())
            assert not any(key.startswith("penalty/") for key in means(statistics))


def finite(weight: float, sigma: float, every: int = 1, antithetic: bool = False) -> Penalty:
    return Penalty(weight=weight, sigma=sigma, every=every, form="finite_difference", antithetic=antithetic)


def test_finite_differences_add_a_perturbed_segment_for_each_penalty_or_one_on_either_side():
    section = {"r1": finite(1.0, 0.1, every=2), "r2": finite(1.0, 0.3, every=2, antithetic=True)}
    objective, _ = made(0, **section)
    real, fake = labelled("real", 3, 1), labelled("fake", 3, 2)
    noise = {"r1": images("noise1", 3), "r2": images("noise2", 3)}
    assert objective.segments.trains == objective.num_segments == 5
    assert not objective.differentiates_inputs
    together, labels = objective.batch(real, fake, noise)
    expected = [real[0], fake[0], real[0] + 0.1 * noise["r1"]]
    expected += [fake[0] + 0.3 * noise["r2"], fake[0] - 0.3 * noise["r2"]]
    assert torch.equal(together, torch.cat(expected))
    assert labels.tolist() == [1] * 3 + [2] * 3 + [1] * 3 + [2] * 6
    objective, _ = made(1, **section)
    assert objective.segments.trains == 2
    together, labels = objective.batch(real, fake, {})
    assert torch.equal(together, torch.cat(expected[:2]))
    assert labels.tolist() == [1] * 3 + [2] * 3


@pytest.mark.parametrize("names", [["r1"], ["r2"], ["r1", "r2"]], ids="+".join)
def test_finite_differences_of_a_linear_discriminator_are_exact_at_any_sigma(names):
    # Over the four noises 2 e_i the mean of (a . noise)^2 is |a|^2, as it is over standard normal noise.
    frame = 2 * torch.eye(4).view(4, *SHAPE)
    section = {name: finite(3.0, 0.7, every=5) for name in names}
    objective, statistics = made(phase=5, loss="wasserstein", **section)
    a, real, fake = coefficients(), labelled("real", 4, 0), labelled("fake", 4, 0)
    batch = objective.batch(real, fake, dict.fromkeys(names, frame))
    value = penalized_loss(objective, lambda x: linear(a, x), batch)
    square = a.square().sum()
    expected = linear(a, fake[0]).mean() - linear(a, real[0]).mean() + len(names) * 5 * 3.0 / 2 * square
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    grad, expected_grad = (torch.autograd.grad(v, a)[0] for v in (value, expected))
    assert torch.allclose(grad, expected_grad, rtol=1e-4)
    found = means(statistics)
    for name in names:
        assert found[f"penalty/{name}"] == pytest.approx(1.5 * square.item(), rel=1e-5)


@pytest.mark.parametrize("names", [["r1"], ["r2"], ["r1", "r2"]], ids="+".join)
def test_exact_penalties_where_g_makes_several_images_of_a_sample(names):
    """A real image stands in the place of each: R1 is on the gradient of D(x, x, x) by x, and R2 by all three."""
    statistics = Statistics(torch.device("cpu"))
    section = Objective(loss="wasserstein", **dict.fromkeys(names, R1))
    objective = DiscriminatorObjective(stateless_terms(section), statistics, 0, 3)
    a = torch.linspace(-1, 2, 12).view(3, 2, 2).requires_grad_()
    fake = torch.cat([images(f"fake{level}", 5) for level in range(3)], dim=1)
    (real, labels), at = labelled("real", 5, 1), {}
    batch = objective.batch((real, labels), (fake, labels), {})
    assert torch.equal(batch[0], torch.cat([real.repeat(1, 3, 1, 1), fake]))
    at["r1"], at["r2"] = real.clone().requires_grad_(), fake.clone().requires_grad_()
    logits = {"r1": quadratic(a, torch.cat([at["r1"]] * 3, dim=1)), "r2": quadratic(a, at["r2"])}
    expected = logits["r2"].mean() - logits["r1"].mean()
    for name in names:
        (grad,) = torch.autograd.grad(logits[name].sum(), at[name], create_graph=True)
        expected = expected + R1.weight / 2 * grad.square().sum(dim=(1, 2, 3)).mean()
    value = penalized_loss(objective, lambda x: quadratic(a, x), batch)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    grad, expected_grad = (torch.autograd.grad(v, a)[0] for v in (value, expected))
    assert torch.allclose(grad, expected_grad, rtol=1e-4)


def test_finite_differences_perturb_all_copies_of_a_real_image_alike():
    section = Objective(r1=finite(1.0, 0.1), r2=finite(1.0, 0.3))
    objective = DiscriminatorObjective(stateless_terms(section), Statistics(torch.device("cpu")), 0, 2)
    real, fake = labelled("real", 3, 1), (torch.cat([images("coarse", 3), images("fine", 3)], dim=1), torch.ones(3))
    drawn = objective.noise(SampleDraws(Draws(0), torch.device("cpu")), (0,), range(3), real[0], fake[0])
    assert {name: x.shape for name, x in drawn.items()} == {"r1": real[0].shape, "r2": fake[0].shape}
    noise = {"r1": images("noise1", 3), "r2": torch.cat([images("noise2", 3), images("noise3", 3)], dim=1)}
    together, _ = objective.batch(real, (fake[0], real[1]), noise)
    moved = real[0] + 0.1 * noise["r1"]
    expected = [torch.cat([real[0]] * 2, 1), fake[0], torch.cat([moved] * 2, 1), fake[0] + 0.3 * noise["r2"]]
    assert torch.equal(together, torch.cat(expected))


def test_statistics_of_the_discriminator():
    objective, statistics = made(loss="least_squares")
    batches = [([2.0, -1.0, 0.0, 3.0], [1.0, -2.0, -3.0, 0.0]), ([1.0, 1.0, 1.0, -5.0], [-1.0, -1.0, 4.0, -1.0])]
    losses = []
    for real, fake in batches:
        logits = torch.tensor([*real, *fake], requires_grad=True)
        losses.append(objective(logits, (torch.zeros(8, *SHAPE), torch.zeros(8, dtype=torch.int64))).item())
    found = means(statistics)
    assert found == pytest.approx({
        "loss/discriminator": sum(losses) / 2,
        "logits/real": (4 - 2) / 8,
        "logits/fake": (-4 + 1) / 8,
        "accuracy/real": 5 / 8,  # a logit of 0 is right for neither
        "accuracy/fake": 5 / 8,
    })  # fmt: skip
    assert losses[0] == pytest.approx(0.5 * ((1 + 4 + 1 + 4) / 4 + (1 + 4 + 9 + 0) / 4))


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_the_generators_objective(loss):
    statistics = Statistics(torch.device("cpu"))
    section = Objective.model_validate({"loss": loss, "r1": R1})
    objective = GeneratorObjective(stateless_terms(section), statistics, pairs=section.pairs)
    assert not objective.differentiates_inputs  # penalties are the discriminator's
    assert objective.pairs == (loss == "relativistic")
    a, real, fake = coefficients(), labelled("real", 5, 1), labelled("fake", 5, 2)
    together, labels = objective.batch(real if objective.pairs else None, fake)
    assert labels.tolist() == ([1] * 5 if objective.pairs else []) + [2] * 5
    together = together.clone().requires_grad_()
    value = objective(quadratic(a, together), (together, labels))
    expected = LOSSES[loss].generator(quadratic(a, real[0]), quadratic(a, fake[0]))
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert means(statistics) == {"loss/generator": pytest.approx(expected.item(), rel=1e-6)}
    # What leaves D: the gradient at the fakes, which stand last.
    (grad,) = torch.autograd.grad(value, together)
    logits = quadratic(a, fake[0])
    slope = {
        "least_squares": (logits - 1) / 5,
        "non_saturating": -torch.sigmoid(-logits) / 5,
        "relativistic": -torch.sigmoid(quadratic(a, real[0]) - logits) / 5,
    }.get(loss, torch.full((5,), -1 / 5))
    assert torch.allclose(grad[-5:], slope.view(-1, 1, 1, 1) * 2 * a * fake[0], rtol=1e-4, atol=1e-6)
