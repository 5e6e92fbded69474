"""Schedules against their formulas at points that can be worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from bigsgan.config.sections import Average, Optimizer
from bigsgan.training.schedules import average_decay, is_due, learning_rate

TOTAL = 1000


def test_a_constant_rate():
    section = Optimizer(lr=2e-4)
    assert [learning_rate(section, nimg, TOTAL) for nimg in (0, 1, 500, 999, 1000, 5000)] == [2e-4] * 6


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_warm_up_is_linear_and_never_zero(decay):
    section = Optimizer(lr=0.4, warmup_nimg=100, decay=decay, final_lr=0.1)
    for nimg in range(100):
        assert learning_rate(section, nimg, TOTAL) == pytest.approx(0.4 * (nimg + 1) / 100)
    assert learning_rate(section, 99, TOTAL) == learning_rate(section, 100, TOTAL) == 0.4
    assert learning_rate(section, 0, TOTAL) > 0


@pytest.mark.parametrize("warmup", [0, 200])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_linear_decay(final, warmup):
    section = Optimizer(lr=0.4, warmup_nimg=warmup, decay="linear", final_lr=final)
    assert learning_rate(section, warmup, TOTAL) == 0.4
    assert learning_rate(section, (warmup + TOTAL) // 2, TOTAL) == pytest.approx((0.4 + final) / 2)
    assert learning_rate(section, warmup + (TOTAL - warmup) // 4, TOTAL) == pytest.approx(0.4 - (0.4 - final) / 4)
    for nimg in (TOTAL, TOTAL + 1, 10 * TOTAL):
        assert learning_rate(section, nimg, TOTAL) == pytest.approx(final, abs=1e-15)


@pytest.mark.parametrize("warmup", [0, 400])
def test_cosine_decay(warmup):
    section = Optimizer(lr=0.5, warmup_nimg=warmup, decay="cosine", final_lr=0.1)
    length = TOTAL - warmup
    # cos 60 = 1/2 at a third, cos 90 = 0 at a half, cos 120 = -1/2 at two thirds.
    for share, expected in ((0, 0.5), (1 / 3, 0.4), (1 / 2, 0.3), (2 / 3, 0.2), (1, 0.1)):
        assert learning_rate(section, round(warmup + share * length), TOTAL) == pytest.approx(expected, abs=1e-3)
    assert learning_rate(section, 3 * TOTAL, TOTAL) == pytest.approx(0.1)
    rates = [learning_rate(section, nimg, TOTAL) for nimg in range(warmup, TOTAL + 1)]
    assert all(later < earlier for earlier, later in pairwise(rates))


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_weights_share_halves_in_a_half_life(batch):
    section = Average(half_life_nimg=640)
    kept = [average_decay(section, batch, nimg) for nimg in range(batch, 640 + 1, batch)]
    assert math.prod(kept) == pytest.approx(0.5)


def test_the_published_decay():
    # Brock et al. 2019: 0.9999 at batch 2048 is a half-life of 14.2 million images.
    section = Average(half_life_nimg=round(2048 * math.log(0.5) / math.log(0.9999)))
    assert average_decay(section, 2048, 10**8) == pytest.approx(0.9999, abs=1e-9)


def test_the_average_is_a_copy_until_it_starts():
    section = Average(half_life_nimg=100, start_nimg=300)
    assert [average_decay(section, 50, nimg) for nimg in (0, 50, 250, 300)] == [0.0] * 4
    assert average_decay(section, 50, 301) == pytest.approx(0.5**0.5)
    assert average_decay(Average(half_life_nimg=100, ramp=0.05), 50, 0) == 0.0


def test_the_ramp_shortens_the_half_life_early():
    section = Average(half_life_nimg=1000, ramp=0.05)
    for nimg, half_life in ((64, 3.2), (1280, 64), (10_000, 500), (20_000, 1000), (10**6, 1000)):
        assert average_decay(section, 64, nimg) == pytest.approx(0.5 ** (64 / half_life))
    decays = [average_decay(section, 64, nimg) for nimg in range(64, 30_000, 64)]
    assert decays == sorted(decays)


@pytest.mark.parametrize("batch", [1, 7, 24, 100, 250])
@pytest.mark.parametrize("interval", [1, 24, 100, 1001])
def test_each_multiple_is_reported_by_the_one_update_that_passes_it(interval, batch):
    nimg, passed = 0, 0
    for _ in range(200):
        nimg += batch
        multiples = [m for m in range(nimg - batch + 1, nimg + 1) if m % interval == 0]
        assert is_due(interval, nimg, batch) == bool(multiples)
        passed += len(multiples)
    assert passed == 200 * batch // interval
    assert not any(is_due(10**9, batch * update, batch) for update in range(1, 200))
