"""``objective.schedule=generator_first``: G's update comes before D's steps, in every layout."""

import pytest

from tests.distributed.test_equivalence import OVERRIDES, check
from tests.distributed.test_overlapped import LAYOUTS

FIRST = "objective.schedule=generator_first"
GAMES = {
    "fresh": ["accumulation=2", "objective.d_steps=2"],
    "shared": ["accumulation=2", "objective={reuse_fakes: true, d_steps: 2}"],
    "pairs": [*OVERRIDES["relativistic"], "objective.reuse_fakes=true"],
    "moved in every pass": ["statistics=every_pass", "objective.d_steps=2", "accumulation=2"],
    "penalty": ["objective.r1={weight: 0.5, every: 2}", "objective.reuse_fakes=true"],
}
CELLS = [
    pytest.param("shared", "1", id="one rank"),
    pytest.param("fresh", "1", id="one rank, fresh images", marks=pytest.mark.slow),
    pytest.param("fresh", "1 + 1", id="ranks of their own", marks=pytest.mark.slow),
    pytest.param("shared", "2, both in stages", id="stages", marks=pytest.mark.slow),
    pytest.param("fresh", "2, both in stages", id="stages, fresh images", marks=pytest.mark.nightly),
    pytest.param("fresh", "2, both in stages, separate", id="stages, phase by phase", marks=pytest.mark.nightly),
    pytest.param("shared", "2, ZeRO 3", id="ZeRO 3", marks=pytest.mark.slow),
    pytest.param("pairs", "2, ZeRO 2", id="pairs", marks=pytest.mark.nightly),
    pytest.param("moved in every pass", "1", id="every pass", marks=pytest.mark.slow),
    pytest.param("penalty", "2, D in stages", id="penalty", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("game, layout", CELLS)
def test_matrix(ranks, game, layout):
    num, overrides, ds = LAYOUTS[layout]
    check(ranks(num), [*GAMES[game], *overrides, FIRST], ds)
