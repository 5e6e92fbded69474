"""Adversarial losses against their formulas in numpy, and their gradients against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch

from bigsgan.adversarial.terms.losses import LOSSES, LogitLoss
from bigsgan.config.objective import Objective

REAL = np.array([2.0, -1.5, 0.25, 1.125, -0.75])
FAKE = np.array([-2.5, 0.5, -0.875, 3.0, 0.125])

Formula = Callable[[np.ndarray, np.ndarray], float]


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.log(1 + np.exp(-x))


# (discriminator's, generator's), as each paper writes them.
FORMULAS: dict[str, tuple[Formula, Formula]] = {
    "hinge": (
        lambda real, fake: float(np.mean(np.maximum(0, 1 - real)) + np.mean(np.maximum(0, 1 + fake))),
        lambda real, fake: float(-np.mean(fake)),
    ),
    "non_saturating": (  # -E log D(x) - E log(1 - D(G(z))), -E log D(G(z)); D = sigmoid(logit)
        lambda real, fake: float(-np.mean(log_sigmoid(real)) - np.mean(np.log(1 - 1 / (1 + np.exp(-fake))))),
        lambda real, fake: float(-np.mean(log_sigmoid(fake))),
    ),
    "least_squares": (  # a = 0, b = c = 1
        lambda real, fake: float(0.5 * np.mean((real - 1) ** 2) + 0.5 * np.mean(fake**2)),
        lambda real, fake: float(0.5 * np.mean((fake - 1) ** 2)),
    ),
    "wasserstein": (lambda real, fake: float(np.mean(fake) - np.mean(real)), lambda real, fake: float(-np.mean(fake))),
    "relativistic": (  # f(t) = -log(1 + exp(-t)) of D(x) - D(G(z)), pair by pair
        lambda real, fake: float(-np.mean(log_sigmoid(real - fake))),
        lambda real, fake: float(-np.mean(log_sigmoid(fake - real))),
    ),
}


def test_every_loss_of_the_recipe_is_there_and_tested():
    choices, _ = get_args(Objective.model_fields["loss"].annotation)  # and one's own
    assert set(LOSSES) == set(FORMULAS) == set(get_args(choices))


@pytest.mark.parametrize("side", ["discriminator", "generator"])
@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient(name, side):
    loss: LogitLoss = getattr(LOSSES[name], side)
    formula = FORMULAS[name][side == "generator"]
    real, fake = (torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (REAL, FAKE))
    value = loss(real, fake)
    assert value.shape == ()
    assert value.item() == pytest.approx(formula(REAL, FAKE), rel=1e-12)
    grads = torch.autograd.grad(value, (real, fake), allow_unused=True)
    for argument, grad in enumerate(grads):
        assert np.allclose(0 if grad is None else grad, slopes(formula, argument), atol=1e-8)


def slopes(formula: Formula, argument: int) -> np.ndarray:
    """Central differences; no logit above lies on a kink."""
    found = []
    for i in range(len(REAL)):
        values = []
        for step in (1e-5, -1e-5):
            logits = [REAL.copy(), FAKE.copy()]
            logits[argument][i] += step
            values.append(formula(logits[0], logits[1]))
        found.append((values[0] - values[1]) / 2e-5)
    return np.array(found)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_generator_needs_real_logits_only_where_the_loss_says_so(name):
    real, fake = torch.tensor(REAL), torch.tensor(FAKE)
    differs = LOSSES[name].generator(real, fake) != LOSSES[name].generator(real + 1, fake)
    assert bool(differs) == Objective(loss=name).pairs == (name == "relativistic")


@pytest.mark.parametrize("name", ["non_saturating", "relativistic"])
def test_extreme_logits_do_not_overflow(name):
    # log(1 + exp(1000)) is 1000, and exp(1000) is not a float32.
    real, fake = (torch.tensor([value], requires_grad=True) for value in (-1000.0, 1000.0))
    value = LOSSES[name].discriminator(real, fake)
    assert value.item() == 2000
    assert [g.item() for g in torch.autograd.grad(value, (real, fake))] == [-1, 1]
