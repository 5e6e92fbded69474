"""The section of augmentation, and what moves its probability."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bigsgan.adversarial.terms.adaptive_augmentation import AdaptiveProbability, adjusted_probability
from bigsgan.config.augmentation import Augmentation
from bigsgan.config.data import Data
from bigsgan.errors import UserError
from bigsgan.training.schedules import augmentation_probability

STEP = 64 * 4 / 500_000


@pytest.mark.parametrize(
    "p, signs, expected",
    [
        (0.2, [70.0, 100.0], 0.2 + STEP),
        (0.2, [50.0, 100.0], 0.2 - STEP),
        (0.2, [75.0, 125.0], 0.2),  # at the target itself
        (STEP / 2, [-100.0, 100.0], 0.0),  # not below 0
        (1.0, [100.0, 100.0], 1 + STEP),  # as published, nothing stops it at 1
        (0.2, [0.0, 0.0], 0.2),  # no real image was seen
    ],
)
def test_the_probability_moves_by_one_step_to_the_target(p, signs, expected):
    found = adjusted_probability(torch.tensor([p]), torch.tensor(signs), 0.6, STEP)
    assert found.shape == (1,)
    assert found.item() == pytest.approx(expected, abs=1e-7)


NO_FAKES = torch.empty(0)


def controller(
    p: Tensor | None, total: Callable[[Tensor], Tensor] = lambda own: own, **section: float
) -> AdaptiveProbability:
    return AdaptiveProbability(Augmentation(target=0.6, **section), 64, torch.device("cpu"), p, total)


def test_the_controller_adjusts_at_intervals_by_all_signs_since():
    p = torch.zeros(1)
    adaptive = controller(p)
    means, trace = [], []
    generator = torch.Generator().manual_seed(0)
    for update in range(24):
        logits = torch.randn(64, generator=generator) + (3.0 if update < 12 else 0.2)
        for part in logits.chunk(4):
            adaptive.observe(part, NO_FAKES)
        means.append(logits.sign().mean().item())
        adaptive.finish_update(update, applied=True)
        trace.append(p.item())
    expected, held = [], 0.0
    for update in range(24):
        if update % 4 == 3:
            held = max(0.0, held + STEP * math.copysign(1, sum(means[update - 3 : update + 1]) / 4 - 0.6))
        expected.append(held)
    assert trace == pytest.approx(expected, abs=1e-7)
    assert trace[2] == 0
    assert trace[11] == pytest.approx(3 * STEP, abs=1e-7)
    assert trace[-1] == pytest.approx(0, abs=1e-7)


def test_ranks_share_their_signs():
    logits = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([-1.0])]  # mean 0.5; of the first rank alone 1
    sums = torch.tensor([2.0, 4.0])
    probabilities = [torch.full((1,), 0.5), None]
    for each, p in zip(logits, probabilities, strict=True):
        adaptive = controller(p, lambda own: sums, interval=1)
        adaptive.observe(each, NO_FAKES)
        adaptive.finish_update(0, applied=True)
    assert probabilities[0].item() == pytest.approx(0.5 - STEP / 4, abs=1e-7)


def test_logits_that_overflowed_do_not_count():
    p = torch.full((1,), 0.5)
    adaptive = controller(p, interval=1)
    adaptive.observe(torch.tensor([math.nan, 1.0, math.inf]), NO_FAKES)
    adaptive.finish_update(0, applied=True)
    assert p.item() == pytest.approx(0.5 + STEP / 4, abs=1e-7)
    adaptive.observe(torch.tensor([math.nan]), NO_FAKES)
    adaptive.finish_update(1, applied=True)
    assert p.item() == pytest.approx(0.5 + STEP / 4, abs=1e-7)


def test_a_continued_run_has_the_signs_of_before():
    p = torch.full((1,), 0.5)
    before = controller(p, interval=2)
    before.observe(torch.full((64,), -1.0), NO_FAKES)
    before.finish_update(0, applied=True)
    after = controller(p, interval=2)
    assert before.state()["signs"].tolist() == [-64, 64]
    after.state()["signs"].copy_(before.state()["signs"])
    after.observe(torch.ones(16), NO_FAKES)
    after.finish_update(1, applied=True)
    assert p.item() == pytest.approx(0.5 - STEP / 2, abs=1e-7)
    assert after.state()["signs"].tolist() == [0, 0]


def test_nothing_waits_for_the_device():
    meta, p = torch.device("meta"), torch.empty(1, device="meta")
    adaptive = AdaptiveProbability(Augmentation(target=0.6), 64, meta, p, lambda own: own)
    adaptive.observe(torch.empty(8, device="meta"), NO_FAKES)
    for update in range(4):
        adaptive.finish_update(update, applied=True)


def test_the_schedule_is_half_a_cosine():
    section = Augmentation(pipeline="r3gan", p=0.1, final_p=0.5, ramp_nimg=1000)
    found = [augmentation_probability(section, nimg) for nimg in (0, 250, 500, 1000, 5000)]
    assert found == pytest.approx([0.1, 0.1 + 0.4 * (1 - math.sqrt(0.5)) / 2, 0.3, 0.5, 0.5])


@pytest.mark.parametrize(
    "section, field",
    [
        ({}, "p"),  # would do nothing
        ({"target": 0.6, "final_p": 0.5}, "final_p"),
        ({"target": 0.6, "policy": ["color"]}, "policy"),
        ({"kind": "diffaugment", "policy": ["color", "color"]}, "policy"),
        ({"kind": "diffaugment", "pipeline": "bg"}, "pipeline"),
        ({"kind": "diffaugment", "final_p": 0.5}, "final_p"),
    ],
)
def test_what_has_no_effect_is_refused(section, field):
    with pytest.raises(UserError, match=rf"^augmentation\.{field}: "):
        Augmentation(**section)


def test_images_must_be_large_enough_to_reflect():
    Augmentation(target=0.6).check(Data(resolution=4))
    with pytest.raises(UserError, match=r"data\.resolution"):
        Augmentation(target=0.6).check(Data(resolution=3))
    Augmentation(kind="diffaugment").check(Data(resolution=3))


def test_a_section_that_was_printed_is_read_again():
    for section in (Augmentation(target=0.6), Augmentation(kind="diffaugment"), Augmentation(p=0.2, final_p=0.3)):
        assert Augmentation.model_validate(section.model_dump()) == section
