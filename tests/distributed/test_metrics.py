"""Metrics during training are the same whatever the layout, but for rounding."""

import pytest

from tests.distributed import scenarios
from tests.tiny import zero

NAMES = ["fid100", "fid50", "kid60", "is100", "pr100", "dc60", "labels100", "cfid100"]
METRICS = ["metrics={names: [" + ", ".join(NAMES) + "], every_nimg: 8}"]
PIPELINE = [f"engines.{network}.pipeline_stages=2" for network in ("generator", "discriminator")]


@pytest.fixture(scope="module")
def alone(ranks):
    return ranks(1).run(scenarios.measured, METRICS, {})[0]


def test_values(alone):
    found = {name.partition("/")[2] for name in alone}
    endings = {"is100": ["", "_std"], "pr100": ["_precision", "_recall"], "dc60": ["_density", "_coverage"]}
    endings["labels100"] = ["_kl", "_js"]
    assert found == {name + ending for name in NAMES for ending in endings.get(name, [""])} | {"seconds"}
    assert alone["metrics/fid50"] != alone["metrics/fid100"]


@pytest.mark.parametrize(
    "overrides, ds",
    [
        ([], {"generator": zero(3), "discriminator": zero(2)}),
        pytest.param(PIPELINE, {}, marks=pytest.mark.slow),
    ],
    ids=["zero3", "stages"],
)
def test_layouts_agree(ranks, alone, overrides, ds):
    for values in ranks(2).run(scenarios.measured, METRICS + overrides, ds):
        for name, value in alone.items():
            if name != "metrics/seconds":
                assert values[name] == pytest.approx(value, rel=2e-3, abs=1e-3), name
