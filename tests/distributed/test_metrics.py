"""Metrics during training are the same whatever the layout, but for rounding."""

import os
import shutil

import pytest

from bigsgan import plugins
from bigsgan.config import both_engines
from tests.distributed import scenarios
from tests.image_games import NAMES as OF_GAMES
from tests.image_games import PAIRS
from tests.tiny import TINY_GAMES, both, stages, zero

pytestmark = pytest.mark.slow

NAMES = ["fid100", "fid50", "kid60", "is100", "pr1700", "dc1700", "labels100", "cfid100"]
METRICS = ["metrics={names: [" + ", ".join(NAMES) + "], every_nimg: 8}", "ema.half_life_nimg=1", "data.num_workers=0"]
PIPELINE = both_engines("pipeline_stages=2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(ranks, cache):
    return ranks(1).run(scenarios.measured, METRICS, {}, str(cache))[0]


def test_a_failing_metric_leaves_the_weights(ranks):
    """And so does an error of the only rank."""
    (found,) = ranks(1).run(scenarios.ema_swap, [], both(1))
    assert found["restored"]


def test_values(alone):
    found = {name.partition("/")[2] for name in alone}
    endings = {"is100": ["", "_std"], "pr1700": ["_precision", "_recall"], "dc1700": ["_density", "_coverage"]}
    endings["labels100"] = ["_kl", "_js"]
    assert found == {name + ending for name in NAMES for ending in endings.get(name, [""])} | {"seconds"}
    assert alone["metrics/fid50"] != alone["metrics/fid100"]
    assert min(alone.values()) >= 0


@pytest.mark.parametrize(
    "overrides, ds",
    [
        ([], {"generator": zero(3), "discriminator": zero(2)}),
        (PIPELINE, {}),
    ],
    ids=["zero3", "stages"],
)
def test_layouts_agree(ranks, alone, cache, overrides, ds, tmp_path):
    """Two ranks look at the real images themselves; then each reads its half of what the other layout has kept."""
    (classifier,) = cache.glob("digits-*")
    shutil.copy(classifier, tmp_path)
    for place in (tmp_path, cache):
        for values in ranks(2).run(scenarios.measured, METRICS + overrides, ds, str(place)):
            for name, value in alone.items():
                if name != "metrics/seconds":
                    assert values[name] == pytest.approx(value, rel=1e-3, abs=2e-5), name
    (kept,) = tmp_path.glob("reals-*")
    assert len(list(kept.glob("rows-*"))) == 2
    assert os.listdir(cache / kept.name)


@pytest.mark.parametrize(
    "game, layout, ds",
    [(PAIRS, [], both(3)), (TINY_GAMES["autoencoder_vq"], stages(2, 1), both(1))],
    ids=["pairs, zero3", "autoencoder, stages"],
)
def test_targets_in_layouts(ranks, game, layout, ds, tmp_path):
    """Each image meets its target on whichever rank, and no feature network is looked for."""
    names = ["psnr50", "ssim50"] + ["codebook50"] * bool(layout)
    metrics = [*game, METRICS[1], f"metrics={{names: [{', '.join(names)}], every_nimg: 8}}"]
    given = [f"tests.image_games:{name}" for name in OF_GAMES]
    found = []
    for num, more in ((1, ([], {})), (2, (layout, ds))):
        ranks(num).run(plugins.give, given)
        found += [ranks(num).run(scenarios.measured, [*metrics, *more[0]], more[1], str(tmp_path))]
    ((alone,), together) = found
    names[2:] = ["codebook50_use", "codebook50_perplexity"] * bool(layout)
    assert alone.keys() == {"metrics/seconds", *(f"metrics/{name}" for name in names)}
    assert 5 < alone["metrics/psnr50"] < 20
    assert any(together)
    for values in filter(None, together):
        for name in names:
            assert values[f"metrics/{name}"] == pytest.approx(alone[f"metrics/{name}"], rel=1e-4), name
    assert not list(tmp_path.iterdir())
