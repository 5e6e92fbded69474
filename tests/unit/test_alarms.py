"""Alarms of runs that are being lost, and none of healthy ones."""

from __future__ import annotations

import json

import pytest
import torch

from bigsgan.training.alarms import DIVERSITY, Alarms, diversity

HEALTHY = {
    "accuracy/real": 0.8, "accuracy/fake": 0.7, "grad_norm/generator": 2.0, "grad_norm/discriminator": 5.0,
    "spectral_norm/generator": 3.0, "spectral_norm/discriminator": 2.0, DIVERSITY: 0.7,
}  # fmt: skip


def test_a_healthy_run_alarms_nobody():
    alarms = Alarms()
    for i in range(100):
        swing = 1 + 0.5 * (-1) ** i
        norms = {name: value * swing for name, value in HEALTHY.items() if "norm" in name}
        assert alarms.examine({**HEALTHY, **norms, "accuracy/real": 0.99}) == {}
    assert alarms.examine({}) == {}


@pytest.mark.parametrize("rate, name", [(0.995, "discriminator_wins"), (0.01, "discriminator_lost")])
def test_signs_count_when_they_last(rate, name):
    alarms = Alarms()
    signs = {"accuracy/real": rate, "accuracy/fake": rate}
    for _ in range(2):
        assert [list(alarms.examine({**HEALTHY, **signs})) for _ in range(5)] == [[], [], [], [], [name]]
        assert alarms.examine(HEALTHY) == {}


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
    alarms = Alarms()
    for _ in range(10):
        alarms.examine(HEALTHY)
    found = alarms.examine({**HEALTHY, metric: value})
    assert list(found) == [name]
    assert found[name].count(":") == 1  # what was seen: what helps


def test_images_that_begin_alike_have_not_collapsed():
    """They have if they stay so for long, or become so again, also after a resume."""
    alarms = Alarms()
    assert [num for num in range(1, 53) if alarms.examine({**HEALTHY, DIVERSITY: 0.0})] == [50, 51, 52]
    alarms, resumed = Alarms(), Alarms()
    assert [alarms.examine({**HEALTHY, DIVERSITY: value}) for value in (0.0, 0.01, 0.5)] == [{}] * 3
    resumed.load(alarms.numbers())
    assert list(resumed.examine({**HEALTHY, DIVERSITY: 0.01})) == ["low_diversity"]


SLOPES = {"penalty/r1": 9.0, "penalty/r1_exact": 1.0, "slope/r1": 1.1, "slope/r1_exact": 1.0}


@pytest.mark.parametrize("name", ["r1", "r2"])
@pytest.mark.parametrize("estimate, num", [(1.15, 0), (0.85, 0), (1.25, 1), (0.75, 1), (12.0, 1), (float("nan"), 0)])
def test_finite_differences_are_off_by_a_fifth_in_three_checks_in_a_row(name, estimate, num):
    alarms = Alarms()
    checked = {f"slope/{name}": estimate * 3.0, f"slope/{name}_exact": 3.0}
    for _ in range(2):
        found = []
        for metrics in (checked, HEALTHY, checked, {}, checked):  # reports without a check do not count
            found += alarms.examine(metrics)
        assert found == [f"penalty_is_off/{name}"] * num
        if num:
            assert alarms.examine(checked)[found[0]].count(":") == 1
        assert alarms.examine({**checked, f"slope/{name}": 3.0}) == {}


def test_what_differs_by_chance_alone_alarms_nobody():
    alarms = Alarms()
    assert not any(alarms.examine(SLOPES) for _ in range(10))


def test_diversity_is_that_of_a_column_over_that_of_real_images():
    draws = torch.Generator().manual_seed(0)
    reals = torch.randn(40, 1, 4, 4, generator=draws)
    assert diversity(reals, 4, reals) == pytest.approx(1, abs=0.1)
    classes = torch.randn(4, 1, 4, 4, generator=draws)
    assert diversity(classes.repeat(10, 1, 1, 1), 4, reals) == 0  # one image a class
    far = torch.zeros(2, 1, 1, 2)
    far[1, 0, 0] = torch.tensor([3.0, 4.0])
    assert diversity(far, 1, torch.tensor([[0.0], [2.0]]).view(2, 1, 1, 1)) == pytest.approx(5 / 2)


def test_a_later_process_goes_on_with_what_was_seen():
    draws = torch.Generator().manual_seed(1)
    checked = {"accuracy/real": 1.0, "accuracy/fake": 1.0, "slope/r1": 3.0, "slope/r1_exact": 1.0}
    reports = [{**checked, "grad_norm/generator": float(x)} for x in torch.rand(12, generator=draws)]
    reports[9]["grad_norm/generator"] = 1e4
    whole = Alarms()
    expected = [whole.examine(report) for report in reports]
    assert [len(found) for found in expected] == [0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 2, 2]
    for num in range(len(reports)):
        first, second = Alarms(), Alarms()
        found = [first.examine(report) for report in reports[:num]]
        second.load(json.loads(json.dumps(first.numbers())))
        assert found + [second.examine(report) for report in reports[num:]] == expected


def test_a_network_that_begins_later_alarms_nobody():
    alarms = Alarms()
    for norm in [0.0] * 10 + [2.0] * 10:
        assert alarms.examine({"grad_norm/discriminator": norm}) == {}
    assert "gradients_vanish/discriminator" in alarms.examine({"grad_norm/discriminator": 0.0})
