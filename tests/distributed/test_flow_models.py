"""Adversarial flow models: transport, centring and normalized gradients agree with the reference in all layouts."""

import pytest

from tests.distributed.agreement import check_updates
from tests.distributed.test_image_games import LAYOUTS, STAGED, combined
from tests.tiny import TINY_GAMES

GAME = [
    *TINY_GAMES["dit"],
    "ema={half_life_nimg: 16, reset_nimg: 8, reset_from_nimg: 16}",
    "objective.r1={weight: 0.5, form: finite_difference, sigma: 0.1}",
    "seed=3",
]
IN_CI = ("one rank, micro-batches", "ranks of their own", "both in stages, recomputed")
OTHERS = [
    *("ZeRO 3", "D in stages", "compiled by layer", "layers recomputed", "G first", "whole batches"),
    *(layout for layout in STAGED if layout not in IN_CI),
]


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in IN_CI),
        *(pytest.param(layout, marks=pytest.mark.nightly) for layout in OTHERS),
    ],
)
def test_updates(ranks, layout):
    world_size, more, ds = LAYOUTS[layout]
    check_updates(ranks(world_size), combined([*GAME, *more]), ds, 3)
