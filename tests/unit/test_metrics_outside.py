"""Metrics of the user's own code: what they see, in which order, and what becomes of their mistakes."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from bigsgan import plugins
from bigsgan.config import plan_run
from bigsgan.config.metrics import OUTSIDE, RECORD_KEYS, Metric, Metrics
from bigsgan.data import build_dataset
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.metrics import Evaluation, Measured, Replica
from bigsgan.metrics.features import no_features
from bigsgan.metrics.outside import MetricError
from bigsgan.monitor import Statistics
from bigsgan.training import loop
from bigsgan.training.measuring import records
from bigsgan.training.reports import Reports
from bigsgan.training.state import Counters
from bigsgan.training.stopping import StopRequests
from tests.tiny import tiny_recipe
from tests.unit.test_metrics_evaluation import DIGITS, random_features, real_images

NUM = 50


class Brightness:
    """Means of images, and what it saw."""

    def __init__(self, power=1):
        self.power, self.nums = power, []

    def __call__(self, images):
        self.nums.append(len(images))
        return images.flatten(1).mean(1) ** self.power

    def compute(self, real, fake):
        return (
            {"real": real, "fake": fake.double().mean(), "first": fake[0]}
            if len(real) == 1
            else fake.mean() / real.mean()
        )


class Shapes(Brightness):
    def __call__(self, images):
        return images.mean()


class Fails(Brightness):
    def compute(self, real, fake):
        return real[len(fake)]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A function that measures digits against digits by some class."""

    def measure(kind, batch=20, names=(), **arguments):
        module = types.ModuleType("their")
        module.Kind = kind
        monkeypatch.setitem(sys.modules, "their", module)
        monkeypatch.setattr(plugins, "_given", {"their:Kind"})
        section = Metrics(names=["their:Kind", *names], every_nimg=1, num=NUM, arguments={"their:Kind": arguments})
        features = random_features() if names else no_features()
        data, dataset = DIGITS, build_dataset(DIGITS)
        made = Evaluation(section.asked, features, dataset, data, batch, tmp_path)
        return {name: v for found in made.measure(real_images, Replica(0, 1)) for name, v in found.values.items()}

    return measure


def brightness(power):
    """The ratio, computed by hand: reals in the order of ``metrics/reals``, samples from number 0 on."""
    dataset, order = build_dataset(DIGITS), Draws(0).permutation("metrics/reals", (), len(build_dataset(DIGITS)))
    reals = torch.stack([dataset[int(i)][0] for i in order[:NUM]]).float() / 127.5 - 1
    fakes = real_images(0, torch.zeros(NUM)).images
    means = [(images.flatten(1).mean(1) ** power).mean() for images in (fakes, reals)]
    return float(means[0] / means[1])


@pytest.mark.parametrize("batch, power", [(20, 1), (7, 1), (64, 2)])
def test_a_metric_sees_the_first_images_of_both_sets(measured, batch, power):
    found = measured(Brightness, batch, power=power)
    assert found == {"Kind": pytest.approx(brightness(power), rel=1e-6)}


def test_beside_metrics_of_our_own(measured):
    alone, together = measured(Brightness), measured(Brightness, names=["fid100"])
    assert together["Kind"] == alone["Kind"]
    assert set(together) == {"Kind", "fid100"}


@pytest.mark.parametrize(
    "kind, text",
    [
        (Shapes, r"^metrics: 'their:Kind' fails: ValueError: it returns \(\) for 20 images, and has to return"),
        (Fails, r"^metrics: 'their:Kind' fails in compute: IndexError: .*\(test_metrics_outside.py:\d+\); fix its"),
    ],
)
def test_a_metric_that_fails_is_named(measured, kind, text):
    with pytest.raises(MetricError, match=text):
        measured(kind)


def test_code_that_is_no_metric_is_refused(measured):
    with pytest.raises(UserError, match=r"^metrics.names: must return a metric: .* compute, got 'their:Kind'"):
        measured(dict)
    with pytest.raises(UserError, match=r"^metrics.arguments.their:Kind.powr: unknown key; did you mean power\?"):
        measured(Brightness, powr=1)


def test_the_best_checkpoint_may_be_kept_by_it(tmp_path):
    names = "metrics={names: ['their:Kind'], every_nimg: 8}"
    for metric in ("metrics/Kind", "metrics/Kind_real"):
        plan_run(tiny_recipe(tmp_path, names, f"checkpoints.keep_best={{metric: {metric}, goal: max}}"), 1)
    with pytest.raises(UserError, match=r"keep_best.metric: must be a metric that metrics.names gives \(Kind\)"):
        plan_run(tiny_recipe(tmp_path, names, "checkpoints.keep_best={metric: metrics/Kin, goal: max}"), 1)


def test_a_run_owes_what_it_could_not_measure():
    """With the metrics beside the one that fails, which a resumed run would leave out otherwise."""

    def fails(*_):
        raise MetricError("metrics", "their:Kind", "fails", "fix its code")

    fails.has_outside = True
    reports = Reports(Statistics(torch.device("cpu")))
    step = types.SimpleNamespace(generator=types.SimpleNamespace(is_held=True))
    run = types.SimpleNamespace(
        counters=Counters(nimg=8), step=step, ema=None, standing=[], reports=reports, measuring=fails
    )
    for _ in range(2):  # at its time, and as the run resumes
        owed, error = loop._measure(run, fails, StopRequests(False))
        assert (owed, error.value) == (False, "their:Kind")
        assert reports.numbers()["owed"] == 1
    with pytest.raises(MetricError, match="fix its code"):
        loop._measure_owed(run, StopRequests(False))


@pytest.mark.parametrize(
    "names, text",
    [
        (["a:precision"], "'a:precision' has the name of another key of evaluations.jsonl"),
        (["fid10k", "a:fid10k"], "'a:fid10k' has values of the same name as those of fid10k"),
        (["a:Kind", "b:Kind"], "'b:Kind' has values of the same name as those of a:Kind"),
    ],
)
def test_no_value_replaces_another(names, text):
    with pytest.raises(UserError, match=f"^metrics.names: {text}"):
        Metrics(names=names, every_nimg=1)


def test_keys_of_records_are_known():
    found = [Measured(Metric("fid10k", "fid", 10), {"fid10k": 1.0}, 1, 1)]
    own = [Measured(Metric("Kind", OUTSIDE, 10, "a:Kind"), {"Kind": 1.0}, 1, 1)]
    for record, name in zip(records([*found, *own], no_features(), {}), ("fid10k", "Kind"), strict=True):
        assert record.keys() - {name} <= set(RECORD_KEYS)
