"""Exact penalties by tangents and by a double backward, and finite differences beside exact slopes, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bigsgan.adversarial.objectives import DiscriminatorObjective, InputGradients
from bigsgan.adversarial.terms import stateless_terms
from bigsgan.config.objective import Objective
from bigsgan.models import dual
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from bigsgan.monitor import Statistics
from bigsgan.training.alarms import Alarms
from tests.tiny import TINY_GAMES, awake, tiny_plan, tiny_recipe, zero
from tests.unit.test_dual import check
from tests.unit.test_objectives import made, means

PENALTIES = {
    "r1": {"r1": {"weight": 3.0}},
    "lazy r1": {"r1": {"weight": 3.0, "every": 4}},
    "r2": {"r2": {"weight": 0.5}},
    "gradient penalty": {"gradient_penalty": {"weight": 7.0}},
    "all": {
        "r1": {"weight": 3.0, "every": 4}, "r2": {"weight": 0.5, "every": 4}, "gradient_penalty": {"weight": 7.0}
    },
    "beside a finite difference": {
        "r1": {"weight": 3.0, "form": "finite_difference", "sigma": 0.1}, "gradient_penalty": {"weight": 7.0}
    },
}  # fmt: skip


class Curve(torch.nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.nn.functional.softplus(x),)


class Linear(torch.nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (super().forward(x.flatten(1)),)


class Logits(Linear):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (super().forward(x)[0].squeeze(1),)


def network(sharpness: float = 1.0) -> LayerStack:
    """Two hidden layers of 12 units; images (n, 2, 3, 3) -> (n,)."""
    torch.manual_seed(0)
    layers = [Linear(18, 12), Curve(), Linear(12, 12), Curve(), Logits(12, 1)]
    with torch.no_grad():
        layers[0].weight.mul_(sharpness)
    return LayerStack(layers).double()


def statistic_names(section: dict[str, object]) -> list[str]:
    return [name for term in stateless_terms(Objective.model_validate(section)) for name in term.statistics]


def batch_of(objective: DiscriminatorObjective, num: int = 5) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    noise = {name: normal(num, 2, 3, 3) for name in ("r1", "r2")}
    noise["gradient_penalty"] = torch.rand(num, 1, 1, 1, generator=draw, dtype=torch.float64)
    return objective.batch((normal(num, 2, 3, 3),), (normal(num, 2, 3, 3),), noise)


@pytest.mark.parametrize("name", PENALTIES)
def test_tangents_and_a_double_backward_give_the_same_gradient(name):
    d = network()
    parameters = list(d.parameters())
    objective, statistics = made(phase=8, loss="non_saturating", **PENALTIES[name])
    (images,) = batch_of(objective)
    assert len(images) == 5 * objective.segments.trains
    images.requires_grad_()
    logits = d(images, segments=objective.num_segments)
    expected = torch.autograd.grad(objective(logits, (images,)), parameters, retain_graph=True)
    noted = means(statistics)

    objective, statistics = made(phase=8, loss="non_saturating", **PENALTIES[name])
    assert objective.num_differentiated == (1 if name in ("r1", "lazy r1") else objective.num_segments)
    first = images.detach()[: 5 * objective.num_differentiated].requires_grad_()
    (grads,) = torch.autograd.grad(d(first, segments=objective.num_differentiated).sum(), first)
    images = images.detach()
    found = d.fold_dual(dual.begin((images,), objective.slopes(grads)), objective.num_segments)
    outputs, tangents = dual.end(found)
    check(d, torch.autograd.grad(objective(outputs, (images,), tangents=tangents), parameters), expected)
    assert means(statistics) == pytest.approx(noted, rel=1e-12)
    if name == "r1":  # without the penalty the gradient is another
        plain = torch.autograd.grad(made(phase=8, loss="non_saturating")[0](logits[:10], ()), parameters)
        assert not torch.allclose(plain[0], expected[0], rtol=0.1)


@pytest.mark.parametrize("name", PENALTIES)
def test_real_images_alone_are_the_first_segment_of_the_batch(name):
    """They are repeated once for each image of a sample."""
    section = Objective.model_validate({"loss": "non_saturating", **PENALTIES[name]})
    objective = DiscriminatorObjective(stateless_terms(section), Statistics(torch.device("cpu")), 8, 2)
    draw = torch.Generator().manual_seed(3)
    real, fake = (torch.randn(5, channels, 3, 3, generator=draw) for channels in (2, 4))
    noise = {"r1": torch.randn(5, 2, 3, 3, generator=draw), "gradient_penalty": torch.rand(5, 1, 1, 1, generator=draw)}
    whole = objective.batch((real, torch.zeros(5)), (fake, torch.ones(5)), noise)
    first = objective.reals((real, torch.zeros(5)))
    assert torch.equal(first[0], real.repeat(1, 2, 1, 1))
    assert [torch.equal(a, b[:5]) for a, b in zip(first, whole, strict=True)] == [True, True]


@pytest.mark.parametrize("antithetic", [False, True])
def test_finite_differences_approach_the_gradient_of_the_slopes(antithetic):
    """As sigma falls, the loss becomes every * weight / 2 * mean((g . e)^2), and so does its gradient."""
    d = network()
    section = {"weight": 3.0, "every": 2, "form": "finite_difference", "sigma": 1e-4, "antithetic": antithetic}
    objective, _ = made(loss="wasserstein", r1=section, r2={**section, "weight": 0.5})
    assert objective.num_segments == 2 + 2 * (1 + antithetic)
    (images,) = batch_of(objective)
    assert len(images) == 5 * objective.segments.trains
    logits = d(images, segments=objective.num_segments)
    found = torch.autograd.grad(objective(logits, (images,)), list(d.parameters()))

    clean = images[:10].detach().requires_grad_()
    real, fake = d(clean).chunk(2)
    (grads,) = torch.autograd.grad(real.sum() + fake.sum(), clean, create_graph=True)
    moved = images.chunk(objective.num_segments)
    directions = torch.cat([moved[2] - moved[0], moved[3 + antithetic] - moved[1]]) / 1e-4
    slopes = (grads * directions).sum(dim=(1, 2, 3)).square()
    loss = fake.mean() - real.mean() + 3.0 * slopes[:5].mean() + 0.5 * slopes[5:].mean()
    expected = torch.autograd.grad(loss, list(d.parameters()))
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm()) <= (1e-6 if antithetic else 1e-2) * float(b.norm()) + 1e-10


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("sharpness", [0.1, 30.0])
def test_a_check_is_of_the_same_directions(antithetic, sharpness):
    d = network(sharpness)
    sigma, weights = 0.05, {"r1": 4.0, "r2": 1.0}
    sections = {
        name: {"weight": weight, "form": "finite_difference", "sigma": sigma, "antithetic": antithetic}
        for name, weight in weights.items()
    }
    objective, statistics = made(**sections)
    (images,) = batch_of(objective)
    images.requires_grad_()
    loss = InputGradients(objective.num_segments, objective.note_slopes)
    value = loss(d(images, segments=objective.num_segments), (images,))
    (grads,) = torch.autograd.grad(value, images)
    objective.note_gradients(images.detach(), grads / loss.scale)
    found = means(statistics)
    assert sorted(found) == sorted(n for n in statistic_names(sections) if n in found)
    assert len(found) == 6

    moved, errors = images.detach().chunk(objective.num_segments), []
    for number, name in enumerate(weights):
        x = moved[number].clone().requires_grad_()
        (g,) = torch.autograd.grad(d(x).sum(), x)
        end = moved[2 + number * (1 + antithetic)]
        e = (end - x.detach()) / sigma
        exact = (g * e).sum(dim=(1, 2, 3)).square().mean().item()
        with torch.no_grad():
            start, width = (x - sigma * e, 2 * sigma) if antithetic else (x, sigma)
            estimate = ((d(end) - d(start)) / width).square().mean().item()
        square = g.square().sum(dim=(1, 2, 3)).mean().item()
        assert found[f"penalty/{name}_exact"] == pytest.approx(weights[name] / 2 * square, rel=1e-6)
        assert found[f"slope/{name}_exact"] == pytest.approx(exact, rel=1e-6)
        assert found[f"slope/{name}"] == pytest.approx(estimate, rel=1e-6)
        errors.append(abs(estimate / exact - 1))
    assert max(errors) < 0.001 if sharpness < 1 else max(errors) > 0.05


@pytest.mark.parametrize(
    "dtype, sigma, antithetic, is_off",
    [
        (torch.float32, 0.01, False, False),
        (torch.float32, 0.01, True, False),
        (torch.float32, 1.0, False, True),  # curvature
        (torch.bfloat16, 0.01, False, True),  # rounding
        (torch.bfloat16, 0.01, True, True),
        (torch.bfloat16, 0.1, True, False),
        (torch.float16, 0.03, False, False),
    ],
)
def test_an_alarm_tells_of_what_a_discriminator_does_not_resolve(tmp_path, dtype, sigma, antithetic, is_off):
    recipe = tiny_recipe(tmp_path)
    with awake():
        d = build_network(recipe, "discriminator")
        initialize(d, seed=3)
    d.float().train()
    for parameter in d.parameters():
        parameter.data = parameter.data.to(dtype)
    section = {"weight": 1.0, "form": "finite_difference", "sigma": sigma, "antithetic": antithetic}
    watch, draw = Alarms(), torch.Generator().manual_seed(1)
    for _ in range(3):
        objective, statistics = made(r1=section)
        real, fake, e = torch.randn(3, 32, 1, 16, 16, generator=draw).clamp(-2, 2) / 2
        labels = torch.arange(32) % 10
        images, labels = objective.batch((real, labels), (fake, labels), {"r1": 2 * e})
        images.requires_grad_()
        loss = InputGradients(objective.num_segments, objective.note_slopes)
        value = loss(d(images, labels, segments=objective.num_segments), (images, labels))
        objective.note_gradients(images.detach(), torch.autograd.grad(value, images)[0] / loss.scale)
        found = means(statistics)
        raised = watch.examine(found)
    assert list(raised) == (["penalty_is_off/r1"] if is_off else []), found


def checks(phase: int, **section: object) -> list[str]:
    return [term.name for term in made(phase, **section)[0].checked]


def test_every_so_many_penalized_phases_are_checked():
    finite = {"weight": 1.0, "form": "finite_difference", "sigma": 0.1, "every": 3}
    section = {"r1": {**finite, "check_every": 4}, "r2": {**finite, "check_every": 2}}
    found = {phase: checked for phase in range(40) if (checked := checks(phase, **section))}
    assert found == {0: ["r1", "r2"], 6: ["r2"], 12: ["r1", "r2"], 18: ["r2"], 24: ["r1", "r2"], 30: ["r2"], 36: [
        "r1", "r2",
    ]}  # fmt: skip
    never = {"r1": {**finite, "check_every": 0}}
    assert not any(checks(phase, **never) for phase in range(40))
    assert not any("exact" in name for name in statistic_names(never))
    assert not checks(0, r1={"weight": 1.0})


@pytest.mark.parametrize(
    "options, ds, sigma",
    [
        ([], {}, 0.01),
        ([], zero(1, bf16={"enabled": True}), 0.1),
        (["half_resolutions: 1"], {}, 0.1),
        (["half_resolutions: 1, half_type: fp16"], {}, 0.03),
        (["half_resolutions: 1, half_type: fp16"], zero(1, bf16={"enabled": True}), 0.1),
    ],
)
def test_sigma_suits_the_coarsest_type(tmp_path, options, ds, sigma):
    overrides = [
        "objective.r1={weight: 1, form: finite_difference}",
        "objective.r2={weight: 1, sigma: 0.4, form: finite_difference}",
    ]
    if options:
        generator, discriminator, *_ = TINY_GAMES["stylegan2"]
        overrides += [generator, discriminator.replace("mbstd_group: 2", f"mbstd_group: 2, {options[0]}")]
    plan = tiny_plan(tmp_path, 1, overrides, {"discriminator": ds})
    assert (plan.objective.r1.sigma, plan.objective.r2.sigma) == (sigma, 0.4)
    assert plan.recipe.objective.r1.sigma is None
    assert plan.objective.model_copy(update={"r1": None, "r2": None}) == plan.recipe.objective.model_copy(
        update={"r1": None, "r2": None}
    )
