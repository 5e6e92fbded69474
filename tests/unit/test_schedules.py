"""Schedules against their formulas at points that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from bigsgan.config import NETWORKS, load_recipe
from bigsgan.config.objective import Penalty
from bigsgan.config.sections import EMA, Optimizer
from bigsgan.engines import Rates
from bigsgan.training.schedules import beta2, cosine, ema_decay, is_due, learning_rate, penalty_weight, scheduled
from tests import REPOSITORY
from tests.tiny import tiny_recipe

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


def published(nimg, base, final, over):
    """Huang et al. 2024, appendix: the share of the way that a cosine has left, then the final value."""
    if nimg > over:
        return final
    return base + (1 - (1 + math.cos(math.pi * nimg / over)) / 2) * (final - base)


@pytest.mark.parametrize("base, final", [(2e-4, 5e-5), (0.9, 0.99), (0.05, 0.005), (0, 0.55)])
def test_schedules_are_the_published_ones(base, final):
    over = 20_000_000
    rising = Optimizer(lr=1.0, betas=[0.0, 0.9], decay="cosine", final_lr=0.1, final_beta2=0.99, decay_nimg=over)
    for nimg in (0, 512, 10**6, over // 3, over // 2, over - 1, over, over + 1, 10**9):
        expected = published(nimg, base, final, over)
        assert cosine(base, final, nimg, over) == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert beta2(rising, nimg, TOTAL) == pytest.approx(published(nimg, 0.9, 0.99, over), rel=1e-12)
        assert learning_rate(rising, nimg, TOTAL) == pytest.approx(published(nimg, 1.0, 0.1, over), rel=1e-12)
        if base:
            section = Penalty(weight=base, final_weight=final, decay_nimg=over)
            assert penalty_weight(section, nimg, TOTAL) == pytest.approx(expected, rel=1e-12)


def test_what_has_no_end_of_its_own_ends_with_the_run():
    optimizer = Optimizer(lr=1.0, betas=[0.0, 0.5], decay="linear", final_lr=0.5, final_beta2=0.9, warmup_nimg=200)
    # Through the warm-up the second decay rate is the first one given.
    assert [beta2(optimizer, nimg, TOTAL) for nimg in (0, 199, 200, 600, 1000, 2000)] == pytest.approx(
        [0.5, 0.5, 0.5, 0.7, 0.9, 0.9]
    )
    penalty = Penalty(weight=4.0, final_weight=0.0)
    assert [penalty_weight(penalty, nimg, TOTAL) for nimg in (0, 500, 1000, 2000)] == pytest.approx([4, 2, 0, 0])
    assert penalty_weight(Penalty(weight=4.0), 500, TOTAL) == 4.0
    assert beta2(Optimizer(lr=1.0, decay="cosine"), 500, TOTAL) is None


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_the_half_life_grows_over_the_warm_up(batch):
    section = EMA(half_life_nimg=5000, warmup_nimg=10_000)
    assert ema_decay(section, batch, batch) == 0.0  # a copy, as the half-life before the first update is 0
    for before in (1_000, 5_000, 9_999, 10_000, 10**6):
        expected = 0.5 ** (batch / published(before, 0, 5000, 10_000))
        assert ema_decay(section, batch, before + batch) == pytest.approx(expected, rel=1e-12)


def test_an_update_is_told_only_what_moves(tmp_path):
    recipe = tiny_recipe(tmp_path, "objective.r1.weight=3")
    assert scheduled(recipe, 500) == (Rates(0.002), Rates(0.002), {}, 1.0, True, None)
    moving = tiny_recipe(
        tmp_path,
        "objective.r1={weight: 3, final_weight: 1, decay_nimg: 100}",
        "objective.r2={weight: 2}",
        "optimizer.discriminator={lr: 1, betas: [0, 0.8], decay: cosine, final_lr: 0.5, final_beta2: 0.9}",
        "optimizer.discriminator.decay_nimg=100",
        "objective.adversarial={weight: 3, from_nimg: 50, ramp_nimg: 2}",
        "objective.discriminator_from_nimg=51",
    )
    (lr, none, ()), (d_lr, d_beta2, ()), weights, factor, learns, _ = scheduled(moving, 50)
    assert (factor, learns) == (pytest.approx(1.0), False)
    assert (lr, none) == (0.002, None)
    assert (d_lr, d_beta2, weights) == (pytest.approx(0.75), pytest.approx(0.85), {"r1": pytest.approx(2.0)})


def test_rates_follow_the_width():
    """As GAT's trainer has it: the rate of width 768, times 768 over the network's own."""
    recipe = load_recipe(
        REPOSITORY / "launch/recipes/gat_xl_imagenet256.yaml",
        ["discriminator.size=L", "optimizer.discriminator={kind: adamw, lr: 1e-4, reference_width: 512}"],
    )
    rates = scheduled(recipe, 10**6)
    assert rates.generator.lr == pytest.approx(2e-4 * 768 / 1152, rel=1e-12)
    assert rates.discriminator.lr == pytest.approx(1e-4 * 512 / 1024, rel=1e-12)


@pytest.mark.parametrize("size, width", [("s", 384), ("b", 768), ("l", 1024), ("xl", 1152)])
def test_recipes_of_gat_have_the_published_numbers(size, width):
    recipe = load_recipe(REPOSITORY / f"launch/recipes/gat_{size}_imagenet256.yaml", [])
    for network in NETWORKS:
        section = getattr(recipe.optimizer, network)
        assert (section.kind, section.betas, section.clip_norm) == ("adamw", [0, 0.99], 1)
    rates = scheduled(recipe, 10**6)
    assert rates.generator.lr == rates.discriminator.lr == pytest.approx(2e-4 * 768 / width, rel=1e-12)
    assert ema_decay(recipe.ema, recipe.batch, 10**7) == pytest.approx(0.999, abs=1e-6)
    assert (recipe.objective.loss, recipe.objective.reuse_fakes, recipe.objective.fake_labels) == (
        "relativistic", True, "data"
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_weights_share_halves_in_a_half_life(batch):
    section = EMA(half_life_nimg=640)
    kept = [ema_decay(section, batch, nimg) for nimg in range(batch, 640 + 1, batch)]
    assert math.prod(kept) == pytest.approx(0.5)


def test_the_ema_is_a_copy_until_it_starts():
    section = EMA(half_life_nimg=100, start_nimg=300)
    assert [ema_decay(section, 50, nimg) for nimg in (0, 50, 250, 300)] == [0.0] * 4
    assert ema_decay(section, 50, 301) == pytest.approx(0.5**0.5)
    assert ema_decay(EMA(half_life_nimg=100, ramp=0.05), 50, 0) == 0.0


def test_the_ramp_shortens_the_half_life_early():
    section = EMA(half_life_nimg=1000, ramp=0.05)
    for nimg, half_life in ((64, 3.2), (1280, 64), (10_000, 500), (20_000, 1000), (10**6, 1000)):
        assert ema_decay(section, 64, nimg) == pytest.approx(0.5 ** (64 / half_life))
    decays = [ema_decay(section, 64, nimg) for nimg in range(64, 30_000, 64)]
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
