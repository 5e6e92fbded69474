"""Alarms of runs that are being lost, and none of healthy ones."""

from __future__ import annotations

import pytest
import torch

from bigsgan.training.doctor import DIVERSITY, Doctor, diversity

HEALTHY = {
    "accuracy/real": 0.8, "accuracy/fake": 0.7, "grad_norm/generator": 2.0, "grad_norm/discriminator": 5.0,
    "spectral_norm/generator": 3.0, "spectral_norm/discriminator": 2.0, DIVERSITY: 0.7,
}  # fmt: skip


def test_a_healthy_run_alarms_nobody():
    doctor = Doctor()
    for i in range(100):
        swing = 1 + 0.5 * (-1) ** i
        norms = {name: value * swing for name, value in HEALTHY.items() if "norm" in name}
        assert doctor.examine({**HEALTHY, **norms, "accuracy/real": 0.99}) == {}
    assert doctor.examine({}) == {}


@pytest.mark.parametrize("rate, name", [(0.995, "discriminator_wins"), (0.01, "discriminator_lost")])
def test_signs_count_when_they_last(rate, name):
    doctor = Doctor()
    signs = {"accuracy/real": rate, "accuracy/fake": rate}
    for _ in range(2):
        assert [list(doctor.examine({**HEALTHY, **signs})) for _ in range(5)] == [[], [], [], [], [name]]
        assert doctor.examine(HEALTHY) == {}


@pytest.mark.parametrize(
    "metric, value, name",
    [
        ("grad_norm/generator", 2e3, "gradients_explode/generator"),
        ("grad_norm/discriminator", 1e-5, "gradients_vanish/discriminator"),
        ("spectral_norm/discriminator", 8.0, "spectral_norm_spikes/discriminator"),
        (DIVERSITY, 0.1, "low_diversity"),
    ],
)
def test_what_leaves_its_usual_range_is_named(metric, value, name):
    doctor = Doctor()
    for _ in range(10):
        doctor.examine(HEALTHY)
    found = doctor.examine({**HEALTHY, metric: value})
    assert list(found) == [name]
    assert found[name].count(":") == 1  # what was seen: what helps


SLOPES = {"penalty/r1": 9.0, "penalty/r1_exact": 1.0, "slope/r1": 1.1, "slope/r1_exact": 1.0}


@pytest.mark.parametrize("name", ["r1", "r2"])
@pytest.mark.parametrize("estimate, alarms", [(1.15, 0), (0.85, 0), (1.25, 1), (0.75, 1), (12.0, 1), (float("nan"), 0)])
def test_finite_differences_are_off_by_a_fifth_in_three_checks_in_a_row(name, estimate, alarms):
    doctor = Doctor()
    checked = {f"slope/{name}": estimate * 3.0, f"slope/{name}_exact": 3.0}
    for _ in range(2):
        found = []
        for metrics in (checked, HEALTHY, checked, {}, checked):  # reports without a check do not count
            found += doctor.examine(metrics)
        assert found == [f"penalty_is_off/{name}"] * alarms
        if alarms:
            assert doctor.examine(checked)[found[0]].count(":") == 1
        assert doctor.examine({**checked, f"slope/{name}": 3.0}) == {}


def test_what_differs_by_chance_alone_alarms_nobody():
    doctor = Doctor()
    assert not any(doctor.examine(SLOPES) for _ in range(10))


def test_diversity_is_that_of_a_column_over_that_of_real_images():
    draws = torch.Generator().manual_seed(0)
    reals = torch.randn(40, 1, 4, 4, generator=draws)
    assert diversity(reals, 4, reals) == pytest.approx(1, abs=0.1)
    classes = torch.randn(4, 1, 4, 4, generator=draws)
    assert diversity(classes.repeat(10, 1, 1, 1), 4, reals) == 0  # one image a class
    far = torch.zeros(2, 1, 1, 2)
    far[1, 0, 0] = torch.tensor([3.0, 4.0])
    assert diversity(far, 1, torch.tensor([[0.0], [2.0]]).view(2, 1, 1, 1)) == pytest.approx(5 / 2)
