"""The game of a CAT in every layout: a logit of each level, paired by level, both penalties, and consistency."""

from itertools import product

import pytest

from bigsgan.config import NETWORKS
from tests import reference
from tests.distributed import scenarios
from tests.distributed.test_equivalence import FEWER, SAME, SEED, check, expected
from tests.distributed.test_state import ADAM, check_same_run
from tests.tiny import FAMILIES, stages, zero

GAME = [*FAMILIES["cat"], "objective.fake_labels=data"]
PENALTIES = {
    "exact": [f"objective.{name}={{weight: 0.2}}" for name in ("r1", "r2")],
    "finite_difference": [
        f"objective.{name}={{weight: 0.2, form: finite_difference, sigma: 0.5}}" for name in ("r1", "r2")
    ],
}


def cells(slow, *axes):
    """All cells, of which some are for CI and the others for a night."""
    for cell in product(*axes):
        yield pytest.param(*cell, marks=pytest.mark.slow if cell in slow else pytest.mark.nightly)


@pytest.mark.slow
def test_each_part_of_the_game_counts():
    """Without it, the comparisons below would see it."""
    found = expected(*GAME, *PENALTIES["exact"], f"seed={SEED}", updates=2)
    for other in (GAME, [*GAME, *PENALTIES["exact"], "objective.consistency=null"]):
        distance, _ = reference.worst(found, expected(*other, f"seed={SEED}", updates=2))
        assert distance > 100 * SAME


@pytest.mark.parametrize("stage, accumulation, penalty", [*cells([(3, 2, "exact")], range(4), (1, 2), PENALTIES)])
def test_zero(ranks, stage, accumulation, penalty):
    options = [*GAME, f"accumulation={accumulation}", *PENALTIES[penalty]]
    check(ranks(2), options, {name: zero(stage) for name in NETWORKS}, FEWER)


@pytest.mark.parametrize(
    "layout, accumulation, penalty",
    [*cells([((2, 2), 2, "finite_difference")], [(2, 2), (2, 1), (1, 2)], (1, 2), PENALTIES)],
)
def test_stages(ranks, layout, accumulation, penalty):
    options = [*GAME, f"accumulation={accumulation}", *PENALTIES[penalty], *stages(*layout)]
    check(ranks(2), options, {name: zero(1) for name in NETWORKS}, FEWER)


@pytest.mark.parametrize("stage, layout", [*cells([], (0, 1, 2, 3), [(1, 1)]), *cells([(1, (2, 2))], (1,), [(2, 2)])])
def test_a_resumed_run_is_the_same_run(ranks, stage, layout, tmp_path):
    options, files = [*ADAM, *GAME, *PENALTIES["exact"], *stages(*layout)], {name: zero(stage) for name in NETWORKS}
    whole = ranks(2).run(scenarios.uninterrupted, options, files, 6)
    check_same_run(whole, ranks(2).run(scenarios.resume, options, files, str(tmp_path), 3, 3))
